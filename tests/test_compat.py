"""flashattn.compat: signatures, results and refusals, and FlashAttention's published test grid on it.

The grid tests have FlashAttention's shapes, options and rule: ``max|x - ref| <= m max|plain - ref| + a``,
with ref in float32 and plain the same formulas in the dtype of the inputs, both rounded to it.  Of the products
of all options every n-th combination runs; on the CPU fewer do, and only short ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cases import offsets
from compare import assert_identical
from flashattn import reference
from flashattn.compat import bert_padding, flash_attn, flash_attn_interface

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
YES_NO = (False, True)


# ---- the grid ----------------------------------------------------------------------------------------------

@dataclass
class Grid:
    """About so many combinations of the axes' values: every n-th, the last axis turning fastest.

    n shares no factor with the number of values of any axis, so all of them turn up.

    Args:
        cuda, cpu: how many combinations are taken, before impossible ones are left out.
        rows: on the CPU lengths are left out whose product is larger.
        possible: which combinations have a meaning.
        size: of a case, bounded by ``most`` on CUDA and on the CPU.
    """

    axes: dict
    cuda: int
    cpu: int
    rows: int = 66_000
    possible: Callable = lambda case: True
    size: Callable = lambda case: 0
    most: tuple[float, float] = (0, 0)

    def cases(self, cpu: bool) -> list[SimpleNamespace]:
        axes = {name: tuple(value for value in axis if not cpu or self._short(name, value))
                for name, axis in self.axes.items()}
        total = math.prod(map(len, axes.values()))
        step = max(1, total // (self.cpu if cpu else self.cuda))
        while math.gcd(step, total) > 1:
            step += 1
        cases = [case_of(axes, index) for index in range(0, total, step)]
        return [case for case in cases if self.possible(case) and self.size(case) <= self.most[cpu]]

    def _short(self, name, value) -> bool:
        return {"length": lambda n: n * n, "lengths": math.prod}.get(name, lambda _: 0)(value) <= self.rows


def case_of(axes: dict, index: int) -> SimpleNamespace:
    """Combination number ``index``."""
    values = {}
    for name, axis in reversed(axes.items()):
        index, at = divmod(index, len(axis))
        values[name] = axis[at]
    return SimpleNamespace(**{name: values[name] for name in axes})


def grid(*, cuda, cpu, rows=66_000, possible=lambda case: True, size=lambda case: 0, most=(0, 0), **axes):
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
        scores = torch.einsum("bqhd,bkhd->bhqk", q * scale, k)
    else:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k * scale)
    if qv is not None:
        scores = scores + torch.einsum("bqhd,bkhd->bhqk", qv * scale, v)
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
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).to(dtype), lse


def within(ours: Tensor, ref: Tensor, plain: Tensor, m: float, a: float, name: str, roundings=0) -> None:
    """FlashAttention's rule; its version 3 adds to a so many errors of ``ref + 0.3 - 0.3``."""
    assert ours.dtype == ref.dtype and ours.shape == ref.shape, f"{name}: {ours.dtype} {tuple(ours.shape)}"
    a += roundings * ((ref + 0.3 - 0.3) - ref).abs().max().item()
    ours, ref, plain = ours.float(), ref.float(), plain.float()
    error, bound = (ours - ref).abs().max().item(), m * (plain - ref).abs().max().item() + a
    assert error <= bound, f"{name}: error {error:.3e} over {bound:.3e}, largest {ref.abs().max().item():.3e}"


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
            if dout is None:
                dout = torch.randn(o.shape[0], 2 * o.shape[1], *o.shape[2:], dtype=o.dtype, device=o.device)
                dout = dout[:, ::2] if transposed else dout[:, ::2].contiguous()
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


def kv_heads(case, heads: int = 6, gqa: int = 2) -> int:
    return {"mha": heads, "mqa": 1, "gqa": gqa}[case.heads]


def window_of(case, len_k: int) -> tuple[int, int]:
    return tuple(torch.randint(0, len_k, (2,)).tolist()) if case.local else (-1, -1)


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
        assert abs(1 - kept.float().mean().item() - p) < 0.01
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


@grid(cuda=480, cpu=16, p=(0.0, 0.17), causal=YES_NO, local=YES_NO, alibi=YES_NO, deterministic=YES_NO,
      dtype=(F16, BF16), d=DIMS, length=(97, 128, 200, 384, 768, 1024, 1025, 2048))
def test_qkvpacked(case, device):
    batch, heads = 4, 9
    qkv = rand(device, case.dtype, batch, case.length, 3, heads, case.d)
    theirs, ours = options(case, device, batch, heads, case.length, case.length)
    check(lambda qkv: call(flash_attn.flash_attn_qkvpacked_func, qkv, **theirs),
          lambda qkv, upcast: attend(*qkv.unbind(2), **ours, upcast=upcast), [qkv])


