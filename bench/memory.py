"""Peak memory of one call: of the process on Linux besides inputs and outputs, and of a CUDA device."""

import ctypes
import multiprocessing
import re
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from .peers import PEERS, Peer, reason
from .shapes import Shape

METHOD = """In a fresh process, after a call of 64 tokens that loads code and starts threads: freed memory
goes back to the system (`malloc_trim`), the peak resident set is reset (5 into `/proc/self/clear_refs`), the
call runs once, and the figure is the peak (`VmHWM`) minus the resident set before the call (`VmRSS`, with the
inputs) minus the bytes of the output."""

CUDA_METHOD = """One call in torch's caching allocator: the peak (`max_memory_allocated`) minus what was
allocated before the call, so that its inputs do not count, but outputs and gradients do."""


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)[1])


def _measure(shape: Shape, peer_name: str) -> dict:
    peer = PEERS[peer_name]
    with torch.no_grad():
        short = replace(shape, Sq=64, Sk=64)
        peer.prepare(short, short.inputs())()
        call = peer.prepare(shape, shape.inputs())
        ctypes.CDLL(None).malloc_trim(0)  # else the call could take what was freed before it
        Path("/proc/self/clear_refs").write_text("5")
        before, begin = _status("VmRSS"), time.perf_counter()
        out = call()
        seconds, peak = time.perf_counter() - begin, _status("VmHWM")
    return {"peer": peer_name, "seconds": seconds, "output_bytes": out.nbytes,
            "extra_bytes": peak - before - out.nbytes}


def peak_extra(shape: Shape, peer_name: str) -> dict:
    """A row: the extra bytes of a forward and the time of that one call."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(_measure, shape, peer_name).result()


def peak_on_card(shape: Shape, peer: Peer, device: str = "cuda") -> dict:
    """A row: the bytes that one call takes of the current CUDA device, results included, and its time."""
    torch.cuda.empty_cache()
    with peer.setting(), torch.set_grad_enabled(shape.differentiates):
        call = peer.prepare(shape, shape.inputs(device))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, begin = torch.cuda.memory_allocated(), time.perf_counter()
        results = call()
        torch.cuda.synchronize()
        seconds, peak = time.perf_counter() - begin, torch.cuda.max_memory_allocated()
        del results, call
    return {"peer": peer.name, "seconds": seconds, "extra_bytes": peak - before}


def rows_on_card(
    peers: list[Peer], shapes: list[Shape], device: str = "cuda"
) -> Iterator[tuple[Shape, dict]]:
    """Every shape by every peer, or the error in its place; who ran out of memory once is not asked again."""
    full = set()
    for shape in shapes:
        for peer in peers:
            measured = {"peer": peer.name, "score_bytes": shape.score_bytes(),
                        "input_bytes": shape.input_bytes()}
            if (peer.name, shape.op) in full:
                yield shape, {**measured, "error": "out of memory at a shorter one"}
                continue
            try:
                if why := peer.refuses(shape):
                    raise NotImplementedError(why)
                yield shape, measured | peak_on_card(shape, peer, device)
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError):
                    full.add((peer.name, shape.op))
                yield shape, {**measured, "error": reason(error)}
