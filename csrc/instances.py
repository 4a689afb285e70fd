"""The kernels that exist.  One row = one compiled kernel = one translation unit.

Read by the builds (flashattn/_build.py, CMakeLists.txt), the README's support matrix and the tests.  Standard
library only.  Rows are ordered: the dispatcher takes the first row that fits the problem.
"""

from __future__ import annotations

import argparse
import pathlib
import platform
from dataclasses import dataclass

OPS = ("forward", "backward", "decode")
FAMILY_SOURCES = ("cpu",)  # folders of csrc/ that hold the kernels of a build


@dataclass(frozen=True)
class Cpu:
    """A CPU kernel: one source compiled for a vector width; float32 and float64 sums, every dtype and
    option."""

    op: str
    family: str
    level: str  # CpuLevel in dispatch.h
    target: str  # of the compiler; empty: its default
    vector_bytes: int
    vector_registers: int
    machines: tuple[str, ...]  # platform.machine(); empty: any

    source = "cpu"
    dtypes = ("float32", "bfloat16", "float16", "float64")
    head_dims = "any"

    @property
    def name(self) -> str:
        return f"{self.op}_{self.family}"

    def unit(self) -> str:
        params = f"{self.op.capitalize()}Params"
        raise_target, lower_target = "", ""
        if self.target:
            raise_target = (
                f'#ifdef __clang__\n#pragma clang attribute push(__attribute__((target("{self.target}"))), '
                f'apply_to = function)\n#else\n#pragma GCC target("{self.target}")\n#endif\n'
            )
            lower_target = "\n#ifdef __clang__\n#pragma clang attribute pop\n#endif\n"
        return f"""// Generated from csrc/instances.py.
#include "cpu/baseline.h"
#include "dispatch.h"
{raise_target}
namespace flashattn::cpu {{
namespace {{
constexpr int kVectorBytes = {self.vector_bytes}, kVectorRegisters = {self.vector_registers};
}}
}}  // namespace flashattn::cpu

#include "cpu/{self.op}.h"

namespace flashattn {{
Workspace workspace_{self.name}(const {params}& p) {{
  return p.dtype == DType::f64 ? cpu::{self.op}_workspace<double>(p) : cpu::{self.op}_workspace<float>(p);
}}
void launch_{self.name}(const {params}& p) {{
  p.dtype == DType::f64 ? cpu::{self.op}<double>(p) : cpu::{self.op}<float>(p);
}}
}}  // namespace flashattn
{lower_target}"""

    def row(self) -> str:
        return (f'{{"{self.name}", "{self.family}", Device::cpu, {self.level}, workspace_{self.name}, '
                f"launch_{self.name}}}")


_X86 = ("x86_64", "AMD64")
_CPU_FAMILIES = (
    # family, level, target, vector bytes, registers, machines
    ("cpu_avx512", "kCpuAvx512", "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma", 64, 32, _X86),
    ("cpu_avx2", "kCpuAvx2", "avx2,fma", 32, 16, _X86),
    ("cpu_baseline", "kCpuBaseline", "", 16, 16, ()),
)

ROWS = tuple(Cpu(op, *family) for family in _CPU_FAMILIES for op in OPS)


def rows(sources: list[str], machine: str) -> list[Cpu]:
    """The rows of these source folders that a build for this machine holds, in the dispatcher's order."""
    return [row for row in ROWS if row.source in sources and (not row.machines or machine in row.machines)]


def registry(chosen: list[Cpu]) -> str:
    text = '// Generated from csrc/instances.py.\n#include "dispatch.h"\n\nnamespace flashattn {\n'
    for op in OPS:
        mine, params = [row for row in chosen if row.op == op], f"{op.capitalize()}Params"
        for row in mine:
            text += f"Workspace workspace_{row.name}(const {params}&);\n"
            text += f"void launch_{row.name}(const {params}&);\n"
        table = ",\n      ".join(row.row() for row in mine)
        text += (f"template <>\nconst std::vector<Instance<{params}>>& instances<{params}>() {{\n"
                 f"  static const std::vector<Instance<{params}>> table{{\n      {table}}};\n"
                 "  return table;\n}\n\n")
    return text + "}  // namespace flashattn\n"


def generate(out_dir: str, sources: list[str], machine: str, only: list[str] | None = None) -> list[str]:
    """Write one unit a row and registry.cpp into out_dir, where they differ, and return their paths.

    ``only`` keeps the rows of these names.
    """
    every = {row.name: row for row in rows(sources, machine)}
    if unknown := set(only or ()) - every.keys():
        raise ValueError(f"rows {sorted(unknown)}: expected names from {list(every)}")
    chosen = [row for name, row in every.items() if only is None or name in only]
    files = {f"{row.name}.cpp": row.unit() for row in chosen} | {"registry.cpp": registry(chosen)}
    folder = pathlib.Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        if not (folder / name).exists() or (folder / name).read_text() != text:
            (folder / name).write_text(text)
    return [str(folder / name) for name in files]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="write the kernel units, print their paths separated by ;")
    parser.add_argument("--out", required=True)
    parser.add_argument("--sources", default="cpu")
    arguments = parser.parse_args()
    print(";".join(generate(arguments.out, arguments.sources.split(","), platform.machine())))
