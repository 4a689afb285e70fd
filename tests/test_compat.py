"""flashattn.compat: signatures, results and refusals, and FlashAttention's published test grid on it.

The grid tests have FlashAttention's shapes, options and rule: ``max|x - ref| <= m max|plain - ref| + a``,
with ref in float32 and plain the same formulas in the dtype of the inputs, both rounded to it.  Of the
products of all options a fixed part runs; on the CPU a smaller one, of short lengths and fewer sequences.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cases import ints, offsets
from compare import assert_identical
from flashattn import reference
from flashattn.compat import bert_padding, flash_attn, flash_attn_interface
from flashattn.compat.layers import rotary

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
YES_NO = (False, True)
PRIMES = (2, 3, 5, 7, 11, 13, 19, 29, 31, 41, 43, 53, 59, 61, 67)


# ---- the grid ----------------------------------------------------------------------------------------------

@dataclass
class Grid:
    """So many combinations of the axes' values, in a fixed order that spreads them evenly (Weyl 1916).

    Combination n takes the value at the fraction ``n sqrt(prime) mod 1`` of each axis, the longest axis with
    the smallest prime.

    Args:
        cuda, cpu: how many combinations are taken, before those without a meaning are left out.
        rows: on the CPU lengths are left out whose product is larger.
        possible: which combinations have a meaning.
        size: of a case, bounded by ``most`` on CUDA and on the CPU.
    """

    axes: dict
    cuda: int
    cpu: int
    rows: int = 45_000
    possible: Callable = lambda case: True
    size: Callable = lambda case: 0
    most: tuple[float, float] = (0, 0)

    def cases(self, cpu: bool) -> list[SimpleNamespace]:
        axes = {name: tuple(value for value in axis if not cpu or self._short(name, value))
                for name, axis in self.axes.items()}
        count = self.cpu if cpu else self.cuda
        if count >= math.prod(map(len, axes.values())):
            chosen = itertools.product(*axes.values())
        else:
            prime = dict(zip(sorted(axes, key=lambda name: -len(axes[name])), PRIMES))
            chosen = dict.fromkeys(tuple(axis[int(n * math.sqrt(prime[name]) % 1 * len(axis))]
                                         for name, axis in axes.items()) for n in range(count))
        cases = [SimpleNamespace(**dict(zip(axes, values))) for values in chosen]
        return [case for case in cases if self.possible(case) and self.size(case) <= self.most[cpu]]

    def _short(self, name, value) -> bool:
        return {"length": lambda n: n * n, "lengths": math.prod}.get(name, lambda _: 0)(value) <= self.rows


def grid(*, cuda, cpu, rows=45_000, possible=lambda case: True, size=lambda case: 0, most=(0, 0), **axes):
    def mark(test):
        test.grid = Grid(axes, cuda, cpu, rows, possible, size, most)
        return test
    return mark


def pytest_generate_tests(metafunc):
    if hasattr(metafunc.function, "grid"):
        cases = metafunc.function.grid.cases(metafunc.config.getoption("--device") == "cpu")
        metafunc.parametrize("case", cases, ids=[name_of(case) for case in cases])


def name_of(case: SimpleNamespace) -> str:
    """What is set, in words."""
    words = []
    for name, value in vars(case).items():
        if value is True:
            words.append(name)
        elif value is not False and value is not None and value != 0:
            text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words.append(text.removeprefix("torch.") if isinstance(value, (str, torch.dtype)) else
                         f"{name}{text}")
    return "-".join(words)


@pytest.mark.parametrize("cpu", YES_NO)
def test_the_thinned_grid_has_every_value(cpu):
    """On the CPU every value but the long lengths."""
    grids = {name: test.grid for name, test in globals().items() if hasattr(test, "grid")}
    assert len(grids) == 16
    for test, chosen in grids.items():
        cases = chosen.cases(cpu)
        for axis, values in chosen.axes.items():
            wanted = {value for value in values if not cpu or chosen._short(axis, value)}
            assert len(wanted) >= min(len(values), 3)
            assert wanted == {getattr(case, axis) for case in cases}, f"{test}: {axis}"
        assert len({name_of(case) for case in cases}) == len(cases)


# ---- the reference -----------------------------------------------------------------------------------------

def attend(q, k, v, *, causal=False, window=(-1, -1), softcap=0.0, slopes=None, kept=None, p=0.0, lens_q=None,
           lens_k=None, first=None, qv=None, upcast=True):
    """Attention by its formula: (out, lse) of q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv).

    Args:
        kept: (B, H, Sq, Sk) bool, what dropout keeps.
        lens_q, lens_k, first: (B) rows that count, keys that count, the first of them.
        upcast: in float32; otherwise in the dtype of q, with the scale applied to k.
    """
    dtype, device = q.dtype, q.device
    if upcast:
        q, k, v, qv = (None if t is None else t.float() for t in (q, k, v, qv))
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    scale = 1 / math.sqrt(q.shape[-1] + (0 if qv is None else v.shape[-1]))
    if upcast:
        q = q * scale
    else:
        k = k * scale
    scores = product("bqhd,bkhd->bhqk", q, k)
    if qv is not None:
        scores = scores + product("bqhd,bkhd->bhqk", qv * scale, v)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap

    def of_each(lengths, default):
        return torch.full((len(q),), default, device=device) if lengths is None else lengths.long()

    lens_q, lens_k, first = of_each(lens_q, q.shape[1]), of_each(lens_k, k.shape[1]), of_each(first, 0)
    row, key = torch.arange(q.shape[1], device=device)[:, None], torch.arange(k.shape[1], device=device)
    at = row + (lens_k - lens_q)[:, None, None]                          # (B, Sq, 1)
    left, right = (math.inf if side < 0 else side for side in window)
    right = min(right, 0 if causal else math.inf)
    visible = (key < lens_k[:, None, None]) & (key >= first[:, None, None]) & (row < lens_q[:, None, None])
    visible = (visible & (key >= at - left) & (key <= at + right))[:, None]   # (B, 1, Sq, Sk)
    if slopes is not None:
        slopes = slopes.expand(len(q), -1)[:, :, None, None]
        scores = scores - slopes * (at - key).abs()[:, None]             # in float32
    scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores.float(), -1)
    weights = torch.softmax(scores, -1).masked_fill(~visible.any(-1, keepdim=True), 0).to(v.dtype)
    if kept is not None:
        weights = weights.masked_fill(~kept, 0) / (round((1 - p) * 65536) / 65536)
    return product("bhqk,bkhd->bqhd", weights, v).to(dtype), lse


def product(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """A product of matrices in their dtype: a CPU's in 16 bits is slow, so that one in float32 is rounded."""
    if a.is_cuda:
        return torch.einsum(equation, a, b)
    return torch.einsum(equation, a.float(), b.float()).to(a.dtype)


def within(ours: Tensor, ref: Tensor, plain: Tensor, m: float, a: float, name: str, roundings=0) -> None:
    """FlashAttention's rule; its version 3 adds so many :func:`rounding` to a."""
    assert ours.dtype == ref.dtype and ours.shape == ref.shape, f"{name}: {ours.dtype} {tuple(ours.shape)}"
    a += roundings * rounding(ref)
    ours, ref, plain = ours.float(), ref.float(), plain.float()
    error, bound = (ours - ref).abs().max().item(), m * (plain - ref).abs().max().item() + a
    assert error <= bound, f"{name}: error {error:.3e} over {bound:.3e}, largest {ref.abs().max().item():.3e}"


def rounding(x: Tensor) -> float:
    """Largest error of ``x + 0.3 - 0.3`` as a GPU computes it: each sum in float32, then rounded."""
    shifted = ((x.float() + 0.3).to(x.dtype).float() - 0.3).to(x.dtype)
    return (shifted - x).abs().max().item()


