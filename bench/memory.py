"""Peak memory of one call besides its inputs and outputs, measured in a fresh process on Linux."""

import ctypes
import multiprocessing
import re
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from .peers import PEERS
from .shapes import Shape

METHOD = """In a fresh process, after a call of 64 tokens that loads code and starts threads: freed memory
goes back to the system (`malloc_trim`), the peak resident set is reset (5 into `/proc/self/clear_refs`), the
call runs once, and the figure is the peak (`VmHWM`) minus the resident set before the call (`VmRSS`, with the
inputs) minus the bytes of the output."""


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
