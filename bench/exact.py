"""Error of outputs and gradients against float64, as a distribution over all elements."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from .peers import Peer, reason
from .shapes import Shape
from .timing import prepared

QUANTILES = {"median": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
TENSORS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}
METHOD = """Error of each element against float64, over the root mean square of its row (the head dim) of the
exact result: in the table the median, the 99.9th percentile, the largest; every figure is in the CSV.
Inputs are normal; outliers: one element of a thousand of q, k and v has 10 times the spread; long: 65,536
keys."""


def inputs(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The shape's random q, k, v and dout; with outliers in q, k and v if its name says so."""
    q, k, v, dout = shape.inputs(device)
    if "outliers" in shape.name:
        generator = torch.Generator(device).manual_seed(1)
        for tensor in (q, k, v):
            rare = torch.rand(tensor.shape, generator=generator, device=device) < 1e-3
            tensor += 10 * rare * torch.randn(tensor.shape, generator=generator, device=device)
    return q, k, v, dout


def oracle(shape: Shape, inputs: tuple[Tensor, ...], block: int = 2**26) -> dict[str, Tensor]:
    """out, dq, dk and dv in float64, (B, S, H, D), from blocks of queries with `block` scores at most."""
    q, k, v, dout = (t.double().transpose(1, 2) for t in inputs)
    group, scale = shape.Hq // shape.Hk, shape.D**-0.5
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    out, dq, dk, dv = torch.empty_like(dout), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    left, right = shape.reach
    keys = torch.arange(shape.Sk, device=q.device)
    for b, h in ((b, h) for b in range(shape.B) for h in range(shape.Hq)):
        for rows in torch.arange(shape.Sq, device=q.device).split(max(1, block // shape.Sk)):
            some = slice(rows[0].item(), rows[-1].item() + 1)
            ahead = keys - (rows[:, None] + shape.Sk - shape.Sq)
            scores = scale * (q[b, h, some] @ k[b, h].T)
            weights = scores.masked_fill_((ahead < -left) | (ahead > right), float("-inf")).softmax(-1)
            out[b, h, some] = weights @ v[b, h]
            dv[b, h] += weights.T @ dout[b, h, some]
            delta = (out[b, h, some] * dout[b, h, some]).sum(-1, keepdim=True)
            dscores = weights * (dout[b, h, some] @ v[b, h].T - delta) * scale
            dq[b, h, some] = dscores @ k[b, h]
            dk[b, h] += dscores.T @ q[b, h, some]
    dk, dv = (t.unflatten(1, (shape.Hk, group)).sum(2) for t in (dk, dv))
    return {name: t.transpose(1, 2) for name, t in zip(("out", "dq", "dk", "dv"), (out, dq, dk, dv))}


def quantiles(errors: Tensor) -> dict[str, float]:
    """QUANTILES of all elements (torch.quantile takes 16 million at most)."""
    ordered = errors.flatten().sort().values
    return {name: ordered[round(q * (len(ordered) - 1))].item() for name, q in QUANTILES.items()}


def distribution(result: Tensor, exact: Tensor) -> dict[str, float]:
    """Quantiles of the absolute error, and of it over the root mean square of the row.

    A row that is all but 0 (the dq of a query with one key) counts as a tenth of the whole tensor's.
    """
    errors, squares = (result.double() - exact).abs(), exact.square()
    scale = squares.mean(-1, keepdim=True).sqrt().clamp(min=0.1 * squares.mean().sqrt())
    relative = errors / scale
    return {**{f"abs_{name}": value for name, value in quantiles(errors).items()}, **quantiles(relative)}


def computed(shape: Shape, peer: Peer, given: tuple[Tensor, ...]) -> list[Tensor]:
    """The peer's results, in (B, S, H, D).  Raises what keeps it from computing them."""
    with torch.set_grad_enabled(shape.differentiates):
        made, missing = prepared(shape, [peer], lambda p: p.results(p.prepare(shape, given)()))
    if missing:
        raise NotImplementedError(missing[0]["reason"])
    return made[peer.name]


def rows(peers: list[Peer], shapes: list[Shape], device: str = "cuda") -> Iterator[tuple[Shape, dict]]:
    """A row for every shape, peer and tensor of the result, or an error in place of the figures."""
    for shape in shapes:
        try:
            given = inputs(shape, device)
            expected = oracle(shape, given)
        except Exception as error:
            yield shape, {"peer": "ours", "tensor": "out", "error": f"no float64 result: {reason(error)}"}
            continue
        for op, tensors in TENSORS.items():
            asked = replace(shape, op=op)
            for peer in peers:
                try:
                    for name, result in zip(tensors, computed(asked, peer, given), strict=True):
                        found = distribution(result, expected[name])
                        yield asked, {"peer": peer.name, "tensor": name, **found}
                except Exception as error:
                    yield asked, {"peer": peer.name, "tensor": tensors[0], "error": reason(error)}
        given = expected = None
        if device == "cuda":
            with suppress(RuntimeError):  # a device that is gone: the next shape says so
                torch.cuda.empty_cache()
