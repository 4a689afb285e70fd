"""Proves that the tests catch planted faults: ``make mutants``, or ``python tests/mutants/run.py [names]``.

Each ``*.patch`` beside this file is a fault.  Above the diff it names its kind, one of ``KINDS``, says the
fault in words, and names the tests that must catch it::

    # kind: window bounds
    # fault: a window sees one key too few on its left
    # tests: tests/test_regressions.py::test_window_counts_include_both_ends

The sources are copied and compiled once, for the baseline family alone, and the tests must pass.  Then each
fault in turn is patched into the copy and compiled, and one of its tests must fail or crash; an error of the
compiler or of pytest's collection is not a catch.  Exits with 1 unless every fault is caught.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDERS, FILES = ("csrc", "flashattn", "tests"), ("setup.py", "pyproject.toml", "README.md", "LICENSE")
KINDS = (  # what came back in every attention library, and the rest
    "NaN and extreme scores", "nothing visible", "32-bit offsets", "grid limits", "strides", "causal corner",
    "window bounds", "ignored options", "LSE base and gradient", "graphs, compile and devices",
    "heads, dropout and caches",
)
HANGS_AFTER = 600  # seconds


class Broken(Exception):
    """The fault does not apply or compile, or its tests cannot run: nothing is known about it."""


@dataclass(frozen=True)
class Mutant:
    path: Path
    kind: str
    tests: list[str]  # ids of pytest

    @classmethod
    def read(cls, path: Path) -> Mutant:
        header = dict(re.findall(r"^# (kind|fault|tests): (.+)$", path.read_text(), re.MULTILINE))
        if len(header) < 3 or header["kind"] not in KINDS:
            raise SystemExit(f"{path}: expected lines '# kind:' with one of {KINDS}, '# fault:', '# tests:'")
        return cls(path, header["kind"], shlex.split(header["tests"]))


def run(tree: Path, *command: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1",
                                "FLASHATTN_CUDA": "off"}
    try:
        return subprocess.run(command, cwd=tree, env=environment, text=True, capture_output=True,
                              timeout=HANGS_AFTER)
    except subprocess.TimeoutExpired:
        raise Broken(f"hangs: no end after {HANGS_AFTER} s of {shlex.join(command)}") from None


def copy_sources(tree: Path) -> None:
    """The sources, changed to compile fast: one CPU family, little optimisation."""
    tree.mkdir()
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in FILES:
        shutil.copy2(ROOT / name, tree)
    with open(tree / "csrc/instances.py", "a") as file:
        file.write('\nROWS = tuple(row for row in ROWS if row.family == "cpu_baseline")\n')
    with open(tree / "flashattn/_build.py", "a") as file:
        file.write('\nCXX_FLAGS.append("-O1")\n')


def compile_sources(tree: Path) -> None:
    result = run(tree, sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    if result.returncode:
        raise Broken(f"does not compile:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")


def apply(tree: Path, mutant: Mutant) -> None:
    result = run(tree, "patch", "-p1", "--force", "--no-backup-if-mismatch", "-i", str(mutant.path))
    if result.returncode:
        raise Broken(f"does not apply any more:\n{result.stdout}{result.stderr}")
    if "+++ b/csrc/" in mutant.path.read_text():
        compile_sources(tree)


def failing_test(tree: Path, tests: list[str]) -> str | None:
    """The first of these tests that fails or crashes."""
    result = run(tree, sys.executable, "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider", *tests)
    if result.returncode == 0:
        return None
    failed = re.findall(r"^FAILED (tests/.+?)(?: - .*)?$", result.stdout, re.MULTILINE)
    started = result.stdout.rpartition("\n")[2].strip()  # -v prints the id of a test before it runs
    if result.returncode == 1 and failed:
        return failed[0]
    if result.returncode < 0 and started.startswith("tests/"):
        return f"{started} (signal {-result.returncode})"
    raise Broken(f"pytest exits with {result.returncode}:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="faults, without .patch; default: all")
    names = parser.parse_args().names
    if not shutil.which("patch"):
        raise SystemExit("patch is not on PATH: install it (Debian, Ubuntu: apt-get install patch)")
    paths = [HERE / f"{name}.patch" for name in names] or sorted(HERE.glob("*.patch"))
    mutants = [Mutant.read(path) for path in paths]
    if not names and (missing := set(KINDS) - {mutant.kind for mutant in mutants}):
        raise SystemExit(f"no fault of the kinds {sorted(missing)}")

    start, caught = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        tree, clean = Path(folder, "tree"), Path(folder, "clean")
        print(f"{len(mutants)} faults; compiling without one (a minute or two)", flush=True)
        copy_sources(tree)
        try:
            compile_sources(tree)
            print(f"tests without a fault (at {time.monotonic() - start:.0f} s)", flush=True)
            failed = failing_test(tree, list(dict.fromkeys(test for m in mutants for test in m.tests)))
        except Broken as problem:
            raise SystemExit(f"without a fault: {problem}") from None
        if failed:
            raise SystemExit(f"without a fault: {failed} fails")
        shutil.copytree(tree, clean)
        for mutant in mutants:
            begin, name = time.monotonic(), mutant.path.stem
            try:
                apply(tree, mutant)
                test = failing_test(tree, mutant.tests)
            except Broken as problem:
                print(f"BROKEN {name} {problem}", flush=True)
            else:
                caught += test is not None
                print(f"caught {name} in {time.monotonic() - begin:.0f} s by {test}" if test else
                      f"SURVIVED {name}", flush=True)
            shutil.rmtree(tree)
            shutil.copytree(clean, tree)  # times too: ninja compiles again what the next fault touches alone
    print(f"{caught} of {len(mutants)} faults caught in {time.monotonic() - start:.0f} s")
    return int(caught < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
