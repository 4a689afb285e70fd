"""The oracle: attention by its definition, in plain torch, with every option, differentiable by autograd.

It loops over the sequences, builds each score matrix and computes in float64 unless told otherwise.  With
``dtype`` set to the inputs' own it is the "plain" unfused baseline of the accuracy rule of the tests.
Arguments mean what they mean in :mod:`flashattn.functional`; nothing is checked here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
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
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`flashattn.forward` by definition, in S^2 memory.

    Args:
        dtype: all arithmetic and all results are in this dtype.
        max_seqlen_q, max_seqlen_k: accepted so that tests can pass one set of options; not needed.

    Returns:
        ``(out, lse, max_logit)``: out like q with Dv, lse (B, Hq, Sq) or (Hq, total_q), max_logit (Hq).
    """
    packed = cu_seqlens_q is not None
    q_rows = _rows(q, cu_seqlens_q, seqused_q)
    k_rows = _rows(k, cu_seqlens_k, seqused_k)
    heads = q.shape[-2]
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)
    lse = torch.full((*q.shape[:-2], heads), -math.inf, dtype=dtype, device=q.device)
    max_logit = torch.full((heads,), -math.inf, dtype=dtype, device=q.device)
    if dropout_p:
        longest_q, longest_k = (max((r.stop - r.start for r in rows), default=0) for rows in (q_rows, k_rows))
        kept = dropout_keep(seed, dropout_p, len(q_rows), heads, longest_q, longest_k).to(q.device)
    for b, (rows, keys) in enumerate(zip(q_rows, k_rows)):
        at_q, at_k = (rows, keys) if packed else ((b, rows), (b, keys))
        len_q, len_k = rows.stop - rows.start, keys.stop - keys.start
        out[at_q], lse[at_q], largest = _attend(
            q[at_q].to(dtype), k[at_k].to(dtype), v[at_k].to(dtype),
            causal=causal, window=window, scale=scale, softcap=softcap, slopes=_slopes(alibi_slopes, b),
            bias=_matrix(bias, b, len_q, len_k), mask=_matrix(mask, b, len_q, len_k), sink=sink,
            dropped=~kept[b, :, :len_q, :len_k] if dropout_p else None,
            keep_scale=65536 / _threshold(dropout_p))
        max_logit = torch.maximum(max_logit, largest)
    return out, lse.movedim(-1, 0 if packed else 1), max_logit


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dlse: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of :func:`forward` by autograd in ``dtype``: ``(dq, dk, dv, dbias | None, dsink | None)``."""
    q, k, v, bias, sink = (
        None if t is None else t.detach().to(dtype).requires_grad_() for t in (q, k, v, bias, sink))
    with torch.enable_grad():
        out, lse, _ = forward(q, k, v, bias=bias, sink=sink, dtype=dtype, **options)
    inputs = [t for t in (q, k, v, bias, sink) if t is not None]
    if not out.requires_grad:                                            # no sequence at all
        grads = iter([torch.zeros_like(t) for t in inputs])
    else:
        seeds = dout.to(dtype), torch.zeros_like(lse) if dlse is None else dlse.to(dtype)
        grads = iter(torch.autograd.grad((out, lse), inputs, seeds, materialize_grads=True))
    return tuple(None if t is None else next(grads) for t in (q, k, v, bias, sink))


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
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """:func:`flashattn.decode` by definition.  The arguments are never written.

    Returns:
        ``(out, lse, k_cache, v_cache)``: out and lse in ``dtype``, and copies of the caches after the append.
        Rotated new keys are rounded to the dtype of the cache; rotated queries are not rounded.
    """
    packed = cu_seqlens_q is not None
    q_rows = _rows(q, cu_seqlens_q, None)
    k_cache, v_cache = k_cache.clone(), None if v_cache is None else v_cache.clone()
    capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    lengths = _per_sequence(cache_seqlens, capacity, len(q_rows))
    first_keys = _per_sequence(leftpad, 0, len(q_rows))

    def slots(b: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Where these positions of sequence b lie in the cache."""
        if page_table is not None:
            page_size = k_cache.shape[1]
            return page_table[b].long()[positions // page_size], positions % page_size
        row = b if cache_batch_idx is None else int(cache_batch_idx[b])
        return torch.full_like(positions, row), positions

    for b, rows in enumerate(q_rows if k_new is not None else ()):       # all appends come before all reads
        at = rows if packed else b
        new = len(k_new[at])
        positions = torch.arange(lengths[b], lengths[b] + new, device=q.device)
        keys = k_new[at].to(dtype)
        if rotary_cos is not None:
            keys = _rotate(keys, positions, rotary_cos, rotary_sin, rotary_interleaved)
        k_cache[slots(b, positions)] = keys.to(k_cache.dtype)
        if v_cache is not None:
            v_cache[slots(b, positions)] = v_new[at]

    values = k_cache[..., :v_head_dim] if v_cache is None else v_cache
    out = torch.zeros((*q.shape[:-1], values.shape[-1]), dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=dtype, device=q.device)
    for b, rows in enumerate(q_rows):
        at = rows if packed else (b, rows)
        len_q = rows.stop - rows.start
        len_k = lengths[b] + (0 if k_new is None else len(k_new[rows if packed else b]))
        q_b = q[at].to(dtype)
        if rotary_cos is not None:
            relative = causal or any(side not in (None, -1) for side in window or ())
            positions = (torch.arange(len_q, device=q.device) + len_k - len_q).clamp(min=0) if relative else \
                torch.full((len_q,), lengths[b], device=q.device)
            q_b = _rotate(q_b, positions, rotary_cos, rotary_sin, rotary_interleaved)
        read = slots(b, torch.arange(first_keys[b], max(first_keys[b], len_k), device=q.device))
        out[at], lse[at], _ = _attend(
            q_b, k_cache[read].to(dtype), values[read].to(dtype), causal=causal, window=window, scale=scale,
            softcap=softcap, slopes=_slopes(alibi_slopes, b), sink=sink, first_key=first_keys[b])
    return out, lse.movedim(-1, 0 if packed else 1), k_cache, v_cache


def dropout_keep(seed: int | Tensor, p: float, batch: int, heads: int, rows: int, cols: int) -> Tensor:
    """Which weights dropout keeps: bool (batch, heads, rows, cols), on the CPU.

    Philox4x32-10 (Salmon et al. 2011), key = seed, counter = (column // 8, row, query head, batch).  One call
    gives eight 16-bit numbers, the low half of each word first; column ``8 c + e`` takes number e and is kept
    iff it is below ``round((1 - p) * 65536)``.
    """
    seed = int(seed)
    index = torch.meshgrid(*(torch.arange(n) for n in (batch, heads, rows, -(-cols // 8))), indexing="ij")
    words = _philox((index[3], index[2], index[1], index[0]), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    numbers = torch.stack([n for word in words for n in reversed(_halves(word, 16))], dim=-1).flatten(-2)
    return numbers[..., :cols] < _threshold(p)


def _philox(counter: Sequence[Tensor], key: Sequence[int]) -> Sequence[Tensor]:
    """Philox4x32-10: four words from four counter words and two key words, all in int64."""
    c, key = counter, list(key)
    for _ in range(10):                                                  # products wrap, their bits are right
        high_0, low_0 = _halves(0xD2511F53 * c[0], 32)
        high_1, low_1 = _halves(0xCD9E8D57 * c[2], 32)
        c = high_1 ^ c[1] ^ key[0], low_1, high_0 ^ c[3] ^ key[1], low_0
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: Sequence[int | None] | None,
    scale: float | None,
    softcap: float,
    slopes: Tensor | None,
    sink: Tensor | None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    dropped: Tensor | None = None,
    keep_scale: float = 1.0,
    first_key: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence: q (Sq, Hq, D), k (Sk, Hk, D), v (Sk, Hk, Dv) -> out (Sq, Hq, Dv), lse (Sq, Hq), max (Hq).

    bias, mask and dropped broadcast to (Hq, Sq, Sk).  Key 0 of k stands at position first_key.
    """
    (len_q, heads, dim), (len_k, kv_heads, _) = q.shape, k.shape
    position = torch.arange(len_q, device=q.device)[:, None] + first_key + len_k - len_q
    key = torch.arange(first_key, first_key + len_k, device=q.device)[None, :]
    left, right = (math.inf if side in (None, -1) else side for side in window or (None, None))
    visible = (key >= position - left) & (key <= position + min(right, 0 if causal else math.inf))
    visible = visible.expand(heads, -1, -1)
    if mask is not None:
        visible = visible & mask

    # A key that nobody sees is unread memory: it may hold NaN, and 0 * NaN would spread it.
    unseen = ~visible.reshape(kv_heads, heads // kv_heads * len_q, len_k).any(1).T[:, :, None]  # (Sk, Hk, 1)
    k, v = (t.masked_fill(unseen, 0).repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))

    scale = 1 / math.sqrt(max(dim, 1)) if scale is None else scale
    score = torch.einsum("qhd,khd->hqk", q, k * scale)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    if slopes is not None:
        score = score - slopes.to(q.dtype)[:, None, None] * (position - key).abs()
    if bias is not None:
        score = score + bias.to(q.dtype)
    score = torch.where(visible, score, -math.inf)
    max_logit = torch.cat([score.flatten(1), score.new_full((heads, 1), -math.inf)], dim=1).detach().amax(1)

    if sink is not None:
        score = torch.cat([score, sink.to(q.dtype)[:, None, None].expand(-1, len_q, 1)], dim=-1)
    empty = (score == -math.inf).all(-1, keepdim=True)
    score = torch.where(empty, 0, score)
    weights = torch.where(empty, 0, torch.softmax(score, dim=-1))[..., :len_k]
    lse = torch.where(empty[..., 0], -math.inf, torch.logsumexp(score, dim=-1))
    if dropped is not None:
        weights = weights.masked_fill(dropped, 0) * keep_scale
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T, max_logit


def _rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding (Su et al. 2021) of the first R columns of x (S, H, D) at these positions."""
    cos, sin = (t[positions].to(x.dtype)[:, None] for t in (cos, sin))  # (S, 1, R / 2)
    half = cos.shape[-1]
    first = torch.arange(half, device=x.device) * (2 if interleaved else 1)
    second = first + (1 if interleaved else half)
    rotated = x.clone()
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., second] * cos + x[..., first] * sin
    return rotated


def _rows(x: Tensor, cu_seqlens: Tensor | None, used: Tensor | None) -> list[slice]:
    """The rows of each sequence that count: within its batch entry, or within the packed tensor."""
    if cu_seqlens is None:
        starts, ends = [0] * x.shape[0], [x.shape[1]] * x.shape[0]
    else:
        starts, ends = cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()
    if used is not None:
        ends = [start + n for start, n in zip(starts, used.tolist())]
    return [slice(start, end) for start, end in zip(starts, ends)]


def _per_sequence(values: int | Tensor | None, default: int, batch: int) -> list[int]:
    return torch.as_tensor(default if values is None else values).expand(batch).tolist()


def _slopes(alibi_slopes: Tensor | None, b: int) -> Tensor | None:
    return alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[b]


def _matrix(x: Tensor | None, b: int, len_q: int, len_k: int) -> Tensor | None:
    """Sequence b of a bias or mask, as (H or 1, Sq or 1, Sk)."""
    return None if x is None else x[b if x.shape[0] > 1 else 0, :, :len_q, :len_k]


def _halves(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    low = (1 << bits) - 1
    return x >> bits & low, x & low


def _threshold(dropout_p: float) -> int:
    return max(1, round((1 - dropout_p) * 65536))
