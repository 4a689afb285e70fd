"""Builds the emulator: ``python tests/emulator/build.py [--rows regex] [--out folder]`` prints its path.

The sources of the kernels stay as they are but for ``kernel<<<...>>>(p)``, which becomes a call of
``emulator::launch``.  Objects are kept by the hash of what they are compiled from.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "flashattn"))
import _build  # noqa: E402  (without the package, which imports torch)

sys.path.pop(0)
TABLE = _build.instances()
CSRC = HERE.parents[1] / "csrc"
OUT = HERE.parents[1] / "build" / "emulator"
HEADERS = (".h", ".cuh")
FLAGS = ("-std=c++17", "-fopenmp", "-Wall", "-Wextra", "-Wno-unknown-pragmas")
LAUNCH = re.compile(r"(\w+(?:<[^<>;]*>)?)<<<(.*?)>>>\(", re.DOTALL)


class DoesNotCompile(Exception):
    pass


def cuda_rows() -> list:
    return [row for row in TABLE.ROWS if row.module in TABLE.CUDA_MODULES]


def unit(row) -> str:
    """The row's unit, with the emulator's products in the place of the wgmma wrappers, which are asm."""
    wrappers = "template <DType dtype, int n>\nstruct Wgmma : EmulatedWgmma<dtype, n> {};\n"
    return re.sub(r"(?<=namespace flashattn::sm90 {\n).*?(?=}  // namespace flashattn::sm90)", wrappers,
                  row.unit(), count=1, flags=re.DOTALL)


def serves_others(row, chosen: list) -> bool:
    """Units of plain kernels hold what the tensor-core ones of the dtype launch too."""
    return row.op != "forward" and row.name.endswith("simt") and any(
        (other.op, other.family, other.dtypes) == (row.op, row.family, row.dtypes) for other in chosen)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def copy_kernels(to: Path, fault: tuple[str, str, str] | None = None) -> None:
    """The headers of csrc/, ready for g++; ``fault`` is (file, text, text that replaces it)."""
    for path in CSRC.rglob("*"):
        if path.suffix not in HEADERS:
            continue
        name, text = path.relative_to(CSRC).as_posix(), path.read_text()
        if fault and fault[0] == name:
            if (count := text.count(fault[1])) != 1:
                raise ValueError(f"{name}: expected {fault[1]!r} once, it is there {count} times")
            text = text.replace(fault[1], fault[2])
        write(to / name, LAUNCH.sub(r"emulator::launch(\1, \2)(", text))


@functools.cache
def headers(*folders: Path) -> bytes:
    return b"".join(path.name.encode() + path.read_bytes() for folder in folders
                    for path in sorted(folder.rglob("*")) if path.suffix in HEADERS)


def compile_source(source: Path, csrc: Path, optimise: str, objects: Path) -> Path:
    command = ["g++", *FLAGS, optimise, "-include", "cuda_runtime.h",
               *(f"-I{folder}" for folder in (HERE / "include", HERE, csrc))]
    key = hashlib.sha256(repr(command).encode() + source.read_bytes() + headers(HERE, csrc)).hexdigest()
    to = objects / f"{source.stem}-{key[:16]}.o"
    if not to.exists():
        objects.mkdir(parents=True, exist_ok=True)
        unfinished = f"{to}.{os.getpid()}"
        result = subprocess.run([*command, "-c", str(source), "-o", unfinished], text=True,
                                capture_output=True)
        if result.returncode:
            raise DoesNotCompile(f"{source}:\n{result.stderr[:4000]}")
        os.replace(unfinished, to)
    return to


def build(out: Path, rows: str = "", optimise: str = "-O2", fault: tuple[str, str, str] | None = None,
          jobs: int = 1) -> Path:
    """The emulator with the rows of the table whose names match, in the folder ``out``.

    CPU rows only if the expression says cpu; they check what the emulator expects.
    """
    every = TABLE.ROWS if "cpu" in rows else cuda_rows()
    chosen = [row for row in every if re.search(rows, row.name)]
    if not chosen:
        raise ValueError(f"rows {rows!r}: expected a part of one of {[row.name for row in every]}")
    copy_kernels(out / "csrc", fault)
    units = []
    for row in chosen + [row for row in cuda_rows() if row not in chosen and serves_others(row, chosen)]:
        units.append(out / "units" / f"{row.name}.cpp")
        write(units[-1], unit(row))
    registry = out / "units" / "registry.cpp"
    write(registry, TABLE.registry(chosen, "cpu", [], 0))
    with ThreadPoolExecutor(jobs) as pool:
        compiled = [pool.submit(compile_source, unit, out / "csrc", optimise, out / "objects")
                    for unit in (*units, registry)]
        compiled += [pool.submit(compile_source, source, CSRC, "-O2", OUT / "objects")
                     for source in (*sorted(HERE.glob("*.cpp")), CSRC / "dispatch.cpp")]
        objects = [str(job.result()) for job in compiled]
    executable = out / "emulator"
    subprocess.run(["g++", "-fopenmp", *objects, "-o", str(executable)], check=True)
    return executable


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="", help="regular expression of the rows of csrc/instances.py")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    try:
        print(build(arguments.out, arguments.rows, jobs=os.cpu_count()))
    except DoesNotCompile as problem:
        raise SystemExit(problem) from None
