"""The oracle against what is known without it: torch's own attention, published vectors, finite differences.

The closed forms of test_regressions.py hold for the oracle too; they are run there.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from cases import NAN, dense, ints, offsets, packed
from compare import assert_identical
from flashattn import reference

F64 = torch.float64


def largest(a, b):
    return (a - b).abs().max().item()


def sdpa(q, k, v, **options):
    """torch's unfused attention on (B, S, H, D) tensors."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, **options, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("options, theirs", [
    ({}, {}),
    ({"scale": 0.3}, {"scale": 0.3}),
    ({"causal": True}, {"is_causal": True}),
    ({"mask": "mask"}, {"attn_mask": "mask"}),
    ({"bias": "bias"}, {"attn_mask": "bias"}),
], ids=str)
def test_equals_torch_attention_and_its_gradients(device, heads, options, theirs):
    inputs = [t.requires_grad_() for t in dense(device, F64, len_q=13, len_k=13, heads=heads, dims=(16, 24))]
    tensors = {"mask": torch.rand(2, 1, 13, 13, device=device) < 0.6,
               "bias": torch.randn(1, heads[0], 13, 13, dtype=F64, device=device)}
    options, theirs = ({n: tensors.get(o, o) for n, o in given.items()} for given in (options, theirs))
    out, _, _ = reference.forward(*inputs, **options)
    expected = sdpa(*inputs, **theirs)
    dout = torch.randn_like(out)
    assert largest(out, expected) < 1e-14
    for ours, wanted in zip(reference.backward(dout, *inputs, **options),
                            torch.autograd.grad(expected, inputs, dout)):
        assert largest(ours, wanted) < 1e-13


def test_causal_with_other_lengths_equals_torch_lower_right(device):
    for len_q, len_k in ((3, 9), (9, 3)):
        q, k, v = dense(device, F64, len_q=len_q, len_k=len_k, dims=(16, 16))
        mask = torch.ones(len_q, len_k, dtype=torch.bool, device=device).tril(len_k - len_q)
        out, lse, _ = reference.forward(q, k, v, causal=True)
        assert largest(out, sdpa(q, k, v, attn_mask=mask).nan_to_num(0)) < 1e-14
        assert (lse.isinf() == ~mask.any(-1)).all()


def test_window_softcap_and_alibi_by_element(device):
    q, k, v = dense(device, F64, batch=2, len_q=4, len_k=6, heads=(2, 2), dims=(3, 3))
    slopes = torch.rand(2, 2, device=device)
    options = {"window": (2, 1), "softcap": 1.5, "alibi_slopes": slopes, "scale": 0.7}
    out, lse, max_logit = reference.forward(q, k, v, **options)
    tops = [-math.inf] * 2
    for b, h, i in itertools.product(range(2), range(2), range(4)):
        weights = {}
        for j in range(6):
            at = i + 6 - 4
            if at - 2 <= j <= at + 1:
                s = 1.5 * math.tanh(0.7 * float(q[b, i, h] @ k[b, j, h]) / 1.5)
                s -= float(slopes[b, h]) * abs(at - j)
                weights[j], tops[h] = math.exp(s), max(tops[h], s)
        total = sum(weights.values())
        expected = sum(w / total * v[b, j, h] for j, w in weights.items())
        assert largest(out[b, i, h], expected) < 1e-14
        assert abs(lse[b, h, i] - math.log(total)) < 1e-14
    assert largest(max_logit, torch.tensor(tops, dtype=F64, device=device)) < 1e-14


def test_sink_is_a_key_without_a_value(device):
    q, k, v = dense(device, F64, len_q=5, len_k=7, heads=(2, 2), dims=(8, 8))
    sink = torch.randn(2, dtype=F64, device=device)
    without, lse, max_logit = reference.forward(q, k, v)
    out, lse_sink, max_logit_sink = reference.forward(q, k, v, sink=sink)
    assert largest(lse_sink, torch.logaddexp(lse, sink[None, :, None].expand_as(lse))) < 1e-14
    assert largest(out, without * (lse - lse_sink).exp().transpose(1, 2)[..., None]) < 1e-14
    assert_identical(max_logit, max_logit_sink, "max_logit")
    assert largest(reference.forward(q, k, v, sink=sink - math.inf)[0], without) < 1e-15


def test_philox_known_answers():
    """The vectors that Random123 publishes for philox4x32, 10 rounds."""
    for counter, key, expected in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        words = reference._philox(torch.tensor(counter).unbind(), key)
        assert tuple(int(word) for word in words) == expected