def check(ours, formula, leaves, *, out=(2, 0), grads=(2, 0), roundings=0, transposed=False) -> None:
    """Holds output, LSE (where ours returns one) and gradients of the leaves against those of the formula.

    Args:
        ours: leaves -> (out, lse or None).
        formula: leaves and upcast -> (out, lse).
        out, grads: the m and a of the rule; no gradients with None.
        roundings: see :func:`within`.
        transposed: the gradient of out has strides of its own.
    """
    results, dout = [], None
    for f in (ours, lambda *t: formula(*t, upcast=True), lambda *t: formula(*t, upcast=False)):
        inputs = [leaf.detach().requires_grad_(grads is not None) for leaf in leaves]
        o, lse = f(*inputs)
        found = [o.detach()]
        if grads is not None:
            if transposed:
                o = o.transpose(0, 1)
            if dout is None and transposed:
                dout = torch.randn(o.shape[0], 2 * o.shape[1], *o.shape[2:], dtype=o.dtype, device=o.device)
                dout = dout[:, ::2]
            elif dout is None:
                dout = torch.randn_like(o)
            found += torch.autograd.grad(o, inputs, dout)
        results.append((found, lse))
    (ours, our_lse), (ref, ref_lse), (plain, _) = results
    within(ours[0], ref[0], plain[0], *out, "out", roundings)
    for i, triple in enumerate(zip(ours[1:], ref[1:], plain[1:])):
        within(*triple, *grads, f"gradient {i}", roundings)
    if our_lse is not None:
        check_lse(our_lse, ref_lse)


def check_lse(ours: Tensor, ref: Tensor) -> None:
    ours, ref = ours.detach(), ref.detach()
    assert ours.dtype == F32
    assert_identical(ours.isfinite(), ref.isfinite(), "where the LSE is finite")
    error = torch.where(ref.isfinite(), ours - ref, 0).abs().max().item()
    largest = torch.where(ref.isfinite(), ref, 0).abs().max().item()
    assert error <= 2e-5 * (1 + largest), f"lse: error {error:.3e}, largest {largest:.3e}"


def rand(device, dtype, *shape):
    return torch.randn(*shape, dtype=dtype, device=device)


def sequences(device, batch: int) -> int:
    return batch if device.type == "cuda" else min(batch, 2)


def kv_heads(case, heads: int = 6, gqa: int = 2) -> int:
    return {"mha": heads, "mqa": 1, "gqa": gqa}[case.heads]


def window_of(case, len_k: int) -> tuple[int, int]:
    """The window that FlashAttention's tests draw for so many keys: with seed 0."""
    drawn = torch.randint(0, len_k, (2,), generator=torch.Generator().manual_seed(0))
    return tuple(drawn.tolist()) if case.local else (-1, -1)


def next_seed(device, start: int) -> Tensor:
    """The number that the next call with dropout draws; puts the generator to where it draws it."""
    torch.manual_seed(start)
    seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=device)
    torch.manual_seed(start)
    return seed


def options(case, device, batch, heads, len_q, len_k):
    """Of a case: (those of FlashAttention-2, those of :func:`attend`)."""
    window = window_of(case, len_k)
    slopes, kept = None, None
    if getattr(case, "alibi", False):
        slopes = 0.3 * torch.rand(batch, heads, device=device)
    p, softcap = getattr(case, "p", 0.0), getattr(case, "softcap", 0.0)
    if p:
        with device:
            kept = reference.dropout_keep(next_seed(device, 7), p, batch, heads, len_q, len_k)
        assert abs(1 - kept.float().mean().item() - p) < 5 * math.sqrt(p * (1 - p) / kept.numel())
    theirs = {"dropout_p": p, "causal": case.causal, "window_size": window, "softcap": softcap,
              "alibi_slopes": slopes, "deterministic": getattr(case, "deterministic", False)}
    return theirs, {"causal": case.causal, "window": window, "softcap": softcap, "slopes": slopes,
                    "kept": kept, "p": p}


def call(function, *args, p=0.0, **theirs):
    """(out, lse) of a function of FlashAttention-2; lse is None with dropout."""
    if theirs["dropout_p"]:
        return function(*args, **theirs), None
    out, lse, weights = function(*args, **theirs, return_attn_probs=True)
    assert weights.numel() == 0
    return out, lse


def random_lengths(device, batch: int, longest: int) -> Tensor:
    """(B) int32, near the longest, which is among them."""
    lengths = torch.randint(max(1, longest - 20), longest + 1, (batch,), dtype=torch.int32)
    return lengths.to(device)


def mask_of(lengths: Tensor, longest: int) -> Tensor:
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


