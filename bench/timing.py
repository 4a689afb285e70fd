"""Interleaved timing: every peer in turn in every round, so that clock, heat and load touch all alike."""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch

from .peers import Peer, reason
from .shapes import Shape

T = TypeVar("T")
GRAPH_CALLS = 8  # in one CUDA graph
GRAPH_BYTES = 400e6  # of inputs that are used in turn: several times what the L2 cache holds
GRAPH_INPUTS = 512  # at most


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
    settings: Mapping[str, Callable[[], AbstractContextManager]] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    failed: dict[str, str] | None = None,
) -> dict[str, list[float]]:
    """Seconds a call, one sample a round and peer; the calls are warm.

    Who fails before the rounds begin takes no part, and `failed` gets the reason; without `failed` the error
    is raised.

    Short calls are repeated until a sample lasts `sample_s`.  Rounds end when every spread over the root of
    the number of rounds is below `settled` (from five rounds on), when another round would pass `budget_s`,
    or at `max_rounds`; never before `min_rounds`.  Each round starts with another peer, and every second one
    runs backwards: a card that has just run hot is slower for who comes next.  A sample is taken inside
    `settings[name]()`, whose own time does not count.
    """
    def seconds(name, repeats):
        call = calls[name]
        with settings[name]() if settings else nullcontext():
            begin = clock()
            for _ in range(repeats):
                call()
            return (clock() - begin) / repeats

    start = clock()
    repeats = {name: 1 for name in calls}
    for name in calls:
        try:
            while repeats[name] * (once := seconds(name, repeats[name])) < sample_s:
                repeats[name] = max(2 * repeats[name], min(math.ceil(sample_s / once), 10 * repeats[name]))
        except Exception as error:
            if failed is None:
                raise
            failed[name] = reason(error)
    samples = {name: [] for name in calls if name not in (failed or ())}
    order = list(samples)
    gc.collect()
    gc.disable()
    try:
        for done in range(max_rounds):
            begin = clock()
            for name in order if done % 2 == 0 else reversed(order):
                samples[name].append(seconds(name, repeats[name]))
            order.append(order.pop(0))
            now = clock()
            if done + 1 >= min_rounds and now - start + (now - begin) > budget_s:
                break
            if done + 1 >= 5 and all(spread(s) / math.sqrt(len(s)) < settled for s in samples.values()):
                break
    finally:
        gc.enable()
    return samples


