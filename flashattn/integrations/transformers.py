"""flashattn as an attention implementation of Hugging Face transformers (5.4 or newer).

    from flashattn.integrations.transformers import register
    register()
    model = AutoModel.from_pretrained(path, attn_implementation="exact_attention")

transformers asks :func:`attention_mask` once a forward pass for the mask, and hands it to :func:`attention`
in every layer.  A mask is never stored where options of the kernels say the same (:class:`Mask`): causal,
windows, padding on either side, packed sequences, caches.  Any other mask is a bool tensor, which the kernels
take as it is: slower, in S^2 bytes.  docs/transformers.md has the table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

import flashattn

# What a model or a caller may pass that changes the result and that this function does not compute.
_REFUSED = {
    "indices": "sparse attention to selected keys",
    "block_indices": "sparse attention to selected blocks of keys",
    "sinks": "a sink for each token",
    "output_attentions": "returned attention weights, which are never stored",
    "block_table": "the pages of continuous batching",
}
# What models hand on to every layer that is no business of attention.
_UNRELATED = {
    "cache_position", "use_cache", "cache", "past_key_values", "token_type_ids", "labels",
    "num_items_in_batch", "seq_idx", "logits_to_keep", "input_ids",
}
_FEW_QUERIES = 16                                                        # what decode kernels have rows for


def register(name: str = "exact_attention") -> str:
    """Make ``attn_implementation=name`` and ``model.set_attn_implementation(name)`` work.  Returns the name.

    Raises:
        ValueError: transformers would take the name for one of its own or for a Hub repository.
        ImportError: this transformers describes masks in another way: older than 5.4.
    """
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(f"transformers {transformers.__version__}: expected 5.4 or newer")
    reserved = ("flash", "sdpa", "flex_attention", "eager", "paged", "|", "/")
    if any(part in name for part in reserved):
        raise ValueError(f"name={name!r}: transformers has a meaning of its own for names with {reserved}")
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, attention_mask)
    return name


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    position_ids: Tensor | None = None,
    deterministic: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """One attention layer, as transformers calls it.

    Args:
        query: (B, Hq, Sq, D).
        key, value: (B, Hk, Sk, D) and (B, Hk, Sk, Dv); heads are not repeated.
        attention_mask: a :class:`Mask`, or (B or 1, Hq or 1, Sq or 1, Sk) bool (True is visible) or floating
            (added to scores).  None: every key is visible, or in a causal layer the keys up to each query (Sq
            is 1 or Sk then).
        is_causal: default ``module.is_causal``, as in transformers; used only without attention_mask.
        sliding_window: keys that a query sees in a causal layer, itself among them; otherwise it sees
            ``sliding_window - 1`` on either side.  Used only without attention_mask, which has it.
        s_aux: (Hq), one sink logit a head.
        position_bias: (B or 1, Hq, Sq, Sk), added to the scores; has a gradient.
        cu_seq_lens_q, cu_seq_lens_k: (sequences + 1) int32, both or neither: rows of the batch, one row
            behind the other, hold these sequences, and each attends to itself alone.
        max_length_q, max_length_k: the longest of them, an int; a tensor or None costs a synchronisation.
        position_ids: (1, S), of a causal layer whose mask hides nothing else: a sequence starts where they do
            not increase.  Some models tell packed sequences to their masks, others (gpt-oss) only here.
        deterministic: the gradients are the same bits on every run.
        kwargs: what else a model passes on.

    Returns:
        ``(out, None)``: out (B, Sq, Hq, Dv), contiguous; weights are never stored.

    Raises:
        NotImplementedError: a keyword asks for something else (see ``_REFUSED``), or is not known.
        ValueError, TypeError: the mask does not fit, or causality is not determined by the shapes.
    """
    _refuse(kwargs)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))           # (B, S, H, D)
    options = {"scale": scaling, "softcap": softcap or 0.0, "sink": _parameter(s_aux, q)}
    trained = (q, k, v, s_aux, position_bias)
    inference = not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in trained))
    if attention_mask is None:
        rule = _rule_of_layer(module, q.shape[1], k.shape[1], is_causal, sliding_window,
                              alone=cu_seq_lens_q is None)
    else:
        fits = attention_mask.shape == (q.shape[0], 1, q.shape[1], k.shape[1])
        rule = getattr(attention_mask, "rule", None) if fits else None

    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if position_bias is not None:
            raise NotImplementedError("position_bias with cu_seq_lens_q: expected one of the two")
        rows = _packed_rows(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        if rule is not None and not rule.has_lengths:                    # packed the same way, or not at all
            rule = Rule(rule.causal, rule.window, rows=rows)
        else:
            rule, attention_mask = None, _within_sequences(attention_mask, q, k, rows)
    elif rule is not None and rule.causal and not (rule.rows or rule.has_lengths) and position_bias is None:
        rule = replace(rule, rows=_rows_of_positions(position_ids, q, k))
    if rule is not None and (position_bias is not None and rule.moves_rows or
                             rule.leftpad is not None and not (inference and dropout == 0)):
        rule = None                                                      # the mask's elements serve these

    if rule is None:
        mask, bias = _mask_and_bias(attention_mask, position_bias)
        out = flashattn.forward(q, k, v, mask=mask, bias=bias, dropout_p=dropout,
                                deterministic=bool(deterministic), **options)
        return out.contiguous(), None

    options |= {"causal": rule.causal, "window": rule.window}
    if rule.keys is not None:
        k, v = k[:, :rule.keys], v[:, :rule.keys]
    few = inference and q.shape[1] <= min(_FEW_QUERIES, k.shape[1] - 1) and not rule.is_packed
    if rule.leftpad is not None or few and position_bias is None and dropout == 0:
        out = flashattn.decode(q, k, v, cache_seqlens=rule.rows.get("seqused_k"), leftpad=rule.leftpad,
                               **options)
        return out.contiguous(), None

    options |= {"bias": _contiguous_rows(position_bias), "dropout_p": dropout,
                "deterministic": bool(deterministic), **rule.rows}
    shape = (*q.shape[:-1], v.shape[-1])
    if rule.is_packed:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))                   # copies only rows that lie apart
    return flashattn.forward(q, k, v, **options).view(shape), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs,
) -> Tensor | None:
    """The mask (B, 1, Sq, Sk) of ``sdpa_mask``, True is visible.

    None where :func:`attention` knows it without: one query or as many as keys in a causal layer, or every
    key visible to all.  A :class:`Mask` where options of the kernels say the same; only then its rows of
    padding queries may differ.  Otherwise, and always under torch.compile, which can neither make a
    :class:`Mask` nor read what is padding, a bool tensor.

    Args: as ``sdpa_mask`` of transformers.
    """
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()                                      # the cache counts on in place

    def dense() -> Tensor:
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
                         allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **kwargs)

    if torch.compiler.is_compiling():
        functions = (causal_mask_function, bidirectional_mask_function)
        known = attention_mask is None and mask_function in functions
        pattern, padding = _Pattern(causal=mask_function is causal_mask_function) if known else None, None
    else:
        pattern, padding = _pattern(mask_function), attention_mask
    rule = None if pattern is None else _rule(pattern, batch_size, q_length, kv_length, q_offset, kv_offset,
                                              padding)
    if rule is not None and rule.is_plain and (
            rule.causal and allow_is_causal_skip and q_length in (1, kv_length) or
            not rule.causal and allow_is_bidirectional_skip):
        return None
    if rule is None or torch.compiler.is_compiling():
        return dense()
    return Mask(rule, dense, (batch_size, 1, q_length, kv_length), kwargs.get("device", "cpu"))


@dataclass(frozen=True)
class Rule:
    """Which keys a query sees, in options of :func:`flashattn.forward` and :func:`flashattn.decode`."""

    causal: bool
    window: tuple[int, int] | None = None
    keys: int | None = None                # only the first so many keys are filled, of a static cache
    leftpad: Tensor | None = None          # (B) int32: keys before are padding
    rows: dict = field(default_factory=dict)  # seqused_*; cu_seqlens_*, max_seqlen_*: of all rows

    def to(self, device: torch.device) -> Rule:
        return replace(self, leftpad=None if self.leftpad is None else self.leftpad.to(device), rows={
            name: row.to(device) if isinstance(row, Tensor) else row for name, row in self.rows.items()})

    @property
    def is_packed(self) -> bool:
        return "cu_seqlens_q" in self.rows

    @property
    def is_plain(self) -> bool:
        return self.window is None and not self.rows and not self.has_lengths

    @property
    def has_lengths(self) -> bool:
        """Whether some keys or queries of the batch are of no sequence."""
        return self.keys is not None or self.leftpad is not None or "seqused_k" in self.rows

    @property
    def moves_rows(self) -> bool:
        """Whether the place of a query or key is another one than in the mask."""
        return self.keys is not None or self.leftpad is not None or self.is_packed


class Mask(Tensor):
    """A bool mask (B, 1, Sq, Sk) by its rule: :func:`attention` reads that, and no element is ever stored.

    To anything else it is the tensor, which is made when an operation asks for it.
    """

    rule: Rule | None
    _dense: Callable[[], Tensor] | Tensor

    @staticmethod
    def __new__(cls, rule: Rule, dense: Callable[[], Tensor], shape: tuple[int, ...],
                device: torch.device | str) -> Mask:
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.rule, mask._dense = rule, dense
        return mask

    def __init__(self, *_) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        device = (kwargs or {}).get("device")
        if function is torch.ops.aten._to_copy.default and device is not None and \
                kwargs.get("dtype", torch.bool) is torch.bool:
            mask = args[0]                                               # for a layer on another device
            return mask.elements().to(device) if mask.rule is None else Mask(
                mask.rule.to(device), lambda: mask.elements().to(device), mask.shape, device)
        shares = any(argument.alias_info is not None for argument in function._schema.arguments)

        def elements(mask: Mask) -> Tensor:
            if shares:                                                   # it may be written to from now on
                mask.rule = None
            return mask.elements()

        return function(*tree_map_only(Mask, elements, args), **tree_map_only(Mask, elements, kwargs or {}))

    def elements(self) -> Tensor:
        """The mask as an ordinary tensor, which is kept."""
        if not isinstance(self._dense, Tensor):
            self._dense = self._dense()
        return self._dense

    def __repr__(self) -> str:
        return f"Mask({self.rule}, shape={tuple(self.shape)})"


# ---- from what transformers says to a rule --------------------------------------------------------------

@dataclass
class _Pattern:
    """What a mask function of transformers demands of a query and a key, all at once."""

    causal: bool = False
    before: int | None = None              # a key is this near before the query (itself is 0)
    around: int | None = None              # or on either side
    sequence: Tensor | None = None         # (B, S): both are in the same one
    positions: Tensor | None = None        # (B, S): places that the rest is about


def _pattern(mask_function: Callable) -> _Pattern | None:
    """The pattern of a function that is built of transformers' own parts, None for any other.

    Each of these parts is a closure; its code says which, and its variables are the parameters.
    """
    pattern = _Pattern()
    return pattern if _collect(mask_function, pattern) else None


def _collect(function: Callable, pattern: _Pattern) -> bool:
    if function is causal_mask_function:
        pattern.causal = True
        return True
    if function is bidirectional_mask_function:
        return True
    kind, names = _PARTS.get(getattr(function, "__code__", None), (None, ()))
    variables = dict(zip(function.__code__.co_freevars, function.__closure__)) if kind else {}
    if kind is None or set(variables) != set(names):
        return False
    values = [variables[name].cell_contents for name in names]
    if kind == "all":
        return all(_collect(part, pattern) for part in values[0])
    if kind == "at positions":
        inner, positions = values
        if pattern.positions is not None or not _collect(inner, pattern):
            return False
        pattern.positions = positions
        return True
    if getattr(pattern, kind) is not None:
        return False
    setattr(pattern, kind, values[0] - 1 if kind == "before" else values[0])
    return True


def _parts() -> dict:
    """Code of a closure: what it demands, and the names of its parameters."""
    makers = {
        "all": ("and_masks", (causal_mask_function,), ("mask_functions",)),
        "before": ("sliding_window_overlay", (1,), ("sliding_window",)),
        "around": ("sliding_window_bidirectional_overlay", (1,), ("sliding_window",)),
        "sequence": ("packed_sequence_mask_function", (None,), ("packed_sequence_mask",)),
        "at positions": ("remap_positions_for_packed_sequence", (causal_mask_function, None),
                         ("mask_function", "position_ids")),
    }
    parts = {}
    for kind, (maker, arguments, names) in makers.items():
        if hasattr(masking_utils, maker):                                # not in every version
            parts[getattr(masking_utils, maker)(*arguments).__code__] = kind, names
    return parts


_PARTS = _parts()


def _rule(
    pattern: _Pattern, batch: int, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int,
    padding: Tensor | None,
) -> Rule | None:
    """The rule for this pattern, with ``padding`` (B, any length) False at keys to hide; None: there is none.

    Causal masks and windows are about positions, which options count from the last key on; so that must be
    the last query's own, at ``end``.  Rows of padding queries may come to see nothing where every query has
    a key of its own.
    """
    end = q_offset + q_length - kv_offset
    ordered = pattern.causal or pattern.before is not None or pattern.around is not None
    known = not isinstance(end, Tensor)
    if known and not 0 < end <= kv_length or not known and not pattern.causal and ordered:
        return None
    if known and ordered and not pattern.causal and end != kv_length:    # a static cache that nothing hides
        return None
    if pattern.before is not None and pattern.around is not None:
        return None

    keys, rows, window = kv_length, {}, None
    if ordered and known:
        keys = end
    elif ordered:
        rows = {"seqused_k": end.reshape(1).to(torch.int32).expand(batch).contiguous()}
    if pattern.before is not None and pattern.before < keys - 1:
        window = pattern.before, 0 if pattern.causal else -1
    elif pattern.around is not None and pattern.around < keys - 1:
        window = pattern.around, 0 if pattern.causal else pattern.around
    own_keys = known and keys == q_length                                # position by position

    if pattern.sequence is not None or pattern.positions is not None:
        if padding is not None or not own_keys or keys != kv_length or q_offset != 0:
            return None
        rows = _rows_of_sequences(pattern.sequence, pattern.positions, batch, keys)
        return None if rows is None else Rule(pattern.causal, window, rows=rows)
    rule = Rule(pattern.causal, window, keys if keys < kv_length else None, rows=rows)
    if padding is None:
        return rule

    real = nn.functional.pad(padding, (0, max(0, kv_offset + keys - padding.shape[-1])))
    real = real[:, kv_offset:kv_offset + keys]                           # (B, keys)
    index = torch.arange(keys, dtype=torch.int32, device=real.device)
    last = keys
    if ordered and not known:
        real, last = real & (index < end), end
    stop = torch.where(real, index + 1, 0).amax(1)                       # (B): keys first .. stop - 1
    first = torch.minimum(torch.where(real, index, keys).amin(1), stop)
    left, right, holes = torch.stack([                                   # the one synchronisation
        (first > 0).any(), (stop < last).any(), (stop - first != real.sum(1)).any()]).tolist()
    if holes:
        return None
    if not (left or right):
        return rule
    if ordered and not own_keys:                                         # queries behind a cache
        return None if right or torch.is_grad_enabled() else replace(rule, leftpad=first)
    if left:
        return replace(rule, rows=_rows_between(first, stop, q_length, keys, ordered))
    return replace(rule, rows={"seqused_k": stop} | ({"seqused_q": stop} if ordered else {}))


def _rows_of_sequences(
    sequence: Tensor | None, positions: Tensor | None, batch: int, length: int
) -> dict | None:
    """Packed rows for sequences that lie one behind the other, their positions counted up by one."""
    if sequence is None or sequence.shape != (batch, length):
        return None
    steps = sequence.diff(dim=1)                                         # (B, S - 1)
    starts = nn.functional.pad(steps != 0, (1, 0), value=True).flatten().nonzero().flatten()
    bounds = nn.functional.pad(starts, (0, 1), value=batch * length).to(torch.int32)
    fits = (steps >= 0).all()
    if positions is not None:
        fits &= ((positions.diff(dim=1) == 1) | (steps != 0)).all()
    fits, longest = torch.stack([fits.to(torch.int32), bounds.diff().amax()]).tolist()
    return _packed(bounds, bounds, longest, longest) if fits else None


def _rows_between(first: Tensor, stop: Tensor, q_length: int, kv_length: int, ordered: bool) -> dict:
    """Packed rows for keys first .. stop - 1 of each sequence: what lies before and behind is two more.

    All queries are with the keys; or, if they are ordered, each is where its own key is.
    """
    nothing = torch.zeros_like(first)
    start = torch.arange(len(first), dtype=torch.int32, device=first.device)
    used = torch.stack([nothing, stop - first, nothing], 1).flatten()
    begins = torch.stack([start * kv_length, start * kv_length + first, start * kv_length + stop], 1)
    bounds_k = nn.functional.pad(begins.flatten(), (0, 1), value=len(first) * kv_length)
    if ordered:
        return _packed(bounds_k, bounds_k, kv_length, kv_length) | {"seqused_q": used, "seqused_k": used}
    begins = torch.stack([start * q_length, start * q_length, (start + 1) * q_length], 1)
    bounds_q = nn.functional.pad(begins.flatten(), (0, 1), value=len(first) * q_length)
    return _packed(bounds_q, bounds_k, q_length, kv_length) | {"seqused_k": used}


def _packed(bounds_q: Tensor, bounds_k: Tensor, longest_q: int, longest_k: int) -> dict:
    return {"cu_seqlens_q": bounds_q, "cu_seqlens_k": bounds_k, "max_seqlen_q": longest_q,
            "max_seqlen_k": longest_k}


# ---- from the keywords of a layer -----------------------------------------------------------------------

def _refuse(keywords: dict) -> None:
    for keyword, given in keywords.items():
        if given is None or given is False or keyword in _UNRELATED:
            continue
        if keyword in _REFUSED or not keyword.startswith(("output_", "return_")):
            meaning = _REFUSED.get(keyword, "this keyword, whose meaning it does not know")
            raise NotImplementedError(f"{keyword} is given, but this attention does not support {meaning}")


def _rule_of_layer(
    module: nn.Module, len_q: int, len_k: int, is_causal: bool | None, sliding_window: int | None, alone: bool
) -> Rule:
    """The rule of a layer that no mask was made for."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal and alone and len_q not in (1, len_k):
        raise ValueError(f"attention_mask=None with {len_q} queries and {len_k} keys in a causal layer: "
                         "expected a mask or is_causal=False: where the first query stands is not known")
    if sliding_window is None or len_k <= sliding_window:
        return Rule(causal)
    if sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window}: expected None or a number of keys, at least 1")
    return Rule(causal, (sliding_window - 1, 0 if causal else sliding_window - 1))