def paged(t: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """t (B, S, ...) in shuffled pages, among others': (pages, table (B, pages of a sequence) int32)."""
    batch, length = t.shape[:2]
    width = -(-length // page_size)
    count = batch * width + 5
    table = torch.randperm(count)[:batch * width].view(batch, width).to(t.device)
    pages = torch.randn(count, page_size, *t.shape[2:], dtype=t.dtype, device=t.device)
    padded = t.new_zeros(batch, width * page_size, *t.shape[2:])
    padded[:, :length] = t
    pages[table] = padded.unflatten(1, (width, page_size))
    return pages, table.to(torch.int32)


def turned(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding as a product of complex numbers, x (B, S, H, D) at positions (B, S)."""
    half = cos.shape[-1]
    pairs = x[..., :2 * half].float().unflatten(-1, (half, 2) if interleaved else (2, half))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    angle = torch.complex(cos.float(), sin.float())[at][:, :, None]
    product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle)
    product = product if interleaved else product.transpose(-1, -2)
    return torch.cat([product.flatten(-2).to(x.dtype), x[..., 2 * half:]], -1)


# ---- FlashAttention-2 --------------------------------------------------------------------------------------

DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
UNEVEN = ((113, 203), (128, 217), (113, 211), (108, 256), (256, 512))
CAUSAL = ((1, 239), (3, 799), (127, 512), (127, 513), *UNEVEN, (1023, 1024))


@grid(cuda=480, cpu=24, p=(0.0, 0.17), causal=YES_NO, local=YES_NO, alibi=YES_NO, deterministic=YES_NO,
      dtype=(F16, BF16), d=DIMS, length=(97, 128, 200, 384, 768, 1024, 1025, 2048))
def test_qkvpacked(case, device):
    batch, heads = sequences(device, 4), 9
    qkv = rand(device, case.dtype, batch, case.length, 3, heads, case.d)
    theirs, ours = options(case, device, batch, heads, case.length, case.length)
    check(lambda qkv: call(flash_attn.flash_attn_qkvpacked_func, qkv, **theirs),
          lambda qkv, upcast: attend(*qkv.unbind(2), **ours, upcast=upcast), [qkv])


@grid(cuda=450, cpu=24, p=(0.0, 0.17), causal=YES_NO, local=YES_NO, alibi=YES_NO, deterministic=YES_NO,
      dtype=(F16, BF16), d=(32, 59, 64, 80, 96, 128, 160, 192, 224, 256),
      length=(97, 128, 200, 257, 384, 512, 768, 1025, 2048))
def test_varlen_qkvpacked(case, device):
    batch, heads = sequences(device, 5), 6
    qkv = rand(device, case.dtype, batch, case.length, 3, heads, case.d)
    lengths = random_lengths(device, batch, case.length)
    theirs, ours = options(case, device, batch, heads, case.length, case.length)

    def packed(qkv):
        rows, indices, cu_seqlens, longest, _ = bert_padding.unpad_input(qkv, mask_of(lengths, case.length))
        out, lse = call(flash_attn.flash_attn_varlen_qkvpacked_func, rows, cu_seqlens, longest, **theirs)
        assert lse is None or lse.shape == (heads, len(rows))
        return bert_padding.pad_input(out, indices, batch, case.length), None

    check(packed, lambda qkv, upcast: attend(*qkv.unbind(2), **ours, lens_q=lengths, lens_k=lengths,
                                             upcast=upcast), [qkv])


OUTPUT = {"kvpacked": YES_NO, "softcap": (0.0, 50.0), "p": (0.0, 0.17), "causal": YES_NO, "local": YES_NO,
          "alibi": YES_NO, "deterministic": YES_NO, "dtype": (F16, BF16), "heads": ("mha", "mqa", "gqa")}


@grid(cuda=400, cpu=24, **OUTPUT, d=tuple(d for d in DIMS if d != 80),
      lengths=(*UNEVEN, (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048)))
def test_output(case, device):
    batch, heads, (len_q, len_k) = sequences(device, 4), 4 if case.softcap else 6, case.lengths
    q = rand(device, case.dtype, batch, len_q, heads, case.d) * (case.softcap or 1)
    kv = rand(device, case.dtype, batch, len_k, 2, kv_heads(case, heads), case.d)
    theirs, ours = options(case, device, batch, heads, len_q, len_k)
    if case.kvpacked:
        check(lambda q, kv: call(flash_attn.flash_attn_kvpacked_func, q, kv, **theirs),
              lambda q, kv, upcast: attend(q, *kv.unbind(2), **ours, upcast=upcast), [q, kv], grads=(3, 0))
    else:
        check(lambda *qkv: call(flash_attn.flash_attn_func, *qkv, **theirs),
              lambda *qkv, upcast: attend(*qkv, **ours, upcast=upcast), [q, *kv.unbind(2)], grads=(3, 0))


@grid(cuda=400, cpu=24, **OUTPUT, d=tuple(d for d in DIMS if d != 40),
      lengths=((1, 147), *UNEVEN, (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048)))
def test_varlen_output(case, device):
    batch, heads, (len_q, len_k) = sequences(device, 4), 4 if case.softcap else 6, case.lengths
    q = rand(device, case.dtype, batch, len_q, heads, case.d) * (case.softcap or 1)
    kv = rand(device, case.dtype, batch, len_k, 2, kv_heads(case, heads), case.d)
    lens_q, lens_k = random_lengths(device, batch, len_q), random_lengths(device, batch, len_k)
    theirs, ours = options(case, device, batch, heads, len_q, len_k)

    def packed(q, kv):
        q, at, cu_q, most_q, _ = bert_padding.unpad_input(q, mask_of(lens_q, len_q))
        kv, _, cu_k, most_k, _ = bert_padding.unpad_input(kv, mask_of(lens_k, len_k))
        function, parts = flash_attn.flash_attn_varlen_kvpacked_func, [kv]
        if not case.kvpacked:
            function, parts = flash_attn.flash_attn_varlen_func, kv.unbind(1)
        out, _ = call(function, q, *parts, cu_q, cu_k, most_q, most_k, **theirs)
        return bert_padding.pad_input(out, at, batch, len_q), None

    check(packed, lambda q, kv, upcast: attend(q, *kv.unbind(2), **ours, lens_q=lens_q, lens_k=lens_k,
                                               upcast=upcast), [q, kv], grads=(3, 0))


@grid(cuda=960, cpu=24, local=YES_NO, dtype=(F16, BF16), swapped=YES_NO, d=DIMS, lengths=CAUSAL)
def test_causal(case, device):
    batch, heads = sequences(device, 8), 9
    len_q, len_k = case.lengths[::-1] if case.swapped else case.lengths
    qkv = [rand(device, case.dtype, batch, n, heads, case.d) for n in (len_q, len_k, len_k)]
    window = window_of(case, len_k)
    check(lambda *qkv: call(flash_attn.flash_attn_func, *qkv, dropout_p=0.0, causal=True, window_size=window),
          lambda *qkv, upcast: attend(*qkv, causal=True, window=window, upcast=upcast), qkv,
          out=(2, 1e-5), grads=(2, 1e-5))


@grid(cuda=420, cpu=24, local=YES_NO, dtype=(F16, BF16), swapped=YES_NO, page=(None, 256, 512), d=DIMS,
      lengths=CAUSAL)
def test_varlen_causal(case, device):
    batch, heads = sequences(device, 8), 9
    len_q, len_k = case.lengths[::-1] if case.swapped else case.lengths
    q, k, v = (rand(device, case.dtype, batch, n, heads, case.d) for n in (len_q, len_k, len_k))
    lens_q, lens_k = random_lengths(device, batch, len_q), random_lengths(device, batch, len_k)
    window = window_of(case, len_k)
    if case.page:
        (k_pages, v_pages), table = paged_kv(k, v, case.page)

    def packed(q, k, v):
        q, at, cu_q, most_q, _ = bert_padding.unpad_input(q, mask_of(lens_q, len_q))
        (k, _, cu_k, most_k, _), v = (bert_padding.unpad_input(t, mask_of(lens_k, len_k)) for t in (k, v))
        keys = (k_pages, v_pages) if case.page else (k, v[0])
        out = flash_attn.flash_attn_varlen_func(
            q, *keys, cu_q, cu_k, most_q, most_k, causal=True, window_size=window,
            block_table=table if case.page else None)
        return bert_padding.pad_input(out, at, batch, len_q), None

    check(packed, lambda *qkv, upcast: attend(*qkv, causal=True, window=window, lens_q=lens_q, lens_k=lens_k,
                                              upcast=upcast), [q, k, v],
          out=(2, 1e-5), grads=None if case.page else (2, 1e-5))


def paged_kv(k: Tensor, v: Tensor, page_size: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """k and v in pages with one table."""
    pages, table = paged(torch.cat([k, v], -1), page_size)
    return tuple(t.contiguous() for t in pages.split((k.shape[-1], v.shape[-1]), -1)), table


@grid(cuda=320, cpu=24, causal=YES_NO, local=YES_NO, alibi=YES_NO, deterministic=YES_NO, dtype=(F16, BF16),
      swapped=YES_NO, d=DIMS, lengths=((3, 1024), (1, 339), (64, 800), (3, 799), (64, 2048), (16, 20000),
                                       (16, 100000), (128, 128), (256, 256)))
def test_splitkv(case, device):
    batch, heads, (len_q, len_k) = 1, 12, case.lengths[::-1] if case.swapped else case.lengths
    qkv = [rand(device, case.dtype, batch, n, heads, case.d) for n in (len_q, len_k, len_k)]
    theirs, ours = options(case, device, batch, heads, len_q, len_k)
    check(lambda *qkv: call(flash_attn.flash_attn_func, *qkv, **theirs),
          lambda *qkv, upcast: attend(*qkv, **ours, upcast=upcast), qkv,
          out=(2, 1e-5), grads=(8 if case.alibi else 2, 2e-4))


def cache_call(case, device, batch, len_q, capacity, dims):
    """Tensors of a call with a cache: k and v dense, k_cache and v_cache as the call gets them."""
    heads, dim, hk = 6, dims[0], kv_heads(case, gqa=3)
    c = SimpleNamespace(heads=heads, fresh=0, k_new=None, v_new=None, table=None, index=None, pad=None)
    c.q = rand(device, case.dtype, batch, len_q, heads, dim)
    c.cos = c.sin = None
    rotary_dim = int(case.rotary * dim) // 16 * 16
    if case.new:
        c.fresh = len_q if case.as_many else int(torch.randint(1, len_q + 1, ()))
        c.k_new, c.v_new = (rand(device, case.dtype, batch, c.fresh, hk, n) for n in dims)
    rows = 2 * batch if case.indexed else batch
    c.k, c.v = (rand(device, case.dtype, rows, capacity, hk, n) for n in dims)
    ahead = 0
    if case.new:                                                         # tables of angles reach as far
        ahead = max(c.fresh, len_q if (case.causal or case.local) and rotary_dim else 0)
    c.lengths = torch.randint(0 if case.new else 1, capacity - ahead + 1, (batch,), dtype=torch.int32)
    if case.leftpad:
        c.pad = (c.lengths * torch.rand(batch) * 0.99).to(torch.int32).to(device)
    c.lengths = c.lengths.to(device)
    if case.indexed:
        c.index = torch.randperm(rows)[:batch].to(torch.int32).to(device)
    c.k_cache, c.v_cache = c.k.clone(), c.v.clone()
    if case.page:
        (c.k_cache, c.v_cache), c.table = paged_kv(c.k, c.v, case.page)
    if rotary_dim:
        angles = 2 * math.pi * torch.rand(capacity, rotary_dim // 2, device=device)
        c.cos, c.sin = angles.cos().to(case.dtype), angles.sin().to(case.dtype)
    c.window = window_of(case, capacity)
    return c


def cache_after(c, case) -> tuple[Tensor, Tensor]:
    """The caches as the call left them, dense, all rows of them."""
    if c.table is None:
        return c.k_cache, c.v_cache
    return tuple(t[c.table.long()].flatten(1, 2)[:, :c.k.shape[1]] for t in (c.k_cache, c.v_cache))


KVCACHE = {"leftpad": YES_NO, "indexed": YES_NO, "interleaved": YES_NO, "as_many": YES_NO, "causal": YES_NO,
           "local": YES_NO, "new": YES_NO, "heads": ("mha", "mqa", "gqa"), "rotary": (0.0, 0.5, 1.0)}


def meaningful(case) -> bool:
    """FlashAttention's own rules for its grid, but that leftpad goes with pages."""
    new_fits = case.lengths[0] <= case.lengths[1] or not case.new
    return new_fits and (case.new or not case.rotary) and (case.new or case.as_many) and (
        case.rotary or not case.interleaved)


@grid(cuda=1200, cpu=80, possible=meaningful, **KVCACHE, alibi=YES_NO, dtype=(F16,), splits=(1, 0),
      page=(None, 256), d=(32, 59, 64, 80, 128, 256),
      lengths=((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000),
               (1, 131072), (16, 131072), (128, 128)))
def test_kvcache(case, device):
    batch, (len_q, capacity) = 2, case.lengths
    c = cache_call(case, device, batch, len_q, capacity, (case.d, case.d))
    slopes = 0.3 * torch.rand(batch, c.heads, device=device) if case.alibi else None
    out, lse = flash_attn.flash_attn_with_kvcache(
        c.q, c.k_cache, c.v_cache, c.k_new, c.v_new, c.cos, c.sin, c.lengths, c.index, c.pad, c.table,
        causal=case.causal, window_size=c.window, rotary_interleaved=case.interleaved, alibi_slopes=slopes,
        num_splits=case.splits, return_softmax_lse=True)
    expect(case, c, out, lse, m=5 if case.alibi else 3, slopes=slopes, empty=math.inf)


def expect(case, c, out, lse, *, m, empty, slopes=None, lens_q=None, fresh=None, first=None, mean=None):
    """Holds the results and the caches of a call against the formula.

    Args:
        out, lse: (B, Sq, H, Dv) and (B, H, Sq).
        lens_q, fresh: (B) queries and new keys of each sequence; all of them unless given.
        first: (B) position of the first new key and query in the table of angles.
        empty: the LSE of a query that sees no key.
        mean: the factor of the rule for the mean error.
    """
    device, lengths, (batch, len_q) = out.device, c.lengths.long(), c.q.shape[:2]
    fresh = torch.full_like(lengths, c.fresh) if fresh is None else fresh.long()
    rows = torch.arange(batch, device=device) if c.index is None else c.index.long()
    q, k_new, k, v = c.q, c.k_new, c.k.clone(), c.v.clone()
    if c.cos is not None:
        first = lengths if first is None else first.long()
        last = len(c.cos) - 1                                            # of rows that do not count
        steps = torch.arange(len_q, device=device) * (case.causal or case.local)
        q = turned(q, c.cos, c.sin, (first[:, None] + steps).clamp(max=last), case.interleaved)
        steps = torch.arange(c.fresh, device=device)
        k_new = turned(k_new, c.cos, c.sin, (first[:, None] + steps).clamp(max=last), case.interleaved)
    for b, row in enumerate(rows.tolist() if case.new else ()):
        at = slice(int(lengths[b]), int(lengths[b] + fresh[b]))
        k[row, at], v[row, at] = k_new[b, :fresh[b]], c.v_new[b, :fresh[b]]

    k_after, v_after = cache_after(c, case)
    assert_identical(v_after, v, "v_cache")
    if c.cos is None:
        assert_identical(k_after, k, "k_cache")
    else:
        torch.testing.assert_close(k_after, k, rtol=1e-3 if case.dtype == F16 else 8e-3, atol=1e-3)

    ref, plain = (attend(q, k[rows], v[rows], causal=case.causal, window=c.window, slopes=slopes,
                         lens_q=lens_q, lens_k=lengths + fresh, first=c.pad, upcast=upcast)
                  for upcast in (True, False))
    within(out, ref[0], plain[0], m, 1e-5, "out")
    if mean is not None:
        ours, baseline = ((t.float() - ref[0].float()).abs().mean().item() for t in (out, plain[0]))
        assert ours <= mean * baseline, f"out: mean error {ours:.3e}, plain {baseline:.3e}"
    if c.cos is None:
        check_lse(lse, ref[1])
    assert (lse[~ref[1].isfinite()] == empty).all()


REPEATED = ((1, 239), (239, 1), (3, 799), (799, 3), (1024, 128), (97, 97), (128, 128), (200, 200), (256, 256),
            (257, 257), (384, 384), (512, 512), (768, 768), (1024, 1024))


def times(cost: float, most: int, device) -> int:
    """How often a call of this cost is repeated."""
    return max(3, min(most, int(4e11 / cost))) if device.type == "cuda" else 3


@grid(cuda=60, cpu=24, p=(0.0, 0.17), causal=YES_NO, dtype=(F16,), d=DIMS, lengths=REPEATED)
def test_race_condition(case, device):
    """The same bits every time; dq may be summed in any order."""
    batch, heads, (len_q, len_k) = sequences(device, 60), 4, case.lengths
    inputs = [rand(device, case.dtype, batch, n, heads, case.d) for n in (len_q, len_k, len_k)]
    inputs = [t.requires_grad_() for t in inputs]
    dout = rand(device, case.dtype, batch, len_q, heads, case.d)

    def run():
        torch.manual_seed(42)
        out = flash_attn.flash_attn_func(*inputs, case.p, causal=case.causal)
        return out, *torch.autograd.grad(out, inputs, dout)

    first = run()
    close = 2 * rounding(first[1])
    for _ in range(times(4 * batch * len_q * len_k * case.d, 250, device)):
        out, dq, dk, dv = run()
        for name, again, before in zip(("out", "dk", "dv"), (out, dk, dv), (first[0], *first[2:])):
            assert_identical(again.detach(), before.detach(), name)
        assert torch.allclose(dq, first[1], atol=close)


@grid(cuda=240, cpu=24, varlen=YES_NO, causal=YES_NO, local=YES_NO, dtype=(F16, BF16), swapped=YES_NO, d=DIMS,
      lengths=CAUSAL)
def test_deterministic(case, device):
    batch, heads, (len_q, len_k) = 2, 9, case.lengths[::-1] if case.swapped else case.lengths
    tensors = [rand(device, case.dtype, batch, n, heads, case.d) for n in (len_q, len_k, len_k)]
    theirs = {"causal": case.causal, "window_size": window_of(case, len_k), "deterministic": True}
    if case.varlen:
        masks = [mask_of(random_lengths(device, batch, n), n) for n in (len_q, len_k)]
        unpadded = [bert_padding.unpad_input(t, mask) for t, mask in zip(tensors, (*masks, masks[1]))]
        inputs = [t[0].requires_grad_() for t in unpadded]
        (_, _, cu_q, most_q, _), (_, _, cu_k, most_k, _) = unpadded[:2]
        out = flash_attn.flash_attn_varlen_func(*inputs, cu_q, cu_k, most_q, most_k, **theirs)
    else:
        inputs = [t.requires_grad_() for t in tensors]
        out = flash_attn.flash_attn_func(*inputs, **theirs)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    for _ in range(times(18 * len_q * len_k * case.d, 50, device)):
        again = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        for name, a, b in zip(("dq", "dk", "dv"), again, first):
            assert_identical(a, b, name)


@grid(cuda=60, cpu=20, causal=YES_NO, dtype=(F16, BF16), d=(16, 32, 64), length=(1, 2, 5, 17, 128))
def test_bwd_overflow(case, device):
    """Keys beyond the end of a tile, with large scores."""
    batch, heads = 2, 5
    qkv = [factor * rand(device, case.dtype, batch, case.length, heads, case.d) for factor in (5, 3, 3)]
    check(lambda *qkv: call(flash_attn.flash_attn_func, *qkv, dropout_p=0.0, causal=case.causal),
          lambda *qkv, upcast: attend(*qkv, causal=case.causal, upcast=upcast), qkv, grads=(5, 1e-3))


@grid(cuda=32, cpu=12, causal=YES_NO, dtype=(F16, BF16), d=(64, 128), length=(97, 128, 200, 256))
def test_bwd_transpose(case, device):
    """A gradient of out that is not contiguous."""
    qkv = [rand(device, case.dtype, 5, case.length, 2, case.d) for _ in range(3)]
    check(lambda *qkv: call(flash_attn.flash_attn_func, *qkv, dropout_p=0.0, causal=case.causal),
          lambda *qkv, upcast: attend(*qkv, causal=case.causal, upcast=upcast), qkv, transposed=True)


@pytest.mark.parametrize("causal", YES_NO)
@pytest.mark.parametrize("d", [16, 32, 64])
def test_bwd_varlen_overflow(d, causal, device):
    cu_q, cu_k = offsets(device, (76, 34, 146)), offsets(device, (1, 1, 1))
    inputs = [(3 * rand(device, F16, n, 5, d)).requires_grad_() for n in (256, 3, 3)]
    out = flash_attn.flash_attn_varlen_func(*inputs, cu_q, cu_k, 256, 3, causal=causal)
    out.backward(torch.randn_like(out))
    assert all(t.grad.isfinite().all() for t in inputs)


@pytest.mark.parametrize("new", YES_NO)
@pytest.mark.parametrize("page_size", [256, 512])
def test_block_table_bounds(page_size, new, device):
    """Lengths over the capacity of the table: refused where the host reads them."""
    q, k_new, v_new = rand(device, F16, 3, 1, 1, 1, 64)
    pages = rand(device, F16, 4, page_size, 1, 64)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    out = flash_attn.flash_attn_with_kvcache(q, pages, pages.clone(), cache_seqlens=page_size,
                                             block_table=table)
    assert out.isfinite().all()
    if device.type == "cpu":
        with pytest.raises(ValueError, match="cache_seqlens"):
            flash_attn.flash_attn_with_kvcache(
                q, pages, pages.clone(), *((k_new, v_new) if new else ()),
                cache_seqlens=page_size + (not new), block_table=table)


# ---- FlashAttention-3 --------------------------------------------------------------------------------------

FA3 = {"deterministic": YES_NO, "softcap": (0.0, 15.0), "causal": YES_NO, "local": YES_NO,
       "pack_gqa": YES_NO, "dtype": (BF16, F16), "num_splits": (1, 3), "heads": ("mha", "mqa", "gqa"),
       "dims": ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (64, 256), (64, 512),
                (64, 256, "qv"), (64, 512, "qv"))}
MISSED = ((64, 128), (128, 128), (256, 256), *UNEVEN, (640, 128), (512, 256), (1024, 1024), (1023, 1024),
          (1024, 1023))


def fa3_options(case, len_k):
    """Of a case: (those of FlashAttention-3, those of :func:`attend`)."""
    window = window_of(case, len_k)
    theirs = {"causal": case.causal, "window_size": window, "softcap": case.softcap,
              "pack_gqa": case.pack_gqa, "num_splits": case.num_splits, "deterministic": case.deterministic}
    return theirs, {"causal": case.causal, "window": window, "softcap": case.softcap}


def fa3_inputs(case, device, batch, len_q, len_k):
    """q, k, v and perhaps qv, each (batch, rows, heads, columns)."""
    dim, dim_v, *qv = case.dims
    shapes = [(len_q, 6, dim), (len_k, kv_heads(case), dim), (len_k, kv_heads(case), dim_v)]
    q, *others = (rand(device, case.dtype, batch, *shape) for shape in shapes + [(len_q, 6, dim_v)] * len(qv))
    return [q * (case.softcap / 4 or 1), *others]


def fa3_rule(case) -> dict:
    m = 3 if case.softcap else 2
    return {"out": (m, 0), "grads": (m, 3e-4 if case.softcap else 0), "roundings": 2}


@grid(cuda=400, cpu=24, **FA3,
      lengths=((1, 1), (128, 192), (239, 1), (799, 3), (113, 128), (384, 256), *MISSED, (4096, 4096),
               (4224, 4224)))
def test_fa3_output(case, device):
    (len_q, len_k), batch = case.lengths, sequences(device, 2 if max(case.lengths) > 2048 else 9)
    theirs, ours = fa3_options(case, len_k)
    check(lambda q, k, v, qv=None: flash_attn_interface.flash_attn_func(q, k, v, qv=qv, **theirs,
                                                                        return_attn_probs=True),
          lambda q, k, v, qv=None, *, upcast: attend(q, k, v, qv=qv, **ours, upcast=upcast),
          fa3_inputs(case, device, batch, len_q, len_k), **fa3_rule(case))


@grid(cuda=400, cpu=24, unused=YES_NO, **FA3,
      lengths=((1, 1), (1, 3), (2, 1), (511, 1), (3, 513), (307, 256), *MISSED, (2048, 2048), (4096, 4096)))
def test_fa3_varlen_output(case, device):
    """unused: rows of q and k that lie in the packed tensors and do not count."""
    (len_q, len_k), batch = case.lengths, sequences(device, 2 if max(case.lengths) > 2048 else 9)
    theirs, ours = fa3_options(case, len_k)
    lens_q, lens_k = random_lengths(device, batch, len_q), random_lengths(device, batch, len_k)
    masks = mask_of(lens_q, len_q), mask_of(lens_k, len_k)
    extra = [mask_of(lens + 7, n) & ~mask if case.unused else None
             for lens, n, mask in zip((lens_q, lens_k), case.lengths, masks)]

    def packed(q, k, v, qv=None):
        q, at, cu_q, most_q, used_q = bert_padding.unpad_input(q, masks[0], extra[0])
        k, _, cu_k, most_k, used_k = bert_padding.unpad_input(k, masks[1], extra[1])
        v = bert_padding.unpad_input(v, masks[1], extra[1])[0]
        if qv is not None:
            qv = bert_padding.unpad_input(qv, masks[0], extra[0])[0]
        used = (used_q, used_k) if case.unused else ()
        out = flash_attn_interface.flash_attn_varlen_func(q, k, v, cu_q, cu_k, most_q, most_k, *used, qv=qv,
                                                          **theirs)
        return bert_padding.pad_input(out, at, batch, len_q), None

    check(packed, lambda q, k, v, qv=None, *, upcast: attend(q, k, v, qv=qv, **ours, lens_q=lens_q,
                                                             lens_k=lens_k, upcast=upcast),
          fa3_inputs(case, device, batch, len_q, len_k), **fa3_rule(case))


@grid(cuda=1600, cpu=100, **KVCACHE, from_elsewhere=YES_NO, varlen=YES_NO, dtype=(BF16,), splits=(1, 3, 0),
      page=(None, 1, 4, 128), lengths=((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799),
                                       (64, 2048), (16, 20000), (128, 128), (256, 512), (2048, 3577)),
      possible=lambda c: meaningful(c) and not (c.causal and c.local) and (c.rotary or not c.from_elsewhere))
def test_fa3_kvcache(case, device):
    """from_elsewhere: rotary_seqlens.  varlen: q and the new keys are packed, alike or each in its way."""
    batch, (len_q, capacity) = 5, case.lengths
    c = cache_call(case, device, batch, len_q, capacity, (128, 128))
    lens_q = fresh = first = None
    theirs = {"rotary_cos": c.cos, "rotary_sin": c.sin, "cache_batch_idx": c.index, "cache_leftpad": c.pad,
              "page_table": c.table, "causal": case.causal, "window_size": c.window,
              "rotary_interleaved": case.interleaved, "num_splits": case.splits, "return_softmax_lse": True,
              "scheduler_metadata": flash_attn_interface.get_scheduler_metadata(
                  batch, len_q, capacity, 6, c.k.shape[2], 128, c.lengths, page_size=case.page)}
    if case.from_elsewhere:
        first = (c.lengths * torch.rand(batch, device=device)).to(torch.int32)
        theirs["rotary_seqlens"] = first
    q, k_new, v_new = c.q, c.k_new, c.v_new
    if case.varlen:
        lens_q = random_lengths(device, batch, len_q)
        q, at, theirs["cu_seqlens_q"], theirs["max_seqlen_q"], _ = bert_padding.unpad_input(
            q, mask_of(lens_q, len_q))
        if case.new:
            fresh = lens_q if case.as_many else random_lengths(device, batch, c.fresh)
            (k_new, _, cu, *_), (v_new, *_) = (
                bert_padding.unpad_input(t, mask_of(fresh, c.fresh)) for t in (k_new, v_new))
            theirs["cu_seqlens_k_new"] = theirs["cu_seqlens_q"] if case.as_many else cu
    before = c.k_cache.clone(), c.v_cache.clone()
    for _ in range(2):                                                   # with the same metadata
        c.k_cache.copy_(before[0]), c.v_cache.copy_(before[1])
        out, lse, *parts = flash_attn_interface.flash_attn_with_kvcache(
            q, c.k_cache, c.v_cache, k_new, v_new, cache_seqlens=c.lengths, **theirs)
    assert [part.numel() for part in parts] == [0, 0]
    if case.varlen:
        out = bert_padding.pad_input(out, at, batch, len_q)
        dense = torch.full((batch * len_q, 6), -math.inf, device=device)
        lse = dense.index_copy(0, at, lse.T).view(batch, len_q, 6).transpose(1, 2)
    expect(case, c, out, lse, m=2, empty=-math.inf, lens_q=lens_q, fresh=fresh, first=first, mean=1.5)


@grid(cuda=240, cpu=32, rows=4100, size=lambda c: c.splits * c.length * c.d, most=(1.5e6, 3e5),
      dtype=(F32, F16, BF16), d=(64, 96, 128, 192, 256, 512), splits=(1, 2, 3, 5, 17, 32, 55, 97, 133),
      length=(1, 2, 3, 32, 64, 256, 113, 108, 640, 1024))
def test_combine(case, device):
    """Parts that are not contiguous, some of them without keys."""
    n, batch, heads = case.splits, 5, 16
    outs = rand(device, F32, 2 * n, batch, heads, case.length, case.d).transpose(2, 3)[:n]
    lses = rand(device, F32, n, batch, 2 * heads, case.length).transpose(-1, -2)[..., :heads]
    lses[n // 2:, :batch // 3] = -math.inf
    out, lse = flash_attn_interface.flash_attn_combine(outs, lses, out_dtype=case.dtype)
    expected = torch.logsumexp(lses, 0)
    torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-5)
    shares = torch.exp(lses - torch.where(expected == -math.inf, 0, expected))
    ref = torch.einsum("nbsh,nbshd->bshd", shares, outs)
    plain = ref.to(case.dtype)
    assert out.dtype == case.dtype and out.shape == ref.shape
    error = (out.float() - ref).abs().max()
    assert error <= 2 * (plain.float() - ref).abs().max() or torch.allclose(out, plain, rtol=1e-5, atol=1e-5)
    buffer = torch.empty_like(plain)
    same, _ = flash_attn_interface.flash_attn_combine(outs, lses, out=buffer)
    assert same.data_ptr() == buffer.data_ptr()
    assert_identical(buffer, out, "out=")


def test_latent_cache(device):
    """qv, and a cache whose first columns are V: an append, a rotation of q and k alone, pages."""
    shapes = (6, 64), (6, 256), (1, 64), (1, 256)
    q, qv, k_new, v_new = (rand(device, BF16, 3, 4, *shape) for shape in shapes)
    kv, lengths = rand(device, BF16, 3, 70, 1, 320), ints(device, 0, 40, 66)
    angles = 6 * torch.rand(70, 16, device=device)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    at = lengths.long()[:, None] + torch.arange(4, device=device)
    q_turned, k_turned = (turned(t, cos, sin, at, False) for t in (q, k_new))
    expected = kv.clone()
    for b in range(3):
        expected[b, at[b]] = torch.cat([v_new[b], k_turned[b]], -1)

    out, lse, *_ = flash_attn_interface.flash_attn_with_kvcache(
        q, kv[..., 256:], kv[..., :256], k_new, v_new, qv, cos, sin, lengths, causal=True,
        rotary_interleaved=False, return_softmax_lse=True)
    torch.testing.assert_close(kv, expected, rtol=8e-3, atol=1e-3)
    ref, plain = (attend(q_turned, expected[..., 256:], expected[..., :256], qv=qv, causal=True,
                         lens_k=lengths + 4, upcast=upcast) for upcast in (True, False))
    within(out, ref[0], plain[0], 2, 1e-5, "out")
    torch.testing.assert_close(lse, ref[1], rtol=1e-2, atol=1e-2)

    pages, table = kv.view(15, 14, 1, 320), torch.arange(15, device=device, dtype=torch.int32).view(3, 5)
    again = flash_attn_interface.flash_attn_with_kvcache(
        q_turned, pages[..., 256:], pages[..., :256], qv=qv, cache_seqlens=lengths + 4, page_table=table,
        causal=True)
    within(again, ref[0], plain[0], 2, 1e-5, "out of pages")
    for k_cache, v_cache in ((kv[..., 256:].clone(), kv[..., :256]), (kv[..., :64], kv[..., 64:])):
        with pytest.raises(NotImplementedError, match="^qv is given, and k_cache and v_cache lie apart"):
            flash_attn_interface.flash_attn_with_kvcache(q, k_cache, v_cache, qv=qv)


# ---- signatures, results, refusals -------------------------------------------------------------------------

TAIL_2 = ("dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
          "alibi_slopes=None, deterministic=False, return_attn_probs=False")
TAIL_3 = ("q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, "
          "softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
          "return_attn_probs=False")
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    flash_attn: {
        "flash_attn_func": f"q, k, v, {TAIL_2}",
        "flash_attn_kvpacked_func": f"q, kv, {TAIL_2}",
        "flash_attn_qkvpacked_func": f"qkv, {TAIL_2}",
        "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {TAIL_2}, block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {TAIL_2}",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL_2}",
        "flash_attn_with_kvcache":
            "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
            "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
            "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
            "return_softmax_lse=False"},
    flash_attn_interface: {
        "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, qv=None, {TAIL_3}",
        "flash_attn_qkvpacked_func":
            "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, "
            "window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, "
            "sm_margin=0, return_attn_probs=False",
        "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, seqused_q=None, seqused_k=None, softmax_scale=None, "
                                  f"causal=False, qv=None, {TAIL_3}",
        "flash_attn_with_kvcache":
            "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
            "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
            "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
            "q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
            "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
            "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
        "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
        "get_scheduler_metadata":
            "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
            "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
            "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), "
            "attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0"},
    bert_padding: {
        "unpad_input": "hidden_states, attention_mask, unused_mask=None",
        "pad_input": "hidden_states, indices, batch, seqlen",
        "index_first_axis": "input, indices",
        "index_put_first_axis": "values, indices, first_axis_dim"},
    rotary: {
        "apply_rotary_emb": "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, "
                            "cu_seqlens=None, max_seqlen=None"},
}


