"""The kernels that exist.  One row = one compiled kernel = one translation unit.

Read by the builds (flashattn/_build.py, CMakeLists.txt), the README's support matrix and the tests.  Standard
library only.  Rows are ordered: the dispatcher takes the first row that fits the problem.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import platform
from dataclasses import dataclass

OPS = ("forward", "backward", "decode")
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}  # DType in params.h
ELEMENTS = {"float32": "float", "bfloat16": "__nv_bfloat16", "float16": "__half", "float64": "double"}
# Extension modules; each holds the rows of its name.  "cpu" is part of flashattn._C.
CUDA_MODULES = ("sm75", "sm80", "sm90")
PARTIAL_MODULES = ("sm90",)  # serve a part of the calls; the module before is built with them for the rest
MODULES = ("cpu", *CUDA_MODULES)
ABI_HEADERS = ("params.h", "instance.h")  # what the modules share
# What a call may ask beyond a softmax over all keys, Need in instance.h; a row serves some of them.
NEEDS = ("softcap", "alibi", "bias", "mask", "dropout", "scale", "head_dim", "alignment", "many_queries",
         "small_tiles", "many_rows", "addressing", "max_logit", "own_values", "odd_pages", "leftpad",
         "few_rows")
PLAIN = ("many_queries", "small_tiles", "many_rows", "addressing", "max_logit")  # what costs a kernel nothing


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

    module = "cpu"
    suffix = "cpp"
    module_pointer = "nullptr"
    dtypes = tuple(DTYPES)
    largest = (0, 0)
    head_dims = "any"
    serves = NEEDS

    @property
    def name(self) -> str:
        return f"{self.op}_{self.family}"

    def unit(self) -> str:
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
namespace {{
Workspace workspace(const {params(self.op)}& p) {{
  return p.dtype == DType::f64 ? cpu::{self.op}_workspace<double>(p) : cpu::{self.op}_workspace<float>(p);
}}
int launch(const {params(self.op)}& p, void*) {{
  p.dtype == DType::f64 ? cpu::{self.op}<double>(p) : cpu::{self.op}<float>(p);
  return 0;
}}
}}  // namespace
{instance(self, "0", "workspace", "launch")}
}}  // namespace flashattn
{lower_target}"""


@dataclass(frozen=True)
class Cuda:
    """What CUDA kernels have in common: each is for one dtype, and its family is a module."""

    op: str
    family: str
    dtype: str

    suffix = "cu"
    module_pointer = "&family"

    @property
    def module(self) -> str:
        return self.family

    @property
    def level(self) -> int:
        """Compute capability, 10 * major + minor."""
        return int(self.family.removeprefix("sm"))

    @property
    def machines(self) -> tuple[str, ...]:
        return (f"compute capability {self.level / 10} or newer",)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return (self.dtype,)


