"""Faults that attention libraries had again and again, as closed forms and exact comparisons.

Two tricks make an answer exact.  q = 0: every score is 0, so a row is the mean of the V rows it sees and its
LSE is the log of their number.  V = identity: out is the matrix of probabilities; likewise dout = identity
makes dV the transposed matrix.  Tests with the ``attend`` fixture hold the oracle to the closed form too.
"""

import itertools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashattn
from cases import DTYPES, NAN, dense, eye, ints, offsets, packed
from compare import assert_identical, check_backward
from flashattn import reference

HALF = (torch.bfloat16, torch.float16)
LN2, LN5 = math.log(2), math.log(5)
RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias or dsink", "dsink")    # of train and check_backward


@pytest.fixture(params=["oracle", "flashattn"])
def attend(request):
    """(q, k, v, **options) -> (out, lse)."""
    if request.param == "oracle":
        return lambda q, k, v, **options: reference.forward(q, k, v, **options)[:2]
    return lambda q, k, v, **options: flashattn.forward(q, k, v, **options, return_lse=True)


def zeros_qk(device, batch, len_q, len_k, heads=(1, 1), dim=16, dtype=torch.float32):
    shapes = (len_q, heads[0], dim), (len_k, heads[1], dim)
    return tuple(torch.zeros(batch, *shape, dtype=dtype, device=device) for shape in shapes)


def rows(*values):
    """A matrix as (1, Sq, 1, Dv) in float64."""
    return torch.tensor(values, dtype=torch.float64)[None, :, None]


def largest(a, b):
    return (a.detach().cpu().double() - b.detach().cpu().double()).abs().max().item() if a.numel() else 0.0


def train(q, k, v, dout=None, *, dlse=None, **options):
    """out, lse, dq, dk, dv[, dbias][, dsink], bit-reproducible, for dout (default: ones) and dlse (none)."""
    leaves = {"q": q, "k": k, "v": v} | {n: options[n] for n in ("bias", "sink") if n in options}
    leaves = {n: t.detach().requires_grad_() for n, t in leaves.items()}
    out, lse = flashattn.forward(**options | leaves, deterministic=True, return_lse=True)
    seeds = (torch.ones_like(out) if dout is None else dout, dlse)[:1 if dlse is None else 2]
    grads = torch.autograd.grad((out, lse)[:len(seeds)], list(leaves.values()), seeds)
    return out.detach(), lse.detach(), *grads


# ---- one key, extreme scores ----

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 8, 16, 40, 64, 80, 96, 128, 160, 192, 256, 512])
def test_one_key_gives_its_value_exactly(device, dtype, dim):
    q, k, v = (3 * t for t in dense(device, dtype, batch=1, len_q=1, len_k=1, heads=(1, 1), dims=(dim, dim)))
    out, lse, dq, dk, dv = train(q, k, v)
    assert_identical(out, v, "out")
    assert_identical(dv, torch.ones_like(v), "dv")
    score = (q.double() * k.double()).sum() / math.sqrt(dim)
    assert abs(lse.item() - score.item()) <= 2e-5 * (1 + abs(score.item()))
    noise = 3 * dim * torch.finfo(dtype).eps if dtype in (torch.float32, torch.float64) else 1e-4 * dim
    assert dq.abs().max() <= noise and dk.abs().max() <= noise


@pytest.mark.parametrize("len_k", [1, 2, 127, 128, 129])
def test_one_query(device, len_k):
    for dtype in DTYPES:
        q, k, v = (3 * t for t in dense(device, dtype, batch=1, len_q=1, len_k=len_k, heads=(1, 1)))
        check_backward(q, k, v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [3, 30])
