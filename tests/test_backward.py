"""Gradients of flashattn.forward and flashattn.backward against the oracle."""

import pytest
import torch

import flashattn
from cases import (
    DIMS,
    DTYPES,
    HEADS,
    LENGTHS,
    NAN,
    OPTIONS,
    RAGGED,
    RANGES,
    cpu_families,
    dense,
    ints,
    offsets,
    packed,
)
from compare import assert_identical, check_backward


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_option(device, dtype, name):
    q, k, v = dense(device, dtype)
    check_backward(q, k, v, **OPTIONS[name](q, 90))


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("len_q, len_k", LENGTHS)
def test_lengths(device, len_q, len_k, name):
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = dense(device, dtype, batch=1, len_q=len_q, len_k=len_k, dims=(32, 32))
        check_backward(q, k, v, **OPTIONS[name](q, len_k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_query_heads_share_kv_heads(device, dtype, heads):
    q, k, v = dense(device, dtype, heads=heads, dims=(16, 16))
    check_backward(q, k, v, **OPTIONS["all"](q, 90))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS)
def test_head_dims(device, dtype, dims):
    q, k, v = dense(device, dtype, len_q=33, len_k=70, dims=dims)
    check_backward(q, k, v, causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["none", "causal", "window", "dropout"])
def test_packed(device, dtype, name):
    q, k, v, layout = packed(device, *RAGGED, dtype)
    check_backward(q, k, v, **layout, **OPTIONS[name](q[None], 129))


def test_packed_bias_counts_within_the_sequence(device):
    q, k, v, layout = packed(device, (1, 70, 33), (90, 5, 64))
    for shape in ((3, 4, 70, 90), (1, 4, 70, 90), (3, 1, 1, 90), (1, 1, 1, 90)):
        check_backward(q, k, v, **layout, bias=torch.randn(shape, device=device))


@pytest.mark.parametrize("name", ["none", "causal", "window", "all"])
def test_rows_that_count(device, name):
    q, k, v = dense(device, batch=3)
    used = {"seqused_q": ints(device, 70, 33, 0), "seqused_k": ints(device, 64, 0, 90)}
    check_backward(q, k, v, **used, **OPTIONS[name](q, 90))


def test_rows_of_no_sequence_get_and_give_no_gradient(device):
    q, k, v = (t[0].requires_grad_() for t in dense(device, batch=1, len_q=100, len_k=120))
    layout = {"max_seqlen_q": 64, "cu_seqlens_q": offsets(device, (20, 30, 7), 11),
              "max_seqlen_k": 64, "cu_seqlens_k": offsets(device, (40, 0, 60), 5)}
    check_backward(q, k, v, **layout, causal=True)
    dout = torch.randn(100, 4, 64, device=device)
    clean = torch.autograd.grad(flashattn.forward(q, k, v, **layout), (q, k, v), dout)
    dout[:11], dout[68:] = NAN, NAN
    dirty = torch.autograd.grad(flashattn.forward(q, k, v, **layout), (q, k, v), dout)
    outside_q, outside_k = [*range(11), *range(68, 100)], [*range(5), *range(105, 120)]
    for ours, wanted, outside in zip(dirty, clean, (outside_q, outside_k, outside_k)):
        assert_identical(ours, wanted, "gradient")
        assert (ours[outside] == 0).all()


@pytest.mark.parametrize("name", ["none", "all"])
def test_loss_without_the_lse(device, name):
    q, k, v = dense(device, torch.bfloat16)
    check_backward(q, k, v, lse_grad=False, **OPTIONS[name](q, 90))


def test_unused_results_cost_nothing(device):
    """A loss of the LSE alone: dv is exactly 0.  max_logit has no gradient."""
    q, k, v = (t.requires_grad_() for t in dense(device))
    out, lse, max_logit = flashattn.forward(q, k, v, return_lse=True, return_max_logit=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    assert (dv == 0).all() and (dq != 0).any() and (dk != 0).any()
    assert out.requires_grad and not max_logit.requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["none", "causal window", "dropout", "all"])
def test_explicit_backward_equals_autograd(device, dtype, name):
    q, k, v = dense(device, dtype)
    options = OPTIONS[name](q, 90)
    leaves = {"q": q, "k": k, "v": v} | {n: options[n] for n in ("bias", "sink") if n in options}
    for leaf in leaves.values():
        leaf.requires_grad_()
    out, lse = flashattn.forward(**leaves | options, return_lse=True, deterministic=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    wanted = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
    with torch.no_grad():
        grads = flashattn.backward(dout, q, k, v, out, lse, dlse=dlse, **options, deterministic=True)
        for ours, theirs, leaf in zip(grads, wanted, leaves, strict=True):
            assert_identical(ours, theirs, f"d{leaf}")
        grads = flashattn.backward(dout, q, k, v, out, lse, **options, deterministic=True)
        zero = flashattn.backward(
            dout, q, k, v, out, lse, dlse=torch.zeros_like(lse), **options, deterministic=True)
        for ours, theirs, leaf in zip(grads, zero, leaves, strict=True):
            assert_identical(ours, theirs, f"d{leaf}")


def test_gradients_go_to_bias_and_sink_alone(device):
    q, k, v = dense(device)
    for name, shape in (("bias", (1, 4, 70, 90)), ("sink", (4,))):
        leaf = torch.randn(shape, device=device, requires_grad=True)
        grad, = torch.autograd.grad(flashattn.forward(q, k, v, **{name: leaf}).square().sum(), leaf)
        with_all = [t.detach().requires_grad_() for t in (q, k, v)]
        loss = flashattn.forward(*with_all, **{name: leaf}).square().sum()
        assert_identical(grad, torch.autograd.grad(loss, [leaf, *with_all])[0], f"d{name}")


@pytest.mark.parametrize("ask", ["argument", "torch"])
def test_deterministic_gradients_have_the_same_bits_on_every_run(device, ask):
    q, k, v, layout = packed(device, (300, 1, 128), (300, 70, 500), torch.bfloat16, heads=(8, 2))
    bias, sink = torch.randn(1, 1, 1, 500, device=device), torch.randn(8, device=device)
    leaves = [t.requires_grad_() for t in (q, k, v, bias, sink)]
    dout = torch.randn(429, 8, 64, dtype=q.dtype, device=device)
    threads, runs = torch.get_num_threads(), []
    torch.use_deterministic_algorithms(ask == "torch")
    try:
        for count in (1, 2, 3, 8, 8, 8):
            torch.set_num_threads(count)
            out = flashattn.forward(q, k, v, bias=bias, sink=sink, causal=True, **layout,
                                    deterministic=ask == "argument")
            runs.append(torch.autograd.grad(out, leaves, dout))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    for run in runs[1:]:
        for ours, first, name in zip(run, runs[0], ("dq", "dk", "dv", "dbias", "dsink")):
            assert_identical(ours, first, name)


def test_sums_over_many_rows_stay_accurate(device):
    """dk, dv and dbias of one KV head for 16 query heads are float32 sums over 2^17 rows."""
    q, k, v = dense(device, batch=1, len_q=8192, len_k=16, heads=(16, 1), dims=(16, 16))
    bias, sink = torch.randn(1, 1, 1, 16, device=device), torch.randn(16, device=device)
    check_backward(q, k, v, bias=bias, sink=sink)


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_do_not_disturb_each_other(device, threads):
    """More tiles than threads: sums over query heads and rows meet in dk, dv, dbias and dsink."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        q, k, v = dense(device, batch=3, len_q=260, len_k=200, heads=(8, 2), dims=(16, 16))
        bias, sink = torch.randn(1, 1, 1, 200, device=device), torch.randn(8, device=device)
        check_backward(q, k, v, bias=bias, sink=sink)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", cpu_families())
def test_every_family_serves_every_option(family, dtype):
    with flashattn.force_family(family):
        for name in OPTIONS:
            q, k, v = dense("cpu", dtype, batch=1, len_q=67, len_k=131, heads=(2, 1), dims=(40, 72))
            check_backward(q, k, v, **OPTIONS[name](q, 131))
