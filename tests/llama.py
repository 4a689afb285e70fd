"""What small Llama-style models of the tests are made of."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

import flashattn


class Layer(nn.Module):
    """x (..., width) to the same; attend(q, k, v) gets and gives (..., heads, dim), not rotated."""

    def __init__(self, width, heads, heads_k, dim):
        super().__init__()
        self.heads, self.heads_k, self.dim = heads, heads_k, dim
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.project = nn.Linear(width, (heads + 2 * heads_k) * dim, bias=False)
        self.output = nn.Linear(heads * dim, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x, attend):
        q, k, v = self.project(self.norms[0](x)).unflatten(-1, (-1, self.dim)).split(
            (self.heads, self.heads_k, self.heads_k), -2)
        x = x + self.output(attend(q, k, v).flatten(-2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Block(nn.Module):
    """x (batch, length, WIDTH) to the same, with this attention; it can be copied and pickled."""

    WIDTH = 32

    def __init__(self):
        super().__init__()
        self.layer = Layer(self.WIDTH, 4, 2, 8)
        self.attend = functools.partial(flashattn.forward, causal=True, softcap=5.0, deterministic=True)

    def forward(self, x):
        return self.layer(x, self.attend)


def rotary_tables(positions, dim, device):
    """cos and sin, (positions, dim / 2)."""
    half = dim // 2
    angles = torch.arange(positions, device=device)[:, None] * 1e4 ** (
        -torch.arange(half, device=device) / half)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """x (..., heads, dim) by tables of its positions, (..., dim / 2), halves paired."""
    cos, sin = (table[..., None, :].to(x.dtype) for table in (cos, sin))
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
