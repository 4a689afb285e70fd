"""Host logic against brute force: mask ranges, split choice, the table of kernels and its dispatch."""

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import torch

import flashattn
from compare import check_backward, check_decode, check_forward
from flashattn import _build, _load, dispatch

CAPS = {"forward": 80, "backward": 60, "decode": 30}         # rows of a family
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


TABLE = _build.instances()
CPU_ROWS = TABLE.rows("cpu", platform.machine())
# What this build holds, in the dispatcher's order.
ROWS = [row for module in reversed(TABLE.CUDA_MODULES) if module in _load.extension().build_info()["cuda"]
        for row in TABLE.rows(module, platform.machine())] + CPU_ROWS


def candidates(op, dtype=torch.float32):
    return _load.extension().candidates(op, "cpu", str(dtype).removeprefix("torch."))


def family_of(name):
    return next(row["family"] for row in _load.extension().instances() if row["name"] == name)


# Mask ranges ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("left", [-1, 0, 1, 2, 5, 100])
@pytest.mark.parametrize("right", [-1, 0, 1, 3, 100])
def test_visible_range(left, right):
    visible_range = _load.extension().visible_range
    for len_q in range(1, 7):
        for len_k in range(7):
            for query in range(len_q):
                for leftpad in range(len_k + 1):
                    position = query + len_k - len_q
                    low = leftpad if left < 0 else max(leftpad, position - left)
                    high = len_k if right < 0 else position + right + 1
                    seen = [key for key in range(len_k) if low <= key < high]
                    first, last = visible_range(query, len_q, len_k, left, right, leftpad)
                    assert list(range(first, last)) == seen
                    assert 0 <= first <= last <= len_k


def test_visible_range_beyond_32_bits():
    visible_range = _load.extension().visible_range
    long = 2**33
    assert visible_range(long - 1, long, long, 10, 0) == (long - 11, long)
    assert visible_range(0, long, long, -1, 0) == (0, 1)
    assert visible_range(0, 1, long, 2**40, 2**40) == (0, long)


# Split choice -----------------------------------------------------------------------------------------------

LENGTHS = [0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4096, 4097, 100_000, 2**33]
TILES = [0, 1, 2, 3, 4, 8, 31, 1000]
PROCESSORS = [1, 2, 3, 8, 64]