def test_dropout_numbers_and_their_order():
    """Seed 0, batch 0, head 0, row 0, columns 0..7: the low half of each word, then the high half."""
    numbers = (0xE8D5, 0x6627, 0xC58D, 0xE169, 0xAC4C, 0xBC57, 0xDBD8, 0x9B00)
    for column, number in enumerate(numbers):
        for threshold in (number, number + 1):
            keep = reference.dropout_keep(0, 1 - threshold / 65536, 1, 1, 1, 8)[0, 0, 0]
            assert keep.tolist() == [n < threshold for n in numbers]
            assert keep[column] == (threshold > number)


def test_dropout_keep_is_a_function_of_the_position():
    whole = reference.dropout_keep(7, 0.3, 3, 4, 50, 90)
    assert whole.shape == (3, 4, 50, 90)
    assert abs(whole.double().mean() - 0.7) < 4 * math.sqrt(0.21 / whole.numel())
    assert torch.equal(whole[:2, :3, :20, :33], reference.dropout_keep(torch.tensor([7]), 0.3, 2, 3, 20, 33))
    assert not torch.equal(whole, reference.dropout_keep(7 + (1 << 32), 0.3, 3, 4, 50, 90))
    for dim in range(4):
        assert not torch.equal(whole.select(dim, 0), whole.select(dim, 1))


def test_dropout_scales_what_it_keeps(device):
    q, k, v = dense(device, F64, len_q=5, len_k=9, heads=(2, 1), dims=(8, 8))
    keep = reference.dropout_keep(3, 0.25, 2, 2, 5, 9).to(device)
    weights = torch.softmax(torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) / math.sqrt(8), -1) * keep / 0.75
    out, lse, _ = reference.forward(q, k, v, dropout_p=0.25, seed=3)
    assert largest(out, torch.einsum("bhqk,bkd->bqhd", weights, v[:, :, 0])) < 1e-14
    assert_identical(lse, reference.forward(q, k, v)[1], "lse")


def rand(*shape):
    return torch.randn(shape, dtype=F64)


OPTIONS = {
    "none": lambda: {},
    "causal, window, softcap": lambda: {"causal": True, "window": (2, None), "softcap": 2.0},
    "bias, mask": lambda: {"bias": rand(1, 2, 1, 4), "mask": torch.rand(2, 1, 3, 4) < 0.5},
    "bias of -inf": lambda: {"bias": rand(2, 2, 3, 4).where(torch.rand(2, 1, 3, 4) < 0.5, -math.inf)},
    "sink, alibi": lambda: {"sink": rand(2), "alibi_slopes": torch.rand(2), "causal": True},
    "dropout": lambda: {"dropout_p": 0.4, "seed": 11, "scale": 0.9},
    "seqused": lambda: {"seqused_q": torch.tensor([2, 3]), "seqused_k": torch.tensor([4, 0])},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_equal_finite_differences(name):
    q, k, v = dense("cpu", F64, batch=2, len_q=3, len_k=4, heads=(2, 1), dims=(3, 2))
    options = OPTIONS[name]()
    trained = {n: options.pop(n) for n in ("bias", "sink") if n in options}
    inputs = [t.requires_grad_() for t in (q, k, v, *trained.values())]

    def run(q, k, v, *rest):
        out, lse, _ = reference.forward(q, k, v, **dict(zip(trained, rest)), **options)
        return out, lse.masked_fill(lse.isinf(), 0)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)
    results = reference.forward(q, k, v, **trained, **options)[:2]
    grads = [torch.randn_like(t) for t in results]
    expected = torch.autograd.grad(results, inputs, grads)
    ours = reference.backward(grads[0], q, k, v, dlse=grads[1], **trained, **options)
    assert [t is not None for t in ours[3:]] == ["bias" in trained, "sink" in trained]
    for a, b in zip((t for t in ours if t is not None), expected):
        assert_identical(a, b, "gradient")


def test_packed_sequences_equal_single_ones(device):
    lens_q, lens_k = (3, 0, 7, 1), (5, 4, 0, 9)
    q, k, v, layout = packed(device, lens_q, lens_k, F64, dims=(8, 8))
    bias = torch.randn(4, 4, 7, 9, dtype=F64, device=device)
    options = {"causal": True, "window": (4, None), "dropout_p": 0.0}
    out, lse, _ = reference.forward(q, k, v, **layout, bias=bias, **options)
    start_q = start_k = 0
    for b, (len_q, len_k) in enumerate(zip(lens_q, lens_k)):
        rows, keys = slice(start_q, start_q + len_q), slice(start_k, start_k + len_k)
        one, one_lse, _ = reference.forward(q[None, rows], k[None, keys], v[None, keys],
                                            bias=bias[b:b + 1, :, :len_q, :len_k], **options)
        assert_identical(out[rows], one[0], "out")
        assert_identical(lse[:, rows], one_lse[0], "lse")
        start_q, start_k = start_q + len_q, start_k + len_k


