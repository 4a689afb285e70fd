"""The card of a run: its state while it works, and what it can do at most, measured in the same run."""

import re
import statistics
import subprocess
from collections.abc import Callable

import torch

from .timing import cuda_clock, interleave

SAMPLED = ("clocks.sm", "power.draw", "temperature.gpu")  # MHz, W, C
READ_KERNEL = r"""
extern "C" __global__ void read_all(const uint4* data, int count, unsigned* out) {
  long long stride = (long long)gridDim.x * blockDim.x;
  unsigned all = 0;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += 8 * stride) {
    uint4 parts[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      parts[j] = i + j * stride < count ? __ldcs(data + i + j * stride) : uint4{0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) all ^= parts[j].x ^ parts[j].y ^ parts[j].z ^ parts[j].w;
  }
  if (all == 0x9e3779b9u) *out = all;  // else the loads could be left out
}
"""


def _query(*fields: str) -> list[str]:
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def cards() -> list[dict]:
    """The driver, and the clock (MHz), power (W) and temperature (C) of every card now; empty without any."""
    fields = ["driver_version", *SAMPLED]
    try:
        done = subprocess.run(_query(*fields), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [dict(zip(fields, line.split(", "), strict=True)) for line in done.stdout.splitlines()]


def _current() -> str:
    """The current device as nvidia-smi knows it, to which CUDA_VISIBLE_DEVICES means nothing."""
    if not torch.cuda.is_available():
        return "0"
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


class Watch:
    """Clock, power and temperature of the current card, twice a second for as long as it is entered."""

    def __enter__(self) -> "Watch":
        try:
            self.process = subprocess.Popen([*_query(*SAMPLED), f"--id={_current()}", "--loop-ms=500"],
                                            text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        except OSError:
            self.process = None
        return self

    def __exit__(self, *error) -> None:
        if self.process:
            self.process.terminate()
            self.text, _ = self.process.communicate()

    def summary(self) -> dict[str, list[float]]:
        """[lowest, median, highest] of each of SAMPLED; empty without a card."""
        number = r"\s*(\d+(?:\.\d+)?)\s*"
        found = re.findall(rf"^{number},{number},{number}$", self.text if self.process else "", re.MULTILINE)
        return {name: [min(values), statistics.median(values), max(values)]
                for name, values in zip(SAMPLED, [list(map(float, column)) for column in zip(*found)])}


def _reads(data: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Ways to read all of float32 numbers once."""
    halves = data.view(torch.bfloat16).view(-1, 4096)
    ones = torch.ones(4096, dtype=halves.dtype, device=data.device)
    ways = {"sum": data.sum, "mv": lambda: halves @ ones}
    if data.is_cuda:
        try:
            kernel = torch.cuda._compile_kernel(READ_KERNEL, "read_all")
            out = torch.zeros(1, dtype=torch.int32, device=data.device)
            blocks = 4 * torch.cuda.get_device_properties(data.device).multi_processor_count
            ways["kernel"] = lambda: kernel((blocks, 1, 1), (256, 1, 1), [data, data.nbytes // 16, out])
            ways["kernel"]()
            torch.cuda.synchronize()
        except Exception as error:  # a private function of torch, or no NVRTC: the library's ways are left
            print(f"read bandwidth without a kernel of its own: {error}".splitlines()[0])
            ways.pop("kernel", None)
    return ways


def ceilings(device: str = "cuda", size: int = 8192, read_bytes: int = 2**32, seconds: float = 0.8) -> dict:
    """What the card does at most: the rates that those of attention are compared with.

    gflops: of a bfloat16 product of random matrices, size^3.  read_gbytes: the fastest way to read
    `read_bytes` of memory, read_by its name.  copy_gbytes: of a copy, bytes read plus bytes written.
    """
    on_device = {"clock": cuda_clock, "sample_s": 20e-3} if device == "cuda" else {}
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    data = torch.randn(read_bytes // 4, device=device)
    copy = torch.empty_like(data)
    reads = _reads(data)
    calls = {"product": lambda: a @ b, "copy": lambda: copy.copy_(data), **reads}
    for call in calls.values():
        call()
    samples = interleave(calls, budget_s=seconds, **on_device)
    times = {name: statistics.median(values) for name, values in samples.items()}
    by = min(reads, key=times.get)
    return {"gflops": 2 * size**3 / times["product"] / 1e9, "read_gbytes": data.nbytes / times[by] / 1e9,
            "read_by": by, "copy_gbytes": 2 * data.nbytes / times["copy"] / 1e9}
