"""flashattn as an attention implementation of Hugging Face transformers (5.x).

    from flashattn.integrations.transformers import register
    register()
    model = AutoModel.from_pretrained(path, attn_implementation="exact_attention")

Masks come from transformers as bool tensors and go to the kernels as they are, so that causal, padding,
window, packed and user-made masks keep their meaning.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

import flashattn

# What a model or a caller may pass that changes the result and that this function does not compute.
_REFUSED = {
    "indices": "sparse attention to selected keys",
    "block_indices": "sparse attention to selected blocks of keys",
    "sinks": "a sink for each token",
    "cu_seq_lens_q": "packed batches by cu_seq_lens; give position_ids that restart at each sequence",
    "cu_seq_lens_k": "packed batches by cu_seq_lens; give position_ids that restart at each sequence",
    "output_attentions": "returned attention weights, which are never stored",
}


def register(name: str = "exact_attention") -> str:
    """Make ``attn_implementation=name`` and ``model.set_attn_implementation(name)`` work.  Returns the name.

    Raises:
        ValueError: transformers would take the name for one of its own or for a Hub repository.
    """
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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """One attention layer, as transformers calls it.

    Args:
        query: (B, Hq, Sq, D).
        key, value: (B, Hk, Sk, D) and (B, Hk, Sk, Dv); heads are not repeated.
        attention_mask: (B or 1, Hq or 1, Sq or 1, Sk), bool (True is visible) or floating (added to scores).
            None: every key is visible, or in a causal layer the keys up to each query (Sq is 1 or Sk then).
        is_causal: default ``module.is_causal``, as in transformers; used only without attention_mask.
        s_aux: (Hq), one sink logit a head.
        position_bias: (B or 1, Hq, Sq, Sk), added to the scores; has a gradient.
        kwargs: what else a model passes on.  A sliding window reaches this function through the mask.

    Returns:
        ``(out, None)``: out (B, Sq, Hq, Dv), contiguous; weights are never stored.

    Raises:
        NotImplementedError: a keyword asks for something else (see ``_REFUSED``).
        ValueError, TypeError: the mask does not fit, or causality is not determined by the shapes.
    """
    for keyword, meaning in _REFUSED.items():
        given = kwargs.get(keyword)
        if given is not None and given is not False:
            raise NotImplementedError(f"{keyword} is given, but this attention does not support {meaning}")

    len_q, len_k = query.shape[2], key.shape[2]
    causal = False
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and len_q not in (1, len_k):
            raise ValueError(f"attention_mask=None with {len_q} queries and {len_k} keys in a causal layer: "
                             "expected a mask or is_causal=False: where the first query stands is not known")
    elif attention_mask.dim() != 4:
        raise ValueError(f"attention_mask of shape {tuple(attention_mask.shape)}: expected (B, 1, Sq, Sk)")

    mask, bias = None, position_bias
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        mask = attention_mask
    elif attention_mask is not None and attention_mask.is_floating_point():
        bias = attention_mask if bias is None else bias + attention_mask
    elif attention_mask is not None:
        raise TypeError(f"attention_mask of dtype {attention_mask.dtype}: expected bool or a floating dtype")

    out = flashattn.forward(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=causal, scale=scaling,
        softcap=softcap or 0.0, bias=_contiguous_rows(bias), mask=_contiguous_rows(mask), sink=s_aux,
        dropout_p=dropout)
    return out.contiguous(), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs,
) -> Tensor | None:
    """The bool mask (B, 1, Sq, Sk) of ``sdpa_mask``, or None where :func:`attention` needs none.

    ``sdpa_mask`` also leaves out causal masks that only top-left alignment gets right (a prompt at the start
    of a static cache, whose later slots hold nothing yet); here those are made.
    """
    ends_together = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    return sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        allow_is_causal_skip=allow_is_causal_skip and ends_together and q_length in (1, kv_length), **kwargs)


def _contiguous_rows(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()
