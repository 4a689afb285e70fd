"""Bad input is one Python error naming the argument, its value and what is accepted; nothing is written.

Every row of the tables replaces arguments of a call that works.  The three texts of a row are searched for in
the message (upper and lower case alike): the argument, its value, what is accepted.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import flashattn

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
I32, I64 = torch.int32, torch.int64
IS_F32, IS_F64, IS_F16, IS_BF16 = r"float32|\bfloat\b", r"float64|double", r"float16|half", "bfloat16"
HEADS, MISSING, OWN = "multiple|divisor", "None|missing", "overlap|broadcast|expanded"
IS_I32, IS_I64, IS_BOOL = r"int32|\bint\b", "int64|long", "bool"


def shape(*sizes: int) -> str:
    return r"[\[(]" + ", ".join(map(str, sizes)) + r",?[\])]"


class Row(NamedTuple):
    id: str
    base: Callable[[], dict]
    change: Callable[[], dict]
    error: type
    argument: str
    value: str
    accepted: str


# Calls that work.  B 2, Sq 5, Sk 7, Hq 4, Hk 2, D 8, Dv 6.

def randn(*sizes: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(sizes, dtype=F32).to(dtype)


def ints(*values: int, dtype: torch.dtype = I32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def dense() -> dict:
    return {"q": randn(2, 5, 4, 8), "k": randn(2, 7, 2, 8), "v": randn(2, 7, 2, 6)}


def half() -> dict:
    return {name: t.to(BF16) for name, t in dense().items()}


def packed() -> dict:
    return {"q": randn(10, 4, 8), "k": randn(14, 2, 8), "v": randn(14, 2, 6),
            "cu_seqlens_q": ints(0, 3, 10), "cu_seqlens_k": ints(0, 9, 14), "max_seqlen_q": 7,
            "max_seqlen_k": 9}


def cache() -> dict:
    return {"q": randn(2, 3, 4, 8), "k_cache": randn(2, 16, 2, 8), "v_cache": randn(2, 16, 2, 6),
            "cache_seqlens": ints(9, 12)}


def append() -> dict:
    return cache() | {"k_new": randn(2, 3, 2, 8), "v_new": randn(2, 3, 2, 6)}


def paged() -> dict:
    return append() | {"k_cache": randn(6, 8, 2, 8), "v_cache": randn(6, 8, 2, 6),
                       "page_table": ints(4, 0, 3, 1).view(2, 2)}


def mla() -> dict:
    return append() | {"v_cache": None, "v_new": None, "v_head_dim": 6}


def packed_append() -> dict:
    return append() | {"q": randn(6, 4, 8), "k_new": randn(6, 2, 8), "v_new": randn(6, 2, 6),
                       "cu_seqlens_q": ints(0, 2, 6), "max_seqlen_q": 4}


def rotary() -> dict:
    return append() | {"rotary_cos": randn(16, 4), "rotary_sin": randn(16, 4)}


def strided(*sizes: int, dtype: torch.dtype = F32) -> Tensor:
    """Zeros whose last dimension has stride 2."""
    return torch.zeros(*sizes, 2, dtype=dtype)[..., 0]


def elsewhere(t: Tensor) -> Tensor:
    return t.to("meta" if t.device.type == "cpu" else "cpu")


NAN, INF = math.nan, math.inf
V, T, N = ValueError, TypeError, NotImplementedError

# Arguments that forward and backward share.
FORWARD = [Row(*row) for row in [
    # tensors
    ("q int32", dense, lambda: {"q": randn(2, 5, 4, 8).int()}, T, "q", IS_I32, IS_F32),
    ("all complex64", dense, lambda: {n: t.to(torch.complex64) for n, t in dense().items()}, T, "q",
     "complex", IS_F32),
    ("all float8", dense, lambda: {n: t.to(torch.float8_e4m3fn) for n, t in dense().items()}, T, "q",
     "float8", IS_F32),
    ("k bfloat16", dense, lambda: {"k": randn(2, 7, 2, 8, dtype=BF16)}, T, "k", IS_BF16, IS_F32),
    ("v float64", dense, lambda: {"v": randn(2, 7, 2, 6, dtype=F64)}, T, "v", IS_F64, IS_F32),
    ("k float16 with q bfloat16", half, lambda: {"k": randn(2, 7, 2, 8, dtype=F16)}, T, "k", IS_F16, IS_BF16),
    ("k elsewhere", dense, lambda: {"k": elsewhere(randn(2, 7, 2, 8))}, V, "k", "cpu|meta", "cpu|cuda"),
    ("v elsewhere", dense, lambda: {"v": elsewhere(randn(2, 7, 2, 6))}, V, "v", "cpu|meta", "cpu|cuda"),
    ("q 2-D", dense, lambda: {"q": randn(5, 8)}, V, "q", shape(5, 8), "B, Sq, Hq, D"),
    ("q 5-D", dense, lambda: {"q": randn(1, 2, 5, 4, 8)}, V, "q", shape(1, 2, 5, 4, 8), "B, Sq, Hq, D"),
    ("k 3-D", dense, lambda: {"k": randn(7, 2, 8)}, V, "k", shape(7, 2, 8), "B, Sk, Hk, D"),
    ("v 5-D", dense, lambda: {"v": randn(1, 2, 7, 2, 6)}, V, "v", shape(1, 2, 7, 2, 6), "Dv"),
    ("k of another batch", dense, lambda: {"k": randn(3, 7, 2, 8)}, V, "k", shape(3, 7, 2, 8), r"\b2\b"),
    ("v of another batch", dense, lambda: {"v": randn(3, 7, 2, 6)}, V, "v", shape(3, 7, 2, 6), r"\b2\b"),
    ("k of another head dim", dense, lambda: {"k": randn(2, 7, 2, 16)}, V, "k", r"\b16\b", r"\b8\b"),
    ("v of another length", dense, lambda: {"v": randn(2, 8, 2, 6)}, V, "v", shape(2, 8, 2, 6), r"\b7\b"),
    ("v of other heads", dense, lambda: {"v": randn(2, 7, 1, 6)}, V, "v", shape(2, 7, 1, 6), r"\b2\b"),
    ("3 heads for 2", dense, lambda: {"q": randn(2, 5, 3, 8)}, V, "q", r"\b3\b", HEADS),
    ("33 heads for 2", dense, lambda: {"q": randn(2, 5, 33, 8)}, V, "q", r"\b33\b", HEADS),
    ("1 head for 2", dense, lambda: {"q": randn(2, 5, 1, 8)}, V, "q", r"\b1\b", HEADS),
    ("no KV head", dense, lambda: {"k": randn(2, 7, 0, 8), "v": randn(2, 7, 0, 6)}, V, "q|k", r"\b0\b",
     HEADS),
    ("q with stride 2", dense, lambda: {"q": strided(2, 5, 4, 8)}, V, "q", r"stride.*\b2\b",
     "contiguous|stride 1"),
    ("k with stride 2", dense, lambda: {"k": strided(2, 7, 2, 8)}, V, "k", r"stride.*\b2\b",
     "contiguous|stride 1"),
    ("v with stride 0", dense, lambda: {"v": randn(2, 7, 2, 1).expand(2, 7, 2, 6)}, V, "v", r"stride.*\b0\b",
     "contiguous|stride 1"),
    # numbers
    ("scale nan", dense, lambda: {"scale": NAN}, V, "scale", "nan", "finite"),
    ("scale inf", dense, lambda: {"scale": INF}, V, "scale", "inf", "finite"),
    ("softcap negative", dense, lambda: {"softcap": -1.0}, V, "softcap", r"-1", "0"),
    ("softcap nan", dense, lambda: {"softcap": NAN}, V, "softcap", "nan", "0"),
    ("softcap inf", dense, lambda: {"softcap": INF}, V, "softcap", "inf", "finite"),
    ("window left -2", dense, lambda: {"window": (-2, 0)}, V, "window", "-2", "0.*-1|-1.*0"),
    ("window right -7", dense, lambda: {"window": (3, -7)}, V, "window", "-7", "0.*-1|-1.*0"),
    ("window of one side", dense, lambda: {"window": (3,)}, V, "window", r"\(3,\)", r"\(left, right\)"),
    ("window of three sides", dense, lambda: {"window": (1, 2, 3)}, V, "window", r"\(1, 2, 3\)",
     r"\(left, right\)"),
    ("window an int", dense, lambda: {"window": 3}, V, "window", r"\b3\b", r"\(left, right\)"),
    ("window of floats", dense, lambda: {"window": (1.5, 0)}, (T, V), "window", r"1\.5",
     "left, right|keys|int"),
    ("dropout 1", dense, lambda: {"dropout_p": 1.0, "seed": 0}, V, "dropout_p", r"\b1",
     r"\[0, 1\)|0 <= dropout_p < 1"),
    ("dropout negative", dense, lambda: {"dropout_p": -0.1, "seed": 0}, V, "dropout_p", r"-0\.1",
     r"\[0, 1\)|0 <= dropout_p < 1"),
    ("dropout nan", dense, lambda: {"dropout_p": NAN, "seed": 0}, V, "dropout_p", "nan",
     r"\[0, 1\)|0 <= dropout_p < 1"),
    ("seed of two", dense, lambda: {"dropout_p": 0.5, "seed": ints(1, 2, dtype=I64)}, V, "seed", shape(2),
     "one"),
    ("seed int32", dense, lambda: {"dropout_p": 0.5, "seed": ints(1)}, T, "seed", IS_I32, IS_I64),
    ("seed elsewhere", dense, lambda: {"dropout_p": 0.5, "seed": elsewhere(ints(1, dtype=I64))}, V, "seed",
     "cpu|meta", "cpu|cuda"),
    ("seed a fraction", dense, lambda: {"dropout_p": 0.5, "seed": 1.5}, T, "seed", r"1\.5", "int"),
    ("seed beyond int64", dense, lambda: {"dropout_p": 0.5, "seed": 2**63}, V, "seed", str(2**63), "64"),
    # per-head and per-score tensors
    ("alibi float64", dense, lambda: {"alibi_slopes": randn(4, dtype=F64)}, T, "alibi_slopes", IS_F64,
     IS_F32),
    ("alibi bfloat16", half, lambda: {"alibi_slopes": randn(4, dtype=BF16)}, T, "alibi_slopes", IS_BF16,
     IS_F32),
    ("alibi of KV heads", dense, lambda: {"alibi_slopes": randn(2)}, V, "alibi_slopes", shape(2), r"\b4\b"),
    ("alibi of another batch", dense, lambda: {"alibi_slopes": randn(3, 4)}, V, "alibi_slopes", shape(3, 4),
     r"\b4\b"),
    ("alibi 3-D", dense, lambda: {"alibi_slopes": randn(1, 2, 4)}, V, "alibi_slopes", shape(1, 2, 4), "Hq|4"),
    ("alibi elsewhere", dense, lambda: {"alibi_slopes": elsewhere(randn(4))}, V, "alibi_slopes", "cpu|meta",
     "cpu|cuda"),
    ("alibi with gradient", dense, lambda: {"alibi_slopes": randn(4).requires_grad_()}, N, "alibi_slopes",
     "requires", "gradient"),
    ("bias int32", dense, lambda: {"bias": randn(2, 4, 5, 7).int()}, T, "bias", IS_I32, IS_F32),
    ("bias float64", dense, lambda: {"bias": randn(2, 4, 5, 7, dtype=F64)}, T, "bias", IS_F64, IS_F32),
    ("bias float16 with q bfloat16", half, lambda: {"bias": randn(2, 4, 5, 7, dtype=F16)}, T, "bias", IS_F16,
     IS_BF16),
    ("bias bool", dense, lambda: {"bias": torch.ones(2, 4, 5, 7, dtype=torch.bool)}, T, "bias", IS_BOOL,
     IS_F32),
    ("bias 2-D", dense, lambda: {"bias": randn(5, 7)}, V, "bias", shape(5, 7), "Sk|7"),
    ("bias longer than k", dense, lambda: {"bias": randn(2, 4, 5, 8)}, V, "bias", shape(2, 4, 5, 8),
     r"\b7\b|Sk"),
    ("bias of one key", dense, lambda: {"bias": randn(2, 4, 5, 1)}, V, "bias", shape(2, 4, 5, 1),
     r"\b7\b|Sk"),
    ("bias of KV heads", dense, lambda: {"bias": randn(2, 2, 5, 7)}, V, "bias", shape(2, 2, 5, 7),
     r"\b4\b|Hq"),
    ("bias of another batch", dense, lambda: {"bias": randn(3, 4, 5, 7)}, V, "bias", shape(3, 4, 5, 7),
     r"\b2\b|B"),
    ("bias with stride 2", dense, lambda: {"bias": strided(2, 4, 5, 7)}, V, "bias", r"stride.*\b2\b",
     "contiguous|stride 1"),
    ("bias with stride 0", dense, lambda: {"bias": randn(2, 4, 5, 1).expand(2, 4, 5, 7)}, V, "bias",
     r"stride.*\b0\b", "contiguous|stride 1"),
    ("bias elsewhere", dense, lambda: {"bias": elsewhere(randn(2, 4, 5, 7))}, V, "bias", "cpu|meta",
     "cpu|cuda"),
    ("mask float", dense, lambda: {"mask": randn(2, 4, 5, 7)}, T, "mask", IS_F32, IS_BOOL),
    ("mask uint8", dense, lambda: {"mask": torch.ones(2, 4, 5, 7, dtype=torch.uint8)}, T, "mask",
     "uint8|byte", IS_BOOL),
    ("mask 2-D", dense, lambda: {"mask": torch.ones(2, 7, dtype=torch.bool)}, V, "mask", shape(2, 7), "Sk|7"),
    ("mask longer than k", dense, lambda: {"mask": torch.ones(2, 1, 5, 8, dtype=torch.bool)}, V, "mask",
     shape(2, 1, 5, 8), r"\b7\b|Sk"),
    ("mask shorter than q", dense, lambda: {"mask": torch.ones(2, 1, 4, 7, dtype=torch.bool)}, V, "mask",
     shape(2, 1, 4, 7), r"\b5\b|Sq"),
    ("mask with stride 2", dense, lambda: {"mask": strided(2, 4, 5, 7, dtype=torch.bool)}, V, "mask",
     r"stride.*\b2\b", "contiguous|stride 1"),
    ("mask elsewhere", dense, lambda: {"mask": elsewhere(torch.ones(2, 1, 5, 7, dtype=torch.bool))}, V,
     "mask", "cpu|meta", "cpu|cuda"),
    ("sink of KV heads", dense, lambda: {"sink": randn(2)}, V, "sink", shape(2), r"\b4\b"),
    ("sink 2-D", dense, lambda: {"sink": randn(2, 4)}, V, "sink", shape(2, 4), "Hq|4"),
    ("sink int32", dense, lambda: {"sink": ints(1, 2, 3, 4)}, T, "sink", IS_I32, IS_F32),
    ("sink float16 with q bfloat16", half, lambda: {"sink": randn(4, dtype=F16)}, T, "sink", IS_F16, IS_BF16),
    ("sink elsewhere", dense, lambda: {"sink": elsewhere(randn(4))}, V, "sink", "cpu|meta", "cpu|cuda"),
    # lengths
    ("packed q alone", packed, lambda: {"cu_seqlens_k": None}, V, "cu_seqlens_k", MISSING,
     "both|cu_seqlens_q"),
    ("packed k alone", packed, lambda: {"cu_seqlens_q": None}, V, "cu_seqlens_q", MISSING,
     "both|cu_seqlens_k"),
    ("3-D without cu_seqlens", packed, lambda: {"cu_seqlens_q": None, "cu_seqlens_k": None}, V, "q",
     shape(10, 4, 8), "B, Sq, Hq, D"),
    ("4-D with cu_seqlens", dense, lambda: {"cu_seqlens_q": ints(0, 5, 10), "cu_seqlens_k": ints(0, 7, 14)},
     V, "q", shape(2, 5, 4, 8), "total_q, Hq, D"),
    ("cu_seqlens int64", packed, lambda: {"cu_seqlens_q": ints(0, 3, 10, dtype=I64)}, T, "cu_seqlens_q",
     IS_I64, IS_I32),
    ("cu_seqlens float", packed, lambda: {"cu_seqlens_k": randn(3)}, T, "cu_seqlens_k", IS_F32, IS_I32),
    ("cu_seqlens 2-D", packed, lambda: {"cu_seqlens_q": ints(0, 3, 10).view(1, 3)}, V, "cu_seqlens_q",
     shape(1, 3), r"B \+ 1|\b3\b"),
    ("cu_seqlens empty", packed, lambda: {"cu_seqlens_q": ints(), "cu_seqlens_k": ints()}, V, "cu_seqlens_q",
     shape(0) + "|empty", r"B \+ 1"),
    ("cu_seqlens of another batch", packed, lambda: {"cu_seqlens_k": ints(0, 9, 12, 14)}, V, "cu_seqlens_k",
     r"\b4\b", r"B \+ 1|\b3\b"),
    ("cu_seqlens elsewhere", packed, lambda: {"cu_seqlens_q": elsewhere(ints(0, 3, 10))}, V, "cu_seqlens_q",
     "cpu|meta", "cpu|cuda"),
    ("cu_seqlens decreasing", packed, lambda: {"cu_seqlens_q": ints(0, 7, 3)}, V, "cu_seqlens_q", r"\b3\b",
     "decreas|order"),
    ("cu_seqlens negative", packed, lambda: {"cu_seqlens_k": ints(-1, 9, 14)}, V, "cu_seqlens_k", "-1", "0"),
    ("cu_seqlens beyond q", packed, lambda: {"cu_seqlens_q": ints(0, 3, 11)}, V, "cu_seqlens_q", r"\b11\b",
     r"\b10\b"),
    ("cu_seqlens beyond k", packed, lambda: {"cu_seqlens_k": ints(0, 9, 2**31 - 1)}, V, "cu_seqlens_k",
     str(2**31 - 1), r"\b14\b"),
    ("max_seqlen_q too small", packed, lambda: {"max_seqlen_q": 6}, V, "max_seqlen_q", r"\b6\b", r"\b7\b"),
    ("max_seqlen_k too small", packed, lambda: {"max_seqlen_k": 8}, V, "max_seqlen_k", r"\b8\b", r"\b9\b"),
    ("max_seqlen_q negative", packed, lambda: {"max_seqlen_q": -1}, V, "max_seqlen_q", "-1",
     r"\b7\b|>= 0|at least 0"),
    ("bias below max_seqlen_k", packed, lambda: {"bias": randn(2, 4, 7, 8)}, V, "bias", shape(2, 4, 7, 8),
     r"\b9\b"),
    ("mask below max_seqlen_q", packed, lambda: {"mask": torch.ones(2, 1, 6, 9, dtype=torch.bool)}, V, "mask",
     shape(2, 1, 6, 9), r"\b7\b"),
    ("seqused_q int64", dense, lambda: {"seqused_q": ints(3, 5, dtype=I64)}, T, "seqused_q", IS_I64, IS_I32),
    ("seqused_k of another batch", dense, lambda: {"seqused_k": ints(3, 5, 7)}, V, "seqused_k", shape(3),
     r"\b2\b"),
    ("seqused_q beyond q", dense, lambda: {"seqused_q": ints(3, 6)}, V, "seqused_q", r"\b6\b", r"\b5\b"),
    ("seqused_k negative", dense, lambda: {"seqused_k": ints(-1, 7)}, V, "seqused_k", "-1", "0"),
    ("seqused_k beyond its sequence", packed, lambda: {"seqused_k": ints(9, 6)}, V, "seqused_k", r"\b6\b",
     r"\b5\b"),
    ("seqused_q elsewhere", dense, lambda: {"seqused_q": elsewhere(ints(3, 5))}, V, "seqused_q", "cpu|meta",
     "cpu|cuda"),
]]

# B 2, Sq 5, Hq 4, Dv 6: arguments of forward alone.
OUT = [Row(*row) for row in [
    ("out of another shape", dense, lambda: {"out": torch.ones(2, 5, 4, 8)}, V, "out", shape(2, 5, 4, 8),
     shape(2, 5, 4, 6)),
    ("out packed", dense, lambda: {"out": torch.ones(10, 4, 6)}, V, "out", shape(10, 4, 6),
     shape(2, 5, 4, 6)),
    ("out of another dtype", dense, lambda: {"out": torch.ones(2, 5, 4, 6, dtype=BF16)}, T, "out", IS_BF16,
     IS_F32),
    ("out elsewhere", dense, lambda: {"out": elsewhere(torch.ones(2, 5, 4, 6))}, V, "out", "cpu|meta",
     "cpu|cuda"),
    ("out with stride 2", dense, lambda: {"out": strided(2, 5, 4, 6)}, V, "out", r"stride.*\b2\b",
     "contiguous|stride 1"),
    ("out expanded", dense, lambda: {"out": torch.ones(1, 5, 4, 6).expand(2, 5, 4, 6)}, V, "out",
     r"stride|overlap", OWN),
    ("out with gradient", dense,
     lambda: {"out": torch.ones(2, 5, 4, 6), "q": randn(2, 5, 4, 8).requires_grad_()}, N, "out", "requires",
     "no_grad"),
]]


def saved() -> dict:
    """Arguments of a backward call; lse is (2, 4, 5)."""
    arguments = dense()
    out, lse = flashattn.forward(**arguments, return_lse=True)
    return {"dout": randn(2, 5, 4, 6), "out": out, "lse": lse, **arguments}


BACKWARD = [Row(*row) for row in [
    ("dout of another shape", saved, lambda: {"dout": randn(2, 5, 4, 8)}, V, "dout", shape(2, 5, 4, 8),
     shape(2, 5, 4, 6)),
    ("dout of another dtype", saved, lambda: {"dout": randn(2, 5, 4, 6, dtype=F64)}, T, "dout", IS_F64,
     IS_F32),
    ("dout elsewhere", saved, lambda: {"dout": elsewhere(randn(2, 5, 4, 6))}, V, "dout", "cpu|meta",
     "cpu|cuda"),
    ("out of another shape", saved, lambda: {"out": randn(2, 4, 5, 6)}, V, "out", shape(2, 4, 5, 6),
     shape(2, 5, 4, 6)),
    ("out of another dtype", saved, lambda: {"out": randn(2, 5, 4, 6, dtype=BF16)}, T, "out", IS_BF16,
     IS_F32),
    ("lse of another shape", saved, lambda: {"lse": randn(2, 5, 4)}, V, "lse", shape(2, 5, 4),
     shape(2, 4, 5)),
    ("lse of another dtype", saved, lambda: {"lse": randn(2, 4, 5, dtype=F64)}, T, "lse", IS_F64, IS_F32),
    ("lse elsewhere", saved, lambda: {"lse": elsewhere(randn(2, 4, 5))}, V, "lse", "cpu|meta", "cpu|cuda"),
    ("dlse of another shape", saved, lambda: {"dlse": randn(2, 5, 4)}, V, "dlse", shape(2, 5, 4),
     shape(2, 4, 5)),
    ("dlse of another dtype", saved, lambda: {"dlse": randn(2, 4, 5, dtype=BF16)}, T, "dlse", IS_BF16,
     IS_F32),
    ("no seed", saved, lambda: {"dropout_p": 0.5}, V, "seed", "None", "forward"),
]]

# B 2, Sq 3, S 16, Hq 4, Hk 2, D 8, Dv 6; 9 and 12 keys before the append of 3.
DECODE = [Row(*row) for row in [
    # tensors
    ("q int64", cache, lambda: {"q": randn(2, 3, 4, 8).long()}, T, "q", IS_I64, IS_F32),
    ("q 3-D", cache, lambda: {"q": randn(2, 4, 8)}, V, "q", shape(2, 4, 8), "B, Sq, Hq, D"),
    ("q with stride 2", cache, lambda: {"q": strided(2, 3, 4, 8)}, V, "q", r"stride.*\b2\b",
     "contiguous|stride 1"),
    ("3 heads for 2", cache, lambda: {"q": randn(2, 3, 3, 8)}, V, "q", r"\b3\b", HEADS),
    ("k_cache bfloat16", append, lambda: {"k_cache": randn(2, 16, 2, 8, dtype=BF16)}, T, "k_cache", IS_BF16,
     IS_F32),
    ("v_cache float64", append, lambda: {"v_cache": randn(2, 16, 2, 6, dtype=F64)}, T, "v_cache", IS_F64,
     IS_F32),
    ("k_cache elsewhere", append, lambda: {"k_cache": elsewhere(randn(2, 16, 2, 8))}, V, "k_cache",
     "cpu|meta", "cpu|cuda"),
    ("k_cache 3-D", append, lambda: {"k_cache": randn(16, 2, 8)}, V, "k_cache", shape(16, 2, 8), "S, Hk, D"),
    ("k_cache of another head dim", append, lambda: {"k_cache": randn(2, 16, 2, 16)}, V, "k_cache", r"\b16\b",
     r"\b8\b"),
    ("caches of another batch", cache, lambda: {"k_cache": randn(3, 16, 2, 8), "v_cache": randn(3, 16, 2, 6)},
     V, "k_cache", r"\b3\b", "cache_batch_idx|2"),
    ("v_cache of another length", append, lambda: {"v_cache": randn(2, 15, 2, 6)}, V, "v_cache",
     shape(2, 15, 2, 6), r"\b16\b"),
    ("v_cache of other heads", append, lambda: {"v_cache": randn(2, 16, 1, 6)}, V, "v_cache",
     shape(2, 16, 1, 6), r"\b2\b"),
    ("v_cache of other pages", paged, lambda: {"v_cache": randn(5, 8, 2, 6)}, V, "v_cache", shape(5, 8, 2, 6),
     r"\b6\b"),
    ("k_cache with stride 2", append, lambda: {"k_cache": strided(2, 16, 2, 8)}, V, "k_cache",
     r"stride.*\b2\b", "contiguous|stride 1"),
    ("v_cache with stride 2", append, lambda: {"v_cache": strided(2, 16, 2, 6)}, V, "v_cache",
     r"stride.*\b2\b", "contiguous|stride 1"),
    ("append to an expanded cache", append, lambda: {"k_cache": randn(1, 16, 2, 8).expand(2, 16, 2, 8)}, V,
     "k_cache", "stride|overlap", OWN),
    ("v_cache None", cache, lambda: {"v_cache": None}, V, "v_head_dim", "None", "v_cache"),
    ("v_head_dim beyond D", mla, lambda: {"v_head_dim": 9}, V, "v_head_dim", r"\b9\b", r"\b8\b"),
    ("v_head_dim negative", mla, lambda: {"v_head_dim": -1}, V, "v_head_dim", "-1", r"\b8\b|head dim"),
    ("v_head_dim not of v_cache", append, lambda: {"v_head_dim": 5}, V, "v_head_dim", r"\b5\b",
     r"\b6\b|v_cache"),
    # lengths
    ("cache_seqlens int64", append, lambda: {"cache_seqlens": ints(9, 12, dtype=I64)}, T, "cache_seqlens",
     IS_I64, IS_I32),
    ("cache_seqlens a fraction", append, lambda: {"cache_seqlens": 2.5}, T, "cache_seqlens", r"2\.5", "int"),
    ("cache_seqlens of another batch", append, lambda: {"cache_seqlens": ints(9, 12, 3)}, V, "cache_seqlens",
     shape(3), r"\b2\b"),
    ("cache_seqlens elsewhere", append, lambda: {"cache_seqlens": elsewhere(ints(9, 12))}, V, "cache_seqlens",
     "cpu|meta", "cpu|cuda"),
    ("cache_seqlens beyond the cache", cache, lambda: {"cache_seqlens": ints(9, 17)}, V, "cache_seqlens",
     r"\b17\b", r"\b16\b"),
    ("cache_seqlens negative", append, lambda: {"cache_seqlens": ints(-1, 12)}, V, "cache_seqlens", "-1",
     "0"),
    ("int beyond the cache", cache, lambda: {"cache_seqlens": 17}, V, "cache_seqlens", r"\b17\b", r"\b16\b"),
    ("int negative", append, lambda: {"cache_seqlens": -1}, V, "cache_seqlens", "-1", "0"),
    ("int beyond int32", append, lambda: {"cache_seqlens": 2**40}, V, "cache_seqlens", str(2**40),
     r"\b16\b|int32"),
    ("append beyond the cache", append, lambda: {"cache_seqlens": ints(9, 14)}, V, "cache_seqlens",
     r"\b1[47]\b", r"\b1[36]\b"),
    ("append without lengths", append, lambda: {"cache_seqlens": None}, V, "cache_seqlens", MISSING, "k_new"),
    ("cache_seqlens beyond the table", paged,
     lambda: {"k_new": None, "v_new": None, "cache_seqlens": ints(9, 17)}, V, "cache_seqlens", r"\b17\b",
     r"\b16\b"),
    ("append beyond the table", paged, lambda: {"cache_seqlens": ints(14, 9)}, V, "cache_seqlens",
     r"\b1[47]\b", r"\b1[36]\b"),
    ("leftpad int64", append, lambda: {"leftpad": ints(0, 1, dtype=I64)}, T, "leftpad", IS_I64, IS_I32),
    ("leftpad negative", append, lambda: {"leftpad": ints(0, -2)}, V, "leftpad", "-2", "0"),
    ("leftpad beyond the cache", append, lambda: {"leftpad": ints(0, 17)}, V, "leftpad", r"\b17\b",
     r"\b1[2356]\b"),
    ("leftpad of another batch", append, lambda: {"leftpad": ints(0)}, V, "leftpad", shape(1), r"\b2\b"),
    ("packed q without cu_seqlens_q", packed_append, lambda: {"cu_seqlens_q": None}, V, "q", shape(6, 4, 8),
     "B, Sq, Hq, D"),
    ("dense q with cu_seqlens_q", append, lambda: {"cu_seqlens_q": ints(0, 3, 6)}, V, "q", shape(2, 3, 4, 8),
     "total_q, Hq, D"),
    ("cu_seqlens_q int64", packed_append, lambda: {"cu_seqlens_q": ints(0, 2, 6, dtype=I64)}, T,
     "cu_seqlens_q", IS_I64, IS_I32),
    ("cu_seqlens_q beyond q", packed_append, lambda: {"cu_seqlens_q": ints(0, 2, 7)}, V, "cu_seqlens_q",
     r"\b7\b", r"\b6\b"),
    ("cu_seqlens_q decreasing", packed_append, lambda: {"cu_seqlens_q": ints(0, 6, 2)}, V, "cu_seqlens_q",
     r"\b2\b", "decreas|order"),
    ("max_seqlen_q too small", packed_append, lambda: {"max_seqlen_q": 3}, V, "max_seqlen_q", r"\b3\b",
     r"\b4\b"),
    # pages
    ("page_table int64", paged, lambda: {"page_table": ints(4, 0, 3, 1, dtype=I64).view(2, 2)}, T,
     "page_table", IS_I64, IS_I32),
    ("page_table 1-D", paged, lambda: {"page_table": ints(4, 0)}, V, "page_table", shape(2),
     "B, max_pages|2"),
    ("page_table of another batch", paged, lambda: {"page_table": ints(4, 0, 3, 1, 2, 5).view(3, 2)}, V,
     "page_table", shape(3, 2), r"\b2\b"),
    ("page_table elsewhere", paged, lambda: {"page_table": elsewhere(ints(4, 0, 3, 1).view(2, 2))}, V,
     "page_table", "cpu|meta", "cpu|cuda"),
    ("page id beyond the pages", paged, lambda: {"page_table": ints(4, 0, 3, 6).view(2, 2)}, V, "page_table",
     r"\b6\b", r"\b[56]\b"),
    ("page id negative", paged, lambda: {"page_table": ints(4, -1, 3, 1).view(2, 2)}, V, "page_table", "-1",
     r"\b0|\b[56]\b"),
    ("page id of the append", paged,
     lambda: {"cache_seqlens": ints(6, 8), "page_table": ints(4, 6, 3, 1).view(2, 2)}, V, "page_table",
     r"\b6\b", r"\b[56]\b"),
    ("page_table with cache_batch_idx", paged, lambda: {"cache_batch_idx": ints(0, 1)}, V, "cache_batch_idx",
     "page_table", "not|without|either|one of"),
    ("cache_batch_idx int64", append, lambda: {"cache_batch_idx": ints(1, 0, dtype=I64)}, T,
     "cache_batch_idx", IS_I64, IS_I32),
    ("cache_batch_idx beyond the cache", append, lambda: {"cache_batch_idx": ints(0, 2)}, V,
     "cache_batch_idx", r"\b2\b", r"\b[012]\b"),
    ("cache_batch_idx negative", append, lambda: {"cache_batch_idx": ints(0, -1)}, V, "cache_batch_idx", "-1",
     r"\b0|\b2\b"),
    ("cache_batch_idx of another batch", append, lambda: {"cache_batch_idx": ints(0, 1, 0)}, V,
     "cache_batch_idx", shape(3), r"\b2\b"),
    # new keys
    ("k_new alone", append, lambda: {"v_new": None}, V, "v_new", MISSING, "k_new|v_cache"),
    ("v_new alone", append, lambda: {"k_new": None}, V, "k_new", MISSING, "v_new|v_cache"),
    ("v_new without v_cache", mla, lambda: {"v_new": randn(2, 3, 2, 6)}, V, "v_new",
     shape(2, 3, 2, 6) + "|given", "v_cache"),
    ("k_new bfloat16", append, lambda: {"k_new": randn(2, 3, 2, 8, dtype=BF16)}, T, "k_new", IS_BF16, IS_F32),
    ("k_new of another head dim", append, lambda: {"k_new": randn(2, 3, 2, 6)}, V, "k_new", shape(2, 3, 2, 6),
     r"\b8\b"),
    ("k_new of other heads", append, lambda: {"k_new": randn(2, 3, 4, 8)}, V, "k_new", shape(2, 3, 4, 8),
     r"\b2\b"),
    ("k_new of another batch", append, lambda: {"k_new": randn(1, 3, 2, 8)}, V, "k_new", shape(1, 3, 2, 8),
     r"\b2\b"),
    ("v_new of another length", append, lambda: {"v_new": randn(2, 2, 2, 6)}, V, "v_new", shape(2, 2, 2, 6),
     r"\b3\b"),
    ("v_new of another head dim", append, lambda: {"v_new": randn(2, 3, 2, 8)}, V, "v_new", shape(2, 3, 2, 8),
     r"\b6\b"),
    ("k_new with stride 2", append, lambda: {"k_new": strided(2, 3, 2, 8)}, V, "k_new", r"stride.*\b2\b",
     "contiguous|stride 1"),
    ("k_new packed for dense q", append, lambda: {"k_new": randn(6, 2, 8)}, V, "k_new", shape(6, 2, 8),
     "B, Snew|2"),
    ("k_new of another total", packed_append, lambda: {"k_new": randn(5, 2, 8)}, V, "k_new", shape(5, 2, 8),
     r"\b6\b"),
    # rotary
    ("rotary_cos alone", rotary, lambda: {"rotary_sin": None}, V, "rotary_sin", MISSING, "rotary_cos"),
    ("rotary_sin alone", rotary, lambda: {"rotary_cos": None}, V, "rotary_cos", MISSING, "rotary_sin"),
    ("rotary_sin of another shape", rotary, lambda: {"rotary_sin": randn(16, 3)}, V, "rotary_sin",
     shape(16, 3), shape(16, 4)),
    ("rotary wider than D", rotary, lambda: {"rotary_cos": randn(16, 5), "rotary_sin": randn(16, 5)}, V,
     "rotary_cos", shape(16, 5), r"\b[48]\b"),
    ("rotary_cos 3-D", rotary, lambda: {"rotary_cos": randn(1, 16, 4)}, V, "rotary_cos", shape(1, 16, 4),
     "positions|R / 2"),
    ("rotary float64", rotary, lambda: {"rotary_cos": randn(16, 4, dtype=F64)}, T, "rotary_cos", IS_F64,
     IS_F32),
    ("rotary_sin of another dtype", rotary, lambda: {"rotary_sin": randn(16, 4, dtype=BF16)}, T, "rotary_sin",
     IS_BF16, IS_F32),
    ("rotary of too few positions", rotary, lambda: {"rotary_cos": randn(14, 4), "rotary_sin": randn(14, 4)},
     V, "rotary_cos", r"\b14\b", r"\b15\b"),
    ("rotary elsewhere", rotary, lambda: {"rotary_cos": elsewhere(randn(16, 4))}, V, "rotary_cos", "cpu|meta",
     "cpu|cuda"),
    # the rest
    ("num_splits negative", append, lambda: {"num_splits": -1}, V, "num_splits", "-1", "0"),
    ("scale nan", append, lambda: {"scale": NAN}, V, "scale", "nan", "finite"),
    ("softcap negative", append, lambda: {"softcap": -0.5}, V, "softcap", r"-0\.5", "0"),
    ("window left -2", append, lambda: {"window": (-2, 0)}, V, "window", "-2", "0.*-1|-1.*0"),
    ("alibi of KV heads", append, lambda: {"alibi_slopes": randn(2)}, V, "alibi_slopes", shape(2), r"\b4\b"),
    ("alibi float64", append, lambda: {"alibi_slopes": randn(4, dtype=F64)}, T, "alibi_slopes", IS_F64,
     IS_F32),
    ("sink of KV heads", append, lambda: {"sink": randn(2)}, V, "sink", shape(2), r"\b4\b"),
    ("sink int32", append, lambda: {"sink": ints(1, 2, 3, 4)}, T, "sink", IS_I32, IS_F32),
    ("out of another shape", append, lambda: {"out": torch.ones(2, 3, 4, 8)}, V, "out", shape(2, 3, 4, 8),
     shape(2, 3, 4, 6)),
    ("out of another dtype", append, lambda: {"out": torch.ones(2, 3, 4, 6, dtype=F16)}, T, "out", IS_F16,
     IS_F32),
    ("out with stride 2", append, lambda: {"out": strided(2, 3, 4, 6)}, V, "out", r"stride.*\b2\b",
     "contiguous|stride 1"),
    ("out elsewhere", append, lambda: {"out": elsewhere(torch.ones(2, 3, 4, 6))}, V, "out", "cpu|meta",
     "cpu|cuda"),
    ("out expanded", append, lambda: {"out": torch.ones(1, 3, 4, 6).expand(2, 3, 4, 6)}, V, "out",
     "stride|overlap", OWN),
]]


def rows(table: list[Row]):
    return pytest.mark.parametrize("row", table, ids=[row.id for row in table])


def make(build: Callable[[], dict], device) -> dict:
    torch.manual_seed(0)
    with torch.device(device):
        return build()


def refuses(row: Row, call: Callable, arguments: dict) -> None:
    """The call raises the row's error with its three texts, and leaves every tensor as it was.

    Lengths and pages on a CUDA device are read with debug_checks only.
    """
    before = {name: t.detach().clone() for name, t in arguments.items() if isinstance(t, Tensor)}
    with pytest.raises(row.error) as caught, flashattn.debug_checks():
        call(**arguments)
    message = str(caught.value)
    for text in (rf"\b({row.argument})\b", row.value, row.accepted):
        assert re.search(text, message, re.IGNORECASE | re.DOTALL), f"no /{text}/ in: {message}"
    assert "Exception raised from" not in message, f"a C++ backtrace in: {message}"
    for name, t in before.items():
        assert t.is_meta or torch.equal(t, arguments[name]), f"{name} was written"


@pytest.mark.parametrize("base", [dense, half, packed], ids=lambda base: base.__name__)
def test_forward_bases_work(base, device):
    out, lse = flashattn.forward(**make(base, device), return_lse=True)
    assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("base", [cache, append, paged, mla, packed_append, rotary],
                         ids=lambda base: base.__name__)
def test_decode_bases_work(base, device):
    assert flashattn.decode(**make(base, device)).isfinite().all()


@rows(FORWARD)
def test_forward(row, device):
    arguments = make(row.base, device) | make(row.change, device)
    refuses(row, flashattn.forward, arguments)


@rows(FORWARD)
def test_forward_into_out(row, device):
    arguments = make(row.base, device)
    out = torch.full_like(arguments["q"][..., :6], 7)
    refuses(row, flashattn.forward, arguments | make(row.change, device) | {"out": out})


@rows(OUT)
def test_out(row, device):
    refuses(row, flashattn.forward, make(row.base, device) | make(row.change, device))


@rows([row for row in FORWARD if row.error is not NotImplementedError])
def test_backward_with_the_options_of_forward(row, device):
    arguments = make(row.base, device)
    out, lse = flashattn.forward(**arguments, return_lse=True)
    arguments |= {"dout": torch.ones_like(out), "out": out, "lse": lse}
    refuses(row, flashattn.backward, arguments | make(row.change, device))


@rows(BACKWARD)
def test_backward(row, device):
    refuses(row, flashattn.backward, make(row.base, device) | make(row.change, device))


@rows(DECODE)
def test_decode(row, device):
    refuses(row, flashattn.decode, make(row.base, device) | make(row.change, device))


@rows([row for row in DECODE if "out" not in row.id])
def test_decode_into_out(row, device):
    arguments = make(row.base, device)
    out = torch.full_like(arguments["q"][..., :6], 7)
    refuses(row, flashattn.decode, arguments | make(row.change, device) | {"out": out})


@pytest.mark.parametrize("number", ["numpy", "tensor"])
@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_max_seqlen_of_another_integer_type(name, number, device):
    """A numpy integer or a 0-d tensor is taken as the number that it is."""
    numpy = pytest.importorskip("numpy")
    arguments = make(packed, device)
    expected = flashattn.forward(**arguments)
    nine = numpy.int64(9) if number == "numpy" else torch.tensor(9)
    assert torch.equal(flashattn.forward(**arguments | {name: nine}), expected)


def test_autograd_names_the_argument_too(device):
    """The error is the same with and without gradients: autograd and autocast do not hide it."""
    row = next(row for row in FORWARD if row.id == "3 heads for 2")
    arguments = make(row.base, device) | make(row.change, device)
    for name in ("q", "k", "v"):
        arguments[name].requires_grad_()
    refuses(row, flashattn.forward, arguments)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        refuses(row, flashattn.forward, arguments)