@pytest.mark.parametrize("dim", [64, 128])
def test_large_scores(device, dtype, factor, dim):
    for length, causal in itertools.product((64, 1025), (False, True)):
        q, k, v = dense(device, dtype, batch=1, len_q=length, len_k=length, heads=(1, 1), dims=(dim, dim))
        check_backward(factor * q, factor * k, factor * v, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_very_negative_scores_are_scores(attend, device, dtype):
    """No finite number may stand for "masked": a single score of -2.5e5 wins against nothing."""
    q, k, v = dense(device, dtype, batch=1, len_q=1, len_k=1, heads=(1, 1))
    q, k = torch.full_like(q, -62.5), torch.full_like(k, 62.5)
    out, lse = attend(q, k, v)
    assert largest(out, v) == 0 and abs(lse.item() + 31250) < 31250 * 2e-5

    q, k = torch.full_like(q[..., :16], -35.25), torch.full((1, 2, 1, 16), 35.25, dtype=dtype, device=device)
    v = torch.tensor([1, 100], dtype=dtype, device=device).view(1, 2, 1, 1)
    k[:, 1] = 0                                                          # score 0, were it visible
    mask = torch.tensor([True, False], device=device).view(1, 1, 1, 2)
    bias = torch.zeros(1, 1, 1, 2, device=device).masked_fill(~mask, -math.inf)
    for options in ({"seqused_k": ints(device, 1)}, {"window": (1, None), "mask": mask}, {"mask": mask},
                    {"window": (-1, 0), "seqused_k": ints(device, 1)}, {"bias": bias}):
        out, lse = attend(q, k, v, scale=1.0, **options)
        assert out.item() == 1 and abs(lse.item() + 16 * 35.25**2) < 0.4
    two = torch.cat([q, q], 1)                                           # row 0 sees key 0, row 1 both
    for options in ({"causal": True}, {"window": (-1, 0)}):
        out, _ = attend(two, k, v, scale=1.0, **options)
        assert out.flatten().tolist() == [1, 100]


def test_a_score_of_minus_1e30_is_a_score(attend, device):
    q, k, v = dense(device, batch=1, len_q=1, len_k=1, heads=(1, 1), dims=(1, 4))
    out, lse = attend(q * 0 - 1e15, k * 0 + 1e15, v)
    assert largest(out, v) == 0 and abs(lse.item() + 1e30) < 1e25


# ---- memory that must not be read or written ----

# kind -> options, rows of q and rows of k that some sequence may read, for q of 2 * 100 and k of 2 * 200 rows
UNREAD = {
    "past seqused": lambda device: (
        {"seqused_q": ints(device, 70, 1), "seqused_k": ints(device, 129, 64), "causal": True},
        [*range(70), 100], [*range(129), *range(200, 264)]),
    "outside the window": lambda device: (
        {"window": (10, 0)}, range(200), [*range(90, 200), *range(290, 400)]),  # row 0 stands at 100
    "hidden by the mask": lambda device: (
        {"mask": torch.arange(200, device=device).view(1, 1, 1, 200) % 3 > 0},
        range(200), [row for row in range(400) if row % 200 % 3]),
    "outside cu_seqlens": lambda device: (
        {"max_seqlen_q": 90, "cu_seqlens_q": offsets(device, (90, 40), 7),
         "max_seqlen_k": 150, "cu_seqlens_k": offsets(device, (65, 150), 3)},
        range(7, 137), range(3, 218)),
    "packed, past seqused": lambda device: (
        {"max_seqlen_q": 100, "cu_seqlens_q": offsets(device, (100, 100)), "seqused_q": ints(device, 1, 65),
         "max_seqlen_k": 300, "cu_seqlens_k": offsets(device, (100, 300)), "seqused_k": ints(device, 0, 128)},
        [0, *range(100, 165)], range(100, 228)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("kind", UNREAD)
def test_unread_memory_changes_no_bit(device, dtype, garbage, kind):
    options, read_q, read_k = UNREAD[kind](device)
    q, k, v = (t.flatten(0, 1) for t in dense(device, dtype, len_q=100, len_k=200))
    dout = torch.randn_like(q)
    dlse = torch.randn(200, 4, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def run(fill):
        given = []
        for t, read in ((q, read_q), (k, read_k), (v, read_k), (dout, read_q), (dlse, read_q)):
            dirty = torch.full_like(t, fill)
            dirty[list(read)] = t[list(read)]
            given.append(dirty if "cu_seqlens_q" in options else dirty.unflatten(0, (2, -1)))
        given[4] = given[4].transpose(-1, -2)
        return train(*given[:4], dlse=given[4], **options)

    for ours, clean, name in zip(run(garbage), run(0), RESULTS):
        assert_identical(ours, clean, name)
        assert not clean.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_is_written_outside_the_results(device, one_family, dtype):
    """Every input and out= lie inside larger tensors of a pattern; only out changes."""
    def banded(t):
        shape = [n + 2 for n in t.shape[:3]] + [t.shape[3] + 6]
        band = torch.full(shape, 77.0, dtype=t.dtype, device=device)
        inside = band[1:-1, 1:-1, 1:-1, 3:-3]
        inside.copy_(t)
        return band, inside

    q, k, v = dense(device, dtype, len_q=67, len_k=131, dims=(40, 72))
    dout = torch.randn(2, 67, 4, 72, dtype=dtype, device=device)
    bands, inputs = zip(*(banded(t) for t in (q, k, v, dout)))
    before = [band.clone() for band in bands]
    out_band, out = banded(torch.zeros_like(dout))
    flashattn.forward(*inputs[:3], causal=True, out=out)
    train(*inputs[:3], inputs[3], causal=True)
    for band, old in zip(bands, before):
        assert_identical(band, old, "input")
    assert_identical(out, flashattn.forward(q, k, v, causal=True), "out")
    out.fill_(77)
    assert (out_band == 77).all()


# ---- ragged tails ----

TAILS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 250, 255, 256, 257, 1025)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (13, 5)}, {"mask": "random"}], ids=str)
@pytest.mark.parametrize("len_q", TAILS)
def test_tails_of_every_length(device, len_q, options):
    for len_k in TAILS:
        q, k, v = dense(device, batch=1, len_q=len_q, len_k=len_k, heads=(1, 1), dims=(16, 16))
        if "mask" in options:
            options = {"mask": torch.rand(1, 1, len_q, len_k, device=device) < 0.8}
        check_backward(q, k, v, **options)


# ---- rows and sequences without anything ----

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_before_the_first_key_are_empty(attend, device, dtype):
    q, k = zeros_qk(device, 1, 5, 2, dtype=dtype)
    out, lse = attend(q, k, eye(device, 1, 2, 1, dtype), causal=True)
    assert largest(out, rows([0, 0], [0, 0], [0, 0], [1, 0], [0.5, 0.5])) == 0
    assert lse[0, 0, :4].tolist() == [-math.inf] * 3 + [0] and abs(lse[0, 0, 4].item() - LN2) < 1e-6


def test_empty_rows_get_and_give_no_gradient(device):
    q, k, v = dense(device, batch=1, len_q=5, len_k=2)
    dout, dlse = torch.randn(1, 5, 4, 64, device=device), torch.randn(1, 4, 5, device=device)
    _, _, dq, dk, dv = train(q, k, v, dout, dlse=dlse, causal=True)
    assert (dq[:, :3] == 0).all() and (dq[:, 4:] != 0).any()
    _, _, _, dk_rest, dv_rest = train(q[:, 3:], k, v, dout[:, 3:], dlse=dlse[..., 3:], causal=True)
    assert largest(dk, dk_rest) < 1e-6 and largest(dv, dv_rest) < 1e-6 and dk.isfinite().all()


@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sink", [None, 0.7])
def test_no_keys(device, layout, causal, sink):
    q, k, v = dense(device, len_q=4, len_k=0, dims=(16, 8))
    options = {"causal": causal} | ({} if sink is None else {"sink": torch.full((4,), sink, device=device)})
    dlse = torch.ones(2, 4, 4, device=device)
    if layout == "packed":
        q, k, v, dlse = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), torch.ones(4, 8, device=device)
        options |= {"cu_seqlens_q": ints(device, 0, 4, 8), "cu_seqlens_k": ints(device, 0, 0, 0),
                    "max_seqlen_q": 4, "max_seqlen_k": 0}
    out, lse, dq, dk, dv, *dsink = train(q, k, v, dlse=dlse, **options)
    assert (out == 0).all() and (dq == 0).all() and dk.shape == k.shape and dv.shape == v.shape
    assert (lse == torch.tensor(-math.inf if sink is None else sink)).all()
    if sink is not None:
        assert (dsink[0] == 8).all()                                     # the LSE of 8 rows is the sink