@grid(cuda=450, cpu=14, p=(0.0, 0.17), causal=YES_NO, local=YES_NO, alibi=YES_NO, deterministic=YES_NO,
      dtype=(F16, BF16), d=(32, 59, 64, 80, 96, 128, 160, 192, 224, 256),
      length=(97, 128, 200, 257, 384, 512, 768, 1025, 2048))
def test_varlen_qkvpacked(case, device):
    batch, heads = 5, 6
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


@grid(cuda=400, cpu=16, **OUTPUT, d=tuple(d for d in DIMS if d != 80),
      lengths=(*UNEVEN, (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048)))
def test_output(case, device):
    batch, heads, (len_q, len_k) = 4, 4 if case.softcap else 6, case.lengths
    q = rand(device, case.dtype, batch, len_q, heads, case.d) * (case.softcap or 1)
    kv = rand(device, case.dtype, batch, len_k, 2, kv_heads(case, heads), case.d)
    theirs, ours = options(case, device, batch, heads, len_q, len_k)
    if case.kvpacked:
        check(lambda q, kv: call(flash_attn.flash_attn_kvpacked_func, q, kv, **theirs),
              lambda q, kv, upcast: attend(q, *kv.unbind(2), **ours, upcast=upcast), [q, kv], grads=(3, 0))
    else:
        check(lambda *qkv: call(flash_attn.flash_attn_func, *qkv, **theirs),
              lambda *qkv, upcast: attend(*qkv, **ours, upcast=upcast), [q, *kv.unbind(2)], grads=(3, 0))


@grid(cuda=400, cpu=16, **OUTPUT, d=tuple(d for d in DIMS if d != 40),
      lengths=((1, 147), *UNEVEN, (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048)))
def test_varlen_output(case, device):
    batch, heads, (len_q, len_k) = 4, 4 if case.softcap else 6, case.lengths
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


@grid(cuda=960, cpu=16, local=YES_NO, dtype=(F16, BF16), swapped=YES_NO, d=DIMS, lengths=CAUSAL)
def test_causal(case, device):
    batch, heads, (len_q, len_k) = 8, 9, case.lengths[::-1] if case.swapped else case.lengths
    qkv = [rand(device, case.dtype, batch, n, heads, case.d) for n in (len_q, len_k, len_k)]
    window = window_of(case, len_k)
    check(lambda *qkv: call(flash_attn.flash_attn_func, *qkv, dropout_p=0.0, causal=True, window_size=window),
          lambda *qkv, upcast: attend(*qkv, causal=True, window=window, upcast=upcast), qkv,
          out=(2, 1e-5), grads=(2, 1e-5))


@grid(cuda=420, cpu=16, local=YES_NO, dtype=(F16, BF16), swapped=YES_NO, page=(None, 256, 512), d=DIMS,
      lengths=CAUSAL)
def test_varlen_causal(case, device):
    batch, heads, (len_q, len_k) = 8, 9, case.lengths[::-1] if case.swapped else case.lengths
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


