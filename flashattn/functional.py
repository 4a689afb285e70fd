"""The public functions: defaults and shape rules in Python, everything else behind ``torch.ops``.

Shapes use B batch, Sq/Sk query and key length, Hq/Hk query and KV heads, D head dim of q and k, Dv head dim
of v.  Every function takes dense tensors (B, S, H, D) or packed ones (total, H, D) with ``cu_seqlens``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _load

Window = Sequence[int | None] | None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_max_logit: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention, ``softmax(scale * q k^T) v``, without ever holding the (Sq, Sk) matrix.

    Differentiable.  Algorithm: tiles with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022),
    see docs/algorithm.md.

    Args:
        q: (B, Sq, Hq, D) or packed (total_q, Hq, D); float32, bfloat16, float16 or float64.  Any strides with
            a contiguous last dimension; the same holds for k and v.
        k: (B, Sk, Hk, D) or (total_k, Hk, D), dtype of q.  Hq must be a multiple of Hk (GQA, MQA): query head
            h reads KV head ``h // (Hq // Hk)``.
        v: (B, Sk, Hk, Dv) or (total_k, Hk, Dv), dtype of q.  Dv may differ from D.
        causal: key j is visible to query i iff ``j <= i + Sk - Sq`` (bottom-right aligned).
        window: ``(left, right)``, inclusive, in keys around ``i + Sk - Sq``; None or -1 is unlimited on that
            side.
        scale: factor on the scores before the softmax.  Default ``1 / sqrt(D)``.
        softcap: scores become ``softcap * tanh(scale * s / softcap)`` before masks and bias; 0 is off.
        alibi_slopes: (Hq) or (B, Hq) float32; adds ``-slope * |i + Sk - Sq - j|``.  It has no gradient.
        bias: (B or 1, Hq or 1, Sq or 1, Sk), dtype of q or float32, added to the scores; has a gradient.  In
            packed calls Sq and Sk are max_seqlen_q and max_seqlen_k and rows and columns count within each
            sequence.
        mask: (B or 1, Hq or 1, Sq or 1, Sk) bool, True is visible.
        sink: (Hq), dtype of q or float32: one extra logit a head that joins the denominator and the LSE and
            has no value row; has a gradient.
        dropout_p: probability in [0, 1) of dropping a weight after normalisation.
        seed: int, or a one-element int64 tensor on q's device, for the dropout mask; None draws one from
            torch's generator on that device.  Untouched when dropout_p is 0.
        cu_seqlens_q, cu_seqlens_k: (B + 1) int32 on q's device; sequence b of a packed tensor is rows
            ``cu[b]:cu[b + 1]``.  Both or neither.
        max_seqlen_q, max_seqlen_k: longest sequence, an int.  Required for packed CUDA tensors (there is no
            hidden synchronisation); optional on the CPU, where it is checked.
        seqused_q, seqused_k: (B) int32: rows of each sequence that count; rows beyond are never read.  Output
            rows beyond are zero.
        deterministic: bit-reproducible backward.  The forward always is.
        batch_invariant: the result of a sequence does not depend, to the bit, on the rest of the batch.
        return_lse: also return the log-sum-exp of the scores (with the sink), natural logarithm, float32
            (float64 for float64 inputs), (B, Hq, Sq) or (Hq, total_q).  It is differentiable.
        return_max_logit: also return the largest score of each head (after softcap, bias and masks, without
            the sink), (Hq), dtype of the LSE.  It has no gradient.
        out: (like q, with Dv) tensor that receives the result; not differentiable.

    Returns:
        out, shaped like q with Dv; a tuple ``(out, lse, max_logit)`` of what was asked for.  A row with no
        visible key is 0 with LSE -inf (the sink, if there is one).

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype, device or value; the text names it.
        NotImplementedError: a combination that no kernel serves; ``flashattn.explain`` says why.
    """
    ops = _load.ops()
    _refuse_slope_gradient(alibi_slopes)
    if dtype := _autocast_dtype(q):
        q, k, v = (_cast(t, dtype) for t in (q, k, v))
        bias, sink = (_cast(t, dtype, torch.float32) for t in (bias, sink))
    left, right = _window(window)
    if dropout_p == 0.0:
        seed = None
    elif not isinstance(seed, Tensor):
        seed = _seed(seed, q.device)
    options = (scale, softcap, causal, left, right, alibi_slopes, bias, mask, sink, dropout_p, seed,
               cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
               deterministic, batch_invariant)
    if out is None:
        out, lse, max_logit = ops.forward(q, k, v, *options, return_max_logit)
    else:
        if _requires_grad(q, k, v, bias, sink):
            raise NotImplementedError("out= has no gradient, but an input requires one: call under "
                                      "torch.no_grad() or without out")
        lse, max_logit = ops.forward_out(q, k, v, out, *options, return_max_logit)
    result = (out, *((lse,) if return_lse else ()), *((max_logit,) if return_max_logit else ()))
    return result if len(result) > 1 else out


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients of :func:`forward` from its saved outputs; the probabilities are recomputed tile by tile.

    Autograd calls this by itself; it is public for hand-written training loops (Dao et al. 2022,
    algorithm 4).

    Args:
        dout: gradient of out, its shape and dtype; any strides.
        q, k, v, out, lse: inputs and outputs of the forward call; the options must be those of that call.
        dlse: gradient of the LSE, its shape and dtype; None is zero.
        seed: required when dropout_p is not 0: the one that the forward used.
        deterministic: the same bits on every run, also when ``torch.use_deterministic_algorithms(True)`` is
            set.

    Returns:
        ``(dq, dk, dv)``, then dbias if bias was given, then dsink if sink was given; each has the shape and
        dtype of its input (dbias is summed over the dimensions that bias broadcasts).

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`forward`.
    """
    ops = _load.ops()
    _refuse_slope_gradient(alibi_slopes)
    left, right = _window(window)
    if dropout_p == 0.0:
        seed = None
    elif seed is None:
        raise ValueError("seed=None: backward with dropout_p > 0 needs the seed that the forward used")
    elif not isinstance(seed, Tensor):
        seed = _seed(seed, q.device)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    dq, dk, dv, dbias, dsink = ops.backward(
        dout, q, k, v, out, lse, dlse,
        scale, softcap, causal, left, right, alibi_slopes, bias, mask, sink, dropout_p, seed,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
        deterministic, batch_invariant, bias is not None)
    return (dq, dk, dv, *((dbias,) if bias is not None else ()), *((dsink,) if sink is not None else ()))


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *,
    cache_seqlens: int | Tensor | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad: Tensor | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    v_head_dim: int | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    causal: bool = False,
    window: Window = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few query tokens against a KV cache, split over the keys and merged.  Inference only.

    Algorithm: split-KV ("flash decoding", Dao et al. 2023) with the LSE merge of docs/algorithm.md.

    Args:
        q: (B, Sq, Hq, D), or packed (total_q, Hq, D) with cu_seqlens_q.  Any Sq: a long one is chunked
            prefill.
        k_cache: (Bc, S, Hk, D), or paged (pages, page_size, Hk, D) with page_table; Bc is B unless
            cache_batch_idx is given.
        v_cache: the same with Dv; None with ``v_head_dim`` makes V the first v_head_dim columns of k_cache
            (MLA).
        cache_seqlens: (B) int32 on q's device, or one int for all: keys in the cache *before* k_new is
            appended. Default: the whole cache (required with k_new).
        page_table: (B, max_pages) int32: page of key j is ``page_table[b, j // page_size]``.
        cache_batch_idx: (B) int32: row of the cache that batch b uses; not with page_table.
        leftpad: (B) int32: first valid key; earlier ones are never read.
        k_new, v_new: (B, Snew, Hk, D or Dv), or packed with cu_seqlens_q like q: written to the cache in
            place at ``cache_seqlens ..``, and visible to this call.  Nothing else of the cache is written.
        rotary_cos, rotary_sin: (positions, R / 2), dtype of q or float32, R <= D: rotate the first R columns
            of k_new (at its position in the cache) and of q (at ``i + Sk - Sq`` but not below 0; all at
            cache_seqlens when neither causal nor window is given) before use (Su et al. 2021).
        rotary_interleaved: pairs are columns (2c, 2c + 1); otherwise (c, c + R / 2).
        num_splits: parts that the keys are divided into; 0 chooses from the shapes and the device.
        batch_invariant: a fixed split length in keys, so that no result depends on the batch, to the bit.
        causal, window, softcap, alibi_slopes, sink, scale: as in :func:`forward`, with Sk the keys of the
            sequence after the append.
        cu_seqlens_q: (B + 1) int32: q (and k_new, v_new) are packed.
        max_seqlen_q: as in :func:`forward`.
        return_lse: also return the LSE, (B, Hq, Sq) or (Hq, total_q).
        out: tensor that receives the result.

    Returns:
        out, (B, Sq, Hq, Dv) or (total_q, Hq, Dv); ``(out, lse)`` with return_lse.

    Raises: ValueError, TypeError, NotImplementedError: as :func:`forward`; on the CPU, and on CUDA inside
            :func:`flashattn.debug_checks`, lengths beyond the cache and page ids out of range too.  The
            cache is untouched then.  Calling ``backward()`` through the result raises
            NotImplementedError.
    """
    ops = _load.ops()
    if dtype := _autocast_dtype(q):
        q, k_new, v_new = (_cast(t, dtype) for t in (q, k_new, v_new))
        sink = _cast(sink, dtype, torch.float32)
    left, right = _window(window)
    if cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        length = _integer("cache_seqlens", cache_seqlens, 32)
        cache_seqlens = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    if v_cache is None and (v_head_dim is None or v_head_dim < 1):
        raise ValueError(f"v_head_dim is {v_head_dim} and v_cache None: expected v_cache, or v_head_dim from "
                         f"1 to the head dim of k_cache, {k_cache.shape[-1]}")
    options = (cache_seqlens, page_table, cache_batch_idx, leftpad, rotary_cos, rotary_sin,
               rotary_interleaved, v_head_dim, num_splits, batch_invariant, causal, left, right, softcap,
               alibi_slopes, sink, scale, cu_seqlens_q, max_seqlen_q)
    if k_new is None and v_new is None and out is None:
        result, lse = ops.decode(q, k_cache, v_cache, *options)
    else:
        result = out
        if result is None:  # rows of a packed q may belong to no sequence
            width = v_head_dim if v_cache is None else v_cache.shape[-1]
            new = q.new_empty if cu_seqlens_q is None else q.new_zeros
            result = new((*q.shape[:-1], width))
        lse = ops.decode_(q, k_cache, v_cache, k_new, v_new, result, *options)
    inputs = (q, k_cache, v_cache, k_new, v_new, alibi_slopes, sink)
    if _requires_grad(*inputs):
        result, lse = _InferenceOnly.apply(result, lse, *inputs)
    return (result, lse) if return_lse else result


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over disjoint sets of keys.  Differentiable in both arguments.

    ``lse = log sum_n exp(lses[n])`` and ``out = sum_n exp(lses[n] - lse) * outs[n]`` (docs/algorithm.md).  A
    part with LSE -inf changes nothing, whatever its out holds.

    Args:
        outs: (n, B, S, H, Dv), any floating dtype.
        lses: (n, B, H, S), float32 or float64, natural logarithm.

    Returns: out (B, S, H, Dv) in the dtype of outs, and lse (B, H, S) in the dtype of lses.  Empty
    everywhere: 0 and -inf.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit.
    """
    if outs.dim() != 5 or outs.shape[0] == 0 or lses.shape != (*outs.shape[:2], outs.shape[3], outs.shape[2]):
        raise ValueError(f"outs of shape {tuple(outs.shape)} and lses of shape {tuple(lses.shape)}: expected "
                         "(n, B, S, H, Dv) and (n, B, H, S) with n >= 1")
    if not outs.is_floating_point() or lses.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"outs of dtype {outs.dtype} and lses of dtype {lses.dtype}: expected a floating "
                        "dtype and float32 or float64")
    peak = lses.detach().amax(0)
    peak = torch.where(peak == -math.inf, torch.zeros_like(peak), peak)
    weights = torch.exp(lses - peak)                                     # (n, B, H, S)
    total = weights.sum(0)
    empty = total == 0
    lse = torch.where(empty, -math.inf, torch.log(torch.where(empty, 1, total)) + peak)
    shares = (weights / torch.where(empty, 1, total)).transpose(2, 3).unsqueeze(-1)
    parts = torch.where(shares == 0, torch.zeros_like(outs), outs)
    return (shares * parts.to(lses.dtype)).sum(0).to(outs.dtype), lse


class _InferenceOnly(torch.autograd.Function):
    """Marks results that have no gradient, so that asking for one is an error and not a silent zero."""

    @staticmethod
    def forward(ctx, result, lse, *inputs):
        return result.view_as(result), lse.view_as(lse)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError("flashattn.decode is inference only and has no gradient: train with "
                                  "flashattn.forward")


def _autocast_dtype(q: Tensor) -> torch.dtype | None:
    """What autocast asks for on q's device, None where it is off."""
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _cast(t: Tensor | None, dtype: torch.dtype, *kept: torch.dtype) -> Tensor | None:
    """t in the autocast dtype; what is no floating tensor, or float64 (torch's own rule), stays as it is."""
    keep = t is None or not t.is_floating_point() or t.dtype in (torch.float64, *kept)
    return t if keep else t.to(dtype)


def _window(window: Window) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if isinstance(window, int) or len(window) != 2:
        raise ValueError(f"window={window!r}: expected None or (left, right)")
    left, right = (-1 if side is None else _integer("window", side, 64) for side in window)
    if left < -1 or right < -1:
        raise ValueError(f"window={tuple(window)}: each side is a number of keys >= 0, or None or -1 for no "
                         "limit")
    return left, right


def _seed(seed: int | None, device: torch.device) -> Tensor:
    if seed is None:
        return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=device)
    return torch.full((1,), _integer("seed", seed, 64), dtype=torch.int64, device=device)


def _integer(name: str, value: int, bits: int) -> int:
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name} has {value!r}: expected an int")
    if not -2 ** (bits - 1) <= value < 2 ** (bits - 1):
        raise ValueError(f"{name} has {value}: expected a number of int{bits}")
    return value


def _refuse_slope_gradient(alibi_slopes: Tensor | None) -> None:
    if _requires_grad(alibi_slopes):
        raise NotImplementedError("alibi_slopes requires a gradient, which is not implemented: expected "
                                  "slopes without one; pass their product with the distances as a bias")


def _requires_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
