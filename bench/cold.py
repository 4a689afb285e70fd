"""Cold start: sizes of what is installed, imports and first calls in fresh processes; on request, builds."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from .peers import reason

ROOT = Path(__file__).parent.parent
METHOD = """Imports and calls are those of a fresh process for each device.  A first call loads its kernel,
the second is the same call again.  Sizes are those of the files that were built."""

TIMED = """
import json, time
def report(**figures): print("figures", json.dumps(figures))
begin = time.perf_counter()
import torch
report(name="import torch", seconds=time.perf_counter() - begin)
begin = time.perf_counter()
import flashattn
report(name="import flashattn, after torch", seconds=time.perf_counter() - begin)
device = {device!r}
if device == "cuda":
    begin = time.perf_counter()
    torch.zeros(1, device=device).item()
    report(name="start of the device", seconds=time.perf_counter() - begin)
options = dict(device=device, dtype=torch.bfloat16, requires_grad=True)
q, k, v = (torch.randn(1, 256, 4, 64, **options) for _ in range(3))
def wait():
    if device == "cuda":
        torch.cuda.synchronize()
out = None
def forward():
    global out
    out = flashattn.forward(q, k, v, causal=True)
def backward(): torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
def decode():
    with torch.no_grad():
        flashattn.decode(q[:, :1], k, v, causal=True)
for op in (forward, backward, decode):
    for which in ("first", "second"):
        wait()
        begin = time.perf_counter()
        op()
        wait()
        report(name=f"{{which}} {{op.__name__}}, {{device}}", seconds=time.perf_counter() - begin)
"""

JIT = """
import json, time
import flashattn.jit
begin = time.perf_counter()
flashattn.jit.load(rows=["forward_cpu_baseline"])
print("figures", json.dumps({{"name": "flashattn.jit.load of one CPU kernel, {which}",
                             "seconds": time.perf_counter() - begin}}))
"""

BUILD = """
import json, pathlib, resource, subprocess, sys, tempfile, time
with tempfile.TemporaryDirectory() as folder:
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "setup.py", "build_ext", f"--build-lib={{folder}}/lib",
                           f"--build-temp={{folder}}/temp"], text=True, capture_output=True)
    seconds = time.perf_counter() - begin
    size = sum(path.stat().st_size for path in pathlib.Path(folder, "lib").rglob("*.so"))
if done.returncode:
    sys.exit((done.stderr or done.stdout or "failed").strip().splitlines()[-1])
print("figures", json.dumps({{"name": "build for {name}, largest process", "seconds": seconds, "bytes": size,
                             "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss}}))
"""


def figures(text: str) -> list[dict]:
    return [json.loads(line) for line in re.findall(r"^figures (.*)$", text, re.MULTILINE)]


def fresh(program: str, timeout: float = 300, **environment: str) -> list[dict]:
    """What a program prints as figures, run by a process of its own; the settings go into its environment."""
    settings = [f"{name}={value}" for name, value in environment.items()]
    done = subprocess.run(["env", *settings, sys.executable, "-c", program], cwd=ROOT, text=True,
                          capture_output=True, timeout=timeout)
    found = figures(done.stdout)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        found.append({"name": "the program", "error": last[:200]})
    return found


def sizes() -> Iterator[dict]:
    from flashattn import _load
    for path in sorted(Path(_load.__file__).parent.glob("_*.so")):
        yield {"name": path.name.partition(".")[0], "bytes": path.stat().st_size}


def build(archs: str) -> list[dict]:
    """A build for these compute capabilities, or for the "cpu" alone."""
    if archs == "cpu":
        return fresh(BUILD.format(name="the CPU"), 3600, FLASHATTN_CUDA="off")
    return fresh(BUILD.format(name=archs), 3600, FLASHATTN_CUDA="on", FLASHATTN_ARCHS=archs)


def rows(builds: list[str]) -> Iterator[dict]:
    """Rows {name, seconds or bytes, or error}; with `builds`, those and JIT-load too, which take minutes."""
    steps = [lambda: list(sizes()), lambda: fresh(TIMED.format(device="cpu"))]
    if torch.cuda.is_available():
        steps.append(lambda: fresh(TIMED.format(device="cuda")))
    steps += [lambda archs=archs: build(archs) for archs in builds]
    with tempfile.TemporaryDirectory() as cache:
        if builds:
            steps += [lambda which=which: fresh(JIT.format(which=which), 900, TORCH_EXTENSIONS_DIR=cache)
                      for which in ("new", "again")]
        seen = set()
        for step in steps:
            try:
                found = step()
            except Exception as error:
                found = [{"name": "a step", "error": reason(error)}]
            for r in found:
                if r["name"] not in seen or "error" in r:  # the imports come twice
                    seen.add(r["name"])
                    yield r