@pytest.mark.parametrize("module", SIGNATURES, ids=lambda module: module.__name__)
def test_signatures(module):
    for name, expected in SIGNATURES[module].items():
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        assert ", ".join(str(p.replace(annotation=p.empty)) for p in parameters) == expected, name
    assert set(getattr(module, "__all__", SIGNATURES[module])) == set(SIGNATURES[module])


def test_results_and_empty_rows(device):
    """How many results, their shapes, and the LSE where no key is seen: +inf in version 2, -inf in 3."""
    q, k, v = (rand(device, F32, 2, n, 4, 16) for n in (9, 5, 5))
    out, lse, weights = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    out_3, lse_3 = flash_attn_interface.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert out.shape == (2, 9, 4, 16) and lse.shape == (2, 4, 9) and weights.numel() == 0
    assert (lse[..., :4] == math.inf).all() and (lse_3[..., :4] == -math.inf).all()
    assert not out[:, :4].any() and torch.equal(out, out_3) and torch.equal(lse[..., 4:], lse_3[..., 4:])
    assert isinstance(flash_attn.flash_attn_func(q, k, v), Tensor)
    assert isinstance(flash_attn_interface.flash_attn_func(q, k, v), Tensor)

    rows = [t.flatten(0, 1) for t in (q, k, v)]
    lengths = offsets(device, (9, 9)), offsets(device, (5, 5)), 9, 5
    out_v, lse_v, _ = flash_attn.flash_attn_varlen_func(*rows, *lengths, causal=True, return_attn_probs=True)
    _, lse_v3 = flash_attn_interface.flash_attn_varlen_func(*rows, *lengths, causal=True,
                                                            return_attn_probs=True)
    assert lse_v.shape == (4, 18) and (lse_v[:, :4] == math.inf).all() and (lse_v3[:, :4] == -math.inf).all()
    torch.testing.assert_close(out_v.view_as(out), out)
    torch.testing.assert_close(lse_v.view(4, 2, 9).transpose(0, 1), lse)

    cached = flash_attn.flash_attn_with_kvcache(q, k, v, causal=True, return_softmax_lse=True)
    cached_3 = flash_attn_interface.flash_attn_with_kvcache(q, k, v, causal=True, return_softmax_lse=True)
    assert len(cached) == 2 and len(cached_3) == 4
    assert isinstance(flash_attn.flash_attn_with_kvcache(q, k, v), Tensor)
    assert isinstance(flash_attn_interface.flash_attn_with_kvcache(q, k, v), Tensor)
    torch.testing.assert_close(cached[0], out)
    torch.testing.assert_close(cached[1], lse)
    torch.testing.assert_close(cached_3[1], lse_3)

    metadata = flash_attn_interface.get_scheduler_metadata(2, 9, 5, 4, 4, 16, ints(device, 5, 5))
    assert metadata.dtype == torch.int32 and metadata.device.type == device.type


