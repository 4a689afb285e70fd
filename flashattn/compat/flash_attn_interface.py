"""The functions of FlashAttention-3: ``from flashattn.compat.flash_attn_interface import flash_attn_func``.

Tensors are (B, S, H, D), or packed (total, H, D) with int32 cumulative lengths.  Arguments mean what they
mean there, and :func:`flashattn.forward` and :func:`flashattn.decode` say more; any dtype and head dim of
theirs, gradients of qv, and packed new keys with a page table work too.

The functions return out.  With return_attn_probs they return ``(out, softmax_lse)``: the LSE is (B, H, Sq) or
(H, total_q) float32, natural logarithm, **-inf** for a query that sees no key, and here it has a gradient.

num_splits has a meaning in flash_attn_with_kvcache.  Elsewhere it only tunes FlashAttention, as pack_gqa,
sm_margin and scheduler_metadata do everywhere: accepted, and without effect.  q_descale, k_descale, v_descale
(8-bit inputs) and attention_chunk raise NotImplementedError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import functional
from . import _adapt

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_with_kvcache", "get_scheduler_metadata"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (B, Sq, Hq, D) to k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv).  Differentiable.

    With qv (B, Sq, Hq, Dv) the scores are ``q k^T + qv v^T``, by default over the root of D + Dv.
    """
    _refuse(attention_chunk, q_descale, k_descale, v_descale)
    scale = _adapt.scale_of(q, qv, softmax_scale)
    q, k = _with_qv(q, k, v, qv)
    return functional.forward(q, k, v, scale=scale, causal=causal, window=window_size, softcap=softcap,
                              deterministic=deterministic, return_lse=return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attn_func` with qkv (B, S, 3, H, D), or (B, S, num_heads_q + 2 Hk, D)."""
    if qkv.dim() == 5:
        q, k, v = _adapt.unpack("qkv", qkv, 3)
    elif qkv.dim() == 4 and num_heads_q is not None and (qkv.shape[2] - num_heads_q) % 2 == 0:
        kv_heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split((num_heads_q, kv_heads, kv_heads), dim=2)
    else:
        raise ValueError(f"qkv has shape {tuple(qkv.shape)} and num_heads_q is {num_heads_q}: expected "
                         "(B, S, 3, H, D), or (B, S, num_heads_q + 2 Hk, D)")
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk,
        softcap, deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed q (total_q, Hq, D) to packed k (total_k, Hk, D) and v.  Differentiable.

    seqused_q and seqused_k (B) int32 say how many rows of each sequence count; qv is as in
    :func:`flash_attn_func`, packed like q.
    """
    _refuse(attention_chunk, q_descale, k_descale, v_descale)
    scale = _adapt.scale_of(q, qv, softmax_scale)
    q, k = _with_qv(q, k, v, qv)
    return functional.forward(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k, scale=scale, causal=causal,
        window=window_size, softcap=softcap, deterministic=deterministic, return_lse=return_attn_probs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of q to a KV cache, to which k and v are appended in place.  Inference only.

    Args:
        q: (B, Sq, Hq, D), or packed (total_q, Hq, D) with cu_seqlens_q.
        k_cache, v_cache: (Bc, S, Hk, D or Dv), or pages (pages, page_size, Hk, D or Dv) with page_table.
        k, v: (B, Snew, Hk, D or Dv), or packed with cu_seqlens_k_new: written at cache_seqlens.., and visible
            to this call.  Packed like q they are fastest with the same tensor of lengths.
        qv: like q with Dv: the scores are ``q k^T + qv v^T``, by default over the root of D + Dv.  The caches
            must be views ``kv[..., Dv:]`` and ``kv[..., :Dv]`` of one tensor (..., Dv + D).
        rotary_cos, rotary_sin: (positions, R / 2): rotate k and q, row i at ``cache_seqlens + i`` (q without
            causal and window: at cache_seqlens).
        cache_seqlens: an int or (B) int32: keys in the cache before the append.
        rotary_seqlens: (B) int32: first position for the rotation, in place of cache_seqlens.
        num_splits: parts that the keys are divided into; 0 chooses.

    Returns:
        out; with return_softmax_lse ``(out, softmax_lse, out_accum, softmax_lse_accum)``, of which the last
        two, FlashAttention's results of the parts, are empty here.
    """
    _refuse(attention_chunk, q_descale, k_descale, v_descale)
    out, lse = _adapt.attend_to_cache(
        q, k_cache, v_cache, k, v, qv=qv, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved, rotary_seqlens=rotary_seqlens, cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, page_table=page_table,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        num_splits=num_splits)
    return (out, lse, lse.new_empty(0), lse.new_empty(0)) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Joins attention over disjoint sets of keys, :func:`flashattn.merge`.  Differentiable without out.

    Args:
        out_partial: (n, B, S, H, D), any floating dtype.
        lse_partial: (n, B, S, H) float32, any strides; parts with -inf are left out.
        out: (B, S, H, D) that receives the result.
        out_dtype: of the result; default that of out_partial.

    Returns: ``(out, lse)``, out (B, S, H, D) and lse (B, S, H).
    """
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(f"lse_partial has shape {tuple(lse_partial.shape)}: expected (n, B, S, H) of "
                         f"out_partial, {tuple(out_partial.shape[:-1])}")
    if out is not None and out_dtype not in (None, out.dtype):
        raise ValueError(f"out_dtype is {out_dtype}: expected that of out, {out.dtype}")
    merged, lse = functional.merge(out_partial.to(lse_partial.dtype), lse_partial.transpose(2, 3))
    merged = merged.to(out_dtype or out_partial.dtype) if out is None else out.copy_(merged)
    return merged, lse.transpose(1, 2)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An empty int32 tensor on the device of cache_seqlens, for flash_attn_with_kvcache(scheduler_metadata=).

    Nothing has to be known ahead here: kernels read the lengths on the device at every call.
    """
    _refuse(attention_chunk)
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def _refuse(attention_chunk: int, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
            v_descale: Tensor | None = None) -> None:
    _adapt.refuse("8-bit inputs are not implemented: expected None", q_descale=q_descale, k_descale=k_descale,
                  v_descale=v_descale)
    _adapt.refuse("chunked attention is not implemented: expected 0, or a mask for flashattn.forward",
                  attention_chunk=attention_chunk)


def _with_qv(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor]:
    """q and k of which the product is ``q k^T + qv v^T``."""
    return (q, k) if qv is None else (torch.cat([q, qv], -1), torch.cat([k, v], -1))
