"""The functions of FlashAttention-2 (2.8): ``from flashattn.compat.flash_attn import flash_attn_func``.

Tensors are (B, S, H, D), or packed (total, H, D) with int32 cumulative lengths; kv is (..., 2, Hk, D) and qkv
(..., 3, H, D).  Arguments mean what they mean there, and :func:`flashattn.forward` and
:func:`flashattn.decode` say more; any head dim, float32 and float64, soft caps with dropout, and caches with
page table and cache_batch_idx or cache_leftpad work too.

All functions return out.  With return_attn_probs they return ``(out, softmax_lse, S_dmask)``: the LSE is
(B, H, Sq) or (H, total_q) float32, natural logarithm, **+inf** for a query that sees no key, and here it has
a gradient; S_dmask is empty, and with dropout, where it would hold the weights, a NotImplementedError.  The
seed of dropout comes from torch's generator of the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import functional
from . import _adapt

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention of q (B, Sq, Hq, D) to k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv).  Differentiable."""
    _refuse_probabilities(return_attn_probs, dropout_p)
    return _results(return_attn_probs, *functional.forward(
        q, k, v, dropout_p=dropout_p, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic, return_lse=True))


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """:func:`flash_attn_func` with kv (B, Sk, 2, Hk, D)."""
    return flash_attn_func(q, *_adapt.unpack("kv", kv, 2), dropout_p, softmax_scale, causal, window_size,
                           softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """:func:`flash_attn_func` with qkv (B, S, 3, H, D)."""
    return flash_attn_func(*_adapt.unpack("qkv", qkv, 3), dropout_p, softmax_scale, causal, window_size,
                           softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention of packed q (total_q, Hq, D) to packed k (total_k, Hk, D) and v.  Differentiable.

    With block_table (B, max_pages) int32, k and v are pages (pages, page_size, Hk, D) of any size,
    cu_seqlens_k counts the keys in them, and there is neither a gradient nor dropout.
    """
    _refuse_probabilities(return_attn_probs, dropout_p)
    if block_table is not None:
        _adapt.refuse("there is no dropout with block_table", dropout_p=dropout_p)
        return _results(return_attn_probs, *functional.decode(
            q, k, v, page_table=block_table, cache_seqlens=cu_seqlens_k.diff(), cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, scale=softmax_scale, causal=causal, window=window_size,
            softcap=softcap, alibi_slopes=alibi_slopes, return_lse=True))
    return _results(return_attn_probs, *functional.forward(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, dropout_p=dropout_p, scale=softmax_scale, causal=causal,
        window=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
        return_lse=True))


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """:func:`flash_attn_varlen_func` with kv (total_k, 2, Hk, D)."""
    return flash_attn_varlen_func(
        q, *_adapt.unpack("kv", kv, 2), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """:func:`flash_attn_varlen_func` with qkv (total, 3, H, D)."""
    return flash_attn_varlen_func(
        *_adapt.unpack("qkv", qkv, 3), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (B, Sq, Hq, D) to a KV cache, to which k and v are appended in place.  Inference only.

    Args:
        k_cache, v_cache: (Bc, S, Hk, D or Dv), or pages (pages, page_size, Hk, D or Dv) with block_table.
        k, v: (B, Snew, Hk, D or Dv): written at cache_seqlens.., and visible to this call.
        rotary_cos, rotary_sin: (positions, R / 2): rotate k and q, row i at ``cache_seqlens + i`` (q without
            causal and window: at cache_seqlens).
        cache_seqlens: an int or (B) int32: keys in the cache before the append.
        num_splits: parts that the keys are divided into; 0 chooses.

    Returns: out (B, Sq, Hq, Dv); ``(out, softmax_lse)`` with return_softmax_lse, the LSE (B, Hq, Sq).
    """
    out, lse = _adapt.attend_to_cache(
        q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad, page_table=block_table, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, num_splits=num_splits, alibi_slopes=alibi_slopes)
    return (out, _positive(lse)) if return_softmax_lse else out


def _refuse_probabilities(return_attn_probs: bool, dropout_p: float) -> None:
    if dropout_p:
        _adapt.refuse(f"with dropout_p={dropout_p} it asks for the matrix of weights, which is never stored",
                      return_attn_probs=return_attn_probs)


def _results(return_attn_probs: bool, out: Tensor, lse: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    return (out, _positive(lse), out.new_empty(0)) if return_attn_probs else out


def _positive(lse: Tensor) -> Tensor:
    """FlashAttention-2's LSE: +inf where there is no key."""
    return torch.where(lse == -math.inf, math.inf, lse)