def test_gradients_of_packed_inputs(device):
    """qkv.grad and kv.grad, through out and through the LSE, whose empty rows have none."""
    qkv = rand(device, F32, 2, 11, 3, 4, 16).requires_grad_()
    mixed = rand(device, F32, 2, 11, 8, 16).requires_grad_()             # 4 heads of q, 2 of k, 2 of v
    bounds = offsets(device, (4, 7, 11))
    asked = {"causal": True, "return_attn_probs": True}
    for leaf, (out, lse, *_) in (
        (qkv, flash_attn.flash_attn_qkvpacked_func(qkv, **asked)),
        (qkv, flash_attn_interface.flash_attn_qkvpacked_func(qkv, **asked)),
        (qkv, flash_attn.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), bounds, 11, **asked)),
        (mixed, flash_attn_interface.flash_attn_qkvpacked_func(mixed, num_heads_q=4, **asked)),
    ):
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        grad, = torch.autograd.grad((out, lse), leaf, (dout, dlse))
        if leaf is qkv:
            q, k, v = qkv.unbind(2)
        else:
            q, k, v = mixed.split((4, 2, 2), dim=2)
        options = {"causal": True}
        if out.dim() == 3:
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            options |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        expected = reference.forward(q, k, v, **options)[:2]
        wanted, = torch.autograd.grad(expected, leaf, (dout.double(), dlse.double()))
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-5)

    q, kv = rand(device, F32, 1, 6, 2, 8), rand(device, F32, 1, 4, 2, 2, 8).requires_grad_()
    _, lse, _ = flash_attn.flash_attn_kvpacked_func(q, kv, causal=True, return_attn_probs=True)
    assert (lse[..., :2] == math.inf).all()
    lse[lse.isfinite()].sum().backward()
    assert kv.grad.isfinite().all() and kv.grad[:, :, 0].any() and not kv.grad[:, :, 1].any()


