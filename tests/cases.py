"""Inputs that several test files share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import flashattn

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAN = float("nan")

# Sizes that forward and backward are both tested with.
LENGTHS = ((1, 1), (1, 200), (200, 1), (3, 130), (64, 64), (65, 63), (130, 257), (257, 130))  # Sq, Sk
RAGGED = (1, 0, 70, 33, 128), (90, 5, 0, 129, 64)                        # of packed queries, of their keys
HEADS = ((1, 1), (3, 3), (8, 4), (6, 2), (5, 1), (12, 3))                # Hq, Hk
DIMS = ((8, 40), (40, 8), (1, 1), (7, 65), (192, 128), (64, 512), (300, 3))  # D, Dv
RANGES = ("none", "causal", "window", "causal window", "all")            # of OPTIONS, for every length


def dense(device, dtype=torch.float32, *, batch=2, len_q=70, len_k=90, heads=(4, 2), dims=(64, 64)):
    """Random q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv); heads is (Hq, Hk), dims is (D, Dv)."""
    shapes = (len_q, heads[0], dims[0]), (len_k, heads[1], dims[0]), (len_k, heads[1], dims[1])
    return tuple(torch.randn(batch, *shape, dtype=dtype, device=device) for shape in shapes)


def packed(
    device, lens_q: Sequence[int], lens_k: Sequence[int], dtype=torch.float32, *, heads=(4, 2), dims=(64, 64)
):
    """Random packed q, k, v and the options that say where the sequences are."""
    q, k, v = dense(device, dtype, batch=1, len_q=sum(lens_q), len_k=sum(lens_k), heads=heads, dims=dims)
    return q[0], k[0], v[0], {
        "cu_seqlens_q": offsets(device, lens_q), "cu_seqlens_k": offsets(device, lens_k),
        "max_seqlen_q": max(lens_q), "max_seqlen_k": max(lens_k)}


def offsets(device, lengths: Sequence[int], start: int = 0) -> Tensor:
    return ints(device, start, *lengths).cumsum(0, dtype=torch.int32)


def ints(device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def eye(device, batch: int, length: int, heads: int, dtype=torch.float32) -> Tensor:
    """V = identity: with it, out is the matrix of probabilities."""
    return torch.eye(length, dtype=dtype, device=device)[None, :, None].repeat(batch, 1, heads, 1)


# name -> options for q (B, Sq, Hq, D) against Sk keys: one feature each, and everything at the end
OPTIONS = {
    "none": lambda *_: {},
    "causal": lambda *_: {"causal": True},
    "window": lambda *_: {"window": (17, 9)},
    "left window": lambda *_: {"window": (20, None)},
    "right window": lambda *_: {"window": (-1, 5)},
    "causal window": lambda *_: {"causal": True, "window": (30, 7)},
    "scale": lambda *_: {"scale": 0.31},
    "softcap": lambda *_: {"softcap": 2.0},
    "alibi": lambda q, len_k: {"alibi_slopes": torch.rand(q.shape[2], device=q.device), "causal": True},
    "alibi of a batch": lambda q, len_k: {"alibi_slopes": torch.rand(len(q), q.shape[2], device=q.device)},
    "bias": lambda q, len_k: {"bias": bias(q, len_k)},
    "bias of a head": lambda q, len_k: {"bias": bias(q, len_k, batch=1)},
    "bias of a batch": lambda q, len_k: {"bias": bias(q, len_k, heads=1)},
    "bias of a key": lambda q, len_k: {"bias": bias(q, len_k, heads=1, len_q=1), "causal": True},
    "float32 bias": lambda q, len_k: {"bias": bias(q, len_k, batch=1, heads=1, dtype=torch.float32)},
    "mask": lambda q, len_k: {"mask": bias(q, len_k) > -1},
    "mask of a key": lambda q, len_k: {"mask": bias(q, len_k, heads=1, len_q=1) > 0},
    "mask of a row": lambda q, len_k: {"mask": bias(q, len_k, batch=1, heads=1) > 0, "window": (40, 40)},
    "sink": lambda q, len_k: {"sink": torch.randn(q.shape[2], dtype=q.dtype, device=q.device)},
    "float32 sink": lambda q, len_k: {"sink": torch.randn(q.shape[2], device=q.device), "causal": True},
    "dropout": lambda *_: {"dropout_p": 0.3, "seed": 0x1234_5678_9ABC_DEF0},
    "all": lambda q, len_k: {
        "causal": True, "window": (50, None), "scale": 0.2, "softcap": 3.0, "dropout_p": 0.2, "seed": 3,
        "alibi_slopes": torch.rand(len(q), q.shape[2], device=q.device), "bias": bias(q, len_k, batch=1),
        "mask": bias(q, len_k, heads=1) > -1.5, "sink": torch.randn(q.shape[2], device=q.device)},
}


def bias(q: Tensor, len_k: int, *, batch=None, heads=None, len_q=None, dtype=None) -> Tensor:
    """Random, of the shape that q asks for where no size is given."""
    shape = batch or len(q), heads or q.shape[2], len_q or q.shape[1], len_k
    return torch.randn(shape, dtype=dtype or q.dtype, device=q.device)


def cpu_families() -> list[str]:
    """The CPU families that this machine can run."""
    return [row.removeprefix("forward_") for row, why_not in
            flashattn._C.candidates("forward", "cpu", "float32") if not why_not]
