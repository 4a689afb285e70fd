"""What the two interfaces share: refusals, packed arguments, and attention to a KV cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import functional
from .layers import rotary


def refuse(reason: str, **arguments: object) -> None:
    """Raises NotImplementedError for the first of these arguments that is set."""
    for name, value in arguments.items():
        if value is not None and value is not False and (isinstance(value, Tensor) or value != 0):
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name} is {shown}: {reason}")


def unpack(name: str, packed: Tensor, count: int) -> tuple[Tensor, ...]:
    """The parts of (..., count, H, D), as views."""
    if packed.dim() < 4 or packed.shape[-3] != count:
        raise ValueError(f"{name} has shape {tuple(packed.shape)}: expected (B, S, {count}, H, D), or "
                         f"(total, {count}, H, D) with cumulative lengths")
    return packed.unbind(-3)


def scale_of(q: Tensor, qv: Tensor | None, softmax_scale: float | None) -> float:
    """The factor on the scores: 1 / sqrt of the columns that make them, unless given."""
    columns = q.shape[-1] + (0 if qv is None else qv.shape[-1])
    return 1 / math.sqrt(max(columns, 1)) if softmax_scale is None else softmax_scale


def attend_to_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_interleaved: bool,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    page_table: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    num_splits: int,
    alibi_slopes: Tensor | None = None,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of flash_attn_with_kvcache.  One call of :func:`flashattn.decode`, where it can be.

    It cannot where queries turn at other positions than decode gives them (row i at ``cache_seqlens + i``
    with fewer new keys than queries, rotary_seqlens, qv): then plain torch rotates before.  Nor where the new
    keys are packed unlike the queries: then a call before appends them.
    """
    scale = scale_of(q, qv, softmax_scale)
    if page_table is not None and cache_batch_idx is not None:
        page_table, cache_batch_idx = page_table.index_select(0, cache_batch_idx), None
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is None: k needs it")
    local = any(side not in (None, -1) for side in window_size)
    alike = k is None or cu_seqlens_k_new is cu_seqlens_q                # q and k are packed alike
    in_step = alike and (k is None or k.shape[:-2] == q.shape[:-2] or not (causal or local))

    if rotary_cos is not None and not (in_step and rotary_seqlens is None and qv is None):
        first = cache_seqlens if rotary_seqlens is None else rotary_seqlens
        if first is None:
            raise ValueError("cache_seqlens is None: rotary_cos needs it")
        at = rotary.positions(q, first, cu_seqlens_q, steps=causal or local)
        q = rotary.rotate(q, rotary_cos, rotary_sin, rotary_interleaved, at)
        if k is not None:
            at = rotary.positions(k, first, cu_seqlens_k_new)
            k = rotary.rotate(k, rotary_cos, rotary_sin, rotary_interleaved, at)
        rotary_cos = rotary_sin = None

    v_head_dim = None
    if qv is not None:
        k_cache, v_cache, v_head_dim = _latent(k_cache, v_cache), None, v_cache.shape[-1]
        q, k, v = torch.cat([qv, q], -1), None if k is None else torch.cat([v, k], -1), None

    cache = {"page_table": page_table, "cache_batch_idx": cache_batch_idx, "v_head_dim": v_head_dim}
    if not alike:                                                        # each new key attends to itself
        rows = k.shape[0] if cu_seqlens_k_new is not None else None      # no sequence is longer
        functional.decode(k, k_cache, v_cache, **cache, cache_seqlens=cache_seqlens, k_new=k, v_new=v,
                          window=(0, 0), cu_seqlens_q=cu_seqlens_k_new, max_seqlen_q=rows)
        cache_seqlens = cache_seqlens + (k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff())
        k = v = None
    return functional.decode(
        q, k_cache, v_cache, **cache, cache_seqlens=cache_seqlens, k_new=k, v_new=v, leftpad=cache_leftpad,
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
        num_splits=num_splits, causal=causal, window=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
        scale=scale, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, return_lse=True)


def _latent(k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """The tensor (..., Dv + D) whose first columns are v_cache and whose last ones are k_cache."""
    dim_v = v_cache.shape[-1]
    if (k_cache.shape[:-1] != v_cache.shape[:-1] or k_cache.stride() != v_cache.stride()
            or k_cache.dtype != v_cache.dtype or k_cache.storage_offset() != v_cache.storage_offset() + dim_v
            or k_cache.untyped_storage().data_ptr() != v_cache.untyped_storage().data_ptr()):
        raise NotImplementedError(
            "qv is given, and k_cache and v_cache lie apart: expected views of one tensor (..., Dv + D), "
            f"v_cache = kv[..., :{dim_v}] and k_cache = kv[..., {dim_v}:], so that nothing is copied")
    return v_cache.as_strided((*v_cache.shape[:-1], dim_v + k_cache.shape[-1]), v_cache.stride())