def test_dropout_follows_the_generator(device):
    q, k, v = rand(device, F32, 3, 1, 40, 2, 16)
    torch.manual_seed(3)
    first = flash_attn.flash_attn_func(q, k, v, 0.4)
    other = flash_attn.flash_attn_func(q, k, v, 0.4)
    torch.manual_seed(3)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, 0.4), first) and not torch.equal(other, first)
    capped = flash_attn.flash_attn_func(q, k, v, 0.4, softcap=1.0)       # which FlashAttention refuses
    assert not torch.equal(capped, first)


def test_pages_with_cache_batch_idx(device):
    """The rows of the table, which FlashAttention-2 refuses, in an append too."""
    q, k_new, v_new = rand(device, F32, 3, 2, 1, 2, 16)
    k, v, index, lengths = *rand(device, F32, 2, 3, 12, 2, 16), ints(device, 2, 0), ints(device, 7, 11)
    (k_pages, v_pages), table = paged_kv(k, v, 4)
    options = {"cache_seqlens": lengths, "causal": True}
    out = flash_attn.flash_attn_with_kvcache(q, k_pages, v_pages, k_new, v_new, cache_batch_idx=index,
                                             block_table=table, **options)
    expected = flash_attn.flash_attn_with_kvcache(q, k, v, k_new, v_new, cache_batch_idx=index, **options)
    torch.testing.assert_close(out, expected)
    assert torch.equal(k_pages[table.long()].flatten(1, 2), k)
    assert torch.equal(k[2, 7], k_new[0, 0]) and torch.equal(v[0, 11], v_new[1, 0])


