"""What ran on GPUs is recorded in tests/receipts: that it was these sources, and that it was good."""

import json
import warnings
from pathlib import Path

import pytest

import test_cuda
from receipts import run

RECEIPTS = sorted(path for path in run.FOLDER.glob("*.json") if path != run.LEDGER)
MEND = "run: make receipt on that card, or: python tests/receipts/run.py --not-run REASON --card"


@pytest.fixture(params=RECEIPTS, ids=lambda path: path.stem)
def receipt(request):
    return json.loads(request.param.read_text()) | {"path": request.param}


def test_the_sources_are_those_that_ran(receipt):
    rows = [row.name for row in run.rows()]
    assert receipt["sources"] == run.digest(), (
        f"the CUDA kernels changed since {receipt['card']} ran them, so these rows are unverified: "
        f"{', '.join(rows)}; {MEND} '{receipt['card']}'")
    for what in ("unverified", "unfinished"):
        assert receipt[what] == getattr(run, what)(receipt)
        if receipt[what]:
            reason = receipt.get("not run", "not all parts have run")
            warnings.warn(f"{receipt['card']}: {reason}; {what}: {', '.join(receipt[what])}", stacklevel=1)


def test_what_ran_was_good(receipt):
    assert receipt["path"] == run.path_of(receipt["card"])
    if "not run" in receipt:
        assert receipt["not run"]
        assert receipt.keys() == {"card", "sources", "not run", "unverified", "unfinished", "path"}
        return
    for key in ("capability", "driver", "torch", "nvcc", "python", "date", "archs"):
        assert isinstance(receipt[key], str) and receipt[key], key
    assert receipt["failures"] == []
    assert set(receipt["rows"].values()) <= {"passed"}
    for family, files in receipt["suite"].items():
        assert files.keys() <= set(run.SUITE)
        for file, counts in files.items():
            assert counts["passed"] and not counts["failed"], f"{family} {file}"
    assert receipt["sanitizers"].keys() <= set(run.TOOLS)
    for tool, found in receipt["sanitizers"].items():
        assert found["rows"] and not found["failures"] and not found["faults"], tool


def test_explained_faults_have_a_reason():
    ledger = json.loads(run.LEDGER.read_text())
    assert ledger.keys() == set(run.TOOLS)
    assert all(line["fault"] and line["reason"] for lines in ledger.values() for line in lines)


def test_the_digest_knows_every_folder_of_kernels():
    csrc = run._build.csrc()
    folders = {path.relative_to(csrc).parts[0] for path in csrc.rglob("*.cuh")}
    assert folders <= set(run.SOURCES) and {"mma", "sm90"} <= set(run.SOURCES)


def test_a_change_of_a_kernel_changes_the_digest(monkeypatch):
    before = run.digest()
    assert before == run.digest()
    monkeypatch.setattr(run._build, "NVCC_FLAGS", [*run._build.NVCC_FLAGS, "-G"])
    assert run.digest() != before


