"""Comparison with the float64 oracle: the accuracy rule of every test lives here.

The 2x rule: a result may be at most twice as far from the float64 answer as unfused torch code in the same
dtype ("plain"), plus two units in the last place of the largest value.  LSE and largest logit are held to
float32 accuracy whatever the dtype of the inputs.  float64 inputs are held to 1e-12.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import flashattn
from flashattn import reference

oracle_device: str | None = None  # where the oracle computes; None: where the tensors are

FORWARD_OPTIONS = set(inspect.signature(reference.forward).parameters) - {"q", "k", "v", "dtype"}
DECODE_OPTIONS = set(inspect.signature(reference.decode).parameters) - {"q", "k_cache", "v_cache", "dtype"}


def assert_close_2x(ours: Tensor, oracle: Tensor, plain: Tensor, name: str, *, floor: float = 0.0) -> None:
    """``max|ours - f64| <= 2 max|plain - f64| + 2 ulp max|f64| + floor``; in float64, 1e-12 max|f64| + floor.

    Args:
        ours: the result under test; its dtype must be that of plain, its NaN and Inf those of the oracle.
        oracle: the float64 answer.
        plain: the same computation, unfused, in the dtype of ours.
        floor: rounding error that is unavoidable even where the exact answer is 0.
    """
    assert ours.dtype == plain.dtype, f"{name}: dtype {ours.dtype}, expected {plain.dtype}"
    error, largest = _error(ours, oracle, name), _largest(oracle)
    if ours.dtype == torch.float64:
        bound = 1e-12 * largest
    else:
        plain_error = _largest(plain.double() - oracle.double())
        bound = 2 * plain_error + 2 * torch.finfo(ours.dtype).eps * largest
    bound += floor
    assert error <= bound, f"{name}: error {error:.3e} over {bound:.3e}, largest value {largest:.3e}"


def assert_lse(
    ours: Tensor, oracle: Tensor, max_logit: Tensor, name: str = "lse", *, floor: float = 0.0
) -> None:
    """``|ours - f64| <= 2e-5 (1 + max|max_logit|) + floor`` (float64: 1e-12), and -inf at the same places.

    Args:
        max_logit: the largest scaled logits, any shape; infinite ones do not count.
    """
    assert ours.dtype in (torch.float32, torch.float64), f"{name}: dtype {ours.dtype}"
    error = _error(ours, oracle, name)
    bound = (2e-5 if ours.dtype == torch.float32 else 1e-12) * (1 + _largest(max_logit)) + floor
    assert error <= bound, f"{name}: error {error:.3e} over {bound:.3e}"


def assert_identical(a: Tensor, b: Tensor, name: str) -> None:
    """Equal in shape, dtype and every bit, but NaN equals NaN and 0 equals -0."""
    assert a.dtype == b.dtype, f"{name}: dtype {a.dtype}, {b.dtype}"
    assert a.shape == b.shape, f"{name}: shape {(*a.shape,)}, {(*b.shape,)}"
    differ = (a != b) & ~(a.isnan() & b.isnan())
    assert not differ.any(), f"{name}: {int(differ.sum())} of {differ.numel()} differ, " \
        f"first at {differ.nonzero()[0].tolist()}: {a[differ][0].item()!r}, {b[differ][0].item()!r}"


def check_forward(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run :func:`flashattn.forward` with these options and hold it against the oracle.

    Kernels that are only for larger problems have to be right too.

    Returns:
        our ``(out, lse, max_logit)``, for further assertions; no max_logit with ``return_max_logit=False``.
    """
    options = {"return_max_logit": True} | options
    results = [flashattn.forward(q, k, v, **options, return_lse=True)]
    for kernel in () if "out" in options else _kernels_of_large_tiles(q, k, v, **options):
        with flashattn.force_family(kernel):
            results.append(flashattn.forward(q, k, v, **options, return_lse=True))
    results = [ours if options["return_max_logit"] else (*ours, None) for ours in results]
    _assert_forward(results, q, k, v, {n: o for n, o in options.items() if n in FORWARD_OPTIONS})
    return results[0]