@grid(cuda=320, cpu=16, causal=YES_NO, local=YES_NO, alibi=YES_NO, deterministic=YES_NO, dtype=(F16, BF16),
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


@grid(cuda=1200, cpu=150, possible=meaningful, **KVCACHE, alibi=YES_NO, dtype=(F16,), splits=(1, 0),
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
    return max(3, min(most, int((4e11 if device.type == "cuda" else 3e7) / cost)))


@grid(cuda=60, cpu=12, rows=10_000, p=(0.0, 0.17), causal=YES_NO, dtype=(F16,), d=DIMS, lengths=REPEATED)
def test_race_condition(case, device):
    """The same bits every time; dq may be summed in any order."""
    batch, heads, (len_q, len_k) = 60, 4, case.lengths
    inputs = [rand(device, case.dtype, batch, n, heads, case.d) for n in (len_q, len_k, len_k)]
    inputs = [t.requires_grad_() for t in inputs]
    dout = rand(device, case.dtype, batch, len_q, heads, case.d)

    def run():
        torch.manual_seed(42)
        out = flash_attn.flash_attn_func(*inputs, case.p, causal=case.causal)
        return out, *torch.autograd.grad(out, inputs, dout)

    first = run()
    close = 2 * ((first[1] + 0.3 - 0.3) - first[1]).abs().max().item()
    for _ in range(times(240 * len_q * len_k * case.d, 250, device)):
        out, dq, dk, dv = run()
        for name, again, before in zip(("out", "dk", "dv"), (out, dk, dv), (first[0], *first[2:])):
            assert_identical(again.detach(), before.detach(), name)
        assert torch.allclose(dq, first[1], atol=close)


@grid(cuda=240, cpu=16, varlen=YES_NO, causal=YES_NO, local=YES_NO, dtype=(F16, BF16), swapped=YES_NO, d=DIMS,
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


@grid(cuda=60, cpu=60, causal=YES_NO, dtype=(F16, BF16), d=(16, 32, 64), length=(1, 2, 5, 17, 128))
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

def dim_v_of(case) -> int:
    return case.dv or case.d


def possible_dims(case) -> bool:
    """Its head dims of v; qv goes with the wide ones, and softcap not with qv."""
    return (case.dv == 0 or (case.d, case.dv) in ((192, 128), (64, 256), (64, 512))) and (
        not case.qv or (case.dv >= 256 and not case.softcap))


FA3 = {"deterministic": YES_NO, "softcap": (0.0, 15.0), "causal": YES_NO, "local": YES_NO, "qv": YES_NO,
       "pack_gqa": YES_NO, "dtype": (BF16, F16), "num_splits": (1, 3), "heads": ("mha", "mqa", "gqa"),
       "dv": (0, 128, 256, 512), "d": (64, 96, 128, 192, 256)}
MISSED = ((64, 128), (128, 128), (256, 256), *UNEVEN, (640, 128), (512, 256), (1024, 1024), (1023, 1024),
          (1024, 1023))


def fa3_options(case, len_k):
    """Of a case: (those of FlashAttention-3, those of :func:`attend`)."""
    window = window_of(case, len_k)
    theirs = {"causal": case.causal, "window_size": window, "softcap": case.softcap,
              "pack_gqa": case.pack_gqa, "num_splits": case.num_splits, "deterministic": case.deterministic}
    return theirs, {"causal": case.causal, "window": window, "softcap": case.softcap}


def fa3_inputs(case, device, batch, len_q, len_k):
    q, k = (rand(device, case.dtype, batch, n, h, case.d) for n, h in ((len_q, 6), (len_k, kv_heads(case))))
    v = rand(device, case.dtype, batch, len_k, kv_heads(case), dim_v_of(case))
    qv = [rand(device, case.dtype, batch, len_q, 6, dim_v_of(case))] if case.qv else []
    return [q * (case.softcap or 1), k, v, *qv]


def fa3_rule(case) -> dict:
    m = 3 if case.softcap else 2
    return {"out": (m, 0), "grads": (m, 3e-4 if case.softcap else 0), "roundings": 2}


@grid(cuda=1600, cpu=70, possible=possible_dims, **FA3,
      lengths=((1, 1), (128, 192), (239, 1), (799, 3), (113, 128), (384, 256), *MISSED, (4096, 4096),
               (4224, 4224)))
def test_fa3_output(case, device):
    (len_q, len_k), batch = case.lengths, 2 if max(case.lengths) > 2048 else 9
    theirs, ours = fa3_options(case, len_k)
    check(lambda q, k, v, qv=None: flash_attn_interface.flash_attn_func(q, k, v, qv=qv, **theirs,
                                                                        return_attn_probs=True),
          lambda q, k, v, qv=None, *, upcast: attend(q, k, v, qv=qv, **ours, upcast=upcast),
          fa3_inputs(case, device, batch, len_q, len_k), **fa3_rule(case))


@grid(cuda=1600, cpu=70, possible=possible_dims, unused=YES_NO, **FA3,
      lengths=((1, 1), (1, 3), (2, 1), (511, 1), (3, 513), (307, 256), *MISSED, (2048, 2048), (4096, 4096)))
def test_fa3_varlen_output(case, device):
    """unused: rows of q and k that lie in the packed tensors and do not count."""
    (len_q, len_k), batch = case.lengths, 2 if max(case.lengths) > 2048 else 9
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
        used = {"seqused_q": used_q, "seqused_k": used_k} if case.unused else {}
        out = flash_attn_interface.flash_attn_varlen_func(q, k, v, cu_q, cu_k, most_q, most_k, qv=qv, **used,
                                                          **theirs)
        return bert_padding.pad_input(out, at, batch, len_q), None

    check(packed, lambda q, k, v, qv=None, *, upcast: attend(q, k, v, qv=qv, **ours, lens_q=lens_q,
                                                             lens_k=lens_k, upcast=upcast),
          fa3_inputs(case, device, batch, len_q, len_k), **fa3_rule(case))


@grid(cuda=1600, cpu=150, **KVCACHE, from_elsewhere=YES_NO, varlen=YES_NO, dtype=(BF16,), splits=(1, 3, 0),
      page=(None, 1, 4, 128), lengths=((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048),
                                       (16, 20000), (128, 128), (256, 512), (2048, 3577)),
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


@grid(cuda=240, cpu=40, rows=4100, size=lambda c: c.splits * c.length * c.d, most=(2.5e7, 3e5),
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
