"""As ``flash_attn.layers.rotary``: ``apply_rotary_emb``, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotary embedding of the first R columns of x (Su et al. 2021).  Differentiable in x, cos and sin.

    Args:
        x: (B, S, H, D), or packed (total, H, D) with cu_seqlens.
        cos, sin: (positions, R / 2) with R <= D.
        interleaved: pairs are columns (2c, 2c + 1); otherwise (c, c + R / 2).
        inplace: write the result to x.
        seqlen_offsets: an int or (B) integers: position of the first row of each sequence.
        cu_seqlens: (B + 1) int32.
        max_seqlen: not needed here.

    Returns: like x, whose dtype it has; the arithmetic is in float32 (float64 for float64 x).

    Raises:
        ValueError: R does not fit; on the CPU also: cos has too few positions.  On CUDA, where the host reads
            no lengths, rows beyond take the last position.
    """
    rotated = rotate(x, cos, sin, interleaved, positions(x, seqlen_offsets, cu_seqlens))
    return x.copy_(rotated) if inplace else rotated


def positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None, *, steps: bool = True) -> Tensor:
    """Position of each row of x, (B or 1, S) or (total); without steps that of the first row of its sequence.

    Rows of a packed x that belong to no sequence are at position 0.
    """
    offsets = torch.as_tensor(offsets, device=x.device).long().reshape(-1)
    if cu_seqlens is None:
        return offsets[:, None] + torch.arange(x.shape[1], device=x.device) * steps
    rows, starts = torch.arange(x.shape[0], device=x.device), cu_seqlens.long()
    sequence = torch.searchsorted(starts, rows, right=True) - 1
    inside = (sequence >= 0) & (rows < starts[-1])
    sequence = sequence.clamp(0, max(len(starts) - 2, 0))
    offsets = offsets.expand(max(len(starts) - 1, 1))[sequence]
    return torch.where(inside, offsets + (rows - starts[sequence]) * steps, 0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: Tensor) -> Tensor:
    """x rotated as at these positions, one for each row; they broadcast over the batch."""
    half = cos.shape[-1]
    if cos.dim() != 2 or sin.shape != cos.shape or 2 * half > x.shape[-1]:
        raise ValueError(f"cos of shape {tuple(cos.shape)} and sin of shape {tuple(sin.shape)}: expected "
                         f"(positions, R / 2) with R at most the head dim, {x.shape[-1]}")
    if x.is_cpu and not torch.compiler.is_compiling():
        needed = int(positions.max()) + 1 if positions.numel() else 0
        if needed > len(cos):
            raise ValueError(f"cos has {len(cos)} positions: expected at least {needed}")
    at = positions.clamp(max=len(cos) - 1)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (table[at].to(wide).unsqueeze(-2) for table in (cos, sin))    # a row's heads share an angle
    turning = x[..., :2 * half].to(wide)
    first, second = turning.unflatten(-1, (half, 2)).unbind(-1) if interleaved else turning.chunk(2, -1)
    turned = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half:]], -1)