def check_backward(
    q: Tensor, k: Tensor, v: Tensor, *, lse_grad: bool = True, served_by: str | None = None, **options
) -> tuple[Tensor, ...]:
    """:func:`check_forward`, and the gradients of q, k, v, bias and sink for random gradients of out and LSE.

    Args:
        lse_grad: False leaves the LSE out of the loss.
        served_by: the kernel of the backward.

    Returns:
        our ``(out, lse, dq, dk, dv[, dbias][, dsink])``.
    """
    options = {"return_max_logit": True} | options
    leaves = {"q": q, "k": k, "v": v, "bias": options.get("bias"), "sink": options.get("sink")}
    leaves = {n: t.detach().requires_grad_() for n, t in leaves.items() if t is not None}
    out, lse, *max_logit = flashattn.forward(**(options | leaves), return_lse=True)
    semantic = {n: o for n, o in options.items() if n in FORWARD_OPTIONS}
    ours = out, lse, max_logit[0] if max_logit else None
    oracle_out, oracle_lse = _assert_forward([ours], q, k, v, semantic)

    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if lse_grad else None
    results = (out, lse) if lse_grad else (out,)
    with flashattn.force_family(served_by) if served_by else contextlib.nullcontext():
        grads = torch.autograd.grad(results, list(leaves.values()), (dout, dlse)[:len(results)])
    oracle = _oracle("backward", dout, q, k, v, dlse=dlse, **semantic)
    plain = _oracle("backward", dout, q, k, v, dlse=dlse, **semantic, dtype=q.dtype)
    noises = _gradient_noises(dout, dlse, oracle_out, oracle_lse, q, k, v, semantic)
    for name, grad, *others in zip(leaves, grads, *map(_given, (oracle, plain, noises))):
        wanted, baseline, noise = others
        assert_close_2x(grad, wanted, baseline.to(leaves[name].dtype), f"d{name}", floor=2 * noise)
    return out, lse, *grads