def _packed_rows(
    cu_q: Tensor | None, cu_k: Tensor | None, longest_q: int | Tensor | None, longest_k: int | Tensor | None
) -> dict:
    if cu_q is None or cu_k is None:
        raise ValueError(f"cu_seq_lens_{'q' if cu_q is None else 'k'}=None beside the other one: expected "
                         "both or neither")
    longest_q, longest_k = (int(cu.diff().max() if longest is None else longest)
                            for cu, longest in ((cu_q, longest_q), (cu_k, longest_k)))
    return _packed(cu_q.to(torch.int32), cu_k.to(torch.int32), longest_q, longest_k)


def _rows_of_positions(position_ids: Tensor | None, q: Tensor, k: Tensor) -> dict:
    """Packed rows of a batch of one row, nothing if that is one sequence; found once for all layers."""
    length = q.shape[1]
    if position_ids is None or position_ids.shape != (1, length) or q.shape[0] != 1 or length != k.shape[1]:
        return {}
    if length == 1 or torch.compiler.is_compiling() or q.is_cuda and torch.cuda.is_current_stream_capturing():
        return {}
    known, version = getattr(position_ids, "_flashattn_rows", None), None
    if not position_ids.is_inference():
        version = position_ids._version                                  # what it holds may have changed
        if known is not None and known[0] == version:
            return known[1]
    starts = (position_ids[0].diff() <= 0).nonzero().flatten() + 1       # a synchronisation
    rows = {}
    if len(starts):
        bounds = nn.functional.pad(starts, (1, 0)).to(torch.int32)
        bounds = nn.functional.pad(bounds, (0, 1), value=length)
        longest = int(bounds.diff().amax())
        rows = _packed(bounds, bounds, longest, longest)
    position_ids._flashattn_rows = version, rows
    return rows


