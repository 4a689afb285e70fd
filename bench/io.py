"""Bytes that attention moves, by the hardware's counters: a small program under Nsight Compute (ncu)."""

import argparse
import csv
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .peers import PEERS, Peer, reason
from .shapes import SETS, Shape

METHOD = """Nsight Compute reads `dram__bytes_read.sum`, `dram__bytes_write.sum` and all that the L2 cache is
asked for (`lts__t_bytes.sum`) of every kernel of one call, without own flushes (`--cache-control none`):
reading 512 MB empties the L2 cache before the call, and what a second reading after it makes the cache write
back counts as written by the call.  Between the kernels of a call the cache keeps what it has.  Formula:
`flashattn.traffic`, all in the dtype of q."""

DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
# The bytes of the L2 cache, by the first of these that this ncu knows; a sector has 32 bytes.
L2 = (("lts__t_bytes.sum", 1), ("lts__t_sectors.sum", 32), (None, 0))
FLUSH_BYTES = 2**29
MARKER = "spin_kernel"  # of torch.cuda._sleep: one before the kernels of a call, one after them
UNITS = {"": 1, "byte": 1, "b": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def find_ncu() -> str | None:
    places = [shutil.which("ncu"), "/usr/local/cuda/bin/ncu",
              *sorted(map(str, Path("/opt/nvidia/nsight-compute").glob("*/ncu")), reverse=True)]
    return next((place for place in places if place and Path(place).exists()), None)


def number(value: str, unit: str) -> float:
    """A value of ncu in bytes (or sectors): ncu separates thousands and may scale by 10^3."""
    prefix = re.sub(r"(bytes?|sectors?|b)$", "", unit.strip().lower())
    return float(value.replace(",", "")) * UNITS[prefix]


def read_csv(text: str) -> list[tuple[str, dict[str, float]]]:
    """(kernel, {metric: value}) in the order of the launches; of ncu's details page or of its raw page."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels, units = {}, {}
    for r in csv.DictReader(line for line in lines[start:] if not line.startswith("==")):
        if not (r.get("ID") or "").isdigit():  # the raw page has its units in a line of their own
            units = r
            continue
        _, metrics = kernels.setdefault(int(r["ID"]), (r["Kernel Name"], {}))
        if "Metric Name" in r:
            found = {r["Metric Name"]: (r["Metric Value"], r["Metric Unit"])}
        else:
            found = {name: (r[name], units.get(name) or "") for name in r if name and "__" in name}
        for name, (value, unit) in found.items():
            try:
                metrics[name] = number(value, unit)
            except (ValueError, KeyError, AttributeError):
                pass  # "n/a", or a metric that is not asked for
    return [kernels[key] for key in sorted(kernels)]


def calls(kernels: list[tuple[str, dict[str, float]]]) -> list[tuple[list, list]]:
    """For each call the kernels between its markers, and those after them, which flush."""
    parts = [[]]
    for kernel in kernels:
        if MARKER in kernel[0]:
            parts.append([])
        else:
            parts[-1].append(kernel)
    return list(zip(parts[1::2], parts[2::2]))


def figures(call: list, flush: list, l2: str | None, l2_bytes: int) -> dict:
    """What a call moved.  Raises if a counter is missing."""
    def total(kernels, metric):
        return sum(metrics[metric] for _, metrics in kernels)

    if not call:
        raise ValueError("ncu saw no kernel of this call")
    read, write = DRAM
    moved = {"dram_read": total(call, read), "dram_write": total(call, write) + total(flush, write)}
    if l2:
        moved["l2_bytes"] = l2_bytes * total(call, l2)
    return moved | {"kernels": [name for name, _ in call]}


def child(cases: list[tuple[Shape, Peer]], done: Path, budget_s: float, device: str = "cuda") -> None:
    """The program under ncu: one call of each case, and a line in `done` for each: its error, or ''.

    A case with markers around its kernels is launched, with an error or without.
    """
    start, flush = time.monotonic(), torch.ones(FLUSH_BYTES // 4, device=device)
    cudart = torch.cuda.cudart()
    with open(done, "w") as log, torch.no_grad():
        for shape, peer in cases:
            launched = False
            why = "the time was used up" if time.monotonic() - start > budget_s else peer.refuses(shape)
            if not why:
                try:
                    with peer.setting():
                        call = peer.prepare(shape, shape.inputs(device))
                        call()
                        flush.sum()
                        torch.cuda.synchronize()
                        cudart.cudaProfilerStart()
                        torch.cuda._sleep(1)
                        launched = True
                        try:
                            call()
                        finally:
                            torch.cuda._sleep(1)
                            flush.sum()
                            torch.cuda.synchronize()
                            cudart.cudaProfilerStop()
                except Exception as error:
                    why = reason(error)
                call = None
                torch.cuda.empty_cache()
            log.write(json.dumps({"error": why, "launched": launched}) + "\n")
            log.flush()


def under_ncu(names: list[str], done: Path, metrics: tuple[str, ...], pattern: str, budget_s: float
              ) -> tuple[str, str]:
    """The child's CSV, and what ncu said."""
    log = done.with_suffix(".csv")
    command = [find_ncu(), "--csv", "--print-units", "base", "--metrics", ",".join(metrics),
               "--profile-from-start", "off", "--cache-control", "none", "--clock-control", "none",
               "--log-file", str(log), sys.executable, "-m", "bench.io", "--peers", ",".join(names),
               "--done", str(done), "--only", pattern, "--seconds", str(budget_s)]
    with subprocess.Popen(command, cwd=Path(__file__).parent.parent, text=True, start_new_session=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            said, _ = process.communicate(timeout=budget_s + 30)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)  # ncu and the program
            said = f"==ERROR== {reason(error)}"
    return log.read_text() if log.exists() else "", said


def failure(text: str, said: str) -> str:
    """The line in which the program (the end of a traceback) or ncu says why nothing was counted."""
    program, ncu = ([line.strip() for line in lines.splitlines() if "rror" in line.lower()]
                    for lines in (said, text))
    return (program[-1:] or ncu[:1] or ["no error was printed"])[0][:200]


def passes(text: str) -> int:
    """How often ncu ran a kernel at most, by what it says; 0 if it does not."""
    return max(map(int, re.findall(r"- (\d+) pass", text)), default=0)


@dataclass
class Counts:
    """What came of a run under ncu."""

    kernels: list[tuple[str, dict[str, float]]]
    cases: list[dict]  # the program's own record
    l2: str | None  # which metric
    l2_bytes: int  # of one of its units
    passes: int
    failure: str


def count(names: list[str], folder: Path, pattern: str, budget_s: float) -> Counts:
    """Memory and L2 cache in one run; memory alone in a second one if that took several passes a kernel.

    Only in the first pass the L2 cache is as the program left it.
    """
    start, done = time.monotonic(), folder / "done"
    for l2, l2_bytes in L2:  # noqa: B007
        text, said = under_ncu(names, done, (*DRAM, *[l2] * bool(l2)), pattern, budget_s)
        if kernels := read_csv(text):
            break
        print(f"ncu without {l2}: {failure(text, said)}", file=sys.stderr)
        if "metric" not in failure(text, said).lower():  # the counters themselves are out of reach
            break
    often = passes(text + said)
    if often > 1 and l2:
        left = budget_s - (time.monotonic() - start)
        again, said_again = under_ncu(names, folder / "again", DRAM, pattern, left)
        alone = read_csv(again)
        if [name for name, _ in alone] == [name for name, _ in kernels]:
            often = passes(again + said_again)
            for (_, metrics), (_, memory) in zip(kernels, alone):
                metrics |= memory
    cases = list(map(json.loads, done.read_text().splitlines())) if done.exists() else []
    return Counts(kernels, cases, l2, l2_bytes, often, failure(text, said))


def rows_on_card(peers: list[Peer], pattern: str = "", budget_s: float = 120) -> Iterator[tuple[Shape, dict]]:
    """A row for every shape and peer, with an error where there is no figure."""
    names = [peer.name for peer in peers]
    base = [(shape, {"peer": peer.name, "formula": shape.moved_bytes(peer.standard)})
            for shape, peer in selected(names, pattern)]
    if not find_ncu():
        yield from ((shape, {**r, "error": "no ncu (Nsight Compute) here"}) for shape, r in base)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = count(names, Path(folder), pattern, budget_s)
    counted = iter(calls(found.kernels))
    for (shape, r), case in itertools.zip_longest(base, found.cases):
        call, flush = next(counted, ((), ())) if case and case["launched"] else ((), ())
        error = case["error"] if case else f"not reached: {found.failure}"
        if not error:
            try:
                moved = figures(call, flush, found.l2, found.l2_bytes)
                yield shape, {**r, **moved, "passes": found.passes}
                continue
            except (ValueError, KeyError) as problem:
                error = f"{reason(problem)} ({found.failure})"
        yield shape, {**r, "error": error}


def selected(peers: list[str], pattern: str) -> list[tuple[Shape, Peer]]:
    """All peers of a shape after each other."""
    shapes = [shape for shape in SETS["io"] if re.search(pattern, shape.name)]
    return [(shape, PEERS[name]) for shape in shapes for name in peers]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.io", description="The program that ncu runs.")
    parser.add_argument("--peers", required=True)
    parser.add_argument("--done", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args()
    child(selected(given.peers.split(","), given.only), given.done, given.seconds)
