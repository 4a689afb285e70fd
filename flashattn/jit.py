"""Compile flashattn from its sources into a running process: for work on kernels, or a build with other rows.

Only on request, never inside a call.  What was compiled once is found again by its content: sources, rows,
flags, compiler, torch and Python.  Each build has its own torch namespace, so several can live in a process.

    build = flashattn.jit.load()                   # compiles, about a minute; then from the cache
    with flashattn.jit.use(build):
        out = flashattn.forward(q, k, v)
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import stat
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TextIO

import torch

from . import _build, ops
from ._load import use

__all__ = ["Build", "load", "use"]


@dataclass(frozen=True)
class Build:
    """A compiled and loaded flashattn.

    Attributes:
        namespace: of its ops: ``torch.ops.<namespace>``.
        extension: its pybind11 module, what ``flashattn._C`` is to an installed one.
        path: the shared library.
    """

    namespace: str
    extension: ModuleType
    path: Path

    @property
    def ops(self) -> ModuleType:
        return getattr(torch.ops, self.namespace)


_builds: dict[str, Build] = {}
_loading = threading.Lock()


def load(
    *, rows: Sequence[str] | None = None, extra_cxx_flags: Sequence[str] = (), verbose: bool = False
) -> Build:
    """Compile and load flashattn, or take it from the cache.

    The cache is ``$TORCH_EXTENSIONS_DIR/flashattn``, otherwise ``flashattn`` in the user's cache folder; if
    that cannot be written, a folder of the user's in the temporary directory.  Processes that want the same
    build at once compile it once; a killed one leaves nothing that could be taken for a build.

    Args:
        rows: names of CPU kernels from csrc/instances.py; None is every one.  CUDA kernels are compiled
            by an installation only.
        extra_cxx_flags: appended to the compiler flags of flashattn/_build.py.
        verbose: show the compiler's command lines.

    Returns:
        The build; the same object for the same sources and arguments in one process.

    Raises:
        ValueError, TypeError: an unknown row; a string in place of a list.
        NotImplementedError: a row of a CUDA kernel.
        RuntimeError: what a build needs is missing (the text says what to type); compiler errors; the sources
            were edited meanwhile.
    """
    for name, value in (("rows", rows), ("extra_cxx_flags", extra_cxx_flags)):
        if isinstance(value, str):
            raise TypeError(f"{name}={value!r}: expected a list of strings")
    cuda = {row.name for row in _build.instances().ROWS if row.module != "cpu"} & set(rows or ())
    if cuda:
        raise NotImplementedError(f"rows has {sorted(cuda)}: CUDA kernels are not compiled at run time, "
                                  f"expected rows of CPU kernels. To compile those run:\n  {_build.INSTALL}")
    flags = [*_build.CXX_FLAGS, *extra_cxx_flags]
    namespace = f"flashattn_{_digest(rows, flags)}"
    with _loading:
        if namespace not in _builds:
            library = _find(namespace)
            extension = _import(library) if library else _compile(namespace, rows, flags, verbose)
            ops.register(namespace)
            _builds[namespace] = Build(namespace, extension, Path(extension.__file__))
    return _builds[namespace]


def _digest(rows: Sequence[str] | None, flags: list[str]) -> str:
    """Of everything that decides what the compiler makes."""
    digest = hashlib.sha256(repr((
        rows and sorted(rows), flags, torch.__version__, torch.version.cuda, _build.compiler(),
        sysconfig.get_config_var("SOABI"))).encode())
    root = _build.csrc()
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(f"\n{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(namespace: str, rows: Sequence[str] | None, flags: list[str], verbose: bool) -> ModuleType:
    _build.check()
    from torch.utils import cpp_extension

    root, lock = _lock(namespace)
    with lock:
        if library := _find(namespace):  # another process compiled it meanwhile
            return _import(library)
        for killed in root.glob(f"{namespace}.build-*"):
            shutil.rmtree(killed)
        with tempfile.TemporaryDirectory(prefix=f"{namespace}.build-", dir=root) as folder:
            print(f"flashattn.jit: compiling {namespace} in {root}", file=sys.stderr, flush=True)
            sources = _build.sources(folder, rows)
            extension = cpp_extension.load(
                namespace, sources, build_directory=folder, extra_include_paths=[str(_build.csrc())],
                extra_cflags=[shlex.quote(flag) for flag in (*flags, f'-DFLASHATTN_NAMESPACE="{namespace}"')],
                with_cuda=False, verbose=verbose)
            if _digest(rows, flags) not in namespace:
                raise RuntimeError(f"{_build.csrc()} was edited while it was compiled: load again")
            library = Path(extension.__file__)
            finished = root / namespace / library.name
            finished.parent.mkdir(mode=0o700, exist_ok=True)
            library.rename(finished)
    extension.__file__ = extension.__spec__.origin = str(finished)
    return extension


def _import(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(library.stem, library)
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def _roots() -> list[Path]:
    """Cache folders in the order of preference."""
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR") or user
    return [Path(chosen, "flashattn"), Path(tempfile.gettempdir(), f"flashattn-{os.getuid()}")]


def _lock(namespace: str) -> tuple[Path, TextIO]:
    """The first cache folder that can be written, and its lock for this namespace, held until it is closed.

    The kernel drops the lock when its holder dies, so a killed build does not block the next one.
    """
    problems = []
    for root in _roots():
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _trusted(root):
                raise PermissionError("others can write there")
            lock = open(root / f"{namespace}.lock", "w")
            fcntl.flock(lock, fcntl.LOCK_EX)
            return root, lock
        except OSError as error:
            problems.append(f"{root}: {error}")
    raise _build.BuildError(f"no folder for compiled kernels ({'; '.join(problems)}): set "
                            "TORCH_EXTENSIONS_DIR to one that you can write")


def _find(namespace: str) -> Path | None:
    """The finished library.  Libraries are renamed into place: whatever lies there is whole."""
    roots = [root for root in _roots() if _trusted(root)]
    return next((path for root in roots for path in root.glob(f"{namespace}/*.so")), None)


def _trusted(root: Path) -> bool:
    """A folder in which nobody but the user and root can have put code."""
    try:
        status = root.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022
