"""flashattn.merge: parts over disjoint keys make the whole, in value and in gradient."""

import math

import pytest
import torch

import flashattn
from compare import assert_close_2x
from flashattn import reference

SHAPE = (2, 5, 3, 4)                                         # B, S, H, Dv


def parts(count, *, dtype=torch.float64, lse_dtype=torch.float64, device="cpu", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    batch, rows, heads, width = SHAPE
    outs = torch.randn(count, *SHAPE, dtype=torch.float64, device=device, generator=generator).to(dtype)
    lses = torch.randn(count, batch, heads, rows, dtype=torch.float64, device=device, generator=generator)
    return outs, (4 * lses).to(lse_dtype)


def formula(outs, lses):
    """The definition in float64, for parts whose out is finite."""
    lses, outs = lses.double(), outs.double()
    lse = torch.logsumexp(lses, 0)
    shares = torch.where(lses == -math.inf, 0.0, torch.exp(lses - lse)).transpose(2, 3).unsqueeze(-1)
    return (shares * outs).sum(0), lse


@pytest.mark.parametrize("count", [1, 2, 3, 7, 130])
@pytest.mark.parametrize("lse_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_formula(count, dtype, lse_dtype, device):
    outs, lses = parts(count, dtype=dtype, lse_dtype=lse_dtype, device=device)
    out, lse = flashattn.merge(outs, lses)
    assert out.shape == SHAPE and out.dtype == dtype and lse.dtype == lse_dtype
    expected, expected_lse = formula(outs, lses)
    # The weights carry the rounding of the LSEs, the result one rounding to its own dtype.
    rounding = 4 * torch.finfo(lse_dtype).eps * (1 + lses.abs().max())
    unit = (rounding + torch.finfo(dtype).eps) * outs.double().abs().max()
    assert (out.double() - expected).abs().max() <= unit
    assert (lse.double() - expected_lse).abs().max() <= rounding


def test_one_part_is_itself(device):
    outs, lses = parts(1, dtype=torch.float32, lse_dtype=torch.float32, device=device)
    out, lse = flashattn.merge(outs, lses)
    assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])