def _within_sequences(mask: Tensor, q: Tensor, k: Tensor, rows: dict) -> Tensor:
    """The mask without what is visible of another sequence."""
    def number(bounds: Tensor, x: Tensor) -> Tensor:                     # (B, S): of the sequence
        index = torch.arange(x.shape[0] * x.shape[1], dtype=torch.int32, device=x.device)
        return torch.searchsorted(bounds, index, right=True).view(x.shape[:2])

    numbers_q, numbers_k = number(rows["cu_seqlens_q"], q), number(rows["cu_seqlens_k"], k)
    same = numbers_q[:, None, :, None] == numbers_k[:, None, None, :]
    mask, bias = _mask_and_bias(mask, None)
    return mask & same if bias is None else bias.masked_fill(~same, -torch.inf)


def _mask_and_bias(mask: Tensor | None, position_bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What an attention mask and a bias are together, in arguments of :func:`flashattn.forward`."""
    if isinstance(mask, Mask):
        mask = mask.elements()
    if mask is not None and mask.dim() != 4:
        raise ValueError(f"attention_mask of shape {tuple(mask.shape)}: expected (B, 1, Sq, Sk)")
    if mask is None or mask.dtype == torch.bool:
        return _contiguous_rows(mask), _contiguous_rows(position_bias)
    if not mask.is_floating_point():
        raise TypeError(f"attention_mask of dtype {mask.dtype}: expected bool or a floating dtype")
    return None, _contiguous_rows(mask if position_bias is None else position_bias + mask)


def _contiguous_rows(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _parameter(x: Tensor | None, q: Tensor) -> Tensor | None:
    return x if x is None or x.dtype in (q.dtype, torch.float32) else x.float()