@pytest.mark.parametrize("wanted", [0, 1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("processors", PROCESSORS)
def test_splits_cover_the_keys(processors, wanted):
    """Every key is in a split, none is empty, and there are never more than were asked for."""
    for tiles in TILES:
        for length in LENGTHS:
            count, keys = _load.extension().decode_splits(tiles, length, processors, wanted, False)
            assert count >= 1 and keys >= 1
            assert (count - 1) * keys < max(1, length) <= max(1, count * keys)
            assert count <= wanted or wanted == 0


def test_wanted_splits_are_given():
    decode_splits = _load.extension().decode_splits
    _, block = decode_splits(1, 10**6, 1, 10**6, False)       # the least keys of a split
    for wanted in (1, 2, 3, 7, 64):
        for blocks in (1, 5):
            assert decode_splits(9, wanted * blocks * block, 2, wanted, False) == (wanted, blocks * block)


def test_chosen_splits():
    """Short splits are not worth their merge; long caches of few sequences occupy all processors."""
    for processors in PROCESSORS:
        for tiles in TILES:
            for length in LENGTHS:
                count, keys = _load.extension().decode_splits(tiles, length, processors, 0, False)
                assert count == 1 or keys >= 256
                if length >= 1024 * processors:
                    assert max(1, tiles) * count >= processors


def test_invariant_splits_depend_on_nothing_else():
    lengths_of_splits = {_load.extension().decode_splits(tiles, length, processors, 0, True)[1]
                         for tiles in TILES for length in LENGTHS for processors in PROCESSORS}
    assert len(lengths_of_splits) == 1
    keys = lengths_of_splits.pop()
    for length in LENGTHS:
        assert _load.extension().decode_splits(1, length, 1, 0, True)[0] == max(1, -(-length // keys))


TEAM_SIZES = """
#include <cstdio>
#include "common/team.h"
int main() {
  for (int processors : {1, 3, 8, 132, 170})
    for (int resident : {1, 2})
      for (int capability : {80, 90, 120})
        for (int tiles : {0, 1, 2, 3, 8, 31, 32, 64, 66, 67, 128, 132, 133, 264, 300, 512, 5000})
          for (int units : {1, 2, 3, 16, 17, 32, 64, 128, 1000, 1 << 24})
            for (int equal : {0, 1}) {
              const auto team = flashattn::team_size(tiles, units, equal, processors, resident, capability);
              std::printf("%d %d %d %d %d %d %d %d\\n", processors, resident, capability, tiles, units, equal,
                          team.blocks, team.cluster);
            }
}
"""


def test_teams(tmp_path):
    """Teams fit on the chip at once, have work for each block, and clusters where there are any."""
    source, program, csrc = tmp_path / "team.cpp", tmp_path / "team", Path(__file__).parents[1] / "csrc"
    source.write_text(TEAM_SIZES)
    subprocess.run(["c++", "-std=c++17", f"-I{csrc}", str(source), "-o", str(program)], check=True)
    lines = subprocess.run([str(program)], check=True, text=True, capture_output=True).stdout
    teams = {}
    for line in lines.splitlines():
        *case, blocks, cluster = map(int, line.split())
        teams[tuple(case)] = blocks, cluster
        processors, resident, capability, tiles, units, equal = case
        assert 0 <= blocks <= 32 and blocks <= -(-units // 2)
        if tiles > processors:
            assert blocks <= equal
        else:
            assert tiles * blocks <= processors
        if cluster:
            assert capability == 90 and 2 <= blocks <= 8
        if blocks and not equal:                              # no block has much more than another one
            assert units <= 32 * blocks
        if blocks and units > 8 * blocks:
            assert 4 * tiles * blocks >= 3 * processors
    h200 = {(tiles, units): teams[132, 2, 90, tiles, units, 1] for tiles in (1, 8, 32, 64, 128, 300, 512)
            for units in (16, 128)}
    assert h200[8, 16] == (8, 1) and h200[8, 128] == (16, 0) and h200[32, 128] == (4, 0)
    assert h200[64, 128] == (2, 1) and h200[128, 128] == (1, 0) and h200[512, 128] == (1, 0)
    assert h200[300, 128] == (0, 0) and h200[1, 128] == (32, 0)


# The table --------------------------------------------------------------------------------------------------

def test_every_row_is_built():
    built = [(row["op"], row["name"], row["family"]) for row in _load.extension().instances()]
    for op in TABLE.OPS:
        expected = [(row.op, row.name, row.family) for row in ROWS if row.op == op]
        assert [row for row in built if row[0] == op] == expected
    assert len(built) == len(ROWS)


def test_names_are_unique():
    assert max(Counter(row.name for row in TABLE.ROWS).values()) == 1


def test_caps():
    for (op, family), rows in Counter((row.op, row.family) for row in TABLE.ROWS).items():
        assert rows <= CAPS[op], f"{family} has {rows} {op} rows"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "riscv64"])
def test_every_machine_has_a_kernel_for_every_op(machine):
    assert {row.op for row in TABLE.rows("cpu", machine)} == set(TABLE.OPS)


def test_the_modules_that_are_loaded_are_those_of_the_table():
    assert _load.CUDA_FAMILIES == TABLE.CUDA_MODULES
    assert {row.module for row in TABLE.ROWS} == {"cpu", *TABLE.CUDA_MODULES}


WHOLE = [module for module in TABLE.CUDA_MODULES if module not in TABLE.PARTIAL_MODULES]


@pytest.mark.parametrize("module", WHOLE)
def test_a_general_row_is_the_last_of_its_family_and_dtype(module):
    """So that every call finds a kernel: what the others refuse, it serves."""
    for op in ("forward", "backward"):
        for dtype in map(str, DTYPES):
            mine = [row for row in TABLE.rows(module, "any") if row.op == op
                    and dtype.removeprefix("torch.") in row.dtypes]
            assert mine[-1].head_dims == "any" and mine[-1].serves == TABLE.NEEDS


@pytest.mark.parametrize("arch", ["7.5", "8.0", "8.6", "9.0", "9.0+PTX", "10.0", "12.0", _build.ALL_ARCHS])
def test_a_partial_family_is_not_built_alone(arch):
    assert set(WHOLE) & _build._families(arch).keys()


def test_needs_have_the_names_of_the_table():
    extension = _load.extension()
    for need in TABLE.NEEDS:
        assert extension.candidates("forward", "cpu", "float32", needs=[need])
    with pytest.raises(ValueError, match=f"needs has 'speed': expected some of {' '.join(TABLE.NEEDS)}$"):
        extension.candidates("forward", "cpu", "float32", needs=["mask", "speed"])


@pytest.mark.parametrize("row", [row for row in TABLE.ROWS if isinstance(row, TABLE.Hopper)],
                         ids=lambda row: row.name)
def test_what_a_hopper_kernel_knows_of_itself(row):
    """A kernel leaves out what its row does not serve, and only that."""
    unit = row.unit()
    assert set(row.serves) <= set(TABLE.NEEDS) and ("softcap" in row.serves) == ("alibi" in row.serves)
    assert f"kGeneral = {str('softcap' in row.serves).lower()}" in unit
    assert f"kRows = {row.rows}, kKeys = {row.keys}," in unit and row.keys % 16 == row.rows % 64 == 0
    scores = row.rows // 2 if getattr(row, "halves", False) else row.rows
    widths = {"forward": (row.keys, row.head_dim_v), "backward": (scores, row.head_dim, row.head_dim_v),
              "prefill": (row.keys, row.head_dim_v), "decode": (row.keys, row.head_dim_v // 2)}
    assert row.op != "backward" or f"kBulkSums = {str(row.bulk_sums).lower()}" in unit
    assert all(f"Wgmma<DType::{TABLE.DTYPES[row.dtype]}, {n}>" in unit for n in widths[row.kernel])
    assert row.kernel == "prefill" or ("few_rows" in row.serves) == (row.op == "decode")
    assert ("_few" in row.name) == ("many_queries" not in row.serves) and row.machines == (
        "compute capability 9.0",)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", TABLE.OPS)
def test_every_dtype_is_served(op, dtype):
    asked = candidates(op, dtype)
    assert [name for name, _ in asked] == [row.name for row in CPU_ROWS if row.op == op]
    assert any(why_not == "" for _, why_not in asked)


@pytest.mark.parametrize(("arguments", "text"), [
    (("attend", "cpu", "float32"), "op.*attend.*forward.*backward.*decode"),
    (("forward", "abacus", "float32"), "device.*abacus.*cpu"),
    (("forward", "cpu", "int8"), "dtype.*int8.*float32"),
], ids=["op", "device", "dtype"])
def test_candidates_refuses(arguments, text):
    with pytest.raises(ValueError, match=text):
        _load.extension().candidates(*arguments)


# Dispatch ---------------------------------------------------------------------------------------------------

def test_force_family():
    """Only that family serves inside the block; nested blocks and errors restore what was before."""
    before = candidates("forward")
    for family in dispatch.families():
        with flashattn.force_family(family):
            for (name, why_not), (_, why_not_before) in zip(candidates("forward"), before, strict=True):
                same = family_of(name) == family
                assert why_not == (why_not_before if same else f"{family} is forced")
            with pytest.raises(ZeroDivisionError), flashattn.force_family("cpu_baseline"):
                raise ZeroDivisionError
            assert _load.extension().forced_family() == family
        assert candidates("forward") == before


def test_force_one_kernel():
    with flashattn.force_family("forward_cpu_baseline"):
        assert [name for name, why_not in candidates("forward") if not why_not] == ["forward_cpu_baseline"]
        assert all(why_not == "forward_cpu_baseline is forced" for _, why_not in candidates("backward"))


def test_force_family_refuses():
    with pytest.raises(ValueError, match="abacus.*cpu_baseline"), flashattn.force_family("abacus"):
        pass
    assert _load.extension().forced_family() == ""


@pytest.mark.parametrize("op", TABLE.OPS)
def test_explain_names_the_kernel_that_serves(op):
    q = k = v = torch.randn(1, 4, 2, 8)
    found = flashattn.explain(q, k, v, op=op)
    asked = candidates(op)
    assert found.kernel == next(name for name, why_not in asked if not why_not)
    assert found.op == op and found.kernel in str(found)
    for name, why_not in asked[: [name for name, _ in asked].index(found.kernel)]:
        assert found.rejected[name] == why_not and name in str(found) and why_not in str(found)
    with flashattn.force_family("cpu_baseline"):
        forced = flashattn.explain(q, k, v, op=op)
    assert forced.kernel == f"{op}_cpu_baseline"
    assert all("forced" in why_not for why_not in forced.rejected.values())


def test_explain_refuses():
    """What the function refuses too."""
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(TypeError, match="attend"):
        flashattn.explain(q, q, q, attend=True)
    with pytest.raises(ValueError, match="softcap is -1"):
        flashattn.explain(q, q, q, softcap=-1.0)
    with pytest.raises(ValueError, match="op.*attend.*forward"):
        flashattn.explain(q, q, q, op="attend")


def test_build_info():
    info = _load.extension().build_info()
    assert info["torch"] == torch.__version__.split("+")[0]
    assert info["openmp"] is True, "without OpenMP the kernels are serial"
    assert isinstance(info["compiler"], str) and isinstance(info["cuda"], dict)


def test_explain_computes_nothing_and_leaves_nothing_behind():
    q, cache = torch.randn(1, 1, 2, 8), torch.zeros(1, 4, 2, 8)
    flashattn.explain(q, cache, cache, op="decode", k_new=q, v_new=q, cache_seqlens=0)
    assert not cache.any()
    flashattn.decode(q, cache, cache.clone(), k_new=q, v_new=q, cache_seqlens=0)
    assert cache.any()


def test_debug_checks():
    """A switch of the process, off unless asked for; without CUDA tensors it changes nothing."""
    on = _load.extension().debug_checks
    assert not on()
    with flashattn.debug_checks():
        assert on()
        with flashattn.debug_checks(False):
            assert not on()
        with pytest.raises(ZeroDivisionError), flashattn.debug_checks():
            1 / 0  # noqa: B018
        assert on()
        check_forward(*(torch.randn(1, 4, 2, 8) for _ in range(3)), causal=True)
    assert not on()


# Dispatch to CUDA families ----------------------------------------------------------------------------------

def without_kernels(family, images, ptx):
    """Source of a Python module: the rows of a family in the table, which do nothing and share no memory."""
    rows = TABLE.rows(family, "")
    instances = "\n".join(TABLE.instance(row, "0", *(f"{name}<{TABLE.params(row.op)}>" for name in (
        "workspace", "launch"))) for row in rows)
    return (f"{TABLE.registry(rows, family, images, ptx)}\n"
            f"namespace flashattn {{\n{instances}\n}}  // namespace flashattn\n")


@pytest.fixture(scope="module")
def faked(tmp_path_factory):
    """What tests/fake_families.py found."""
    folder, here = tmp_path_factory.mktemp("fake"), Path(__file__).parent
    includes = [here / "host", _build.csrc(), Path(torch.__file__).parent / "include",
                sysconfig.get_path("include")]
    sources = {"fakes": here / "host" / "fake_families.cpp"}
    for family, (images, ptx) in _build._families(_build.ALL_ARCHS).items():
        sources[f"_{family}"] = folder / f"{family}.cpp"
        sources[f"_{family}"].write_text(without_kernels(family, images, ptx))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    compilers = [subprocess.Popen([
        "c++", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", *(f"-I{path}" for path in includes),
        f'-DCONTRACT="{TABLE.contract()}"', f"-DTORCH_EXTENSION_NAME={name}", source,
        "-o", folder / f"{name}{suffix}"]) for name, source in sources.items()]
    assert not any([compiler.wait() for compiler in compilers])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(here.parent)])}
    result = subprocess.run([sys.executable, here / "fake_families.py"], check=True, text=True,
                            stdout=subprocess.PIPE, env=environment)
    return json.loads(result.stdout)


def test_added_families_come_first(faked):
    assert [row["name"] for row in faked["instances"]] == ["new", "wide", "rest", "old"]
    assert all(row["device"] == "cuda" for row in faked["instances"])
    assert faked["cuda"] == {"sm80": ["8.0", "9.0", "12.0", "9.0+PTX"], "sm75": ["7.5"]}
    assert faked["families"][:2] == ["sm80", "sm75"] and faked["device"] == [90, 132, 227 << 10]


def test_a_family_of_other_sources_is_refused(faked):
    assert "compiled from other sources" in faked["stale"] and TABLE.contract() in faked["stale"]


def test_every_chip(faked):
    """The reasons of every row on every chip, against the rules written down once more."""
    shared = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
    for chip, dtype, head_dim, needs, candidates in faked["choices"]:
        plain = "mask" not in needs
        reasons = dict(candidates)
        assert list(reasons) == ["new", "wide", "rest", "old"]
        image = chip >= 80                                    # of sm80: 8.0 for 8.x, 9.0, 12.0, PTX for 10.0
        half, narrow = dtype != "float32", {"new": 64, "wide": 128, "rest": 999}
        fits = {name: image and (half or name == "rest") and head_dim <= narrow[name]
                and (plain or name == "rest") and {"new": 48, "wide": 160, "rest": 0}[name] <= shared[chip]
                for name in narrow}
        fits["old"] = chip == 75 and dtype == "float16" and head_dim <= 128
        assert {name: reason == "" for name, reason in candidates} == fits, (chip, dtype, head_dim, needs)
        if chip in (86, 89, 120) and half and head_dim == 128 and plain:
            assert reasons["wide"] == "needs 163840 bytes of shared memory a block, the device has 101376"
        if chip == 75:
            assert reasons["rest"] == "needs compute capability 8.0 or newer, this is 7.5"
        else:
            assert reasons["old"] == f"was not built for compute capability {chip / 10}, only for 7.5"
            if not half:
                assert reasons["new"] == "serves float16 and bfloat16 only"
            elif head_dim == 256:
                assert reasons["wide"] == "serves head dims (D, Dv) up to (128, 128)"
            elif head_dim == 64 and not plain:
                assert reasons["new"] == "does not serve mask"


def test_forced_and_missing(faked):
    assert faked["decode"] == []
    assert dict(map(tuple, faked["forced"])) == {
        **dict.fromkeys(("new", "wide", "rest"), "sm75 is forced"),
        "old": "was not built for compute capability 9.0, only for 7.5"}


MANY = "packed sequences, batch_invariant or many queries"
MULTIPLE = "a head dim that is not a multiple of 8"
VECTORS = "a tensor whose base or strides are not multiples of 16 bytes"
STRIDE = "a stride of 0 or too large for TMA"


@pytest.mark.parametrize(("call", "bare", "plain"), [
    *((name, None, None) for name in (
        "nothing", "sink", "causal", "left", "right", "one row", "128 queries")),
    ("129 queries", MANY, None),
    *((name, name, name) for name in ("softcap", "alibi_slopes", "bias", "mask", "dropout")),
    ("scale", "a scale that is not positive", "a scale that is not positive"),
    ("D", MULTIPLE, MULTIPLE), ("Dv", MULTIPLE, MULTIPLE), ("base", VECTORS, VECTORS),
    ("strides", VECTORS, VECTORS),
    *((name, STRIDE, None) for name in ("one batch", "one row of k", "one head of v")),
    ("two", "softcap", "softcap"), ("two of a layout", MANY, None),
])
def test_what_a_call_needs(faked, call, bare, plain):
    """The first need that a row does not serve; "bare" serves none, "plain" those of kSome."""
    assert faked["calls"][call] == [text and f"does not serve {text}" for text in (bare, bare, plain, plain)]


def test_when_large_tiles_serve(faked):
    small = "does not serve packed sequences, batch_invariant or too few queries and keys for large tiles"
    assert faked["large"] == {
        "large": None, "fewer queries": small, "fewer heads": small, "more batches": None,
        "just enough keys": None, "fewer keys": small, "just enough visible": None, "fewer visible": small,
        "just enough window": None, "smaller window": small, "batch_invariant": small, "packed": small,
        "forced": None, "family": small}


def test_what_results_need(faked):
    assert faked["out"] == f"does not serve {VECTORS}"
    assert faked["max_logit"] == ["does not serve return_max_logit", None]
    assert [dict(map(tuple, reasons)) for reasons in faked["dout"]] == [
        dict.fromkeys(("bare_backward", "plain_backward"), f"does not serve {VECTORS}"),
        {"bare_backward": f"does not serve {STRIDE}", "plain_backward": ""}]
    assert faked["packed"] == ["long", f"does not serve {MANY}"]  # whose batch stride is 0
    assert not faked["random state changed"]


def chosen(faked, *problem):
    """The row of the table that serves (chip, op, dtype, D, Dv, needs)."""
    return next(name for *key, name in faked["table"] if key == list(problem))


@pytest.mark.parametrize(("dims", "needs", "forward", "backward"), [
    ((128, 128), ["many_queries"], r"sm90_bf16_d128_192x\d+", r"sm90_bf16_d128_\d+x\d+"),
    ((128, 128), ["many_queries", "small_tiles"], r"sm90_bf16_d128_128x\d+", r"sm90_bf16_d128_\d+x\d+"),
    ((128, 128), [], r"sm90_bf16_d128_192x\d+", r"sm90_bf16_d128_\d+x\d+"),
    ((64, 64), ["many_queries"], r"sm90_bf16_d64_\d+x\d+", r"sm90_bf16_d64_\d+x\d+"),
    ((64, 64), [], r"sm90_bf16_d64_\d+x\d+_few", r"sm90_bf16_d64_\d+x\d+"),
    ((72, 72), ["many_queries"], r"sm90_bf16_d80_\d+x\d+", r"sm90_bf16_d96_\d+x\d+"),
    ((192, 128), [], *2 * (r"sm90_bf16_d192v128_\d+x\d+",)),
    ((192, 192), ["many_queries"], r"sm90_bf16_d192_\d+x\d+", r"sm90_bf16_d192_\d+x\d+"),
    ((256, 256), ["many_queries"], r"sm90_bf16_d256_\d+x\d+", r"sm90_bf16_d256_\d+x\d+"),
    ((72, 72), ["softcap", "many_queries"], r"sm90_bf16_d128_\d+x\d+_general",
     r"sm90_bf16_d128_\d+x\d+_general"),
    ((64, 64), ["alibi"], *2 * (r"sm90_bf16_d64_\d+x\d+_general",)),
    ((128, 128), ["bias"], *2 * (r"sm80_bf16_d128_\d+x\d+_general",)),
    ((128, 128), ["alignment"], *2 * (r"sm80_bf16_d128_\d+x\d+_general",)),
    ((128, 128), ["addressing"], *2 * (r"sm80_bf16_d128_\d+x\d+",)),
    ((512, 512), [], *2 * ("sm80_bf16_simt",)),
])
def test_the_table_on_hopper(faked, dims, needs, forward, backward):
    for op, kernel in (("forward", forward), ("backward", backward)):
        assert re.fullmatch(f"{op}_{kernel}", chosen(faked, 90, op, "bfloat16", *dims, needs))
        assert chosen(faked, 90, op, "float32", *dims, needs) == f"{op}_sm80_f32_simt"


@pytest.mark.parametrize(("dims", "needs", "kernel"), [
    ((576, 512), [], r"sm90_bf16_d576v512_64x64"),
    ((576, 512), ["many_queries", "many_rows"], r"sm90_bf16_d576v512_64x64"),
    ((320, 256), [], r"sm90_bf16_d576v512_64x64"),
    ((576, 512), ["own_values"], r"sm80_bf16_d576v512_16x64"),
    ((576, 512), ["odd_pages"], r"sm80_bf16_d576v512_16x64"),
    ((576, 512), ["alignment"], r"sm80_bf16_d576v512_16x64"),
    ((576, 512), ["softcap", "many_queries", "many_rows"], r"sm80_bf16_d576v512_64x16"),
    ((584, 512), [], r"sm80_bf16_simt"),
    ((128, 128), ["own_values", "few_rows"], r"sm80_bf16_d128_8x64"),
    ((128, 128), ["own_values", "many_queries", "many_rows"], r"sm90_bf16_d128_128x128"),
    ((128, 128), ["own_values", "many_queries", "many_rows", "leftpad"], r"sm80_bf16_d128_64x64"),
])
def test_decodes_on_hopper(faked, dims, needs, kernel):
    assert re.fullmatch(f"decode_{kernel}", chosen(faked, 90, "decode", "bfloat16", *dims, needs))


def test_what_a_cache_needs(faked):
    """Whether its values are its keys, and of its layout: sizes are those of the cache, not of the batch."""
    served = {name: not reason for name, reason in faked["caches"].items()}
    assert served == {
        "values in keys": True, "a view of them": True, "other values": False, "narrow keys": False,
        "odd keys": False, "pages of 1": False, "pages of 8": True, "pages of 12": False, "pages of 16": True,
        "pages of 48": True, "pages of 192": True, "one sequence of strided pages": True, "one page": True,
        "one sequence of odd pages": False, "one sequence of an expanded cache": False,
        "one page of odd stride": True, "one row of a page, of odd stride": True}
    assert faked["caches"]["other values"] == faked["caches"]["odd keys"] == (
        "does not serve a v_cache that is not the first columns of a k_cache of 320, 384, .. columns")
    assert faked["caches"]["pages of 12"] == "does not serve a page size that is not a multiple of 8"


def test_the_table_on_other_chips(faked):
    assert {(chip, name.split("_")[1]) for chip, *_, name in faked["table"]} == {
        (75, "sm75"), (90, "sm90"), *((chip, "sm80") for chip in (80, 86, 89, 90, 100, 120))}


# Every row computes -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", CPU_ROWS, ids=lambda row: row.name)
def test_row(row, dtype, device):
    """Each row of the table, forced, is right; a row that this machine cannot run is refused by name."""
    q, k, v = (torch.randn(2, rows, heads, 24, dtype=dtype, device=device)
               for rows, heads in ((37, 4), (70, 2), (70, 2)))
    options = {"causal": True, "softcap": 3.0}
    check = {"forward": check_forward, "backward": check_backward, "decode": check_decode}[row.op]
    served = dict(candidates(row.op, dtype))[row.name] == ""
    with flashattn.force_family(row.family):
        if served:
            assert dict(candidates(row.op, dtype))[row.name] == ""
            check(q, k, v, **options)
        else:
            with pytest.raises(NotImplementedError, match=f"{row.family}.*instructions"):
                check(q, k, v, **options)
