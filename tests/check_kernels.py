"""Compiles every CUDA row for its own architecture and looks at what came out; needs nvcc, but no GPU.

    python tests/check_kernels.py [--archs 80,90,90a] [--rows REGEX] [--jobs N] [--if-nvcc]

Prints registers, spills and tensor-core instructions of each kernel.  Fails where a kernel spills more bytes
than kernels_ledger.json allows (none, unless a line whose regular expression matches says why), where a
tensor-core row lacks the instructions that one pass through its loop needs, or where ptxas says that it lost
performance, as when it serialises wgmma.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).absolute().parents[1]
sys.path.insert(0, str(ROOT / "flashattn"))
import _build  # noqa: E402  (without the package, which imports torch)

sys.path.pop(0)
LEDGER = ROOT / "tests/kernels_ledger.json"
OUTPUT = ROOT / "build/kernels"
INSTRUCTION = re.compile(r"^\s+/\*\w+\*/\s+(?:@!?\w+\s+)?([A-Z]\w*)", re.MULTILINE)  # of nvdisasm
RESOURCES = re.compile(r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, "  # of ptxas
                       r"(\d+) bytes spill loads.*?Used (\d+) registers", re.DOTALL)
LOSSES = re.compile(r"^.*(?:wgmma.*serializ|potential performance loss).*$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: its resources, and how often each instruction is in its SASS."""

    row: object
    name: str
    arch: str
    registers: int
    spills: tuple[int, int]  # bytes of stores and loads
    instructions: collections.Counter
    losses: list[str]  # what ptxas says of the unit's speed

    @property
    def key(self) -> str:
        """Its name in the ledger."""
        return f"{self.row.name} {self.name} sm_{self.arch}"

    def __str__(self) -> str:
        spills = "spills {} and {} bytes".format(*self.spills) if any(self.spills) else "no spills"
        multiply = "HGMMA" if self.instructions["HGMMA"] else "HMMA"
        return f"{self.key}: {self.registers} registers, {spills}, {self.instructions[multiply]} {multiply}"


def disassembler() -> str:
    """nvdisasm: on PATH, or in the package nvidia-cuda-nvdisasm."""
    packaged = Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin/nvdisasm")
    found = shutil.which("nvdisasm") or (packaged.exists() and str(packaged))
    return found or sys.exit("no nvdisasm on PATH: pip install nvidia-cuda-nvdisasm")


def kernel_name(symbol: str) -> str:
    """The last of the names in a mangled one: forward_kernel of _ZN9flashattn3mma14forward_kernelI..."""
    name, rest = "", symbol.removeprefix("_ZN")
    while length := re.match(r"\d+", rest):
        end = length.end() + int(length[0])
        name, rest = rest[length.end():end], rest[end:]
    return name


def compile_row(nvcc: str, flags: list[str], row, arch: str) -> list[Kernel]:
    cubin = OUTPUT / row.module / f"{row.name}.sm_{arch}.cubin"
    compiled = subprocess.run(
        [nvcc, *flags, "-Xptxas=-v", "-I", str(ROOT / "csrc"), f"-arch=sm_{arch}", "-cubin", "-o", str(cubin),
         str(OUTPUT / row.module / f"{row.name}.{row.suffix}")], capture_output=True, text=True)
    if compiled.returncode:
        sys.exit(f"{row.name} does not compile for sm_{arch}:\n{compiled.stderr}")
    sass = subprocess.run([disassembler(), "-c", str(cubin)], capture_output=True, text=True, check=True)
    texts = re.findall(r"^\.text\.(\w+):\n(.*?)(?=^\.text\.|\Z)", sass.stdout, re.MULTILINE | re.DOTALL)
    instructions = {symbol: collections.Counter(INSTRUCTION.findall(text)) for symbol, text in texts}
    resources = RESOURCES.findall(compiled.stderr)
    assert len(resources) == len(instructions) > 0, f"{row.name}: ptxas or nvdisasm prints something new"
    return [Kernel(row, kernel_name(symbol), arch, int(registers), (int(stores), int(loads)),
                   instructions[symbol], LOSSES.findall(compiled.stderr))
            for symbol, stores, loads, registers in resources]