@pytest.mark.parametrize("argument, value", [
    ("q_descale", 1), ("k_descale", 1), ("v_descale", 1), ("attention_chunk", 64), ("attention_chunk", -1)])
@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
                                  "flash_attn_with_kvcache"])
def test_refused_by_fa3(name, argument, value, device):
    """An error that names argument and value, whether or not anything else is asked for."""
    q, k, v = rand(device, F16, 3, 2, 5, 2, 16)
    rows, bounds = [t.flatten(0, 1) for t in (q, k, v)], offsets(device, (5, 5))
    inputs = {"flash_attn_func": (q, k, v), "flash_attn_with_kvcache": (q, k, v),
              "flash_attn_qkvpacked_func": (torch.stack([q, k, v], 2),),
              "flash_attn_varlen_func": (*rows, bounds, bounds, 5, 5)}
    shown = str(value)
    if argument.endswith("descale"):
        value, shown = torch.ones(2, 2, device=device), r"a tensor of shape \(2, 2\)"
    with pytest.raises(NotImplementedError, match=f"^{argument} is {shown}: .*expected"):
        getattr(flash_attn_interface, name)(*inputs[name], **{argument: value})


def test_other_refusals(device):
    q, k, v = rand(device, F32, 3, 2, 4, 2, 16)
    rows, bounds, pages = q.flatten(0, 1), offsets(device, (4, 4)), rand(device, F32, 2, 4, 2, 16)
    table = ints(device, 0, 1)[:, None]
    for function, arguments in (
        (flash_attn.flash_attn_func, (q, k, v)),
        (flash_attn.flash_attn_kvpacked_func, (q, torch.stack([k, v], 2))),
        (flash_attn.flash_attn_qkvpacked_func, (torch.stack([q, k, v], 2),)),
        (flash_attn.flash_attn_varlen_func, (rows, rows, rows, bounds, bounds, 4, 4)),
    ):
        with pytest.raises(NotImplementedError, match="^return_attn_probs is True: with dropout_p=0.25 "):
            function(*arguments, dropout_p=0.25, return_attn_probs=True)
    paged_call = (rows, pages, pages, bounds, bounds, 4, 4)
    with pytest.raises(NotImplementedError, match="^dropout_p is 0.25: .* block_table"):
        flash_attn.flash_attn_varlen_func(*paged_call, dropout_p=0.25, block_table=table)
    out = flash_attn.flash_attn_varlen_func(rows.requires_grad_(), *paged_call[1:], block_table=table)
    with pytest.raises(NotImplementedError, match="no gradient"):
        out.sum().backward()
    with pytest.raises(NotImplementedError, match="alibi_slopes requires a gradient"):
        flash_attn.flash_attn_func(q, k, v, alibi_slopes=torch.rand(2, device=device).requires_grad_())
    with pytest.raises(NotImplementedError, match="^attention_chunk is 8: "):
        flash_attn_interface.get_scheduler_metadata(2, 1, 4, 2, 2, 16, ints(device, 4, 4), attention_chunk=8)
    with pytest.raises(ValueError, match=r"^qkv has shape .* expected \(B, S, 3, H, D\)"):
        flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k], 2))
    with pytest.raises(ValueError, match=r"^kv has shape .* expected \(B, S, 2, H, D\)"):
        flash_attn.flash_attn_kvpacked_func(q, q)
    with pytest.raises(ValueError, match="^qkv has shape .* num_heads_q is None"):
        flash_attn_interface.flash_attn_qkvpacked_func(q)
    with pytest.raises(ValueError, match="^qkv has shape .* num_heads_q is 1"):
        flash_attn_interface.flash_attn_qkvpacked_func(q, num_heads_q=1)
    with pytest.raises(ValueError, match="^cache_seqlens is None"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k[:, :1], v[:, :1])
    with pytest.raises(ValueError, match="^lse_partial has shape"):
        flash_attn_interface.flash_attn_combine(q[None], rand(device, F32, 1, 2, 2, 4))
    with pytest.raises(ValueError, match="^out_dtype is torch.float16"):
        flash_attn_interface.flash_attn_combine(q[None], rand(device, F32, 1, 2, 4, 2), q.clone(), F16)