def check_agreement(shape: Shape, results: dict[str, list[torch.Tensor]]) -> dict[str, str]:
    """Who solved another problem than most peers, and why that is said; raises if no majority agrees.

    Results, in (B, S, H, D), agree up to a few roundings, in relative L2 distance: the same problem was
    solved, no more.
    """
    limit = max(1e-4, 6 * torch.finfo(getattr(torch, shape.dtype)).eps)

    def differing(first: str) -> dict[str, str]:
        wrong = {}
        for name in results.keys() - {first}:
            for tensor, other in zip(results[name], results[first], strict=True):
                distance = ((tensor.float() - other.float()).norm() / other.float().norm()).item()
                if not distance <= limit:
                    wrong[name] = f"{shape.name}: {name} and {first} differ by {distance:.2g} of the result"
        return wrong

    views = []
    for first in itertools.islice(results, len(results) // 2 + 1):  # one of them is of the majority
        views.append(differing(first))
        if not views[-1]:
            return {}
    fewest = min(views, key=len)
    if 2 * len(fewest) >= len(results):
        raise RuntimeError(next(iter(views[0].values())))
    return fewest


def cuda_clock() -> float:
    """Seconds at which the work given to the current CUDA device so far is done."""
    torch.cuda.synchronize()
    return time.perf_counter()


@dataclass
class Prepared:
    """A peer's part in the timing of a shape."""

    call: Callable[[], object]  # what is timed
    count: int  # how often it calls the peer
    results: list[torch.Tensor]  # of one of these, in (B, S, H, D)


def eager(peer: Peer, shape: Shape, inputs: tuple[torch.Tensor, ...]) -> Prepared:
    """One call, as it is; decodes use two caches in turn, of which a small one could stay in the L2 cache."""
    calls = [peer.prepare(shape, inputs) for _ in range(2 if shape.op == "decode" else 1)]
    turn = itertools.cycle(calls)
    call = calls[0] if len(calls) == 1 else lambda: next(turn)()
    return Prepared(call, 1, peer.results(call()))


def input_sets(shape: Shape) -> int:
    """How many sets of inputs the calls in graphs use in turn, so that none is still in the L2 cache."""
    return min(max(2, math.ceil(GRAPH_BYTES / shape.input_bytes())), GRAPH_INPUTS)


def capture(calls: list[Callable[[], T]]) -> tuple[list[torch.cuda.CUDAGraph], T]:
    """The calls in turn, in as many graphs of GRAPH_CALLS as hold all; what the first call writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what a library does at its first call must not be captured
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    endless, graphs, returned = itertools.cycle(calls), [], []
    for _ in range(math.ceil(len(calls) / GRAPH_CALLS)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=graphs[0].pool() if graphs else None):
            for call in itertools.islice(endless, GRAPH_CALLS):
                out = call()
                returned = returned or [out]
        graphs.append(graph)
    return graphs, returned[0]


def graphed(peer: Peer, shape: Shape, inputs: tuple[torch.Tensor, ...]) -> Prepared:
    """Many calls, replayed from CUDA graphs: the time of the device, not of the host."""
    calls = [peer.prepare(shape, inputs) for _ in range(input_sets(shape))]
    graphs, returned = capture(calls)

    def replay(held=calls):  # the graphs read the tensors of the calls
        for graph in graphs:
            graph.replay()

    replay()
    return Prepared(replay, GRAPH_CALLS * len(graphs), peer.results(returned))


def as_the_shape_says(peer: Peer, shape: Shape, inputs: tuple[torch.Tensor, ...]) -> Prepared:
    return (graphed if shape.graph else eager)(peer, shape, inputs)


def prepared(
    shape: Shape, peers: list[Peer], make: Callable[[Peer], Prepared]
) -> tuple[dict[str, Prepared], list[dict]]:
    """What `make` gives for each peer that takes the shape, and why the others do not."""
    made, missing = {}, []
    for peer in peers:
        why = peer.refuses(shape)
        if not why:
            try:
                with peer.setting():
                    made[peer.name] = make(peer)
                continue
            except Exception as error:  # whatever a library raises for what it cannot do
                why = reason(error)
        missing.append({"name": shape.name, "peer": peer.name, "reason": why})
    return made, missing


def time_shape(
    shape: Shape,
    peers: list[Peer],
    budget_s: float,
    device: str = "cpu",
    how: Callable[..., Prepared] = as_the_shape_says,
) -> tuple[list[dict], list[dict]]:
    """One row per peer that takes the shape: median seconds of a call, spread, rounds and GFLOP/s.

    In a decode GB/s of the cache too.  Also {"name", "peer", "reason"} for each of the others.
    """
    inputs = shape.inputs(device)
    # On a CUDA device a sample is long beside the host's part in starting it and waiting for it.
    on_device = {"clock": cuda_clock, "sample_s": 20e-3} if device == "cuda" else {}

    def make(peer):
        made = how(peer, shape, inputs)
        if device == "cuda":
            torch.cuda.synchronize()  # the error of a kernel shows here
        return made

    with torch.set_grad_enabled(shape.differentiates):
        takers, missing = prepared(shape, peers, make)
        if not takers:
            return [], missing
        failed = check_agreement(shape, {name: made.results for name, made in takers.items()})
        for made in takers.values():
            made.results.clear()  # their memory is the calls'
        samples = interleave({name: made.call for name, made in takers.items() if name not in failed},
                             budget_s=budget_s, settings={peer.name: peer.setting for peer in peers},
                             failed=failed, **on_device)
        missing += [{"name": shape.name, "peer": name, "reason": why} for name, why in failed.items()]
    rows = []
    for name, times in samples.items():
        seconds = statistics.median(times) / takers[name].count
        rows.append({"peer": name, "seconds": seconds, "spread": spread(times), "rounds": len(times),
                     "gflops": shape.flops() / seconds / 1e9})
        if shape.op == "decode":
            rows[-1]["gbytes"] = shape.cache_bytes() / seconds / 1e9
        if kernel := next(peer for peer in peers if peer.name == name).kernel(shape, inputs):
            rows[-1]["kernel"] = kernel
    return rows, missing