def test_rows_outside_the_sequences_are_not_read_and_empty(device):
    q, k, v = dense(device, F64, batch=1, len_q=12, len_k=14, dims=(8, 8))
    options = {"cu_seqlens_q": offsets(device, (4, 5), 1), "cu_seqlens_k": offsets(device, (6, 5), 2),
               "seqused_q": ints(device, 3, 5), "seqused_k": ints(device, 6, 2), "window": (2, 0)}
    counted = [1, 2, 3, *range(5, 10)]
    seen = [*range(3, 8), 8, 9]                              # keys 1..5 of six, and both of two
    q_nan, k_nan, v_nan = (torch.full_like(t[0], NAN) for t in (q, k, v))
    q_nan[counted] = q[0, counted]
    k_nan[seen], v_nan[seen] = k[0, seen], v[0, seen]
    dout = torch.full_like(q_nan, NAN)
    dout[counted] = torch.randn(8, 4, 8, dtype=F64, device=device)
    out, lse, _ = reference.forward(q_nan, k_nan, v_nan, **options)
    clean = reference.forward(q[0], k[0], v[0], **options)
    for ours, wanted, name in zip((out, lse), clean, ("out", "lse")):
        assert_identical(ours, wanted, name)
    rest = [row for row in range(12) if row not in counted]
    assert (out[rest] == 0).all() and (lse[:, rest] == -math.inf).all()
    grads = reference.backward(dout, q_nan, k_nan, v_nan, **options)[:3]
    for ours, wanted in zip(grads, reference.backward(dout.nan_to_num(7), q[0], k[0], v[0], **options)):
        assert_identical(ours, wanted, "gradient")
    assert (grads[0][rest] == 0).all()


def test_keys_that_a_mask_hides_from_everyone_are_not_read(device):
    q, k, v = dense(device, F64, len_q=4, len_k=6, dims=(8, 8))
    mask = torch.ones(1, 4, 1, 6, dtype=torch.bool, device=device)
    mask[..., 2] = False                                     # hidden from everyone
    mask[:, :2, :, 4] = False                                # hidden from the first KV head
    dirty_k, dirty_v = k.clone(), v.clone()
    for t in (dirty_k, dirty_v):
        t[:, 2] = NAN
        t[:, 4, 0] = NAN
    out, clean = (reference.forward(q, *kv, mask=mask)[0] for kv in ((dirty_k, dirty_v), (k, v)))
    assert_identical(out, clean, "out")
    dout = torch.randn(2, 4, 4, 8, dtype=F64, device=device)
    for ours, wanted in zip(reference.backward(dout, q, dirty_k, dirty_v, mask=mask)[:3],
                            reference.backward(dout, q, k, v, mask=mask)):
        assert_identical(ours, wanted, "gradient")


def test_empty_problems(device):
    q, k, v = dense(device, F64, len_q=3, len_k=0, dims=(8, 4))
    out, lse, max_logit = reference.forward(q, k, v)
    assert out.shape == (2, 3, 4, 4) and (out == 0).all() and (lse == -math.inf).all()
    assert (max_logit == -math.inf).all()
    sink = torch.randn(4, dtype=F64, device=device)
    out, lse, _ = reference.forward(q, k, v, sink=sink)
    assert (out == 0).all() and torch.equal(lse, sink[None, :, None].expand(2, 4, 3))
    for batch, len_q in ((0, 3), (2, 0)):
        q, k, v = dense(device, F64, batch=batch, len_q=len_q, len_k=5, dims=(8, 4))
        out, lse, _ = reference.forward(q, k, v)
        assert out.shape == (batch, len_q, 4, 4) and lse.shape == (batch, 4, len_q)
        for grad, like in zip(reference.backward(torch.zeros_like(out), q, k, v), (q, k, v)):
            assert grad.shape == like.shape and (grad == 0).all()


def test_plain_computes_in_the_dtype_asked_for(device):
    q, k, v = dense(device, torch.bfloat16)
    plain, exact = (reference.forward(q, k, v, dtype=dtype)[0] for dtype in (torch.bfloat16, F64))
    assert plain.dtype == torch.bfloat16 and exact.dtype == F64
    assert 1e-4 < largest(plain.double(), exact) < 5e-2