def check_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, **options
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Run :func:`flashattn.decode` on copies of the caches and hold result and caches against the oracle.

    Returns:
        our ``(out, lse, k_cache, v_cache)``, the caches as the call left them.
    """
    semantic = {n: o for n, o in options.items() if n in DECODE_OPTIONS}
    oracle_out, oracle_lse, *oracle_caches = _oracle("decode", q, k_cache, v_cache, **semantic)
    plain_out, *_ = _oracle("decode", q, k_cache, v_cache, **semantic, dtype=q.dtype)
    magnitude = _decode_magnitude(q, k_cache, v_cache, **semantic)
    if options.get("k_new") is not None:
        k_cache, v_cache = k_cache.clone(), None if v_cache is None else v_cache.clone()
    out, lse = flashattn.decode(q, k_cache, v_cache, **options, return_lse=True)
    assert lse.dtype == _statistics_dtype(q)

    score_floor = 0.0
    if options.get("rotary_cos") is None:
        assert_identical(k_cache, oracle_caches[0], "k_cache")
    else:
        # Rotated keys may round to the neighbouring number, and a kernel may round rotated queries as well.
        eps = torch.finfo(q.dtype).eps
        close = torch.isclose(k_cache, oracle_caches[0], rtol=eps, atol=1e-6, equal_nan=True)
        assert close.all(), f"k_cache: {int((~close).sum())} differ"
        scale = 1 / math.sqrt(q.shape[-1]) if options.get("scale") is None else options["scale"]
        q_norm, k_norm = (_largest(t.double().norm(dim=-1)) for t in (q, k_cache))
        score_floor = eps * abs(scale) * q_norm * k_norm
    if v_cache is not None:
        assert_identical(v_cache, oracle_caches[1], "v_cache")
    assert_close_2x(out, oracle_out, plain_out, "out", floor=_out_noise(lse, oracle_lse, magnitude))
    assert_lse(lse, oracle_lse, oracle_lse, floor=score_floor)
    return out, lse, k_cache, v_cache


def _oracle(function: str, *tensors, **options):
    """A function of :mod:`flashattn.reference`."""
    device = tensors[0].device
    given = tree_map_only(Tensor, lambda t: t.to(oracle_device or device), (tensors, options))
    return tree_map_only(Tensor, lambda t: t.to(device), getattr(reference, function)(*given[0], **given[1]))


def _kernels_of_large_tiles(q, k, v, **options) -> list[str]:
    """Those that would serve this call if it were larger."""
    rejected = flashattn.explain(q, k, v, **options).rejected
    names = [name for name, reason in rejected.items() if reason.endswith("for large tiles")]
    return [name for name in names if _serves(name, q, k, v, **options)]  # that may be only the first reason


def _serves(kernel, q, k, v, **options) -> bool:
    with flashattn.force_family(kernel):
        return flashattn.explain(q, k, v, **options).kernel == kernel


def _assert_forward(results, q, k, v, semantic) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        both, oracle_lse, oracle_max = _oracle("forward", q, k, torch.cat([v, v.abs()], -1), **semantic)
        plain_out, _, _ = _oracle("forward", q, k, v, **semantic, dtype=q.dtype)
    oracle_out, magnitude = both.chunk(2, -1)
    for out, lse, max_logit in results:
        assert lse.dtype == _statistics_dtype(q), f"lse: dtype {lse.dtype} for inputs of dtype {q.dtype}"
        assert_close_2x(out, oracle_out, plain_out, "out", floor=_out_noise(lse, oracle_max, magnitude))
        assert_lse(lse, oracle_lse, oracle_max)
        if max_logit is not None:
            assert max_logit.dtype == lse.dtype, f"max_logit: dtype {max_logit.dtype}"
            assert_lse(max_logit, oracle_max, oracle_max, "max_logit")
    return oracle_out, oracle_lse


def _decode_magnitude(q, k_cache, v_cache, *, k_new=None, v_new=None, v_head_dim=None, **options) -> Tensor:
    """What decode gives for the magnitudes of the values."""
    if v_cache is None:
        v_cache, v_new = (None if t is None else t[..., :v_head_dim] for t in (k_cache, k_new))
    v_new = None if v_new is None else v_new.abs()
    return _oracle("decode", q, k_cache, v_cache.abs(), k_new=k_new, v_new=v_new, **options)[0]


def _out_noise(lse: Tensor, scores: Tensor, magnitude: Tensor) -> float:
    """Rounding error of the scores, and of the products with values, in sums of weights times this magnitude.

    Plain code has it too; but where few results are compared, luck may differ by more than the factor 2.
    """
    return torch.finfo(lse.dtype).eps * (1 + _largest(scores)) * _largest(magnitude)


def _gradient_noises(dout, dlse, out, lse, q, k, v, semantic) -> list[float | None]:
    """What rounding that no backward from the saved out and LSE avoids does to the gradients: mean of draws.

    The score gradient is ``P (dP - delta + dlse)`` with ``P = exp(S - LSE)`` and ``delta = sum(dout * out)``.
    Rounding of scores and LSE scales a row of P, which is as if its dout and dlse were scaled.  Rounding of
    out changes delta, as random errors do, by the root of the sum of squares, and that of the sum grows with
    the root of Dv; a change of delta is one of dlse.
    """
    eps_out, eps = torch.finfo(q.dtype).eps, torch.finfo(_statistics_dtype(q)).eps
    heads = 1 if q.dim() == 4 else 0                                     # of the LSE
    dout, lse = dout.double().nan_to_num(0, 0, 0), lse.nan_to_num(0, 0, 0)
    dlse = torch.zeros_like(lse) if dlse is None else dlse.double().nan_to_num(0, 0, 0)
    change = (dout * out).norm(dim=-1).movedim(-1, heads) * (eps_out + eps * math.sqrt(out.shape[-1]) / 2)
    draws = []
    for _ in range(3):
        factor = eps * (1 + lse.abs()) * _signs(lse)
        draws.append(_oracle(
            "backward", dout * factor.movedim(heads, -1)[..., None], q, k, v,
            dlse=dlse * factor + change * _signs(lse), **semantic, dtype=torch.float32))
    return [None if draw[0] is None else sum(map(_largest, draw)) / len(draws) for draw in zip(*draws)]


def _signs(like: Tensor) -> Tensor:
    return torch.randint_like(like, 2) * 2 - 1


def _error(ours: Tensor, oracle: Tensor, name: str) -> float:
    """Largest difference where the oracle is finite; elsewhere they must be the same."""
    ours, oracle = ours.detach().double(), oracle.detach().double()
    assert ours.shape == oracle.shape, f"{name}: shape {(*ours.shape,)}, expected {(*oracle.shape,)}"
    assert_identical(torch.where(ours.isfinite(), 0, ours), torch.where(oracle.isfinite(), 0, oracle), name)
    return _largest(torch.where(oracle.isfinite(), ours - oracle, 0))


def _largest(x: Tensor) -> float:
    """Largest finite magnitude, 0 if there is none."""
    x = x.detach().double().abs()
    x = x[x.isfinite()]
    return x.max().item() if x.numel() else 0.0


def _given(grads: Iterable) -> list:
    return [grad for grad in grads if grad is not None]


def _statistics_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