def test_no_queries_and_no_sequences(device):
    q, k, v = dense(device, len_q=0, len_k=5, dims=(16, 8))
    out, lse, dq, dk, dv = train(q, k, v)
    assert out.shape == (2, 0, 4, 8) and lse.shape == (2, 4, 0) and dq.shape == q.shape
    assert (dk == 0).all() and (dv == 0).all()
    q, k, v = dense(device, batch=0, len_q=3, len_k=5, dims=(16, 8))
    out, lse, dq, dk, dv = train(q, k, v, sink=torch.zeros(4, device=device))[:5]
    assert out.shape == (0, 3, 4, 8) and lse.shape == (0, 4, 3)
    assert dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    nothing = {"cu_seqlens_q": ints(device, 0), "cu_seqlens_k": ints(device, 0)}
    out, lse, *_ = train(q, k, v, **nothing, max_seqlen_q=0, max_seqlen_k=0)
    assert out.shape == (0, 4, 8) and lse.shape == (4, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_packed_sequences_without_queries_or_keys(device, dim, dtype):
    lens_q, lens_k = (0, 150, 0, 1, 0), (100, 0, 7, 0, 64)
    q, k, v, layout = packed(device, lens_q, lens_k, dtype, heads=(6, 2), dims=(dim, dim))
    out, lse, dq, dk, dv = check_backward(q, k, v, **layout)
    assert (out == 0).all() and (lse == -math.inf).all() and all((grad == 0).all() for grad in (dq, dk, dv))
    one_row = (0, 1, 0, 1, 1), (100, 3, 7, 0, 64)
    q, k, v, layout = packed(device, *one_row, dtype, heads=(6, 2), dims=(dim, dim))
    _, _, _, dk, dv = check_backward(q, k, v, **layout, causal=True)     # max_seqlen_q = 1
    for grad in (dk, dv):
        assert (grad[:100] == 0).all() and (grad[103:110] == 0).all() and (grad[110:] != 0).any()
    q, k, v, layout = packed(device, (0, 0, 0), (0, 0, 0), dtype, heads=(6, 2), dims=(dim, dim))
    assert check_backward(q, k, v, **layout)[0].shape == (0, 6, dim)


# ---- offsets beyond 32 bits ----

large = pytest.mark.xdist_group("large")  # on a GPU these take much memory, so one runs at a time


@large
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("which", ["q", "k", "v", "out", "dout"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_strides_beyond_32_bits(device, dtype, which, dim):
    """One tensor spans 2^32 elements; pages that nobody touches take no memory."""
    q, k, v = dense(device, dtype, batch=3, len_q=5, len_k=5, heads=(3, 3), dims=(16, 16))
    tensors = {"q": q, "k": k, "v": v, "dout": torch.randn_like(q), "out": torch.zeros_like(q)}
    wanted = [flashattn.forward(q, k, v), *train(q, k, v, tensors["dout"])]
    tensors[which] = sparse(tensors[which], dim)
    flashattn.forward(tensors["q"], tensors["k"], tensors["v"], out=tensors["out"])
    results = [tensors["out"], *train(tensors["q"], tensors["k"], tensors["v"], tensors["dout"])]
    for ours, clean, name in zip(results, wanted, ("out=", *RESULTS)):
        assert_identical(ours, clean, name)


@large
@pytest.mark.parametrize("which", ["bias", "mask"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_bias_and_mask_strides_beyond_32_bits(device, which, dim):
    q, k, v = dense(device, torch.bfloat16, batch=3, len_q=5, len_k=7, heads=(3, 3), dims=(16, 16))
    matrix = torch.randn(3, 3, 5, 7, dtype=torch.bfloat16, device=device)
    matrix = matrix if which == "bias" else matrix > -1
    wanted, results = (train(q, k, v, **{which: given}) for given in (matrix, sparse(matrix, dim)))
    for ours, clean, name in zip(results, wanted, RESULTS):
        assert_identical(ours, clean, name)


@large
def test_packed_rows_beyond_32_bits(device):
    """The sequences of k and v are the last rows of 2^32 elements."""
    lens_q, lens_k = (5, 9), (20, 13)
    q, k, v, layout = packed(device, lens_q, lens_k, torch.bfloat16, heads=(2, 2), dims=(16, 16))
    wanted = flashattn.forward(q, k, v, **layout)
    total = 2**32 // 32 + 1
    far = [torch.empty(total, 2, 16, dtype=t.dtype, device=device) for t in (k, v)]
    for there, here in zip(far, (k, v)):
        there[-33:] = here
    layout["cu_seqlens_k"] = offsets(device, lens_k, total - 33)
    assert_identical(flashattn.forward(q, *far, **layout), wanted, "out")


@large
@pytest.mark.parametrize("pages", [131_074, 262_146])
def test_pages_beyond_32_bits(device, pages):
    """A pool of pages of 16,384 elements with the used pages at its end, over 2^31 and over 2^32."""
    q = torch.randn(2, 1, 8, 64, dtype=torch.bfloat16, device=device)
    near_k, near_v = (torch.randn(4, 32, 8, 64, dtype=q.dtype, device=device) for _ in range(2))
    far_k, far_v = (torch.empty(pages, 32, 8, 64, dtype=q.dtype, device=device) for _ in range(2))
    far_k[-4:], far_v[-4:] = near_k, near_v
    table, lengths = ints(device, 2, 0, 3, 1).view(2, 2), ints(device, 33, 64)
    near = flashattn.decode(q, near_k, near_v, page_table=table, cache_seqlens=lengths)
    far = flashattn.decode(q, far_k, far_v, page_table=table + pages - 4, cache_seqlens=lengths)
    assert_identical(far, near, "out")


def sparse(t, dim):
    """Equal to t, with a stride along dim that makes it span 2^32 elements."""
    strides = list(t.stride())
    strides[dim] = 2**32 // (t.shape[dim] - 1)
    span = sum((n - 1) * stride for n, stride in zip(t.shape, strides)) + 1
    return torch.empty(span, dtype=t.dtype, device=t.device).as_strided(t.shape, strides).copy_(t)


# ---- more blocks than a grid dimension holds ----

@pytest.mark.parametrize("batch, heads, length", [
    (65535, (2, 1), 3), (65536, (2, 1), 3), (70000, (2, 1), 3), (1, (65536, 65536), 4), (2, (65536, 1), 2),
    (300, (300, 100), 2),
])
def test_many_sequences_and_heads(device, batch, heads, length):
    q, k, v = dense(device, batch=batch, len_q=length, len_k=length, heads=heads, dims=(8, 8))
    dout = torch.randn_like(q)
    results = train(q, k, v, dout, causal=True)
    some = [0, batch // 2, batch - 1]
    q, k, v, dout = (t[some] for t in (q, k, v, dout))
    out, lse, _ = reference.forward(q, k, v, causal=True)
    for ours, oracle in zip(results, (out, lse, *reference.backward(dout, q, k, v, causal=True))):
        assert largest(ours[some], oracle) < 1e-5 * max(1, math.sqrt(heads[0] / heads[1]))


def test_many_packed_sequences(device):
    lengths = [1 + b % 3 for b in range(70_000)]
    q, k, v, layout = packed(device, lengths, lengths[::-1], heads=(2, 1), dims=(8, 8))
    dout = torch.randn_like(q)
    results = train(q, k, v, dout, **layout, causal=True)
    for b in (0, 35_000, 69_999):
        rows, keys = (slice(*layout[name][b:b + 2].tolist()) for name in ("cu_seqlens_q", "cu_seqlens_k"))
        one = [t[None] for t in (q[rows], k[keys], v[keys])]
        out, lse, _ = reference.forward(*one, causal=True)
        grads = reference.backward(dout[None, rows], *one, causal=True)
        assert largest(results[0][rows], out[0]) < 1e-5
        assert lse[0].isinf().equal(results[1][:, rows].isinf())
        assert largest(results[1][:, rows].nan_to_num(0, 0, 0), lse[0].nan_to_num(0, 0, 0)) < 1e-5
        for ours, oracle, at in zip(results[2:], grads, (rows, keys, keys)):
            assert largest(ours[at], oracle[0]) < 1e-5


@pytest.mark.parametrize("len_q", [64 * 65535 + 1, 128 * 65535 + 1])
def test_many_rows(device, len_q):
    q, k, v = dense(device, batch=1, len_q=len_q, len_k=16, heads=(1, 1), dims=(2, 1))
    some = [0, len_q // 2, len_q - 1]
    dout = torch.zeros_like(q[..., :1])
    dout[:, some] = torch.randn(1, 3, 1, 1, device=device)
    out, lse, dq, dk, dv = train(q, k, v, dout)
    wanted_out, wanted_lse, _ = reference.forward(q[:, some], k, v)
    wanted_dq, wanted_dk, wanted_dv, *_ = reference.backward(dout[:, some], q[:, some], k, v)
    assert largest(out[:, some], wanted_out) < 1e-5 and largest(lse[..., some], wanted_lse) < 1e-5
    assert largest(dq[:, some], wanted_dq) < 1e-5 and (dq != 0).any(-1).sum() == 3
    assert largest(dk, wanted_dk) < 1e-5 and largest(dv, wanted_dv) < 1e-5


def test_many_keys(device):
    """q = 0 and 2^22 + 2^10 keys of value 0 or 1: the exact share of ones, and the log of the number."""
    len_k = 2**22 + 2**10
    q, k = zeros_qk(device, 1, 1, len_k, dim=1)
    v = (torch.arange(len_k, device=device) % 4 == 0).float().view(1, len_k, 1, 1)
    out, lse, _, _, dv = train(q, k, v)
    assert abs(out.item() - 0.25) < 1e-6 and abs(lse.item() - math.log(len_k)) < 2e-5 * math.log(len_k)
    assert largest(dv, torch.full_like(v, 1 / len_k)) < 1e-12


# ---- layouts ----

# name -> a view of other memory with values of its own; (B, S, H, D) or (B, H, Sq, Sk)
LAYOUTS = {
    "heads before rows": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "rows before the batch": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "slice of three": lambda t: torch.stack([t + 1, t, t - 1], 2)[:, :, 1],
    "slice of wider rows": lambda t: torch.cat([t + 1, t, t - 1], -1)[..., t.shape[-1]:-t.shape[-1]],
    "odd storage offset": lambda t: torch.cat([t.new_ones(1), t.flatten()])[1:].view(t.shape),
    "every second row": lambda t: torch.stack([t, t + 1], 2).flatten(1, 2)[:, ::2],
    "one batch for all": lambda t: t[:1].expand(t.shape),
    "one head for all": lambda t: t[:, :, :1].expand(t.shape),
    "one row for all": lambda t: t[:, :1].expand(t.shape),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first, second", [*itertools.combinations(("q", "k", "v", "dout", "bias"), 2)])
def test_layouts_change_no_bit(device, dtype, first, second):
    q, k, v = dense(device, dtype, batch=3, len_q=19, len_k=35, dims=(16, 24))
    tensors = {"q": q, "k": k, "v": v, "dout": torch.randn(3, 19, 4, 24, dtype=dtype, device=device),
               "bias": torch.randn(3, 4, 19, 35, dtype=dtype, device=device)}
    for one, two in itertools.product(LAYOUTS.values(), LAYOUTS.values()):
        viewed = tensors | {first: one(tensors[first]), second: two(tensors[second])}
        results = train(**viewed, causal=True)
        wanted = train(**{name: t.clone(memory_format=torch.contiguous_format) for name, t in viewed.items()},
                       causal=True)
        for ours, clean, name in zip(results, wanted, RESULTS):
            assert_identical(ours, clean, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "for all" not in name])
def test_layouts_of_out_and_mask_change_no_bit(device, dtype, layout):
    q, k, v = dense(device, dtype, batch=3, len_q=19, len_k=35, dims=(16, 24))
    mask = torch.rand(3, 4, 19, 35, device=device) < 0.5
    out = LAYOUTS[layout](torch.randn(3, 19, 4, 24, dtype=dtype, device=device))
    viewed = LAYOUTS[layout](mask.view(torch.uint8)).view(torch.bool)
    wanted = flashattn.forward(q, k, v, mask=mask)
    flashattn.forward(q, k, v, mask=viewed, out=out)
    assert_identical(out, wanted, "out")


def test_strides_of_single_elements_mean_nothing(device):
    """Dimensions of size 1 may have any stride, the last one too."""
    q, k, v = dense(device, batch=1, len_q=1, len_k=1, heads=(1, 1), dims=(1, 1))
    strange = [t.as_strided((1, 1, 1, 1), (3, 10**12, 0, 7)) for t in (q, k, v, torch.ones_like(q))]
    for ours, clean, name in zip(train(*strange), train(q, k, v), RESULTS):
        assert_identical(ours, clean, name)
    q, k, v = dense(device, batch=1, len_q=1, len_k=70, heads=(4, 1), dims=(16, 16))
    strange = [t.as_strided(t.shape, (10**12, 10**11 if t.shape[1] == 1 else 16, 16, 1)) for t in (q, k, v)]
    for ours, clean, name in zip(train(*strange), train(q, k, v), RESULTS):
        assert_identical(ours, clean, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_sums_splits_and_transposes(device, dtype):
    """What autograd hands over as dout: all strides 0, a slice of a wider tensor, a transposed one."""
    q, k, v = (t.requires_grad_() for t in dense(device, dtype, len_q=19, len_k=35, dims=(16, 24)))
    weight = torch.randn(2, 19, 4, 24, dtype=dtype, device=device)
    wanted = torch.autograd.grad(flashattn.forward(q, k, v), (q, k, v), torch.ones_like(weight))
    for ours, clean in zip(torch.autograd.grad(flashattn.forward(q, k, v).sum(), (q, k, v)), wanted):
        assert_identical(ours, clean, "gradient of a sum")
    wanted = torch.autograd.grad(flashattn.forward(q, k, v), (q, k, v), weight)
    for loss in (lambda out: (torch.cat([out, out.detach()], -1) * torch.cat([weight, weight], -1)).sum(),
                 lambda out: (out.transpose(1, 2).contiguous() * weight.transpose(1, 2).contiguous()).sum()):
        for ours, clean in zip(torch.autograd.grad(loss(flashattn.forward(q, k, v)), (q, k, v)), wanted):
            assert_identical(ours, clean, "gradient")


# ---- which keys a query sees: exact counts ----

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_is_aligned_to_the_last_key(attend, device, dtype):
    q, k = zeros_qk(device, 1, 2, 5, dtype=dtype)
    out, lse = attend(q, k, eye(device, 1, 5, 1, dtype), causal=True)
    fifth = torch.tensor(0.2, dtype=dtype).item()
    assert largest(out, rows([0.25] * 4 + [0], [fifth] * 5)) <= torch.finfo(dtype).eps / 8
    assert largest(lse, torch.tensor([[[4.0, 5.0]]]).log()) < 1e-6


def test_causal_in_packed_sequences_of_mixed_lengths(attend, device):
    """Sq < Sk, Sq = Sk and Sq > Sk in one batch; the LSE is the log of the number of visible keys."""
    lens_q, lens_k = (2, 3, 4), (4, 3, 2)
    q, k, v, layout = packed(device, lens_q, lens_k)
    _, lse = attend(0 * q, k, v, **layout, causal=True)
    counts = [3, 4, 1, 2, 3, 0, 0, 1, 2]
    assert largest(lse.exp(), torch.tensor(counts).expand(4, 9)) < 1e-5


@pytest.mark.parametrize("heads", [(1, 1), (4, 1)])
@pytest.mark.parametrize("len_q, len_k, options, visible", [
    (10, 10, {"window": (3, 0)}, [range(max(0, i - 3), i + 1) for i in range(10)]),
    (10, 10, {"window": (3, None), "causal": True}, [range(max(0, i - 3), i + 1) for i in range(10)]),
    (10, 10, {"window": (3, 5), "causal": True}, [range(max(0, i - 3), i + 1) for i in range(10)]),
    (8, 8, {"window": (2, 1)}, [range(max(0, i - 2), min(8, i + 2)) for i in range(8)]),
    (3, 8, {"window": (2, 0)}, [range(3, 6), range(4, 7), range(5, 8)]),
    (3, 8, {"window": (2, -1)}, [range(3, 8), range(4, 8), range(5, 8)]),
    (3, 8, {"window": (None, 1)}, [range(7), range(8), range(8)]),
    (8, 3, {"window": (0, 0)}, [range(0)] * 5 + [range(1), range(1, 2), range(2, 3)]),
    (8, 3, {"window": (0, 4)}, [range(max(0, i - 5), max(0, min(3, i))) for i in range(8)]),
    (4, 4, {"window": (9, 9)}, [range(4)] * 4),
    (4, 4, {"window": (2**31 - 1, 2**31 - 1)}, [range(4)] * 4),
    (4, 4, {"window": (-1, None)}, [range(4)] * 4),
    (4, 4, {"window": (-1, 2**40), "causal": True}, [range(1), range(2), range(3), range(4)]),
], ids=str)
def test_window_counts_include_both_ends(attend, device, heads, len_q, len_k, options, visible):
    q, k = zeros_qk(device, 1, len_q, len_k, heads)
    out, _ = attend(q, k, eye(device, 1, len_k, heads[1]), **options)
    weights = torch.zeros(len_q, len_k)
    for row, keys in enumerate(visible):
        weights[row, list(keys)] = 1 / max(len(keys), 1)
    assert largest(out, weights[None, :, None].expand_as(out)) < 1e-7


def test_window_of_one_key_gives_its_value(attend, device):
    q, k, v = dense(device, torch.bfloat16, len_q=70, len_k=70, heads=(2, 2))
    out, _ = attend(q, k, v, window=(0, 0))
    assert largest(out, v) == 0


def test_prefill_in_chunks_gives_the_rows_of_the_whole(device):
    q, k, v = dense(device, torch.float64, len_q=130, len_k=130, heads=(4, 1))
    for options in ({"causal": True}, {"window": (17, 0)}, {"causal": True, "window": (64, None)}):
        whole = flashattn.forward(q, k, v, **options)
        for start, end in ((0, 1), (1, 65), (65, 130)):
            part = flashattn.forward(q[:, start:end], k[:, :end], v[:, :end], **options)
            assert largest(part, whole[:, start:end]) < 1e-14


# ---- softcap, ALiBi, sink, bias: closed forms ----

def logits(device, *values, dtype=torch.float32):
    """q (1, 1, 1, 1) and k (1, Sk, 1, 1) whose scores are these values at scale 1."""
    k = torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1)
    return torch.ones_like(k[:, :1]), k


def test_softcap_closed_form(attend, device):
    """Logits 2 and 0: p0 = 1 / (1 + exp(-cap tanh(2 / cap))); the derivative has the factor 1 - tanh^2."""
    q, k = logits(device, 2.0, 0.0)
    v = torch.tensor([1.0, 0.0], device=device).view(1, 2, 1, 1)
    for cap, p0, slope in ((0.0, 0.880797, 0.104994), (1.0, 0.723927, 0.0141200), (30.0, 0.880486, 0.104763)):
        k.requires_grad_()
        out, _ = attend(q, k, v, scale=1.0, softcap=cap)
        grad, = torch.autograd.grad(out, k, torch.ones_like(out))
        assert abs(out.item() - p0) < 2e-6 and abs(grad[0, 0].item() - slope) < 2e-6


def test_softcap_zero_is_off(device):
    q, k, v = dense(device)
    for ours, clean, name in zip(train(q, k, v, softcap=0.0), train(q, k, v), RESULTS):
        assert_identical(ours, clean, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softcap_with_everything(device, dtype):
    """Causal, packed, D = 128, dropout, S = 1024."""
    q, k, v, layout = packed(device, (1024, 3), (1024, 130), dtype, heads=(1, 1), dims=(128, 128))
    check_backward(q, k, v, **layout, causal=True, softcap=20.0, dropout_p=0.1, seed=1)


def test_alibi_closed_form(attend, device):
    """Slope ln 2, one query at the last of four keys: weights 1, 2, 4, 8 of 15."""
    expected = torch.tensor([1, 2, 4, 8]) / 15
    for slopes in (torch.tensor([LN2]), torch.tensor([[LN2]])):
        q, k = zeros_qk(device, 1, 1, 4)
        out, lse = attend(q, k, eye(device, 1, 4, 1), alibi_slopes=slopes.to(device))
        assert largest(out.flatten(), expected) < 1e-6 and abs(lse.item() - math.log(15 / 8)) < 1e-6


def test_alibi_counts_from_the_last_key_in_every_sequence(attend, device):
    """Distance |i + Sk - Sq - j|, on both sides, for slopes of heads and of heads in a batch."""
    lens_q, lens_k = (3, 1, 5), (8, 4, 2)
    q, k, v, layout = packed(device, lens_q, lens_k, heads=(2, 2))
    slopes = torch.tensor([[LN2, 0.5], [0.0, 1.0], [0.25, LN2]])
    for given in (slopes, slopes[0]):
        _, lse = attend(0 * q, k, v, **layout, alibi_slopes=given.to(device))
        row = 0
        for b, (len_q, len_k) in enumerate(zip(lens_q, lens_k)):
            for i, h in itertools.product(range(len_q), range(2)):
                slope = float(given[b, h] if given.dim() == 2 else given[h])
                total = sum(math.exp(-slope * abs(i + len_k - len_q - j)) for j in range(len_k))
                assert abs(lse[h, row + i].item() - math.log(total)) < 1e-5
            row += len_q


def test_sink_closed_form(attend, device):
    """Three keys of score 0 and a sink: the weights do not add up to 1, and the LSE counts the sink."""
    q, k = zeros_qk(device, 1, 1, 3)
    for sink, share, count in ((-math.inf, 1 / 3, 3), (0.0, 0.25, 4), (LN5, 0.125, 8)):
        out, lse = attend(q, k, eye(device, 1, 3, 1), sink=torch.tensor([sink], device=device))
        assert largest(out, torch.full_like(out, share)) < 1e-6 and abs(lse.item() - math.log(count)) < 1e-6


def test_sink_of_minus_infinity_is_none(device):
    q, k, v = dense(device)
    sink = torch.full((4,), -math.inf, device=device)
    for ours, clean, name in zip(train(q, k, v, sink=sink), train(q, k, v), RESULTS):
        assert_identical(ours, clean, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sink_gradient(device, dtype):
    """- sum over rows of p_sink (dout . out), in the dtype of the sink."""
    q, k, v = dense(device, dtype, len_q=250, len_k=250)
    for sink_dtype in {torch.float32, dtype}:
        sink = torch.randn(4, dtype=sink_dtype, device=device)
        dout = torch.randn_like(q)
        out, lse, *_, dsink = train(q, k, v, dout, sink=sink)
        share = (sink.double()[:, None] - lse.double()).exp()
        expected = -(share * (dout.double() * out.double()).sum(-1).transpose(1, 2)).sum((0, 2))
        assert dsink.dtype == sink_dtype
        assert largest(dsink, expected) <= 2 * torch.finfo(sink_dtype).eps * expected.abs().max() + 1e-5
        check_backward(q, k, v, sink=sink)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("len_k", [5, 43, 77, 129])
@pytest.mark.parametrize("shape", ["1 1 Sq Sk", "B 1 1 Sk", "1 H Sq Sk", "B H Sq Sk", "1 H 1 Sk"])
def test_bias_and_mask_of_odd_lengths(device, dtype, len_k, shape):
    q, k, v = dense(device, dtype, batch=2, len_q=31, len_k=len_k, dims=(16, 16))
    shape = [{"1": 1, "B": 2, "H": 4, "Sq": 31, "Sk": len_k}[size] for size in shape.split()]
    bias, mask = torch.randn(shape, device=device), torch.rand(shape, device=device) < 0.7
    for options in ({"bias": bias.to(dtype)}, {"mask": mask, "causal": True}, {"bias": bias, "mask": mask}):
        check_backward(q, k, v, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_of_minus_infinity_hides(attend, device, dtype):
    """The closed form of empty rows, by bias and by mask; nothing else becomes NaN."""
    q, k = zeros_qk(device, 1, 5, 2, dtype=dtype)
    v = eye(device, 1, 2, 1, dtype)
    mask = torch.tensor([[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]], device=device).bool()[None, None]
    bias = torch.zeros(1, 1, 5, 2, dtype=dtype, device=device).masked_fill(~mask, -math.inf).requires_grad_()
    for options in ({"mask": mask}, {"bias": bias}):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)] + list(options.values())[:"bias" in options]
        out, lse = attend(*inputs[:3], **options)
        assert largest(out, rows([0, 0], [0, 0], [0, 0], [1, 0], [0.5, 0.5])) == 0
        assert lse[0, 0, :4].tolist() == [-math.inf] * 3 + [0]
        seeds = torch.ones_like(out), torch.ones_like(lse)
        dq, dk, dv, *dbias = torch.autograd.grad((out, lse), inputs, seeds)
        assert (dq[:, :3] == 0).all() and dk.isfinite().all()
        assert largest(dv, torch.tensor([1.5, 0.5]).view(1, 2, 1, 1).expand_as(dv)) == 0
        if dbias:
            assert (dbias[0][0, 0, :3] == 0).all() and dbias[0].isfinite().all() and dbias[0][0, 0, 3, 0] == 1


def test_broadcast_bias_and_mask_take_no_square_memory(device):
    """What the forward and the backward allocate besides results stays far below one score matrix."""
    length = 4096
    q, k, v = dense(device, batch=1, len_q=length, len_k=length, heads=(1, 1), dims=(8, 8))
    q.requires_grad_()
    options = {"bias": torch.randn(1, 1, 1, length, device=device, requires_grad=True),
               "mask": torch.rand(1, 1, 1, length, device=device) < 0.5, "causal": True}
    with torch.profiler.profile(profile_memory=True) as profile:
        flashattn.forward(q, k, v, **options).sum().backward()
    where = "device" if device.type == "cuda" else "cpu"
    allocated = sum(max(0, getattr(event, f"self_{where}_memory_usage")) for event in profile.events())
    assert 4 * length * 8 * 4 <= allocated < length**2 * 4 / 4


# ---- GQA and the LSE ----

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 71])
def test_query_head_reads_its_kv_head(attend, device, dtype, group):
    """KV head h holds the value h everywhere: the output of query head i is i // group, exactly."""
    q, k, v = dense(device, dtype, batch=1, len_q=5, len_k=8, heads=(3 * group, 3), dims=(16, 16))
    v = torch.arange(3, dtype=dtype, device=device).view(1, 1, 3, 1).repeat(1, 8, 1, 16)
    out, _ = attend(0 * q, k, v)
    assert largest(out, (torch.arange(3 * group) // group).view(1, 1, -1, 1).expand_as(out)) == 0


@pytest.mark.parametrize("group", [2, 7, 71])
def test_kv_gradients_are_the_sum_over_the_group(device, group):
    q, k, v = dense(device, torch.float64, len_q=5, len_k=70, heads=(2 * group, 2), dims=(16, 16))
    dout = torch.randn_like(q)
    _, _, dq, dk, dv = train(q, k, v, dout)
    each = train(q, *(t.repeat_interleave(group, 2) for t in (k, v)), dout)
    assert largest(dq, each[2]) < 1e-13
    for ours, wanted in ((dk, each[3]), (dv, each[4])):
        assert largest(ours, wanted.unflatten(2, (2, group)).sum(3)) < 1e-12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lse_is_the_natural_logarithm(attend, device, dtype):
    q, k = zeros_qk(device, 2, 3, 8, (4, 2), dtype=dtype)
    _, lse = attend(q, k, k)
    assert lse.shape == (2, 4, 3) and largest(lse, torch.full_like(lse, 2.079442)) < 1e-6
    q, k, v, layout = packed(device, (2, 3), (8, 8), dtype)
    _, lse = attend(0 * q, k, v, **layout)
    assert lse.shape == (4, 5) and largest(lse, torch.full_like(lse, 2.079442)) < 1e-6


def test_parts_merge_to_the_whole(device):
    q, k, v = dense(device, len_q=6, len_k=8)
    whole, whole_lse = flashattn.forward(q, k, v, return_lse=True)
    cuts = (0, 3, 3, 8)                                                  # the second part has no key
    outs, lses = zip(*(flashattn.forward(q, k[:, start:end], v[:, start:end], return_lse=True)
                       for start, end in zip(cuts, cuts[1:])))
    out, lse = flashattn.merge(torch.stack(outs), torch.stack(lses))
    assert largest(out, whole) < 1e-6 and largest(lse, whole_lse) < 1e-6


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scale": 0.5}], ids=str)
def test_gradient_of_the_lse(device, options):
    """dQ = scale P K, dK = scale P^T Q, dV = 0."""
    inputs = dense(device, torch.float64, batch=1, len_q=5, len_k=9, heads=(1, 1))
    q, k, v = (t.requires_grad_() for t in inputs)
    _, lse = flashattn.forward(q, k, v, **options, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    weights = flashattn.forward(q, k, eye(device, 1, 9, 1, torch.float64), **options)[0, :, 0].detach()
    scale = options.get("scale", 1 / 8)
    assert largest(dq[0, :, 0], scale * weights @ k[0, :, 0]) < 1e-14
    assert largest(dk[0, :, 0], scale * weights.T @ q[0, :, 0]) < 1e-14
    assert (dv == 0).all()


def test_weights_add_up_to_one(device):
    """V = identity gives the probabilities themselves, of shape (B, Sq, H, Sk), all of one sign."""
    q, k, _ = dense(device, len_q=33, len_k=70)
    weights = flashattn.forward(q, k, eye(device, 2, 70, 2), window=(30, 30))
    assert weights.shape == (2, 33, 4, 70) and (weights >= 0).all()
    assert largest(weights.sum(-1), torch.ones(2, 33, 4)) < 1e-6


# ---- dropout ----

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dropout_drops_the_same_weights_forwards_and_backwards(attend, device, dtype):
    """V = dout = identity: out is the dropped P, dV its transpose, kept weights are P / 0.7."""
    q, k, _ = dense(device, dtype, len_q=90, len_k=90, heads=(4, 4), dims=(64, 64))
    v = eye(device, 2, 90, 4, dtype).requires_grad_()
    whole, _ = attend(q, k, v)
    out, _ = attend(q, k, v, dropout_p=0.3, seed=9)
    dv, = torch.autograd.grad(out, v, eye(device, 2, 90, 4, out.dtype))
    kept = out != 0
    share = kept.double().mean().item()
    assert abs(share - 0.7) < 4 * math.sqrt(0.3 * 0.7 / kept.numel())
    assert torch.equal(kept.transpose(1, 3), dv != 0)
    assert torch.equal(kept.transpose(1, 2), reference.dropout_keep(9, 0.3, 2, 4, 90, 90).to(device))
    bound = 2e-5 + torch.finfo(dtype).eps                                # 0.7 is a number of 65536ths
    assert largest(out, kept * whole / 0.7) < bound and largest(dv.transpose(1, 3), out) < bound


def test_dropout_seeds(device):
    q, k, v = dense(device, len_q=90)
    options = {"dropout_p": 0.3}
    torch.manual_seed(5)
    first, second = (flashattn.forward(q, k, v, **options) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert_identical(flashattn.forward(q, k, v, **options), first, "after manual_seed")

    seeded = flashattn.forward(q, k, v, **options, seed=7)
    padding = torch.empty(1000, device=device)                           # other addresses for what follows
    again = [t.clone() for t in (q, k, v)]
    assert_identical(flashattn.forward(*again, **options, seed=7), seeded, "the same seed")
    tensor_seed = torch.tensor([7], device=device)
    assert_identical(flashattn.forward(*again, **options, seed=tensor_seed), seeded, "the seed in a tensor")
    assert not torch.equal(flashattn.forward(q, k, v, **options, seed=8), seeded)
    del padding

    generator = torch.cuda if device.type == "cuda" else torch
    state = generator.get_rng_state()
    flashattn.forward(q, k, v, **options, seed=7)
    flashattn.forward(q, k, v, dropout_p=0.0)
    assert torch.equal(generator.get_rng_state(), state)
    flashattn.forward(q, k, v, **options)
    assert not torch.equal(generator.get_rng_state(), state)


def test_dropout_is_recomputed_by_checkpointing(device):
    q, k, v = (t.requires_grad_() for t in dense(device, len_q=90))

    def run(q, k, v):
        return flashattn.forward(q, k, v, dropout_p=0.3, deterministic=True)

    results = []
    for checkpointed in (False, True):
        torch.manual_seed(1)
        out = checkpoint(run, q, k, v, use_reentrant=False) if checkpointed else run(q, k, v)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for ours, wanted in zip(*results):
        assert_identical(ours, wanted, "checkpointed")


# ---- autograd ----

@pytest.mark.parametrize("asked", ["q", "k", "v", "qk", "qv", "kv", "qkv"])
def test_gradients_of_a_subset_are_those_of_all(device, asked):
    tensors = dict(zip("qkv", dense(device, torch.bfloat16)))
    dout = torch.randn(2, 70, 4, 64, dtype=torch.bfloat16, device=device)
    wanted = dict(zip("qkv", train(*tensors.values(), dout)[2:]))
    leaves = [tensors[name].requires_grad_() for name in asked]
    grads = torch.autograd.grad(flashattn.forward(*tensors.values(), deterministic=True), leaves, dout)
    for name, grad in zip(asked, grads):
        assert_identical(grad, wanted[name], f"d{name}")


def test_nothing_is_recorded_where_no_gradient_is_asked(device):
    q, k, v = dense(device)
    assert flashattn.forward(q, k, v).grad_fn is None
    q.requires_grad_()
    with torch.no_grad():
        assert flashattn.forward(q, k, v).grad_fn is None
    with torch.inference_mode():
        assert flashattn.forward(q, k, v).is_inference()
    grad, = torch.autograd.grad(flashattn.forward(q, k, v).sum(), q)     # and training works after that
    assert (grad != 0).any()


def small(device):
    q, k, v = dense(device, torch.float64, batch=2, len_q=3, len_k=4, heads=(2, 1), dims=(3, 2))
    bias, sink = torch.randn(2, 2, 3, 4, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    return [t.to(device).requires_grad_() for t in (q, k, v, bias, sink)]


SMALL_OPTIONS = (
    {}, {"causal": True, "window": (1, None)}, {"softcap": 2.0, "scale": 0.9}, {"dropout_p": 0.4, "seed": 2})


@pytest.mark.parametrize("options", SMALL_OPTIONS, ids=str)
def test_float64_gradients_equal_finite_differences(device, options):
    def run(q, k, v, bias, sink):
        return flashattn.forward(q, k, v, bias=bias, sink=sink, **options, return_lse=True)

    assert torch.autograd.gradcheck(run, small(device))


@pytest.mark.parametrize("options", SMALL_OPTIONS, ids=str)
def test_second_derivatives_are_right_or_refused(device, options):
    """A gradient penalty: the same number as through the oracle, never a silent zero."""
    def penalty(forward):
        inputs = small(device)
        out, lse = forward(*inputs[:3], bias=inputs[3], sink=inputs[4], **options)
        grads = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), inputs)

    torch.manual_seed(3)
    wanted = penalty(lambda *qkv, **options: reference.forward(*qkv, **options)[:2])
    torch.manual_seed(3)
    try:
        ours = penalty(lambda *qkv, **options: flashattn.forward(*qkv, **options, return_lse=True))
    except NotImplementedError as error:
        assert "double backward" in str(error).lower()
    else:
        for a, b in zip(ours, wanted):
            assert largest(a, b) < 1e-10 and (b != 0).any()


# ---- head dims ----

@pytest.mark.parametrize("dim", [1, 8, 16, 24, 32, 40, 48, 56, 63, 64, 72, 80, 88, 96, 104, 112, 120, 128,
                                 136, 160, 192, 224, 256, 512])
def test_every_head_dim_with_its_own_default_scale(device, dim):
    """The default scale is that of the given D; the LSE shows it to float32 accuracy."""
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = dense(device, dtype, batch=1, len_q=5, len_k=70, heads=(2, 1), dims=(dim, dim))
        check_backward(q, k, v)
        scaled = flashattn.forward(q, k, v, scale=dim**-0.5, return_lse=True)
        for ours, wanted in zip(flashattn.forward(q, k, v, return_lse=True), scaled):
            assert_identical(ours, wanted, "default scale")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(192, 128), (64, 512), (576, 512)])
def test_value_head_dims_of_their_own(device, dtype, dims):
    q, k, v = dense(device, dtype, batch=1, len_q=17, len_k=70, heads=(4, 1), dims=dims)
    check_backward(q, k, v)


def test_no_columns_are_refused(device):
    q, k, v = dense(device, dims=(0, 1))
    with pytest.raises(ValueError, match="q.*0.*column"):
        flashattn.forward(q, k, v)
