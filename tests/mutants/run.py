"""Proves that the tests catch planted faults: ``make mutants``, or ``python tests/mutants/run.py [names...]``.

Each ``*.patch`` beside this file is a fault.  Above the diff it says its kind (one of ``KINDS``, the kinds of
fault that came back in every attention library), the fault in words, and the tests that must catch it::

    # kind: window bounds
    # fault: a window sees one key too few on its left
    # tests: tests/test_regressions.py::test_window_counts_include_both_ends

The tree is copied, compiled once for the baseline family alone, and the tests named by the faults must pass.
Then every fault in turn is patched into that tree and compiled, and one of its tests must fail or crash; an
error while compiling or collecting is not a catch.  Exits with 1 if a fault survives or does not apply.
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
SOURCES = ("csrc", "flashattn", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE")
KINDS = (
    "NaN and extreme scores", "nothing visible", "32-bit offsets", "grid limits", "strides", "causal corner",
    "window bounds", "ignored options", "LSE base and gradient", "graphs, compile and devices",
    "heads, dropout and caches",
)
HANGS_AFTER = 600  # seconds


@dataclass(frozen=True)
class Mutant:
    path: Path
    kind: str
    tests: list[str]  # ids of pytest

    @classmethod
    def read(cls, path: Path) -> Mutant:
        header = dict(re.findall(r"^# (kind|fault|tests): (.+)$", path.read_text(), re.MULTILINE))
        if header.keys() != {"kind", "fault", "tests"} or header["kind"] not in KINDS:
            raise SystemExit(f"{path}: expected lines '# kind:' with one of {KINDS}, '# fault:', '# tests:'")
        return cls(path, header["kind"], shlex.split(header["tests"]))


class Broken(Exception):
    """The fault does not apply or compile, or its tests cannot run: nothing is known about it."""


def run(tree: Path, *command: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1",
                                "FLASHATTN_CUDA": "off"}
    return subprocess.run(command, cwd=tree, env=environment, text=True, timeout=HANGS_AFTER,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def copy_sources(tree: Path) -> None:
    """The tree, for a quick compile: one CPU family, little optimisation."""
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, tree / name, **({"ignore": shutil.ignore_patterns("*.so", "__pycache__")}
                                          if copy is shutil.copytree else {}))
    with open(tree / "csrc/instances.py", "a") as file:
        file.write('\nROWS = tuple(row for row in ROWS if row.family == "cpu_baseline")\n')
    with open(tree / "flashattn/_build.py", "a") as file:
        file.write('\nCXX_FLAGS.append("-O1")\n')


def compile_sources(tree: Path) -> None:
    result = run(tree, sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    if result.returncode:
        raise Broken(f"does not compile:\n{result.stdout[-3000:]}")


def failing_test(tree: Path, tests: list[str]) -> str | None:
    """The first of these tests that fails or crashes."""
    result = run(tree, sys.executable, "-m", "pytest", "-x", "-v", "--tb=short", "-p", "no:cacheprovider",
                 *tests)
    if result.returncode == 0:
        return None
    if result.returncode == 1 and (failed := re.findall(r"^FAILED (tests/.+?)(?: - |$)", result.stdout,
                                                        re.MULTILINE)):
        return failed[0]
    if result.returncode < 0 and (started := re.findall(r"^(tests/\S+::.+?) *$", result.stdout,
                                                        re.MULTILINE)):
        return f"{started[-1]} (signal {-result.returncode})"
    raise Broken(f"pytest ended with {result.returncode}:\n{result.stdout[-3000:]}")


def apply(tree: Path, mutant: Mutant) -> None:
    result = run(tree, "patch", "-p1", "--force", "--no-backup-if-mismatch", "-i", str(mutant.path))
    if result.returncode:
        raise Broken(f"does not apply any more:\n{result.stdout}")
    if "+++ b/csrc/" in mutant.path.read_text():
        compile_sources(tree)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="faults, without .patch; default: all")
    names = parser.parse_args().names
    if shutil.which("patch") is None:
        raise SystemExit("patch is not on PATH: install it (Debian, Ubuntu: apt-get install patch)")
    mutants = [Mutant.read(HERE / f"{name}.patch") for name in names] or \
        [Mutant.read(path) for path in sorted(HERE.glob("*.patch"))]
    if not names and (missing := set(KINDS) - {mutant.kind for mutant in mutants}):
        raise SystemExit(f"no fault of the kinds {sorted(missing)}")

    start = time.monotonic()
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        tree, clean = Path(folder, "tree"), Path(folder, "clean")
        tree.mkdir()
        print(f"{len(mutants)} faults: compiling without one (a minute or two)", flush=True)
        copy_sources(tree)
        compile_sources(tree)
        print(f"at {time.monotonic() - start:.0f} s: tests without a fault", flush=True)
        if failed := failing_test(tree, [*dict.fromkeys(test for mutant in mutants for test in mutant.tests)]):
            raise SystemExit(f"{failed} fails without a fault")
        shutil.copytree(tree, clean)  # with all times, so that ninja compiles what the fault touches and no more
        for mutant in mutants:
            begin = time.monotonic()
            try:
                apply(tree, mutant)
                test = failing_test(tree, mutant.tests)
            except Broken as problem:
                test, text = None, f"BROKEN {mutant.path.stem} {problem}"
            else:
                text = f"SURVIVED {mutant.path.stem}"
            if test:
                text = f"caught {mutant.path.stem} in {time.monotonic() - begin:.0f} s by {test}"
            print(text, flush=True)
            survived += not test
            shutil.rmtree(tree)
            shutil.copytree(clean, tree)
    print(f"{len(mutants) - survived} of {len(mutants)} faults caught in {time.monotonic() - start:.0f} s")
    return survived > 0


if __name__ == "__main__":
    sys.exit(main())