@dataclass(frozen=True)
class TensorCores(Cuda):
    """A kernel for head dims up to a bound."""

    head_dim: int
    head_dim_v: int

    @property
    def kernel(self) -> str:
        """What launch.cuh of its folder calls it."""
        return self.op

    @property
    def largest(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim_v

    @property
    def head_dims(self) -> str:
        bounds = f"to {self.head_dim}" + (f", {self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        return bounds if "head_dim" in self.serves else f"{bounds}, multiples of 8"

    def name_with(self, marks: str) -> str:
        width = f"d{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        return f"{self.op}_{self.family}_{DTYPES[self.dtype]}_{width}_{self.rows}x{self.keys}{marks}"

    def unit_with(self, folder: str, integers: dict[str, int], flags: dict[str, bool],
                  before: str = "") -> str:
        """The unit: constants for the kernel of a folder, named as in C++ without the k; code before it."""
        constants = ", ".join(f"k{name} = {value}" for name, value in integers.items())
        booleans = ", ".join(f"k{name} = {str(value).lower()}" for name, value in flags.items())
        row = instance(self, f"{folder}::{self.kernel}_shared_bytes<{self.name}>()",
                       f"{folder}::{self.kernel}_workspace<{self.name}>",
                       f"{folder}::launch_{self.kernel}<{self.name}>")
        return f"""// Generated from csrc/instances.py.
#include "instance.h"
{before}#include "{folder}/launch.cuh"

namespace flashattn {{
struct {self.name} {{
  static constexpr DType kDType = DType::{DTYPES[self.dtype]};
  static constexpr int {constants};
  static constexpr bool {booleans};
}};
extern const Family family;
{row}
}}  // namespace flashattn
"""


@dataclass(frozen=True)
class Mma(TensorCores):
    """A kernel of mma.sync instructions, with its tile."""

    general: bool  # serves every option and layout, otherwise plain calls: PLAIN
    rows: int  # of queries, in a tile
    keys: int  # in a tile
    warps: int
    stages: int  # tiles in flight
    min_blocks: int  # that must fit on a multiprocessor
    row_warps: int = 0  # of a backward: into how many parts warps split the rows of S, dP and dQ
    key_warps: int = 0  # and the rows of dK and dV

    @property
    def name(self) -> str:
        return self.name_with("_general" if self.general else "")

    @property
    def serves(self) -> tuple[str, ...]:
        return NEEDS if self.general else PLAIN

    def unit(self) -> str:
        return self.unit_with("mma", {
            "Arch": self.level, "HeadDim": self.head_dim, "HeadDimV": self.head_dim_v, "Rows": self.rows,
            "Keys": self.keys, "Warps": self.warps, "Stages": self.stages, "MinBlocks": self.min_blocks,
            "RowWarps": self.row_warps, "KeyWarps": self.key_warps}, {"General": self.general})


@dataclass(frozen=True)
class MmaDecode(TensorCores):
    """A decode of mma.sync instructions: rows are queries of every head of a KV head's group."""

    row_blocks: int  # of 8 rows each, of a row warp
    row_warps: int
    key_warps: int
    warp_keys: int  # that a key warp takes at a time
    stages: int  # tiles of a key warp, of K and V in turn
    min_blocks: int  # that must fit on a multiprocessor
    value_columns: int = 0  # that a block has; 0: all

    @property
    def rows(self) -> int:
        return 8 * self.row_blocks * self.row_warps

    @property
    def keys(self) -> int:
        return self.key_warps * self.warp_keys

    @property
    def warps(self) -> int:
        return self.row_warps * self.key_warps

    @property
    def name(self) -> str:
        return self.name_with("")

    @property
    def serves(self) -> tuple[str, ...]:
        return tuple(need for need in NEEDS if not (
            need == "many_rows" and self.rows <= 8 or need == "many_queries" and self.rows <= 16))

    def unit(self) -> str:
        return self.unit_with("mma", {
            "Arch": self.level, "HeadDim": self.head_dim,
            "HeadDimV": self.value_columns or self.head_dim_v, "RowBlocks": self.row_blocks,
            "RowWarps": self.row_warps, "KeyWarps": self.key_warps, "Keys": self.warp_keys,
            "Stages": self.stages, "MinBlocks": self.min_blocks}, {"General": True})


@dataclass(frozen=True)
class Hopper(TensorCores):
    """A kernel of wgmma and TMA instructions, which no later architecture has."""

    serves: tuple[str, ...]  # of NEEDS
    keys: int  # in a tile

    @property
    def machines(self) -> tuple[str, ...]:
        return (f"compute capability {self.level / 10}",)

    @property
    def name(self) -> str:
        return self.name_with(("" if "many_queries" in self.serves else "_few")
                              + ("_general" if "softcap" in self.serves else ""))

    def unit_for(self, widths: set[int], integers: dict[str, int], flags: dict[str, bool]) -> str:
        """The unit, with wgmma of these widths."""
        wrappers = "".join(wgmma(DTYPES[self.dtype], n) for n in sorted(widths))
        before = ('#include "sm90/wgmma.cuh"\n\n'
                  f"namespace flashattn::sm90 {{\n{wrappers}}}  // namespace flashattn::sm90\n\n")
        return self.unit_with("sm90", {
            "HeadDim": self.head_dim, "HeadDimV": self.head_dim_v, "Rows": self.rows, "Keys": self.keys,
            **integers}, {**flags, "General": "softcap" in self.serves}, before)


@dataclass(frozen=True)
class HopperForward(Hopper):
    """A forward of it, or a decode of many queries, which is a forward whose keys lie in a cache."""

    warpgroups: int  # that compute, each 64 rows of the tile
    blocks: int  # that share a multiprocessor
    query_stages: int  # tiles in flight
    key_stages: int
    value_stages: int
    queries_in_registers: bool
    turns: bool  # warpgroups take turns between tensor cores and softmax

    @property
    def kernel(self) -> str:
        return "prefill" if self.op == "decode" else self.op

    @property
    def rows(self) -> int:
        """Of queries, in a tile."""
        return 64 * self.warpgroups

    def unit(self) -> str:
        return self.unit_for({self.keys, self.head_dim_v}, {
            "Warpgroups": self.warpgroups, "Blocks": self.blocks, "QueryStages": self.query_stages,
            "KeyStages": self.key_stages, "ValueStages": self.value_stages}, {
            "QueriesInRegisters": self.queries_in_registers, "Turns": self.turns,
            "Cached": self.op == "decode"})


@dataclass(frozen=True)
class HopperBackward(Hopper):
    """A backward of it: two warpgroups compute, each for 64 keys of the tile; when that has no more than 64
    keys, one dV and dQ and the other one dK."""

    rows: int  # of queries, in a tile: 64 or 128
    query_stages: int  # tiles in flight
    dout_stages: int
    steps_in_turn: int  # of the product dO V^T, 16 deep each, before the other warpgroup's turn
    bulk_sums: bool  # dQ is added by the copy engine, otherwise by the threads

    @property
    def halves(self) -> bool:
        """Does a warpgroup take half the queries of a tile at a time?"""
        return self.keys == 128 and self.head_dim + self.head_dim_v > 256

    @property
    def query_columns(self) -> int:
        """Columns of dQ that a warpgroup computes at once."""
        if self.halves:
            return 32
        if self.keys == 64:
            return 64
        return self.head_dim // 2 if self.rows == 64 else self.head_dim

    def unit(self) -> str:
        rows = self.rows // 2 if self.halves else self.rows
        return self.unit_for({rows, self.head_dim, self.head_dim_v, self.query_columns}, {
            "QueryStages": self.query_stages, "DOutStages": self.dout_stages,
            "StepsInTurn": self.steps_in_turn}, {"BulkSums": self.bulk_sums})


@dataclass(frozen=True)
class HopperDecode(Hopper):
    """A decode of it, where values lie in the first columns of the keys: a tile has 64 queries and heads."""

    rows = 64

    def unit(self) -> str:
        return self.unit_for({self.keys, self.head_dim_v // 2}, {
            "RowBlocks": 2, "RowWarps": 4, "KeyWarps": 1, "Stages": 2, "MinBlocks": 1}, {})


def wgmma(dtype: str, n: int) -> str:
    """The wrappers of wgmma for one shape (Wgmma in csrc/sm90/wgmma.cuh): an instruction has a list of n / 2
    results, which C++ cannot write for any n."""
    count = n // 2
    results = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a = ", ".join(f"%{count + 1 + i}" for i in range(4))
    begin = (f'asm volatile("{{ .reg .pred add; setp.ne.b32 add, %{count}, 0; '
             f'wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {{{results}}}, ')
    return f"""template <>
struct Wgmma<DType::{dtype}, {n}> {{
  template <int rows = 0>
  __device__ static void ss(float (&d)[{count}], uint64_t a, uint64_t b, int add) {{
    {begin}%{count + 1}, %{count + 2}, add, 1, 1, 0, %{count + 3}; }}"
                 : {outputs}
                 : "r"(add), "l"(a), "l"(b), "n"(rows));
  }}
  template <int rows>
  __device__ static void rs(float (&d)[{count}], const uint32_t (&a)[4], uint64_t b, int add) {{
    {begin}{{{a}}}, %{count + 5}, add, 1, 1, %{count + 6}; }}"
                 : {outputs}
                 : "r"(add), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(rows));
  }}
}};
"""


# What the other kernels of a family launch too (csrc/any/launches.cuh); the units of these hold it.
_LEFT_TO_SIMT = {"backward": ("sink_gradient", "bias_gradient"), "decode": ("append",)}


@dataclass(frozen=True)
class Simt(Cuda):
    """A kernel of ordinary instructions, which serves every head dim, option and layout."""

    largest = (0, 0)
    head_dims = "any"
    serves = NEEDS

    @property
    def name(self) -> str:
        return f"{self.op}_{self.family}_{DTYPES[self.dtype]}_simt"

    def unit(self) -> str:
        element = ELEMENTS[self.dtype]
        shared = "".join(f"template int launch_{what}<{element}>(const {params(self.op)}&, cudaStream_t);\n"
                         for what in _LEFT_TO_SIMT.get(self.op, ()))
        row = instance(self, f"sizeof(any::SharedTiles<any::Sum<{element}>>)",
                       f"any::simt_workspace<{element}>", "launch")
        return f"""// Generated from csrc/instances.py.
#include "any/launch.cuh"
#include "instance.h"

namespace flashattn::any {{
{shared}}}  // namespace flashattn::any

namespace flashattn {{
namespace {{
int launch(const {params(self.op)}& p, void* stream) {{
  return any::launch_simt_{self.op}<{element}>(p, static_cast<cudaStream_t>(stream));
}}
}}  // namespace
extern const Family family;
{row}
}}  // namespace flashattn
"""


def params(op: str) -> str:
    return f"{op.capitalize()}Params"


def instance(row, shared_bytes: str, workspace: str, launch: str) -> str:
    """Declaration and definition of a row's Instance (instance.h)."""
    head = f"const Instance<{params(row.op)}> instance_{row.name}"
    dtypes = ", ".join(f"DType::{DTYPES[dtype]}" for dtype in row.dtypes)
    serves = ", ".join(f"Need::{need}" for need in row.serves)
    return (f"extern {head};\n{head}{{\n"
            f'    "{row.name}", "{row.family}", {row.module_pointer}, {row.level}, set_of({dtypes}), '
            f"{row.largest[0]}, {row.largest[1]},\n"
            f"    {'kEveryNeed' if row.serves == NEEDS else f'set_of({serves})'},\n"
            f"    {shared_bytes}, {workspace}, {launch}}};")


def contract() -> str:
    """Digest of the declarations that modules share: those of other sources do not fit together."""
    here = pathlib.Path(__file__).parent
    text = b"".join((here / name).read_bytes() for name in ABI_HEADERS)
    return f"flashattn family {hashlib.sha256(text).hexdigest()[:16]}"


def registry(chosen: list, module: str, images: list[int], ptx: int) -> str:
    """The tables of a module; that of a CUDA family is its Python module too."""
    cuda = module != "cpu"
    tables = ""
    for op in OPS:
        mine = [f"instance_{row.name}" for row in chosen if row.op == op]
        tables += "".join(f"extern const Instance<{params(op)}> {name};\n" for name in mine)
        tables += (f"static const Instance<{params(op)}>* const {op}_rows[] = {{\n    "
                   f"{', '.join([f'&{name}' for name in mine] + ['nullptr'])}}};\n")
    tables += (f"const Tables tables{{{', '.join(f'{op}_rows' for op in OPS)}}};\n"
               f'const char* const kContract = "{contract()}";\n')
    header = '"families/module.h"' if cuda else '"instance.h"'
    if cuda:
        tables += (f"static const int images[] = {{{', '.join(map(str, [*images, 0]))}}};\n"
                   "extern const Family family;\n"
                   f'const Family family{{"{module}", images, {ptx}, tables, device, error_text}};\n')
    python = "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { flashattn::export_family(m, flashattn::family); }\n"
    return (f"// Generated from csrc/instances.py.\n#include {header}\n\nnamespace flashattn {{\n{tables}"
            f"}}  // namespace flashattn\n{python if cuda else ''}")


def rows(module: str, machine: str) -> list:
    """The rows of a module in a build for this kind of machine, in the dispatcher's order."""
    return [row for row in ROWS if row.module == module
            and (module != "cpu" or not row.machines or machine in row.machines)]


def generate(out_dir: str, module: str = "cpu", only: list[str] | None = None, images: list[int] = (),
             ptx: int = 0) -> list[str]:
    """Write one unit a row and registry.cpp into out_dir, where they differ, and return their paths.

    ``only`` keeps the rows of these names; ``images`` and ``ptx`` are what a CUDA family is compiled for
    (Family in instance.h).
    """
    every = {row.name: row for row in rows(module, platform.machine())}
    if unknown := set(only or ()) - every.keys():
        raise ValueError(f"rows {sorted(unknown)}: expected names from {list(every)}")
    chosen = [row for name, row in every.items() if only is None or name in only]
    files = {f"{row.name}.{row.suffix}": row.unit() for row in chosen}
    files["registry.cpp"] = registry(chosen, module, images, ptx)
    folder = pathlib.Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        if not (folder / name).exists() or (folder / name).read_text() != text:
            (folder / name).write_text(text)
    return [str(folder / name) for name in files]


# ---- rows ----------------------------------------------------------------------------------------------

_X86 = ("x86_64", "AMD64")
_CPU_FAMILIES = (
    # family, level, target, vector bytes, registers, machines
    ("cpu_avx512", "kCpuAvx512", "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma", 64, 32, _X86),
    ("cpu_avx2", "kCpuAvx2", "avx2,fma", 32, 16, _X86),
    ("cpu_baseline", "kCpuBaseline", "", 16, 16, ()),
)

# op, head dims (D, Dv), general, then the tile: rows, keys, warps, stages, min_blocks (a backward also has
# row_warps, key_warps).
# Every forward has 64 keys in a tile, so that no result depends on which row of a family serves a call.
# Narrow before wide; of one width what is faster on a large chip first, then what fits smaller ones.
_SM80_TILES = (
    ("forward", 64, 64, False, 128, 64, 4, 2, 2),
    ("forward", 96, 96, False, 128, 64, 4, 2, 2),
    ("forward", 128, 128, False, 128, 64, 4, 1, 2),
    ("forward", 192, 128, False, 64, 64, 4, 1, 2),
    ("forward", 192, 192, False, 64, 64, 4, 1, 2),
    ("forward", 256, 256, False, 64, 64, 4, 1, 2),
    ("forward", 64, 64, True, 64, 64, 4, 1, 2),
    ("forward", 128, 128, True, 64, 64, 4, 1, 2),
    ("forward", 256, 256, True, 64, 64, 4, 1, 2),
    ("backward", 64, 64, False, 64, 64, 4, 1, 3, 2, 2),
    ("backward", 96, 96, False, 64, 64, 4, 2, 2, 2, 2),
    ("backward", 128, 128, False, 64, 128, 8, 2, 1, 2, 4),
    ("backward", 128, 128, False, 64, 64, 4, 1, 2, 2, 2),
    ("backward", 192, 192, False, 64, 64, 8, 2, 1, 2, 2),
    ("backward", 256, 256, False, 64, 64, 8, 1, 1, 2, 2),
    ("backward", 256, 256, False, 32, 32, 4, 1, 1, 2, 2),
    ("backward", 64, 64, True, 64, 64, 8, 1, 1, 4, 4),
    ("backward", 128, 128, True, 64, 64, 8, 1, 1, 4, 4),
    ("backward", 256, 256, True, 32, 32, 4, 1, 1, 2, 2),
)
_SM75_TILES = (  # 64 KB of shared memory, no asynchronous copies
    ("forward", 64, 64, False, 64, 64, 4, 1, 2),
    ("forward", 128, 128, False, 64, 64, 4, 1, 1),
    ("forward", 64, 64, True, 64, 64, 4, 1, 2),
    ("forward", 128, 128, True, 64, 64, 4, 1, 1),
    ("backward", 64, 64, False, 64, 64, 4, 1, 1, 2, 2),
    ("backward", 128, 128, False, 32, 32, 4, 1, 1, 2, 2),
    ("backward", 64, 64, True, 64, 64, 8, 1, 1, 4, 4),
    ("backward", 128, 128, True, 32, 32, 4, 1, 1, 2, 2),
)
# head dims, row blocks, row warps, key warps, keys of a warp, stages, min_blocks, columns of V if not all.
_SM80_DECODE = (
    (64, 64, 1, 1, 4, 32, 6, 2),
    (64, 64, 4, 2, 2, 32, 4, 2),
    (128, 128, 1, 1, 4, 16, 6, 2),
    (128, 128, 2, 1, 4, 16, 5, 2),
    (128, 128, 2, 4, 1, 64, 4, 2),
    (192, 128, 2, 1, 4, 16, 3, 2),
    (256, 256, 1, 1, 4, 16, 3, 2),
    (256, 256, 2, 4, 1, 16, 4, 2),
    (576, 512, 2, 1, 4, 16, 2, 1, 256),
    (576, 512, 2, 4, 1, 16, 4, 1, 256),
)
_SM75_DECODE = (
    (64, 64, 1, 1, 4, 16, 2, 2),
    (64, 64, 2, 4, 1, 32, 2, 2),
    (128, 128, 1, 1, 4, 16, 2, 2),
    (128, 128, 2, 4, 1, 16, 2, 2),
)
_FEW = ("max_logit", "many_rows", "small_tiles")
_MANY = (*_FEW, "many_queries")
_LARGE = ("max_logit", "many_rows", "many_queries")
_SCORES = (*_MANY, "softcap", "alibi")
_CACHED = (*_MANY, "own_values")
_LATENT = (*_MANY, "leftpad", "few_rows")
# op, head dims (D, Dv), serves, keys in a tile, warpgroups, blocks, stages of q, k and v,
# q in registers, turns.
_SM90_FORWARD = (
    ("forward", 64, 64, _FEW, 64, 1, 3, 2, 2, 2, False, False),
    ("forward", 64, 64, _MANY, 128, 3, 1, 2, 2, 2, False, True),
    ("forward", 80, 80, _LARGE, 96, 3, 1, 2, 2, 2, False, True),
    ("forward", 80, 80, _MANY, 128, 2, 1, 2, 2, 2, True, True),
    ("forward", 96, 96, _LARGE, 96, 3, 1, 2, 2, 2, False, True),
    ("forward", 96, 96, _MANY, 128, 2, 1, 2, 2, 2, True, True),
    ("forward", 128, 128, _LARGE, 80, 3, 1, 2, 2, 2, False, True),
    ("forward", 128, 128, _MANY, 128, 2, 1, 2, 2, 2, True, True),
    ("forward", 192, 128, _MANY, 128, 2, 1, 1, 2, 2, False, True),
    ("forward", 192, 192, _MANY, 96, 2, 1, 1, 2, 2, False, True),
    ("forward", 256, 256, _MANY, 80, 2, 1, 1, 2, 2, False, True),
    ("forward", 64, 64, _SCORES, 128, 2, 1, 2, 2, 2, False, True),
    ("forward", 128, 128, _SCORES, 128, 2, 1, 2, 2, 2, False, True),
    ("forward", 256, 256, _SCORES, 64, 2, 1, 1, 2, 2, False, True),
    ("decode", 64, 64, _CACHED, 128, 2, 1, 2, 2, 2, False, True),
    ("decode", 128, 128, _CACHED, 128, 2, 1, 2, 3, 2, True, True),
    ("decode", 256, 256, _CACHED, 64, 2, 1, 1, 3, 2, False, True),
)
# op, head dims (D, Dv), serves, keys and rows in a tile, stages of q and dout, steps in a turn, bulk sums.
_SM90_BACKWARD = (
    ("backward", 64, 64, _MANY, 128, 128, 3, 2, 2, True),
    ("backward", 96, 96, _MANY, 128, 64, 3, 2, 3, True),
    ("backward", 128, 128, _MANY, 128, 64, 3, 3, 4, True),
    ("backward", 192, 128, _MANY, 128, 64, 2, 3, 0, False),
    ("backward", 192, 192, _MANY, 64, 64, 2, 2, 0, False),
    ("backward", 256, 256, _MANY, 64, 64, 2, 2, 0, False),
    ("backward", 64, 64, _SCORES, 128, 64, 3, 3, 2, True),
    ("backward", 128, 128, _SCORES, 128, 64, 3, 3, 4, True),
    ("backward", 256, 256, _SCORES, 64, 64, 2, 2, 0, False),
)
# op, head dims (D, Dv), serves, keys in a tile.
_SM90_DECODE = (("decode", 576, 512, _LATENT, 64),)
_MMA = {"sm80": (_SM80_TILES, _SM80_DECODE, ("bfloat16", "float16")),
        "sm75": (_SM75_TILES, _SM75_DECODE, ("float16",))}


def _hopper() -> list:
    return [kind(op, "sm90", dtype, *tile)
            for kind, tiles in ((HopperForward, _SM90_FORWARD), (HopperBackward, _SM90_BACKWARD),
                                (HopperDecode, _SM90_DECODE))
            for op, *tile in tiles for dtype in ("bfloat16", "float16")]


def _cuda(family: str) -> list:
    """The rows of a family: tensor cores first, then what serves the rest."""
    tiles, decode_tiles, dtypes = _MMA[family]
    mma = [Mma(op, family, dtype, *tile) for op, *tile in tiles for dtype in dtypes]
    mma += [MmaDecode("decode", family, dtype, *tile) for tile in decode_tiles for dtype in dtypes]
    return mma + [Simt(op, family, dtype) for op in OPS for dtype in DTYPES]


ROWS = (*_hopper(), *_cuda("sm80"), *_cuda("sm75"),
        *(Cpu(op, *family) for family in _CPU_FAMILIES for op in OPS))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="write the kernel units, print their paths separated by ;")
    parser.add_argument("--out", required=True)
    parser.add_argument("--module", choices=MODULES, default="cpu")
    arguments = parser.parse_args()
    print(";".join(generate(arguments.out, arguments.module)))
