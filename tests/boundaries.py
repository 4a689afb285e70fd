"""Boundaries between the parts of the sources, each a search: ``python tests/boundaries.py [root]``.

Prints ``file:line: rule: text`` for each violation and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

CXX = (".h", ".cuh", ".cpp", ".cu")
FOLDERS = ("cpu", "mma", "sm90")  # of kernels; any/ and common/ are everybody's
# How a decode is divided and merged, which another folder's decode shares.
DECODE = ("csrc/sm90/decode.cuh mma/decode.cuh", "csrc/sm90/launch.cuh mma/launch.cuh")
ENVIRONMENT_READERS = ("setup.py", "flashattn/_build.py", "flashattn/_load.py", "flashattn/jit.py")
MOST_VARIABLES = 6

# (rule, where the pattern is searched, pattern, where it is allowed: a file, or file.py:function)
SEARCHES = (
    ("torch headers only in the binding", CXX, r'#\s*include\s*[<"](torch|ATen|c10)/',
     r"csrc/((ops|autograd|python)\.cpp|(ops_checks|calls)\.h)"),
    ("no CUDA header in flashattn._C", CXX, r'#\s*include\s*[<"](cuda|cooperative_groups)',
     r"csrc/(families/.*|(common|any|mma|sm90)/.*\.cuh)"),
    ("pybind11 only in the modules", CXX, r'#\s*include\s*[<"]pybind11/', r"csrc/families/module\.h"),
    ("asm only in the PTX wrappers", (*CXX, ".py"), r"\b(__)?asm(__)?\b",
     r"csrc/((common|sm90)/ptx\.cuh|instances\.py:wgmma)"),
    ("launches only in launch.cuh and any/", CXX, r"<<<", r"csrc/(\w+/launch\.cuh|any/.*)"),
    ("no function-like macro", CXX, r"#\s*define\s+(?!FLASHATTN_CUDA_CHECK\()\w+\(", None),
    ("no #if for features", CXX, r"#\s*(el)?if(n?def)?\b(?!(\W|defined|__\w+__|__clang__|__CUDACC__|_OPENMP|"
     r"FLASHATTN_NAMESPACE|\d)*$)", None),
    ("the environment is read in the build and load modules only", (*CXX, ".py"),
     r"\bgetenv\b|\bos\.(environ|getenv)\b", "|".join(map(re.escape, ENVIRONMENT_READERS))),
)


def violations(root: Path) -> Iterator[str]:
    files = [root / "setup.py", *sorted((root / "csrc").rglob("*")), *sorted((root / "flashattn").rglob("*"))]
    for file in files:
        if file.suffix not in (*CXX, ".py"):
            continue
        path, lines = file.relative_to(root).as_posix(), file.read_text().splitlines()
        functions = _functions("\n".join(lines)) if file.suffix == ".py" else {}
        for number, line in enumerate(lines, 1):
            for rule in _broken(path, functions.get(number), file.suffix, line):
                yield f"{path}:{number}: {rule}: {line.strip()}"
    yield from _variables(root)


def _functions(text: str) -> dict[int, str]:
    """The function of a module that each line belongs to."""
    return {line: node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)
            for line in range(node.lineno, node.end_lineno + 1)}


def _broken(path: str, function: str | None, suffix: str, line: str) -> Iterator[str]:
    for rule, suffixes, pattern, allowed in SEARCHES:
        if suffix in suffixes and re.search(pattern, line) and not any(
                allowed and re.fullmatch(allowed, place) for place in (path, f"{path}:{function}")):
            yield rule
    folder = re.match(r"csrc/(\w+)/", path)
    included = re.search(r'#\s*include\s*"((\w+)/.*?)"', line)
    if (folder and included and {folder[1], included[2]} <= set(FOLDERS) and included[2] != folder[1]
            and f"{path} {included[1]}" not in DECODE):
        yield "a folder of kernels includes common/, any/ and itself only"


def _variables(root: Path) -> Iterator[str]:
    text = "".join((root / path).read_text() for path in ENVIRONMENT_READERS)
    variables = sorted(set(re.findall(r"[\"'](FLASHATTN_[A-Z_]+)[\"']", text)))
    if len(variables) > MOST_VARIABLES:
        yield f"at most {MOST_VARIABLES} FLASHATTN_* variables: {', '.join(variables)}"
    readme = (root / "README.md").read_text()
    yield from (f"README.md: {variable} is not explained" for variable in variables if variable not in readme)


if __name__ == "__main__":
    found = list(violations(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])))
    print("\n".join(found) or "boundaries: nothing crosses them")
    sys.exit(bool(found))
