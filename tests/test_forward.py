"""flashattn.forward against the oracle, option by option, shape by shape, on every kernel family."""

import pytest
import torch

import flashattn
from cases import (
    DIMS,
    DTYPES,
    HEADS,
    LENGTHS,
    OPTIONS,
    RAGGED,
    RANGES,
    cpu_families,
    dense,
    ints,
    offsets,
    packed,
)
from compare import assert_identical, check_forward


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_option(device, dtype, name):
    q, k, v = dense(device, dtype)
    check_forward(q, k, v, **OPTIONS[name](q, 90))


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("len_q, len_k", LENGTHS)
def test_lengths(device, len_q, len_k, name):
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = dense(device, dtype, len_q=len_q, len_k=len_k, dims=(32, 32))
        check_forward(q, k, v, **OPTIONS[name](q, len_k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_query_heads_share_kv_heads(device, dtype, heads):
    q, k, v = dense(device, dtype, heads=heads, dims=(16, 16))
    check_forward(q, k, v, **OPTIONS["all"](q, 90))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS)
def test_head_dims(device, dtype, dims):
    q, k, v = dense(device, dtype, len_q=33, len_k=70, dims=dims)
    check_forward(q, k, v, causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["none", "causal", "window", "dropout"])
def test_packed(device, dtype, name):
    q, k, v, layout = packed(device, *RAGGED, dtype)
    check_forward(q, k, v, **layout, **OPTIONS[name](q[None], 129))


def test_packed_bias_and_mask_count_within_the_sequence(device):
    lens_q, lens_k = (1, 70, 33), (90, 5, 64)
    q, k, v, layout = packed(device, lens_q, lens_k)
    for batch, heads, len_q in ((3, 4, 70), (1, 4, 70), (3, 1, 1)):
        shape = batch, heads, len_q, 90
        check_forward(q, k, v, **layout, bias=torch.randn(shape, device=device))
        check_forward(q, k, v, **layout, mask=torch.rand(shape, device=device) < 0.7)


def test_packed_lengths_may_be_left_to_the_cpu():
    q, k, v, layout = packed("cpu", (7, 70), (90, 5))
    asked = {name: layout[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    assert_identical(check_forward(q, k, v, **asked)[0], flashattn.forward(q, k, v, **layout), "out")


def test_packed_tensors_may_hold_rows_of_no_sequence(device):
    q, k, v = (t[0] for t in dense(device, batch=1, len_q=100, len_k=120))
    out, lse, _ = check_forward(
        q, k, v, cu_seqlens_q=offsets(device, (20, 30, 7), 11), cu_seqlens_k=offsets(device, (40, 0, 60), 5),
        max_seqlen_q=64, max_seqlen_k=64, causal=True)
    assert (out[:11] == 0).all() and (out[68:] == 0).all()
    assert (lse[:, :11] == -torch.inf).all() and (lse[:, 68:] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_count(device, dtype):
    """seqused_q and seqused_k: causal and window follow the lengths that count."""
    q, k, v = dense(device, dtype, batch=4)
    used = {"seqused_q": ints(device, 70, 33, 0, 1), "seqused_k": ints(device, 64, 0, 90, 90)}
    for name in ("none", "causal", "window", "all"):
        check_forward(q, k, v, **used, **OPTIONS[name](q, 90))
    q, k, v, layout = packed(device, (50, 20, 0), (60, 70, 10), dtype)
    used = {"seqused_q": ints(device, 49, 3, 0), "seqused_k": ints(device, 0, 65, 10)}
    check_forward(q, k, v, **layout, **used, causal=True)
    check_forward(q, k, v, **layout, seqused_k=ints(device, 60, 1, 2), window=(9, 9))


def test_results_come_in_the_order_asked_for(device, one_family):
    q, k, v = dense(device, torch.bfloat16)
    out, lse, max_logit = flashattn.forward(q, k, v, return_lse=True, return_max_logit=True)
    assert isinstance(flashattn.forward(q, k, v), torch.Tensor)
    for options, wanted in (({}, (out,)), ({"return_lse": True}, (out, lse)),
                            ({"return_max_logit": True}, (out, max_logit))):
        given = flashattn.forward(q, k, v, **options)
        for a, b in zip(given if options else (given,), wanted, strict=True):
            assert_identical(a, b, str(options))


def test_the_largest_logit_leaves_out_what_no_query_sees(device):
    """-inf of a head that sees nothing; neither hidden keys nor the sink count."""
    q, k, v = dense(device, len_q=5, len_k=7, heads=(2, 2))
    k[:, 6] = 100 * q[:, 4]                                              # past the keys that count
    mask = torch.ones(1, 2, 1, 7, dtype=torch.bool, device=device)
    mask[:, 1] = False
    sink = torch.full((2,), 50.0, device=device)
    _, _, visible = check_forward(q, k, v, sink=sink)
    _, _, max_logit = check_forward(q, k, v, mask=mask, sink=sink, seqused_k=ints(device, 6, 6))
    assert visible[0] > 500 and max_logit[0] < 50 and max_logit[1] == -torch.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_is_written_in_place(device, dtype):
    q, k, v = dense(device, dtype, dims=(64, 40))
    wanted, lse = flashattn.forward(q, k, v, causal=True, return_lse=True)
    out = torch.full_like(wanted, float("nan"))
    given, given_lse = flashattn.forward(q, k, v, causal=True, return_lse=True, out=out)
    assert given.data_ptr() == out.data_ptr()
    assert_identical(out, wanted, "out")
    assert_identical(given_lse, lse, "lse")


def test_out_keeps_the_rows_of_no_sequence(device):
    q, k, v = (t[0] for t in dense(device, batch=1, len_q=20, len_k=20))
    out = torch.full((20, 4, 64), 7.0, device=device)
    flashattn.forward(q, k, v, cu_seqlens_q=offsets(device, (5, 6), 3), cu_seqlens_k=offsets(device, (8, 9)),
                      max_seqlen_q=6, max_seqlen_k=9, seqused_q=ints(device, 5, 2), out=out)
    assert (out[:3] == 7).all() and (out[14:] == 7).all()
    assert (out[10:14] == 0).all() and (out[3:10] != 7).all()


def test_same_bits_on_every_run_and_for_any_number_of_threads(device):
    q, k, v = dense(device, torch.bfloat16, batch=3, len_q=300, len_k=300)
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8, 8):
            torch.set_num_threads(threads)
            runs.append(flashattn.forward(q, k, v, causal=True, return_lse=True))
    finally:
        torch.set_num_threads(before)
    for out, lse in runs[1:]:
        assert_identical(out, runs[0][0], "out")
        assert_identical(lse, runs[0][1], "lse")


def test_batch_invariant_results_are_those_of_each_sequence_alone(device):
    lens_q, lens_k = (1, 70, 200, 3), (300, 65, 1000, 0)
    q, k, v, layout = packed(device, lens_q, lens_k, torch.bfloat16)
    options = {"causal": True, "batch_invariant": True, "return_lse": True}
    out, lse = flashattn.forward(q, k, v, **layout, **options)
    ends_q, ends_k = layout["cu_seqlens_q"].tolist(), layout["cu_seqlens_k"].tolist()
    for start_q, end_q, start_k, end_k in zip(ends_q, ends_q[1:], ends_k, ends_k[1:]):
        one, one_lse = flashattn.forward(
            q[None, start_q:end_q], k[None, start_k:end_k], v[None, start_k:end_k], **options)
        assert_identical(out[start_q:end_q], one[0], "out")
        assert_identical(lse[:, start_q:end_q], one_lse[0], "lse")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", cpu_families())
def test_every_family_serves_every_option(family, dtype):
    with flashattn.force_family(family):
        for name in OPTIONS:
            q, k, v = dense("cpu", dtype, batch=1, len_q=67, len_k=131, heads=(2, 1), dims=(40, 72))
            check_forward(q, k, v, **OPTIONS[name](q, 131))
