"""Host logic against brute force: mask ranges, split choice, the table of kernels and its dispatch."""

import importlib.util
import platform
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import flashattn
from compare import check_backward, check_decode, check_forward
from flashattn import _load

CAPS = {"forward": 80, "backward": 60, "decode": 30}         # rows of a family
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def table():
    """The module csrc/instances.py."""
    path = Path(__file__).parents[1] / "csrc" / "instances.py"
    spec = importlib.util.spec_from_file_location("instances", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module                           # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


TABLE = table()
ROWS = TABLE.rows(list(TABLE.FAMILY_SOURCES), platform.machine())


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
    assert {row.op for row in TABLE.rows(["cpu"], machine)} == set(TABLE.OPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", TABLE.OPS)
def test_every_dtype_is_served(op, dtype):
    asked = candidates(op, dtype)
    assert [name for name, _ in asked] == [row.name for row in ROWS if row.op == op]
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
    families = sorted({row["family"] for row in _load.extension().instances()})
    for family in families:
        with flashattn.force_family(family):
            for (name, why_not), (_, why_not_before) in zip(candidates("forward"), before, strict=True):
                same = family_of(name) == family
                assert why_not == (why_not_before if same else f"family {family} is forced")
            with pytest.raises(ZeroDivisionError), flashattn.force_family("cpu_baseline"):
                raise ZeroDivisionError
            assert _load.extension().forced_family() == family
        assert candidates("forward") == before


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
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="op.*attend.*forward"):
        flashattn.explain(q, q, q, op="attend")


def test_build_info():
    info = _load.extension().build_info()
    assert info["torch"] == torch.__version__.split("+")[0]
    assert info["openmp"] is True, "without OpenMP the kernels are serial"
    assert isinstance(info["compiler"], str) and isinstance(info["cuda"], bool)


# Every row computes -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
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