def test_combine_has_gradients(device):
    outs, lses = rand(device, F32, 3, 2, 4, 5, 8), rand(device, F32, 3, 2, 4, 5)
    lses[1, 0] = -math.inf
    leaves = outs.requires_grad_(), lses.requires_grad_()
    results = flash_attn_interface.flash_attn_combine(*leaves)
    shares = torch.softmax(lses, 0)
    expected = (shares[..., None] * outs).sum(0), torch.logsumexp(lses, 0)
    seeds = [torch.randn_like(t) for t in expected]
    ours, wanted = (torch.autograd.grad(t, leaves, seeds) for t in (results, expected))
    torch.testing.assert_close(ours, wanted)


# ---- padding and rotation ----------------------------------------------------------------------------------

def test_unpad_and_pad(device):
    x = rand(device, F32, 3, 5, 2, 4).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], device=device)
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]], device=device)
    for kept, given in ((mask, None), (mask + unused, unused), (mask.bool() | unused.bool(), unused.bool())):
        rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(
            x, mask.to(kept.dtype), given)
        assert torch.equal(rows, x[kept.bool()]) and torch.equal(x.flatten(0, 1)[indices], rows)
        assert cu_seqlens.dtype == used.dtype == torch.int32 and type(longest) is int and longest == 5
        assert cu_seqlens.tolist() == [0, *kept.long().sum(1).cumsum(0).tolist()]
        assert used.tolist() == [3, 0, 5]
        padded = bert_padding.pad_input(rows, indices, 3, 5)
        assert torch.equal(padded, torch.where(kept.bool()[..., None, None], x, 0))
        grad, = torch.autograd.grad((padded * x.detach()).sum(), x)
        assert torch.equal(grad, padded)


@pytest.mark.parametrize("interleaved", YES_NO)
def test_apply_rotary_emb(interleaved, device):
    x, offsets_of = rand(device, F32, 2, 6, 3, 16).requires_grad_(), ints(device, 3, 9)
    angles = 6 * torch.rand(20, 4, device=device)
    cos, sin = angles.cos(), angles.sin()
    steps = torch.arange(6, device=device)
    for offset, at in ((0, steps.expand(2, -1)), (7, (steps + 7).expand(2, -1)),
                       (offsets_of, offsets_of.long()[:, None] + steps)):
        expected = turned(x, cos, sin, at, interleaved)
        ours = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offset)
        torch.testing.assert_close(ours, expected)
        dout = torch.randn_like(ours)
        torch.testing.assert_close(*(torch.autograd.grad(y, x, dout)[0] for y in (ours, expected)))
        rows = [x[0, :2], x[1, :5], x[0, :1]]                            # the last row belongs to nobody
        packed = rotary.apply_rotary_emb(torch.cat(rows), cos, sin, interleaved, seqlen_offsets=offset,
                                         cu_seqlens=offsets(device, (2, 5)), max_seqlen=5)
        torch.testing.assert_close(packed[:7], torch.cat([expected[0, :2], expected[1, :5]]))
    y = x.detach().clone()
    assert rotary.apply_rotary_emb(y, cos, sin, interleaved, inplace=True) is y
    torch.testing.assert_close(y, turned(x.detach(), cos, sin, steps.expand(2, -1), interleaved))
    with pytest.raises(ValueError, match=r"^cos of shape \(20, 9\) .* at most the head dim, 16"):
        rotary.apply_rotary_emb(x, torch.ones(20, 9, device=device), torch.ones(20, 9, device=device))
    if device.type == "cpu":
        with pytest.raises(ValueError, match="^cos has 20 positions: expected at least 21"):
            rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=15)


# ---- other libraries ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("version", [2, 3])
def test_transformers_flash_path(version, device, monkeypatch):
    """transformers' own code for FlashAttention, told that these modules are the package."""
    pytest.importorskip("transformers")
    from transformers import modeling_flash_attention_utils as utils

    for name in (2, 3, 4):
        monkeypatch.setattr(utils, f"is_flash_attn_{name}_available", lambda name=name: name == version)
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", bert_padding)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn_interface)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn",
                 "_pad_fn", "_unpad_fn", "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"):
        monkeypatch.setattr(utils, name, None, raising=False)            # not every version has all
    implementation = f"flash_attention_{version}"
    functions = utils._lazy_imports(implementation)
    module = flash_attn if version == 2 else flash_attn_interface
    assert functions[:3] == (module.flash_attn_func, module.flash_attn_varlen_func,
                             module.flash_attn_with_kvcache)
    if version == 2:
        assert functions[3:] == (bert_padding.pad_input, bert_padding.unpad_input)

    q, k, v = (rand(device, F16, 2, 12, heads, 32).requires_grad_() for heads in (4, 2, 2))
    options = {"query_length": 12, "is_causal": True, "softcap": 20.0, "attn_implementation": implementation}
    for lens, extra in ((None, {}), (None, {"sliding_window": 5}), (ints(device, 12, 7), {})):
        mask = None if lens is None else mask_of(lens, 12)
        out = utils._flash_attention_forward(q, k, v, mask, **options, **extra)
        window = (4, 4) if extra else (-1, -1)
        ref, plain = (attend(q, k, v, causal=True, window=window, softcap=20.0, lens_q=lens, lens_k=lens,
                             upcast=upcast)[0] for upcast in (True, False))
        within(out.detach(), ref.detach(), plain.detach(), 2, 1e-4, "out")
        assert torch.autograd.grad(out.float().square().sum(), k)[0].any()


def test_compiled(device):
    """One graph, with gradients."""
    def loss(qkv):
        out, lse, _ = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
        return out.square().sum() + lse.sum()

    qkv = rand(device, F32, 2, 9, 3, 2, 16).requires_grad_()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    ours, eager = (torch.autograd.grad(f(qkv), qkv)[0] for f in (compiled, loss))
    torch.testing.assert_close(ours, eager)