def decode_cache(device, paging):
    """Two cached sequences of 11 and 6 keys; the same keys as dense tensors; what else decode needs."""
    keys, values = (torch.randn(2, 16, 2, 8, dtype=F64, device=device) for _ in range(2))
    if paging:
        table = ints(device, 5, 1, 7, 2, 6, 0, 3, 4).view(2, 4)
        k_cache, v_cache = (torch.full((8, 4, 2, 8), NAN, dtype=F64, device=device) for _ in range(2))
        k_cache[table.flatten()], v_cache[table.flatten()] = keys.view(8, 4, 2, 8), values.view(8, 4, 2, 8)
        return k_cache, v_cache, keys, values, {"page_table": table}
    k_cache, v_cache = (torch.full((4, 16, 2, 8), NAN, dtype=F64, device=device) for _ in range(2))
    k_cache[[3, 1]], v_cache[[3, 1]] = keys, values
    return k_cache, v_cache, keys, values, {"cache_batch_idx": ints(device, 3, 1)}


@pytest.mark.parametrize("paging", [False, True])
def test_decode_equals_forward_over_the_cached_keys(device, paging):
    k_cache, v_cache, keys, values, layout = decode_cache(device, paging)
    q, k_new, v_new = (torch.randn(2, 3, heads, 8, dtype=F64, device=device) for heads in (4, 2, 2))
    sink = torch.randn(4, dtype=F64, device=device)
    options = {"causal": True, "window": (6, None), "sink": sink, "softcap": 3.0}
    out, lse, k_after, v_after = reference.decode(
        q, k_cache, v_cache, **layout, cache_seqlens=ints(device, 11, 6), leftpad=ints(device, 0, 4),
        k_new=k_new, v_new=v_new, **options)
    for b, (length, first) in enumerate(((11, 0), (6, 4))):
        k_b, v_b = (torch.cat([t[b, :length], new[b]])[None] for t, new in ((keys, k_new), (values, v_new)))
        mask = torch.arange(length + 3, device=device)[None, None, None] >= first
        wanted, wanted_lse, _ = reference.forward(q[b:b + 1], k_b, v_b, mask=mask, **options)
        assert largest(out[b], wanted[0]) < 1e-14 and largest(lse[b], wanted_lse[0]) < 1e-14
    changed = ((k_after != k_cache) & ~(k_after.isnan() & k_cache.isnan())).any(-1).any(-1)
    assert changed.sum() == 2 * 3
    if not paging:
        assert changed[3, 11:14].all() and changed[1, 6:9].all()
        assert_identical(v_after[1, 6:9], v_new[1], "v_cache")


def test_decode_packed_queries_and_values_inside_the_keys(device):
    cache = torch.randn(2, 9, 1, 8, dtype=F64, device=device)
    q = torch.randn(5, 4, 8, dtype=F64, device=device)
    out, lse, _, none = reference.decode(q, cache, None, v_head_dim=6, cu_seqlens_q=offsets(device, (1, 4)),
                                         cache_seqlens=ints(device, 9, 7), causal=True)
    assert none is None and out.shape == (5, 4, 6) and lse.shape == (4, 5)
    for rows, b, length in ((slice(0, 1), 0, 9), (slice(1, 5), 1, 7)):
        keys = cache[b:b + 1, :length]
        wanted, _, _ = reference.forward(q[None, rows], keys, keys[..., :6], causal=True)
        assert_identical(out[rows], wanted[0], "out")


@pytest.mark.parametrize("interleaved", [False, True])
def test_decode_rotary_is_a_rotation_of_pairs(device, interleaved):
    """A pair (x, y) is the complex number x + iy; position p turns it by the angle p * frequency."""
    q, k_new, v_new = (torch.randn(1, 2, 1, 6, dtype=F64, device=device) for _ in range(3))
    k_cache, v_cache = (torch.randn(1, 8, 1, 6, dtype=F64, device=device) for _ in range(2))
    angles = torch.arange(8, device=device)[:, None] * torch.tensor([0.3, 0.01], dtype=F64, device=device)

    def turned(x, positions):
        first, second = ((0, 2), (1, 3)) if interleaved else ((0, 1), (2, 3))
        pairs = torch.complex(x[..., first], x[..., second])
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)[positions][:, None]
        x = x.clone()
        x[..., first], x[..., second] = pairs.real, pairs.imag
        return x

    for causal, q_positions in ((True, [5, 6]), (False, [5, 5])):
        out, _, k_after, _ = reference.decode(
            q, k_cache, v_cache, cache_seqlens=5, k_new=k_new, v_new=v_new, rotary_cos=angles.cos(),
            rotary_sin=angles.sin(), rotary_interleaved=interleaved, causal=causal)
        keys = torch.cat([k_cache[:, :5], turned(k_new, [5, 6])], 1)
        assert largest(k_after[:, :7], keys) < 1e-14
        values = torch.cat([v_cache[:, :5], v_new], 1)
        wanted, _, _ = reference.forward(turned(q, q_positions), keys, values, causal=causal)
        assert largest(out, wanted) < 1e-14
