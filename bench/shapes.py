"""The named problems: one entry per thing that is timed, in sets that a command runs together."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Work in forward passes (two matrix products): a backward recomputes Q K^T and has four products more.
PASSES = {"forward": 1.0, "decode": 1.0, "backward": 2.5, "forward+backward": 3.5}


@dataclass(frozen=True)
class Shape:
    """q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), by the rules of flashattn.forward."""

    name: str
    op: str  # a key of PASSES
    B: int
    Sq: int
    Sk: int
    Hq: int
    Hk: int
    D: int
    Dv: int
    causal: bool = False
    window: tuple[int, int] | None = None
    dtype: str = "float32"

    @property
    def differentiates(self) -> bool:
        return "backward" in self.op

    @property
    def reach(self) -> tuple[int, int]:
        """Query i sees the keys from i + Sk - Sq - left to i + Sk - Sq + right that exist."""
        left, right = (self.Sq + self.Sk if side == -1 else side for side in self.window or (-1, -1))
        return left, 0 if self.causal else right

    def visible_pairs(self) -> int:
        """Pairs (query, key) of one head that the mask lets through."""
        left, right = self.reach
        centre = torch.arange(self.Sq) + self.Sk - self.Sq
        first, last = (centre - left).clamp(min=0), (centre + right).clamp(max=self.Sk - 1)
        return int((last - first + 1).clamp(min=0).sum())

    def flops(self) -> float:
        """Floating-point operations of the visible pairs: 2 (D + Dv) each in a forward (4 D when D = Dv)."""
        return PASSES[self.op] * 2 * (self.D + self.Dv) * self.visible_pairs() * self.B * self.Hq

    def score_bytes(self) -> int:
        """Size of the one (B, Hq, Sq, Sk) score matrix that standard attention writes, in the dtype of q."""
        return self.B * self.Hq * self.Sq * self.Sk * getattr(torch, self.dtype).itemsize

    def inputs(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Random q, k, v and the gradient of the output, the same for every peer."""
        generator = torch.Generator(device).manual_seed(0)
        sizes = ((self.B, self.Sq, self.Hq, self.D), (self.B, self.Sk, self.Hk, self.D),
                 (self.B, self.Sk, self.Hk, self.Dv), (self.B, self.Sq, self.Hq, self.Dv))
        return tuple(torch.randn(size, generator=generator, device=device, dtype=getattr(torch, self.dtype))
                     for size in sizes)


def _square(name: str, op: str, S: int, H: int, D: int, **options) -> Shape:
    return Shape(name, op, 1, S, S, H, H, D, D, **options)


def _model(name: str, op: str, B: int, S: int, Hq: int, Hk: int, D: int, causal: bool) -> Shape:
    return Shape(f"{op}-{name}", op, B, S, S, Hq, Hk, D, D, causal=causal, dtype="bfloat16")


SETS = {
    # Heads shrink as S grows: a call of any row takes between 10 ms and a few seconds on two cores.
    "cpu": [
        _square(f"{op}-{dtype}-d{D}-s{S}-{'causal' if causal else 'full'}", op, S, H, D,
                causal=causal, dtype=dtype)
        for op in ("forward", "backward") for dtype in ("float32", "bfloat16") for D in (64, 128)
        for S, H in ((1024, 8), (4096, 2)) for causal in (False, True)
    ],
    # 16,384 tokens and 2,048 columns, and what models run.
    "cuda": [
        _model(f"d{D}-s{S}-{'causal' if causal else 'full'}", op, 16384 // S, S, 2048 // D, 2048 // D, D,
               causal)
        for op, lengths in (
            ("forward", {128: (512, 2048, 8192, 16384), 64: (2048, 16384), 256: (2048, 16384)}),
            ("backward", {128: (2048, 8192, 16384), 64: (8192,), 256: (8192,)}))
        for D, some in lengths.items() for causal in (False, True) for S in some
    ] + [
        _model(name, op, *sizes) for op in ("forward", "backward") for name, *sizes in (
            ("llama3-8b", 2, 8192, 32, 8, 128, True), ("llama3-70b", 1, 8192, 64, 8, 128, True),
            ("d96", 2, 8192, 16, 16, 96, True), ("d80-vit", 16, 1024, 16, 16, 80, False),
            ("short", 128, 128, 16, 16, 64, False))
    ],
    # Almost no arithmetic: the time is Python, dispatcher, checks and allocation.
    "overhead": [
        _square("small-forward", "forward", 4, 1, 64, causal=True),
        _square("small-forward+backward", "forward+backward", 4, 1, 64, causal=True),
        Shape("small-decode", "decode", 1, 1, 16, 1, 1, 64, 64, causal=True),
    ],
    "memory": [_square(f"memory-s{S}", "forward", S, 8, 64) for S in (8192, 32768)],
}
