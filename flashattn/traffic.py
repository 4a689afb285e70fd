"""How many bytes attention has to move: the formulas of docs/algorithm.md, section "Bytes moved"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .functional import Window, _window


@dataclass(frozen=True)
class Traffic:
    """Bytes read and written by one call; see :func:`traffic` for what is counted."""

    score_matrix: int
    standard_forward: int
    tiled_forward: int
    standard_backward: int
    tiled_backward: int

    def __str__(self) -> str:
        rows = (("forward", self.standard_forward, self.tiled_forward),
                ("backward", self.standard_backward, self.tiled_backward))
        return "\n".join((
            f"score matrix {_megabytes(self.score_matrix)}",
            f"{'bytes moved':<12}{'standard':>14}{'tiled':>14}{'ratio':>9}",
            *(f"{name:<12}{_megabytes(standard):>14}{_megabytes(tiled):>14}{_ratio(standard, tiled):>9}"
              for name, standard, tiled in rows)))


def traffic(
    q: Tensor | Sequence[int],
    k: Tensor | Sequence[int] | None = None,
    v: Tensor | Sequence[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    causal: bool = False,
    window: Window = None,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
) -> Traffic:
    """Bytes that standard and tiled attention move for one call of forward and of backward.

    Only shapes and the dtype are used, so tensors may be on any device, "meta" included, or be given as
    shapes: ``traffic((1, 8192, 1, 64), dtype=torch.float16)``.

    Standard attention is three library calls, each of which reads its inputs and writes its result once: S
    = Q K^T, P = softmax(S), O = P V, with S and P in the dtype of q; they store the full rectangle whatever
    the mask. Its backward keeps P and makes dP, dV, dS, dQ and dK in five calls. Tiled attention reads Q, K
    and V once and writes O and the LSE; its backward reads O and dO for delta, then Q, K, V, dO, LSE and
    delta, and writes dQ, dK and dV. It skips queries that see no key and keys that no query sees. K and V
    count once per KV head on both sides. Not counted: tiles that are read again because a cache is small,
    bias and masks, copies of K and V for grouped heads, and tables of lengths.

    Args:
        q: (B, Sq, Hq, D) or packed (total_q, Hq, D), a tensor or its shape.
        k: (B, Sk, Hk, D) or (total_k, Hk, D); default: the shape of q.
        v: (B, Sk, Hk, Dv) or (total_k, Hk, Dv); default: the shape of k.
        dtype: of q, k and v; default: that of q, or float16 if q is a shape.
        causal, window: as in :func:`flashattn.forward`.
        cu_seqlens_q, cu_seqlens_k: (B + 1) integers, required for packed shapes; their contents are read.

    Returns:
        :class:`Traffic`: bytes as ints; ``print`` it for a table.

    Raises:
        ValueError, TypeError: shapes, dtype, window or lengths do not fit.
    """
    if dtype is None:
        dtype = q.dtype if isinstance(q, Tensor) else torch.float16
    if not dtype.is_floating_point:
        raise TypeError(f"dtype={dtype}: expected a floating dtype")
    packed = cu_seqlens_q is not None
    if packed != (cu_seqlens_k is not None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k: expected both or neither")
    q_shape = _shape("q", q, packed)
    k_shape = q_shape if k is None else _shape("k", k, packed)
    v_shape = k_shape if v is None else _shape("v", v, packed)
    (*q_rows, q_heads, dim), (*k_rows, kv_heads, k_dim), (*v_rows, v_heads, dim_v) = q_shape, k_shape, v_shape
    if dim != k_dim or k_rows != v_rows or kv_heads != v_heads or kv_heads == 0 or q_heads % kv_heads or (
            not packed and q_rows[0] != k_rows[0]):
        raise ValueError(f"q {q_shape}, k {k_shape}, v {v_shape}: expected (B, Sq, Hq, D), (B, Sk, Hk, D), "
                         "(B, Sk, Hk, Dv) or packed (total, H, D), with Hq a multiple of Hk")
    if packed:
        if len(cu_seqlens_q) != len(cu_seqlens_k):
            raise ValueError(f"cu_seqlens_q has {len(cu_seqlens_q)} entries and cu_seqlens_k "
                             f"{len(cu_seqlens_k)}: expected B + 1 in both")
        lengths = list(zip(_lengths("cu_seqlens_q", cu_seqlens_q, q_rows[0]),
                           _lengths("cu_seqlens_k", cu_seqlens_k, k_rows[0])))
    else:
        lengths = [(q_rows[1], k_rows[1])] * q_rows[0]

    item, statistic = dtype.itemsize, 8 if dtype == torch.float64 else 4
    left, right = (math.inf if side == -1 else side for side in _window(window))
    read = [_read(len_q, len_k, left, min(right, 0) if causal else right) for len_q, len_k in lengths]

    scores = item * q_heads * sum(len_q * len_k for len_q, len_k in lengths)
    rows, keys = sum(len_q for len_q, _ in lengths), sum(len_k for _, len_k in lengths)
    seen_rows, seen_keys = sum(r for r, _ in read), sum(s for _, s in read)
    # Bytes of one tensor: every row of it, and the rows that tiled attention reads.
    all_q, all_o = (item * q_heads * rows * d for d in (dim, dim_v))
    all_k, all_v = (item * kv_heads * keys * d for d in (dim, dim_v))
    seen_q, seen_o = (item * q_heads * seen_rows * d for d in (dim, dim_v))
    seen_k, seen_v = (item * kv_heads * seen_keys * d for d in (dim, dim_v))
    all_lse, seen_lse = statistic * q_heads * rows, statistic * q_heads * seen_rows
    return Traffic(
        score_matrix=scores,
        standard_forward=4 * scores + all_q + all_k + all_v + all_o,
        tiled_forward=seen_q + seen_k + seen_v + all_o + all_lse,
        standard_backward=7 * scores + 2 * (all_q + all_k + all_v + all_o),
        tiled_backward=(2 * seen_o + seen_lse) + (seen_q + seen_k + seen_v + seen_o + 2 * seen_lse)
        + (all_q + all_k + all_v))


def _read(len_q: int, len_k: int, left: float, right: float) -> tuple[int, int]:
    """How many queries see a key, and how many keys a query sees: both are contiguous ranges."""
    offset = len_k - len_q                                               # query i stands at key i + offset
    first_row, last_row = max(0, -offset - right), min(len_q, len_k + left - offset)
    if len_k == 0 or last_row <= first_row:
        return 0, 0
    first_key, last_key = max(0, first_row + offset - left), min(len_k, last_row + offset + right)
    return int(last_row - first_row), int(last_key - first_key)


def _shape(name: str, x: Tensor | Sequence[int], packed: bool) -> tuple[int, ...]:
    shape = tuple(x.shape if isinstance(x, Tensor) else x)
    if len(shape) != (3 if packed else 4) or min(shape) < 0:
        raise ValueError(f"{name} of shape {shape}: expected " + ("(total, H, D)" if packed else
                         "(B, S, H, D), or (total, H, D) with cu_seqlens_q and cu_seqlens_k"))
    return shape


def _lengths(name: str, cu_seqlens: Tensor | Sequence[int], total: int) -> list[int]:
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    lengths = [end - start for start, end in zip(bounds, bounds[1:])]
    if not bounds or bounds[0] < 0 or bounds[-1] > total or any(n < 0 for n in lengths):
        raise ValueError(f"{name}={bounds}: expected non-decreasing bounds within 0 and {total}")
    return lengths


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _ratio(standard: int, tiled: int) -> str:
    return f"{standard / tiled:.1f}x" if tiled else "-"
