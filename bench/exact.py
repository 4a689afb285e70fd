"""Error of outputs and gradients against float64, as a distribution over all elements."""

import math
import statistics
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from .peers import Peer, reason
from .shapes import Shape
from .timing import prepared

QUANTILES = {"median": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
COMPARED = ("median", "p999")  # of outputs with those of the other peers
TENSORS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}
DRAWS = {"forward": 16, "backward": 1}
METHOD = f"""Error of each element against float64, over the root mean square of its row (the head dim) of the
exact result: in the table the median, the 99.9th percentile, the largest; every figure is in the CSV.
Inputs are normal; outliers: one element of a thousand of q, k and v has 10 times the spread; long: 65,536
keys.  Outputs are those of {DRAWS["forward"]} draws of the inputs: the tables have the means of the draws'
medians and percentiles, and of the ratios of these to a peer's, with the standard error."""


def inputs(shape: Shape, device: str, draw: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A draw of the shape's random q, k, v and dout; with outliers in q, k and v if its name says so."""
    q, k, v, dout = shape.inputs(device, seed=2 * draw)
    if "outliers" in shape.name:
        generator = torch.Generator(device).manual_seed(2 * draw + 1)
        for tensor in (q, k, v):
            rare = torch.rand(tensor.shape, generator=generator, device=device) < 1e-3
            tensor += 10 * rare * torch.randn(tensor.shape, generator=generator, device=device)
    return q, k, v, dout


def oracle(shape: Shape, inputs: tuple[Tensor, ...], block: int = 2**26) -> dict[str, Tensor]:
    """out in float64, or dq, dk and dv, (B, S, H, D), from blocks of queries with `block` scores at most."""
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
            if not shape.differentiates:
                continue
            dv[b, h] += weights.T @ dout[b, h, some]
            delta = (out[b, h, some] * dout[b, h, some]).sum(-1, keepdim=True)
            dscores = weights * (dout[b, h, some] @ v[b, h].T - delta) * scale
            dq[b, h, some] = dscores @ k[b, h]
            dk[b, h] += dscores.T @ q[b, h, some]
    if not shape.differentiates:
        return {"out": out.transpose(1, 2)}
    dk, dv = (t.unflatten(1, (shape.Hk, group)).sum(2) for t in (dk, dv))
    return {name: t.transpose(1, 2) for name, t in zip(("dq", "dk", "dv"), (dq, dk, dv))}


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


def of_draws(draws: list[dict[str, float]]) -> dict[str, float]:
    """Means of the draws' quantiles, and the largest error of all."""
    return {name: (max if name.endswith("max") else statistics.fmean)([draw[name] for draw in draws])
            for name in draws[0]}


def ratios(ours: list[dict[str, float]], peer: list[dict[str, float]]) -> dict[str, float]:
    """Ours over the peer's, draw by draw: the mean, and its standard error."""
    found = {}
    for name in COMPARED:
        each = [a[name] / b[name] for a, b in zip(ours, peer, strict=True)]
        found |= {f"{name}_ratio": statistics.fmean(each),
                  f"{name}_ratio_error": statistics.stdev(each) / math.sqrt(len(each))}
    return found


def of_peers(shape: Shape, peers: list[Peer], device: str) -> Iterator[dict]:
    """A row for every peer and tensor of the shape's result."""
    tensors, found, failed = TENSORS[shape.op], {peer.name: [] for peer in peers}, {}
    for draw in range(DRAWS[shape.op]):
        try:
            given = inputs(shape, device, draw)
            expected = oracle(shape, given)
        except Exception as error:
            yield {"peer": "ours", "tensor": tensors[0], "error": f"no float64 result: {reason(error)}"}
            return
        for peer in (peer for peer in peers if peer.name not in failed):
            try:
                results = dict(zip(tensors, computed(shape, peer, given), strict=True))
                found[peer.name].append({t: distribution(results[t], expected[t]) for t in tensors})
            except Exception as error:
                failed[peer.name] = reason(error)
    for name, draws in found.items():
        if name in failed:
            yield {"peer": name, "tensor": tensors[0], "error": failed[name]}
            continue
        for tensor in tensors:
            figures = [draw[tensor] for draw in draws]
            row = {"peer": name, "tensor": tensor, "draws": len(draws), **of_draws(figures)}
            if name != "ours" and len(draws) > 1 and "ours" in found.keys() - failed.keys():
                row |= ratios([draw[tensor] for draw in found["ours"]], figures)
            yield row


def rows(peers: list[Peer], shapes: list[Shape], device: str = "cuda") -> Iterator[tuple[Shape, dict]]:
    """A row for every shape, peer and tensor of the result, or an error in place of the figures."""
    for shape in shapes:
        for asked in (replace(shape, op=op) for op in TENSORS):
            yield from ((asked, row) for row in of_peers(asked, peers, device))
            if device == "cuda":
                with suppress(RuntimeError):  # a device that is gone: the next shape says so
                    torch.cuda.empty_cache()