SANITIZER = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at void flashattn::mma::forward_kernel<flashattn::row>(flashattn::ForwardParams)+0x10 in f.cuh:1
=========     by thread (0,0,0) in block (0,0,0)
========= Error: Race reported between Write access at flashattn::a+0x340 in f.cuh:12
=========     and Read access at flashattn::a+0x350 in f.cuh:13 [4 hazards]
========= ERROR SUMMARY: 2 errors
"""


def test_faults_are_read_from_a_sanitizers_log():
    found = [" ".join(match.groups()) for match in run.FAULT.finditer(SANITIZER)]
    assert len(found) == 2 and "forward_kernel" in found[0]
    assert "f.cuh:12" in found[1] and "f.cuh:13" in found[1]


def test_rows_are_read_from_the_results():
    tests = {"forward_sm80_f16_simt-all": "passed", "forward_sm80_f16_simt-causal window": "failed",
             "backward_sm80_f16_d64_64x64-causal window": "passed",
             "backward_sm80_f16_d64_64x64-all": "skipped", "forward_sm75_f16_simt-all": "passed",
             "decode_sm80_f16_d64_16x64-pages": "passed", "decode_sm80_f16_simt-latent": "failed",
             "decode_sm80_f16_simt-splits": "passed"}
    results = [{"test": f"tests/test_cuda.py::test_row[{name}]", "outcome": outcome}
               for name, outcome in tests.items()]
    assert run.outcomes_of_rows(results, "sm80") == {
        "forward_sm80_f16_simt": "failed", "backward_sm80_f16_d64_64x64": "passed",
        "decode_sm80_f16_d64_16x64": "passed", "decode_sm80_f16_simt": "failed"}


def test_a_sanitizer_sees_what_compiles_to_something_new():
    names = [row.name for row in run.rows()]
    code = dict.fromkeys(names, "a")
    seen = code | {names[1]: "b"}
    del seen[names[3]]
    receipt = {"code": code, "sanitizers": {"memcheck": {"rows": seen}}}
    assert run.unseen(receipt, "memcheck") == [names[1], names[3]]
    assert run.unseen(receipt, "racecheck") == names
    assert "memcheck" in run.unfinished(receipt)
    receipt["sanitizers"]["memcheck"]["rows"] = code
    assert "memcheck" not in run.unfinished(receipt)


def test_a_suite_counts_until_a_kernel_of_its_family_changes():
    names = [row.name for row in run.rows()]
    receipt = {"code": dict.fromkeys(names, "a"), "suite": {"sm90": {}, "sm80": {}, "sm75": {}},
               "rows": dict.fromkeys(names, "passed"), "failures": ["sm90 x", "sm80 x", "sm75 x"]}
    receipt["suite code"] = {family: run.code_of(receipt, family) for family in receipt["suite"]}
    run.forget_what_changed(receipt)
    assert set(receipt["suite"]) == {"sm90", "sm80", "sm75"} and len(receipt["rows"]) == len(names)
    receipt["code"]["decode_sm80_f32_simt"] = "b"                        # which sm90's suite launches too
    run.forget_what_changed(receipt)
    assert set(receipt["suite"]) == set(receipt["suite code"]) == {"sm75"}
    assert receipt["failures"] == ["sm75 x"] and all("_sm75_" in name for name in receipt["rows"])


@pytest.mark.parametrize("changed", [False, True])
def test_a_build_that_fails_leaves_nothing_of_other_sources(monkeypatch, tmp_path, changed):
    def fail(self):
        raise SystemExit("the build failed")

    code = dict.fromkeys([row.name for row in run.rows()], "a")
    old = {"card": "a card", "sources": "others" if changed else run.digest(), "code": code,
           "suite": {"sm75": {}}, "rows": code, "failures": [], "sanitizers": {"memcheck": {"rows": code}}}
    old["suite code"] = {"sm75": run.code_of(old, "sm75")}
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setattr(run, "SCRATCH", tmp_path)
    monkeypatch.setattr(run.Run, "build", fail)
    run.path_of("a card").write_text(json.dumps(old))
    receipt = run.start("a card")
    with pytest.raises(SystemExit):
        run.Run(receipt, 1).parts(["build", "suite"], ["sm75"], ["test_cuda.py"], False, 1, 1, "")
    assert receipt["sources"] == run.digest() and ("sm75" in receipt["suite"]) == (not changed)
    assert bool(run.unseen(receipt, "memcheck")) == changed


def test_what_failed_and_passes_again_counts_as_passed(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "SCRATCH", tmp_path)
    names = ["tests/test_cuda.py::test_a[x-1]@large", "tests/test_cuda.py::test_b"]
    receipt = {"suite": {"sm80": {"test_cuda.py": {"passed": 5, "failed": 2}}}, "rows": {},
               "failures": [*(f"sm80 {name}" for name in names), "sm75 tests/test_cuda.py::test_b"]}
    again = run.Run(receipt, 1)
    assert again.failed("sm80") == ["tests/test_cuda.py::test_a[x-1]", "tests/test_cuda.py::test_b"]
    results = [{"test": name, "outcome": outcome} for name, outcome in zip(names, ("passed", "failed"))]
    monkeypatch.setattr(again, "results", lambda family, child: (True, {}, results))
    again.tested_again("sm80", None)
    assert receipt["suite"]["sm80"]["test_cuda.py"] == {"passed": 6, "failed": 1}
    assert receipt["failures"] == ["sm80 tests/test_cuda.py::test_b", "sm75 tests/test_cuda.py::test_b"]


def test_a_row_is_clean_if_all_its_tests_passed():
    outcomes = {"a-cache": "passed", "a-pages": "passed", "b-cache": "passed", "b-pages": "skipped",
                "c-all": "failed"}
    assert run.passed_rows([{"test": f"tests/test_cuda.py::test_row[{name}]", "outcome": outcome}
                            for name, outcome in outcomes.items()]) == ["a"]


def test_every_row_has_a_test():
    assert {row.name for row in run.rows()} == {row.name for row in test_cuda.ROWS}
    assert {row.op for row in test_cuda.ROWS} == set(run._build.instances().OPS)
    for row in test_cuda.ROWS:
        assert test_cuda.calls(row), row.name


def test_the_suite_is_there():
    assert all(Path(__file__).with_name(file).exists() for file in run.SUITE)