def least_instructions(row) -> dict[str, int]:
    """Of the main kernel of a tensor-core row: multiplications of a warp for one tile of scores, (rows, keys)
    times each head dim, and what brings the tiles and takes O away."""
    if row.module == "sm90":  # of a warpgroup, 16 deep: Q K^T and P V; S, dP, dQ, dK and dV
        depth = {"forward": row.head_dim + row.keys,
                 "backward": row.head_dim + row.head_dim_v + row.keys + 2 * row.rows,
                 "decode": row.head_dim + 2 * row.keys}[row.op]
        stores = {"STSM": row.head_dim_v // 16} if hasattr(row, "turns") else {}
        return {"HGMMA": depth // 16, "UTMALDG": 1, **stores}
    if not hasattr(row, "warps"):
        return {}
    of_q, of_v = {"forward": (1, 1), "backward": (3, 2), "decode": (1, 1)}[row.op]
    head_dim_v = getattr(row, "value_columns", 0) or row.head_dim_v
    products = row.rows * row.keys * (of_q * row.head_dim + of_v * head_dim_v)
    if row.module == "sm75":
        return {"HMMA": products // (16 * 8 * 8 * row.warps), "LDSM": 1}
    return {"HMMA": products // (16 * 8 * 16 * row.warps), "LDSM": 1, "LDGSTS": 1}


def faults(kernel: Kernel, ledger: dict) -> list[str]:
    """What is wrong with a kernel."""
    allowed = next((line for keys, line in ledger.items() if re.fullmatch(keys, kernel.key)), None)
    found, count = [], kernel.instructions
    if any(ours > most for ours, most in zip(kernel.spills, allowed["bytes"] if allowed else (0, 0))):
        found.append(f"spills {kernel.spills} bytes of stores and loads, allowed: {allowed}")
    if allowed and not any(kernel.spills):
        found.append(f"spills nothing: remove its line from {LEDGER.name}")
    if kernel.name == f"{kernel.row.op}_kernel" and (least := least_instructions(kernel.row)):
        found += [f"{count[name]} {name}, expected at least {number}" for name, number in least.items()
                  if count[name] < number]
        if not allowed and count["LDL"] + count["STL"]:
            found.append(f"local memory: {count['LDL']} LDL, {count['STL']} STL")
    return [f"{kernel.key}: {text}" for text in found + kernel.losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", default="75,80,90a",
                        help="of the images: compute capabilities as 10 * major + minor, and 90a for sm90")
    parser.add_argument("--rows", default="", help="only rows whose name this regular expression matches")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--if-nvcc", action="store_true", help="without nvcc, succeed")
    arguments = parser.parse_args()
    home = _build.cuda_home()
    if home is None:
        print("no nvcc (CUDA_HOME, PATH, /usr/local/cuda): the CUDA kernels are not checked")
        sys.exit(not arguments.if_nvcc)
    table = _build.instances()
    for module in table.CUDA_MODULES:
        table.generate(OUTPUT / module, module)
    archs = {"sm75": "75", "sm80": r"[89]\d|\d{3}", "sm90": "90a"}  # of which a module has images
    tasks = [(row, arch) for row in table.ROWS for arch in arguments.archs.split(",")
             if row.module in archs and re.search(arguments.rows, row.name)
             and re.fullmatch(archs[row.module], arch)]
    ledger = json.loads(LEDGER.read_text())
    with ThreadPoolExecutor(arguments.jobs) as pool:
        compiled = list(pool.map(
            lambda task: compile_row(f"{home}/bin/nvcc", _build.NVCC_FLAGS, *task), tasks))
    kernels = [kernel for of_row in compiled for kernel in of_row]
    print(*kernels, sep="\n")
    found = [text for kernel in kernels for text in faults(kernel, ledger)]
    print(*found, f"{len(kernels)} kernels of {len(tasks)} rows, {len(found)} faults", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
