"""How flashattn is compiled: requirements, flags, sources.  setup.py, jit.py and CMakeLists.txt read it.

Loaded by path before the package is installed, so it imports neither flashattn nor, at the top, torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

VERSION = "0.1.0"
CXX_FLAGS = ["-O3", "-g0", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wno-psabi"]
# -gencode flags of each CUDA family: a family is an extension module of its own.  None has kernels yet.
CUDA_FAMILIES: dict[str, list[str]] = {}
INSTALL = "pip install --no-build-isolation ."
OLDEST_TORCH = (2, 11)
OLDEST_GCC = 11  # torch's headers need C++20


class BuildError(RuntimeError):
    """The build cannot go on; the text says why and what to type next."""


def check() -> None:
    """Raise :class:`BuildError` unless everything a build needs is here.  Cheap: torch is not imported."""
    if sys.platform != "linux":
        raise BuildError(f"flashattn is built on Linux (x86-64 or aarch64) only; this is {sys.platform}")
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise BuildError("this build sees no torch, but it compiles against the torch that will run it "
                         "(pip's build isolation hides an installed one). Run:\n"
                         f"  pip install setuptools wheel ninja torch && {INSTALL}") from None
    if tuple(int(part) for part in re.findall(r"\d+", torch)[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise BuildError(f"torch {torch} is too old: flashattn needs {oldest} or newer. Run:\n"
                         f"  pip install 'torch>={oldest}' && {INSTALL}")
    _cuda_mode()
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").exists():
        raise BuildError(f"no Python.h in {headers}: install Python's headers (Debian, Ubuntu: "
                         f"apt-get install python3-dev), then run:\n  {INSTALL}")
    compiler()
    if not find_ninja():
        raise BuildError("ninja is missing, which compiles the kernels in parallel. Run:\n"
                         f"  pip install ninja && {INSTALL}")


def compiler() -> str:
    """First line of ``--version`` of the compiler that torch will call: $CXX or c++."""
    command = os.environ.get("CXX", "c++")
    path = shutil.which(command)
    if path is None:
        raise BuildError(f"no C++ compiler: {command} is not on PATH. Install g++ {OLDEST_GCC} or newer "
                         f"(Debian, Ubuntu: apt-get install g++), then run:\n  {INSTALL}")
    text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    line = text.partition("\n")[0]
    version = re.search(r"\) (\d+)\.", line)
    if "Free Software Foundation" not in text or not version or int(version[1]) < OLDEST_GCC:
        raise BuildError(f"{path} is {line!r}: flashattn needs g++ {OLDEST_GCC} or newer. Run:\n"
                         f"  CXX=g++-{OLDEST_GCC} {INSTALL}")
    return line


def find_ninja() -> bool:
    """True if ninja runs; one of an environment that is not activated is added to PATH."""
    scripts = sysconfig.get_path("scripts")
    if not shutil.which("ninja") and shutil.which("ninja", path=scripts):
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    return shutil.which("ninja") is not None


def cuda_home() -> str | None:
    """A CUDA toolkit: nvcc and headers.  nvcc on PATH may be a wrapper script far from its toolkit."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"),
             nvcc and str(Path(nvcc).resolve().parents[1]), "/usr/local/cuda"]
    return next((home for home in homes if home and Path(home, "bin/nvcc").exists()
                 and Path(home, "include/cuda_runtime.h").exists()), None)


def decision() -> str:
    """What will be built, in one line; it warns where somebody could expect CUDA kernels."""
    import torch
    text = f"version {VERSION}, torch {torch.__version__}, {compiler()}: building the CPU kernels"
    home = cuda_home()
    signs = [f"torch is a CUDA {torch.version.cuda} build" if torch.version.cuda else "",
             f"nvcc is in {home}" if home else "",
             "FLASHATTN_ARCHS is set" if "FLASHATTN_ARCHS" in os.environ else ""]
    if _cuda_mode() == "off" or not any(signs):
        return text
    return (f"{text}\nflashattn: WARNING: {' and '.join(filter(None, signs))}, but this version has no CUDA "
            "kernels yet: calls with CUDA tensors will be refused. FLASHATTN_CUDA=off silences this.")


def csrc() -> Path:
    """The C++ sources: the copy inside an installed package, or the source tree's."""
    package = Path(__file__).absolute().parent
    return next(path for path in (package / "_csrc", package.parent / "csrc") if path.is_dir())


def sources(generated: str | Path, rows: list[str] | None = None) -> list[str]:
    """Sources of ``flashattn._C``; one unit a kernel and the registry are written into ``generated``."""
    spec = importlib.util.spec_from_file_location("flashattn_instances", csrc() / "instances.py")
    instances = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = instances  # dataclasses look their module up
    spec.loader.exec_module(instances)
    units = instances.generate(generated, ["cpu"], platform.machine(), rows)
    return [*map(str, sorted(csrc().glob("*.cpp"))), *units]


def build_extension(command) -> None:
    """Body of setup.py's build_ext: check, say what is built, compile with torch's BuildExtension."""
    check()
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    print(f"flashattn: {decision()}", file=sys.stderr)
    # Objects lie in a folder of this Python and torch, so that every way to install reuses them.
    objects = Path("build", f"{sys.implementation.cache_tag}-torch{torch.__version__}")
    command.distribution.ext_modules[:] = [CppExtension(
        "flashattn._C", [os.path.relpath(path) for path in sources(objects / "generated")],
        include_dirs=[str(csrc())], extra_compile_args={"cxx": CXX_FLAGS})]
    worker = BuildExtension(command.distribution)
    for option in ("build_lib", "inplace", "editable_mode", "debug", "parallel"):
        setattr(worker, option, getattr(command, option))
    worker.build_temp = str(objects)
    worker.ensure_finalized()
    worker.run()
    info = Path(worker.get_ext_fullpath("flashattn._C")).with_name("_build_info.json")
    info.write_text(json.dumps({"torch": torch.__version__}))


def _cuda_mode() -> str:
    mode = os.environ.get("FLASHATTN_CUDA", "auto")
    if mode not in ("auto", "on", "off"):
        raise BuildError(f"FLASHATTN_CUDA={mode}: accepted are auto, on and off")
    if mode == "on" and not CUDA_FAMILIES:
        raise BuildError(f"FLASHATTN_CUDA=on, but flashattn {VERSION} has no CUDA kernels yet. For the CPU "
                         f"kernels run:\n  FLASHATTN_CUDA=off {INSTALL}")
    return mode
