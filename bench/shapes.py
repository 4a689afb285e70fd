"""The named problems: one entry per thing that is timed, in sets that a command runs together."""

import itertools
import math
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashattn import traffic

# Work in forward passes (two matrix products): a backward recomputes Q K^T and has four products more.
PASSES = {"forward": 1.0, "decode": 1.0, "backward": 2.5, "forward+backward": 3.5}


@dataclass(frozen=True)
class Shape:
    """q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), by the rules of flashattn.forward.

    With ``lengths`` the batch is packed, (total, heads, head dim): B sequences of these lengths attend to
    themselves, and Sq = Sk is the longest.  A decode is never packed: k and v are its cache, and ``lengths``
    are the keys of each sequence that count.
    """

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
    softcap: float = 0.0
    alibi: bool = False  # with the slopes of `slopes`
    deterministic: bool = False  # sums of a backward in an order that never varies
    lengths: tuple[int, ...] = ()
    page_size: int = 0  # of a cache in pages, whose order is random
    latent: bool = False  # v is the first Dv columns of k
    append: bool = False  # the keys and values of the queries come into the cache in the call, rotated
    graph: bool = False  # timed in CUDA graphs
    against: str = ""  # name of the shape whose rate of reading the cache is compared with this one's

    @property
    def packed(self) -> bool:
        return bool(self.lengths) and self.op != "decode"

    @property
    def differentiates(self) -> bool:
        return "backward" in self.op

    @property
    def reach(self) -> tuple[int, int]:
        """Query i sees the keys from i + Sk - Sq - left to i + Sk - Sq + right that exist."""
        left, right = (self.Sq + self.Sk if side == -1 else side for side in self.window or (-1, -1))
        return left, 0 if self.causal else right

    def sequences(self) -> list["Shape"]:
        """The sequences of ``lengths``, each as a batch of its own."""
        return [replace(self, B=1, Sq=S if self.packed else self.Sq, Sk=S, lengths=()) for S in self.lengths]

    def visible_pairs(self) -> int:
        """Pairs (query, key) of one head that the mask lets through, over the whole batch."""
        if self.lengths:
            return sum(sequence.visible_pairs() for sequence in self.sequences())
        left, right = self.reach
        centre = torch.arange(self.Sq) + self.Sk - self.Sq
        first, last = (centre - left).clamp(min=0), (centre + right).clamp(max=self.Sk - 1)
        return self.B * int((last - first + 1).clamp(min=0).sum())

    def flops(self) -> float:
        """Floating-point operations of the visible pairs: 2 (D + Dv) each in a forward (4 D when D = Dv)."""
        return PASSES[self.op] * 2 * (self.D + self.Dv) * self.visible_pairs() * self.Hq

    @property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype).itemsize

    def cache_bytes(self) -> int:
        """Of the keys and values that some query may see: what a decode has to read."""
        if self.lengths:
            return sum(sequence.cache_bytes() for sequence in self.sequences())
        keys, columns = min(self.Sk, self.reach[0] + self.Sq), self.D + (0 if self.latent else self.Dv)
        return self.B * keys * self.Hk * columns * self.itemsize

    def moved_bytes(self, standard: bool = False) -> int:
        """By the formulas of flashattn.traffic, of standard or tiled attention; a decode reads its cache."""
        if self.op == "decode":
            queries, *_, outputs = map(math.prod, self.sizes())
            return self.cache_bytes() + (queries + outputs) * self.itemsize
        bounds = list(itertools.accumulate((0, *self.lengths))) if self.packed else None
        moved = traffic(*self.sizes()[:3], dtype=getattr(torch, self.dtype), causal=self.causal,
                        window=self.window, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
        kind = "standard" if standard else "tiled"
        return sum(getattr(moved, f"{kind}_{step}") for step in self.op.split("+"))

    def score_bytes(self) -> int:
        """Size of the one (B, Hq, Sq, Sk) score matrix that standard attention writes, in the dtype of q."""
        return self.B * self.Hq * self.Sq * self.Sk * self.itemsize

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Of q, k, v and the output."""
        total = (sum(self.lengths),)
        queries, keys = (total, total) if self.packed else ((self.B, self.Sq), (self.B, self.Sk))
        return ((*queries, self.Hq, self.D), (*keys, self.Hk, self.D), (*keys, self.Hk, self.Dv),
                (*queries, self.Hq, self.Dv))

    def input_bytes(self) -> int:
        """Of q, k and v."""
        return sum(map(math.prod, self.sizes()[:2 if self.latent else 3])) * self.itemsize

    def inputs(self, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Random q, k, v and the gradient of the output, the same for every peer."""
        generator = torch.Generator(device).manual_seed(seed)
        q, k, v, dout = (
            torch.randn(size, generator=generator, device=device, dtype=getattr(torch, self.dtype))
            for size in self.sizes())
        return q, k, k[..., :self.Dv] if self.latent else v, dout

    def bounds(self, device: torch.device) -> Tensor:
        """cu_seqlens of a packed batch."""
        return torch.tensor([0, *self.lengths], device=device).cumsum(0).int()

    def slopes(self, device: torch.device) -> Tensor:
        """ALiBi's slopes of the heads, 2^(-8/Hq) to 2^-8."""
        return torch.exp2(torch.arange(1, self.Hq + 1, device=device) * (-8 / self.Hq))


def _square(name: str, op: str, S: int, H: int, D: int, **options) -> Shape:
    return Shape(name, op, 1, S, S, H, H, D, D, **options)


def _model(name: str, op: str, B: int, S: int, Hq: int, Hk: int, D: int, causal: bool, **options) -> Shape:
    return Shape(f"{op}-{name}", op, B, S, S, Hq, Hk, D, causal=causal,
                 **{"Dv": D, "dtype": "bfloat16", **options})


def _mask(causal: bool) -> str:
    return "causal" if causal else "full"


def _grid(op: str, lengths: dict[int, tuple[int, ...]], label: str = "", **options) -> list[Shape]:
    """16,384 tokens and 2,048 columns: the lengths of every head dim, the short ones first."""
    return [_model(f"{label}d{D}-s{S}-{_mask(causal)}", op, 16384 // S, S, 2048 // D, 2048 // D, D, causal,
                   **options)
            for S in sorted(set(sum(lengths.values(), ()))) for D, some in lengths.items() if S in some
            for causal in (False, True)]


def _uneven(name: str, longest: int, B: int, Hq: int, Hk: int, D: int) -> list[Shape]:
    """A packed causal batch of random lengths, and the dense one with about as many visible pairs."""
    generator = random.Random(0)
    lengths = tuple(1 + int(longest * generator.random()) for _ in range(B))
    packed = _model(name, "forward", B, max(lengths), Hq, Hk, D, True, lengths=lengths)
    even = 128 * round(math.sqrt(2 * packed.visible_pairs() / B) / 128)
    return [packed, _model(f"{name}-equal", "forward", B, even, Hq, Hk, D, True)]


def _decode(B: int, S: int, Hq: int, Hk: int, name: str = "", Sq: int = 1, **options) -> Shape:
    return Shape(f"{name}{'-' * bool(name)}b{B}-s{S}-h{Hq}-{Hk}", "decode", B, Sq, S, Hq, Hk,
                 **{"D": 128, "Dv": 128, "causal": True, "dtype": "bfloat16", **options})


def _ragged(B: int, shortest: int, longest: int, Hq: int, Hk: int) -> list[Shape]:
    """A cache of sequences of random lengths, and one of as many keys in sequences of one length."""
    generator = random.Random(0)
    lengths = tuple(generator.randint(shortest, longest) for _ in range(B))
    even = _decode(B, round(sum(lengths) / B), Hq, Hk, "ragged-equal")
    return [even, _decode(B, max(lengths), Hq, Hk, "ragged", lengths=lengths, against=even.name)]


_LLAMA = (64, 8192, 32, 8)  # B, S and heads of the variants of a decode
_CHUNK = (4, 8192, 32, 8)  # the same of 512 tokens of prompts whose other keys are in the cache
_MODELS = (("llama3-8b", 2, 8192, 32, 8, 128, True), ("llama3-70b", 1, 8192, 64, 8, 128, True),
           ("d96", 2, 8192, 16, 16, 96, True), ("d80-vit", 16, 1024, 16, 16, 80, False),
           ("short", 128, 128, 16, 16, 64, False))

SETS = {
    # Heads shrink as S grows: a call of any row takes between 10 ms and a few seconds on two cores.
    "cpu": [
        _square(f"{op}-{dtype}-d{D}-s{S}-{_mask(causal)}", op, S, H, D, causal=causal, dtype=dtype)
        for op in ("forward", "backward") for dtype in ("float32", "bfloat16") for D in (64, 128)
        for S, H in ((1024, 8), (4096, 2)) for causal in (False, True)
    ],
    # Squares, what models run, and packed against dense.
    "cuda": [
        *_grid("forward", {128: (512, 2048, 8192, 16384), 64: (2048, 16384), 256: (2048, 16384)}),
        *(_model(name, "forward", *sizes) for name, *sizes in _MODELS),
        _model("mla-192-128", "forward", 1, 8192, 16, 16, 192, True, Dv=128),
        _model("window-1024", "forward", 1, 16384, 32, 8, 128, True, window=(1023, 0)),
        _model("softcap-50", "forward", 2, 8192, 16, 16, 128, True, softcap=50.0),
        _model("alibi", "forward", 2, 8192, 16, 16, 128, True, alibi=True),
        *_uneven("varlen", 4096, 64, 32, 8, 128),
        *_grid("forward", {128: (2048, 8192)}, "float16-", dtype="float16"),
        *_grid("backward", {128: (2048, 8192, 16384), 64: (8192,), 256: (8192,)}),
        *(_model(name, "backward", *sizes) for name, *sizes in _MODELS),
        _model("mla-192-128", "backward", 1, 8192, 16, 16, 192, True, Dv=128),
        *_grid("backward", {128: (8192,)}, "deterministic-", deterministic=True),
    ],
    # Of a size where the host's part would be seen: timed inside CUDA graphs.
    "graphs": [
        _model(f"b{B}-s{S}-h{H}-d{D}-{_mask(causal)}", "forward", B, S, H, H, D, causal, graph=True)
        for B, S, H, D, causal in ((32, 512, 16, 128, False), (32, 512, 16, 128, True),
                                   (4, 512, 16, 128, True), (1, 512, 32, 128, True),
                                   (1, 2048, 32, 128, True), (128, 128, 16, 64, False),
                                   (1, 128, 16, 64, False))
    ],
    # A token against a cache: as called, then what else a serving loop asks for, then in CUDA graphs.
    "decode": [
        *(_decode(B, S, Hq, Hk) for Hq, Hk in ((32, 8), (64, 8), (32, 32))
          for B, S in ((1, 8192), (1, 131072), (16, 8192), (64, 8192), (128, 2048))),
        *(_decode(*_LLAMA, f"pages-of-{size}", page_size=size, against=_decode(*_LLAMA).name)
          for size in (16, 64)),
        *_ragged(64, 100, 32768, 32, 8),
        *(_decode(64, 4096, Hq, 1, "mla", D=576, Dv=512, latent=True) for Hq in (128, 16)),
        _decode(*_LLAMA, "append-rotary", append=True, against=_decode(*_LLAMA).name),
        *(_decode(*_LLAMA, f"queries-{Sq}", Sq, against=_decode(*_LLAMA).name) for Sq in (4, 16)),
        _decode(*_CHUNK, "chunk", 512),
        *(_decode(*_CHUNK, f"chunk-pages-of-{size}", 512, page_size=size,
                  against=_decode(*_CHUNK, "chunk").name) for size in (16, 64)),
        _decode(16, 32768, 32, 8, "window-4096", window=(4095, 0)),
        _decode(64, 8192, 128, 1),
        *(_decode(*sizes, "graph", graph=True)
          for sizes in ((1, 1024, 32, 8), (1, 8192, 32, 8), (1, 32768, 32, 8), (4, 8192, 64, 8),
                        (8, 4096, 32, 8), (1, 131072, 32, 8), (64, 8192, 32, 8))),
    ],
    # Almost no arithmetic: the time is Python, dispatcher, checks and allocation.
    "overhead": [
        _square("small-forward", "forward", 4, 1, 64, causal=True),
        _square("small-forward+backward", "forward+backward", 4, 1, 64, causal=True),
        Shape("small-decode", "decode", 1, 1, 16, 1, 1, 64, 64, causal=True),
    ],
    "overhead-cuda": [
        *(_model("small", op, 1, 64, 4, 4, 64, True) for op in ("forward", "forward+backward")),
        _decode(1, 128, 32, 8, "small-decode"),
        _decode(1, 128, 32, 8, "small-decode-append-rotary", append=True),
    ],
    "memory": [_square(f"memory-s{S}", "forward", S, 8, 64) for S in (8192, 32768)],
    # To a million tokens of one head: standard attention would need 2.2 TB for its scores.
    "memory-cuda": [_square(f"{op}-s{2**n}", op, 2**n, 1, 128, dtype="bfloat16")
                    for op in ("forward", "forward+backward") for n in (10, 12, 14, 16, 17, 18, 20)],
    # Counted by the hardware, beside the formulas of flashattn.traffic.
    "io": [_square(f"d{D}-s{S}", "forward", S, 16, D, dtype="float16")
           for D in (128, 64) for S in (1024, 2048, 4096, 8192, 16384)],
    # Results against float64; outliers and long contexts are where rounding shows.
    "exact": [
        Shape(f"{kind}-{dtype}", "forward", B, S, S, H, H, 128, 128, causal, dtype=dtype)
        for dtype in ("bfloat16", "float16")
        for kind, B, S, H, causal in (("normal", 2, 4096, 8, True), ("outliers", 2, 4096, 8, True),
                                      ("long", 1, 65536, 1, False))
    ],
    # One size of 16 heads of 128 columns grows at a time; what varies is the first word of the name.
    "growth": [
        *(_square(f"S-{op}-{2**n}", op, 2**n, 8, 128, dtype="bfloat16")
          for op in ("forward", "backward") for n in range(9, 19)),
        *(Shape(f"B-forward-{B}", "forward", B, 2048, 2048, 16, 16, 128, 128, dtype="bfloat16")
          for B in (1, 2, 4, 8, 16, 32)),
        *(_square(f"H-forward-{H}", "forward", 4096, H, 128, dtype="bfloat16")
          for H in (1, 2, 4, 8, 16, 32, 64)),
        *(_square(f"D-forward-{D}", "forward", 8192, 16, D, dtype="bfloat16")
          for D in (32, 64, 96, 128, 192, 256)),
    ],
}
