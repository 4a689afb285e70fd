"""Finds the compiled extension, once, or says exactly what is wrong and what to type next.

``import flashattn`` works without it; the error comes at the first call.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .jit import Build

_PACKAGE = Path(__file__).parent
CUDA_FAMILIES = ("sm75", "sm80", "sm90")  # each an extension module; the dispatcher prefers the last


def ops() -> ModuleType:
    """The ops in use: those of ``torch.ops.flashattn``, or of a build that :func:`use` has made active.

    Eager calls get them as functions of the extension module, which cost less than torch.ops itself.

    Raises:
        ImportError: the extension is missing or broken; the text says how to mend it.
    """
    if _ops is None:
        raise ImportError(problem)
    return _ops if torch.compiler.is_compiling() else _extension


def extension() -> ModuleType:
    """The pybind11 module that goes with :func:`ops`: build info, kernel table, host logic.

    Raises:
        ImportError: as :func:`ops`.
    """
    if _extension is None:
        raise ImportError(problem)
    return _extension


@contextmanager
def use(build: Build) -> Iterator[None]:
    """Let ``build`` (from ``flashattn.jit.load``) serve flashattn's functions, in the whole process."""
    global _ops, _extension
    before = _ops, _extension
    _ops, _extension = build.ops, build.extension
    try:
        yield
    finally:
        _ops, _extension = before


def _import() -> tuple[ModuleType | None, str | None]:
    """The extension module and no problem, or no module and what is wrong."""
    files = {path.name for path in _PACKAGE.glob("_C.*so")}
    if not files:
        return None, f"flashattn is not compiled in {_PACKAGE}.{_hidden()} {_rebuild()}"
    if not files & {f"_C{suffix}" for suffix in EXTENSION_SUFFIXES}:
        return None, f"flashattn is compiled for another Python ({', '.join(sorted(files))}). {_rebuild()}"
    info = _PACKAGE / "_build_info.json"
    built_for = json.loads(info.read_text())["torch"] if info.exists() else torch.__version__
    if built_for != torch.__version__:
        return None, (f"flashattn is compiled against torch {built_for}, but torch {torch.__version__} is "
                      f"running; C++ extensions do not carry over. {_rebuild()}")
    try:
        extension = importlib.import_module("flashattn._C")
        for family in CUDA_FAMILIES:
            if list(_PACKAGE.glob(f"_{family}.*so")):
                extension.add_family(importlib.import_module(f"flashattn._{family}").family)
        return extension, None
    except ImportError as error:
        return None, f"flashattn's extension does not load: {error}. {_rebuild()}"


def _hidden() -> str:
    """A compiled flashattn that this one hides: Python started in the source tree prefers the source tree."""
    place = next((place for place in sys.path if any(Path(place, "flashattn").glob("_C.*so"))), None)
    return f" It hides the one in {place}: start Python elsewhere, or compile here too." if place else ""


def _rebuild() -> str:
    source = _PACKAGE.parent
    if (source / "setup.py").exists():
        where, install = f"Run:\n  cd {source} && ", "pip install --no-build-isolation -e ."
    else:
        where = "Run in flashattn's source tree:\n  "
        install = "pip install --no-build-isolation --force-reinstall --no-deps ."
    return f"{where}pip install setuptools wheel ninja && {install}"


_extension, problem = _import()
_ops = torch.ops.flashattn if _extension else None