def test_inputs_need_not_be_contiguous(device):
    outs, lses = parts(3, device=device)
    expected = flashattn.merge(outs, lses)
    scattered = outs.permute(4, 1, 0, 3, 2).contiguous().permute(2, 1, 4, 3, 0)
    wide = torch.full((*lses.shape, 2), math.nan, dtype=lses.dtype, device=device)
    wide[..., 0] = lses
    for ours, contiguous in zip(flashattn.merge(scattered, wide[..., 0]), expected, strict=True):
        assert torch.equal(ours, contiguous)


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("empty", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_empty_part_changes_nothing(empty, garbage, device):
    outs, lses = parts(3, dtype=torch.float32, lse_dtype=torch.float32, device=device)
    kept = [n for n in range(3) if n not in empty]
    expected = flashattn.merge(outs[kept], lses[kept])
    for n in empty:
        outs[n], lses[n] = garbage, -math.inf
    for ours, without in zip(flashattn.merge(outs, lses), expected, strict=True):
        assert torch.equal(ours, without)


def test_empty_in_some_rows_only(device):
    outs, lses = parts(2, device=device)
    outs[0, :, 1], lses[0, :, :, 1] = math.nan, -math.inf     # row 1: only part 1
    outs[1, :, 3], lses[1, :, :, 3] = math.nan, -math.inf     # row 3: only part 0
    outs[:, :, 4], lses[:, :, :, 4] = math.nan, -math.inf     # row 4: nothing
    out, lse = flashattn.merge(outs, lses)
    assert torch.equal(out[:, 1], outs[1, :, 1]) and torch.equal(lse[..., 1], lses[1, :, :, 1])
    assert torch.equal(out[:, 3], outs[0, :, 3]) and torch.equal(lse[..., 3], lses[0, :, :, 3])
    assert torch.equal(out[:, 4], torch.zeros_like(out[:, 4])) and (lse[..., 4] == -math.inf).all()
    assert out.isfinite().all() and not lse.isnan().any()


@pytest.mark.parametrize("offset", [-1e4, -200.0, 200.0, 1e4])
def test_extreme_lse(offset, device):
    """exp(lse) overflows or vanishes in every format; only differences may matter."""
    outs, lses = parts(3, device=device)
    out, lse = flashattn.merge(outs, lses + offset)
    expected, expected_lse = flashattn.merge(outs, lses)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(lse, expected_lse + offset, rtol=1e-11, atol=1e-11)


def test_gradients(device):
    outs, lses = parts(3, device=device)
    assert torch.autograd.gradcheck(flashattn.merge, (outs.requires_grad_(), lses.requires_grad_()))
    assert torch.autograd.gradgradcheck(flashattn.merge, (outs, lses))


def test_gradients_of_an_empty_part_are_zero(device):
    outs, lses = parts(3, device=device)
    outs[1], lses[1] = math.nan, -math.inf
    outs[:, :, 2], lses[:, :, :, 2] = math.nan, -math.inf
    outs, lses = outs.requires_grad_(), lses.requires_grad_()
    out, lse = flashattn.merge(outs, lses)
    weight = torch.randn(out.shape, dtype=out.dtype, device=device)
    finite = torch.where(lse == -math.inf, 0.0, lse)
    d_outs, d_lses = torch.autograd.grad((out * weight).sum() + finite.sum(), (outs, lses))
    assert d_outs.isfinite().all() and d_lses.isfinite().all()
    for gradient in (d_outs[1], d_outs[:, :, 2], d_lses[1], d_lses[:, :, :, 2]):
        assert torch.equal(gradient, torch.zeros_like(gradient))

    kept_outs, kept_lses = outs.detach()[[0, 2]].requires_grad_(), lses.detach()[[0, 2]].requires_grad_()
    out, lse = flashattn.merge(kept_outs, kept_lses)
    finite = torch.where(lse == -math.inf, 0.0, lse)
    expected = torch.autograd.grad((out * weight).sum() + finite.sum(), (kept_outs, kept_lses))
    assert torch.equal(d_outs[[0, 2]], expected[0]) and torch.equal(d_lses[[0, 2]], expected[1])


@pytest.mark.parametrize("cuts", [(0, 3, 8), (0, 0, 8), (0, 8, 8), (0, 1, 2, 5, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_splitting_the_keys(cuts, dtype, device):
    """Attention to key ranges [cut, next cut), merged, is attention to all keys, and so are its gradients."""
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(2, rows, heads, 16, dtype=dtype, device=device)
                      for rows, heads in ((5, 4), (8, 2), (8, 2), (5, 4)))
    d_lse = torch.randn(2, 4, 5, dtype=dtype, device=device)

    def whole(q, k, v):
        return reference.forward(q, k, v, dtype=q.dtype)[:2]

    def merged(q, k, v):
        results = [flashattn.forward(q, k[:, first:last], v[:, first:last], return_lse=True)
                   for first, last in zip(cuts, cuts[1:])]
        return flashattn.merge(*(torch.stack(column) for column in zip(*results)))

    def value_and_gradients(function, dtype):
        inputs = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        results = function(*inputs)
        return *results, *torch.autograd.grad(results, inputs, (d_out.to(dtype), d_lse.to(dtype)))

    ours = value_and_gradients(merged, dtype)
    plain = value_and_gradients(whole, dtype)
    exact = value_and_gradients(whole, torch.float64)
    for name, *results in zip(("out", "lse", "dq", "dk", "dv"), ours, exact, plain, strict=True):
        assert_close_2x(*results, name)


def test_compiles(device):
    outs, lses = parts(3, dtype=torch.float32, lse_dtype=torch.float32, device=device)
    compiled = torch.compile(flashattn.merge, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(compiled(outs, lses), flashattn.merge(outs, lses), strict=True):
        assert torch.equal(ours, eager)


OUTS, LSES = (3, 2, 5, 4, 8), (3, 2, 4, 5)


@pytest.mark.parametrize(("outs", "lses", "error", "text"), [
    ((2, 5, 4, 8), LSES, ValueError, r"outs.*\(2, 5, 4, 8\).*lses.*\(n, B, S, H, Dv\)"),
    (OUTS, (3, 2, 5), ValueError, r"lses.*\(3, 2, 5\).*\(n, B, H, S\)"),
    (OUTS, (3, 2, 5, 4), ValueError, r"lses.*\(3, 2, 5, 4\).*\(n, B, H, S\)"),
    (OUTS, (2, 2, 4, 5), ValueError, r"lses.*\(2, 2, 4, 5\).*\(n, B, H, S\)"),
    ((0, 2, 5, 4, 8), (0, 2, 4, 5), ValueError, r"outs.*\(0, 2, 5, 4, 8\)"),
], ids=["outs 4-D", "lses 3-D", "lses as rows and heads", "counts differ", "no part"])
def test_bad_shapes(outs, lses, error, text, device):
    with pytest.raises(error, match=text):
        flashattn.merge(torch.zeros(outs, device=device), torch.zeros(lses, device=device))


@pytest.mark.parametrize(("outs", "lses", "text"), [
    (torch.int32, torch.float32, r"outs.*int32.*floating"),
    (torch.float32, torch.bfloat16, r"lses.*bfloat16.*float32 or float64"),
    (torch.float32, torch.int64, r"lses.*int64.*float32 or float64"),
], ids=str)
def test_bad_dtypes(outs, lses, text, device):
    with pytest.raises(TypeError, match=text):
        flashattn.merge(torch.zeros(OUTS, dtype=outs, device=device),
                        torch.zeros(LSES, dtype=lses, device=device))
