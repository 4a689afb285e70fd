"""The same values over differently laid out memory, with NaN in the gaps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Layouts in which every element has its own place, and layouts that repeat one slice by stride 0.
DISTINCT = ("contiguous", "heads first", "odd offset", "interleaved", "padded columns", "every other row")
REPEATED = ("one sequence", "one row", "one head")


def laid_out(t: Tensor, layout: str) -> Tensor:
    """t (batch, rows, heads, columns) or packed (rows, heads, columns) in that layout, detached.

    A layout of REPEATED has the values of the first sequence, row or head everywhere.
    """
    if t.dim() == 3:
        return laid_out(t[None], layout)[0]
    t = t.detach()
    batch, rows, heads, columns = t.shape
    if layout in REPEATED and t.numel():
        first = t.narrow(REPEATED.index(layout), 0, 1)
        return first.clone().expand(t.shape)

    def nan(*sizes: int) -> Tensor:
        return t.new_full(sizes, math.nan)

    if layout == "heads first":
        view = nan(batch, heads, rows, columns).transpose(1, 2)
    elif layout == "odd offset":
        view = nan(t.numel() + 3)[1: t.numel() + 1].view(t.shape)
    elif layout == "interleaved":
        view = nan(batch, rows, 3, heads, columns)[:, :, 1]
    elif layout == "padded columns":
        view = nan(batch, rows, heads, columns + 3)[..., 1: columns + 1]
    elif layout == "every other row":
        view = nan(batch, 2 * rows, heads, columns)[:, ::2]
    else:
        view = nan(*t.shape)
    return view.copy_(t)


def around(view: Tensor) -> Tensor:
    """A copy of the memory of the view's storage that the view does not cover."""
    size = (view.untyped_storage().nbytes() // view.itemsize,)
    inside = torch.zeros(size, dtype=torch.bool, device=view.device)
    inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    return view.as_strided(size, (1,), 0)[~inside]
