"""Interleaved timing: every peer in turn in every round, so that clock, heat and load touch all alike."""

import gc
import math
import statistics
import time
from collections.abc import Callable

import torch

from .peers import Peer
from .shapes import Shape


def spread(samples: list[float]) -> float:
    """Interquartile range over the median."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def interleave(
    calls: dict[str, Callable[[], object]],
    *,
    budget_s: float,
    min_rounds: int = 3,
    max_rounds: int = 31,
    sample_s: float = 2e-3,
    settled: float = 0.01,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds a call, one sample a round and peer; the calls are warm.

    Short calls are repeated until a sample lasts `sample_s`.  Rounds end when every spread over the root of
    the number of rounds is below `settled` (from five rounds on), when another round would pass `budget_s`,
    or at `max_rounds`; never before `min_rounds`.  Each round starts with the next peer.
    """
    def seconds(call, repeats):
        begin = clock()
        for _ in range(repeats):
            call()
        return (clock() - begin) / repeats

    start = clock()
    repeats = {name: 1 for name in calls}
    for name, call in calls.items():
        while repeats[name] * (once := seconds(call, repeats[name])) < sample_s:
            repeats[name] = max(2 * repeats[name], min(math.ceil(sample_s / once), 10 * repeats[name]))
    samples = {name: [] for name in calls}
    order = list(calls)
    gc.collect()
    gc.disable()
    try:
        for done in range(max_rounds):
            begin = clock()
            for name in order:
                samples[name].append(seconds(calls[name], repeats[name]))
            order.append(order.pop(0))
            now = clock()
            if done + 1 >= min_rounds and now - start + (now - begin) > budget_s:
                break
            if done + 1 >= 5 and all(spread(s) / math.sqrt(len(s)) < settled for s in samples.values()):
                break
    finally:
        gc.enable()
    return samples


def check_agreement(shape: Shape, results: dict[str, list[torch.Tensor]]) -> None:
    """Raises unless all peers' results, in (B, S, H, D), are the first one's up to rounding.

    The limit is a few roundings, in relative L2 distance: the same problem was solved, no more.
    """
    limit = max(1e-4, 6 * torch.finfo(getattr(torch, shape.dtype)).eps)
    (first, expected), *others = results.items()
    for name, tensors in others:
        for tensor, other in zip(tensors, expected, strict=True):
            distance = ((tensor.float() - other.float()).norm() / other.float().norm()).item()
            if not distance <= limit:
                raise RuntimeError(f"{shape.name}: {name} and {first} differ by {distance:.2g} of the result")


def cuda_clock() -> float:
    """Seconds at which the work given to the current CUDA device so far is done."""
    torch.cuda.synchronize()
    return time.perf_counter()


def time_shape(shape: Shape, peers: list[Peer], budget_s: float, device: str = "cpu") -> list[dict]:
    """One row per peer that takes the shape: median seconds, spread, rounds and GFLOP/s."""
    inputs = shape.inputs(device)
    takers = [peer for peer in peers if not peer.refuses(shape)]
    if not takers:
        return []
    with torch.set_grad_enabled(shape.differentiates):
        calls = {peer.name: peer.prepare(shape, inputs) for peer in takers}
        warm_up = {peer.name: peer.results(calls[peer.name]()) for peer in takers}
        check_agreement(shape, warm_up)
        # On a CUDA device a sample is long beside the host's part in starting it and waiting for it.
        on_device = {"clock": cuda_clock, "sample_s": 10e-3} if device == "cuda" else {}
        samples = interleave(calls, budget_s=budget_s, **on_device)
    return [{"peer": name, "seconds": (median := statistics.median(times)), "spread": spread(times),
             "rounds": len(times), "gflops": shape.flops() / median / 1e9} for name, times in samples.items()]
