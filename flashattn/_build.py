"""How flashattn is compiled: requirements, flags, sources.  setup.py, jit.py and CMakeLists.txt read it.

Loaded by path before the package is installed, so it imports neither flashattn nor, at the top, torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from types import ModuleType

VERSION = "0.1.0"
CXX_FLAGS = ["-O3", "-g0", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wno-psabi"]
NVCC_FLAGS = ["-O3", "-std=c++17", "-lineinfo", "--expt-relaxed-constexpr",
              "-Xcompiler=-g0,-fvisibility=hidden"]
# Images of the CUDA families where no card tells which one is needed; the PTX serves every newer card.
ALL_ARCHS = "7.5;8.0+PTX;9.0;12.0"
INSTALL = "pip install --no-build-isolation ."
OLDEST_TORCH = (2, 11)
OLDEST_CARD = (7, 5)
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
    _families(os.environ.get("FLASHATTN_ARCHS", ""))
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


def cuda_images() -> tuple[dict[str, tuple[list[int], int]], str]:
    """What to compile of each CUDA family, native images and the oldest PTX one (0: none), and why.

    Compute capabilities are ``10 * major + minor``.  Nothing with the reason if CUDA kernels cannot be built.
    """
    import torch
    home, mode = cuda_home(), _cuda_mode()
    if mode == "off":
        return {}, "because of FLASHATTN_CUDA=off"
    nvcc = home and subprocess.run([Path(home, "bin/nvcc"), "--version"], capture_output=True, text=True)
    version = nvcc and re.search(r"release (\d+)\.\d+", nvcc.stdout)
    if torch.version.cuda is None:
        problem = f"torch {torch.__version__} is not a CUDA build"
    elif not version:
        problem = ("there is no CUDA toolkit: neither CUDA_HOME, nvcc on PATH nor /usr/local/cuda leads to "
                   "bin/nvcc and include/cuda_runtime.h")
    elif version[1] != torch.version.cuda.partition(".")[0]:
        problem = f"nvcc in {home} is of CUDA {version[0][8:]}, torch of CUDA {torch.version.cuda}"
    else:
        archs, reason = _archs()
        return _families(archs), f"{reason}, with nvcc in {home}"
    if mode == "on":
        raise BuildError(f"FLASHATTN_CUDA=on, but {problem}. Set CUDA_HOME to a toolkit of torch's CUDA "
                         f"version, or for the CPU kernels run:\n  FLASHATTN_CUDA=off {INSTALL}")
    return {}, f"because {problem}"


def _archs() -> tuple[str, str]:
    """The list of architectures, and where it comes from."""
    import torch
    if archs := os.environ.get("FLASHATTN_ARCHS"):
        return archs, "for FLASHATTN_ARCHS"
    try:
        cards = {torch.cuda.get_device_capability(card) for card in range(torch.cuda.device_count())}
    except RuntimeError:
        cards = set()
    served = sorted(card for card in cards if card >= OLDEST_CARD)
    if not served:
        return ALL_ARCHS, "for every card, because none is visible; FLASHATTN_ARCHS chooses"
    return ";".join(f"{major}.{minor}" for major, minor in served), "for the visible cards"


def _families(archs: str) -> dict[str, tuple[list[int], int]]:
    """The families that serve a list of architectures such as ``"8.0;9.0"`` or ``"7.5+PTX"``."""
    families: dict[str, tuple[list[int], int]] = {}
    for arch in filter(None, re.split(r"[;,\s]+", archs)):
        match = re.fullmatch(r"(\d+)\.(\d)(\+PTX)?", arch)
        capability = match and 10 * int(match[1]) + int(match[2])
        if not match or capability < 10 * OLDEST_CARD[0] + OLDEST_CARD[1]:
            raise BuildError(f"FLASHATTN_ARCHS has {arch!r}: accepted are compute capabilities from 7.5 on, "
                             "such as 7.5, 8.0, 9.0 or 12.0, each with +PTX or without, separated by ; or ,")
        family = "sm80" if capability >= 80 else "sm75"
        images, ptx = families.get(family, ([], 0))
        families[family] = (sorted({*images, capability}),
                            min(filter(None, (ptx, capability))) if match[3] else ptx)
        if capability == 90:
            families["sm90"] = ([90], 0)  # sm80 serves what it does not
    return families


def target(family: str, capability: int) -> str:
    """What nvcc calls an architecture; that of sm90 has the instructions that only Hopper has."""
    return f"{capability}a" if family == "sm90" else f"{capability}"


def gencode(family: str, images: list[int], ptx: int) -> list[str]:
    """Flags of nvcc for these images."""
    native = [f"-gencode=arch=compute_{name},code=sm_{name}"
              for name in (target(family, image) for image in images)]
    return native + ([f"-gencode=arch=compute_{ptx},code=compute_{ptx}"] if ptx else [])


def describe(families: dict[str, tuple[list[int], int]]) -> str:
    """One line: ``sm80 (8.0, 9.0, PTX of 8.0)``."""
    def text(images: list[int], ptx: int) -> str:
        return ", ".join([f"{image / 10}" for image in images] + ([f"PTX of {ptx / 10}"] if ptx else []))
    return ", ".join(f"{family} ({text(*images)})" for family, images in families.items())


def decision() -> str:
    """What will be built, and why; it warns where somebody could expect CUDA kernels and there are none."""
    import torch
    families, reason = cuda_images()
    kernels = f"the CPU kernels and {describe(families)}" if families else "the CPU kernels only"
    text = f"version {VERSION}, torch {torch.__version__}, {compiler()}: building {kernels}, {reason}"
    expected = torch.version.cuda or "FLASHATTN_ARCHS" in os.environ
    if families or not expected or _cuda_mode() == "off":
        return text
    return (f"{text}\nflashattn: WARNING: without CUDA kernels, calls with CUDA tensors will be refused. "
            "FLASHATTN_CUDA=off silences this, FLASHATTN_CUDA=on makes it an error.")


def csrc() -> Path:
    """The C++ sources: the copy inside an installed package, or the source tree's."""
    package = Path(__file__).absolute().parent
    return next(path for path in (package / "_csrc", package.parent / "csrc") if path.is_dir())


def instances() -> ModuleType:
    """csrc/instances.py: the rows, and the generator of their units."""
    spec = importlib.util.spec_from_file_location("flashattn_instances", csrc() / "instances.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def sources(generated: str | Path, rows: list[str] | None = None) -> list[str]:
    """Sources of ``flashattn._C``; one unit a kernel and the registry are written into ``generated``."""
    return [*map(str, sorted(csrc().glob("*.cpp"))), *instances().generate(generated, only=rows)]


def extensions(generated: Path) -> list:
    """The extension modules of this build: ``flashattn._C``, and one for each CUDA family."""
    families, _ = cuda_images()
    if families:
        os.environ["CUDA_HOME"] = cuda_home()  # torch looks where nvcc lies, which may be a script
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    def extension(kind, name: str, paths: list[str], **flags: list[str]):
        return kind(f"flashattn.{name}", [os.path.relpath(path) for path in paths],
                    include_dirs=[str(csrc())], extra_compile_args={"cxx": CXX_FLAGS, **flags})

    modules = [extension(CppExtension, "_C", sources(generated / "cpu"))]
    for family, (images, ptx) in families.items():
        units = instances().generate(generated / family, family, images=images, ptx=ptx)
        modules.append(extension(CUDAExtension, f"_{family}", units,
                                 nvcc=NVCC_FLAGS + gencode(family, images, ptx)))
    return modules


def objects() -> Path:
    """Where objects lie, in a folder of this Python and torch, so that every way to install reuses them."""
    import torch

    return Path("build", f"{sys.implementation.cache_tag}-torch{torch.__version__}")


def build_extension(command) -> None:
    """Body of setup.py's build_ext: check, say what is built, compile with torch's BuildExtension."""
    check()
    import torch

    print(f"flashattn: {decision()}", file=sys.stderr)
    command.distribution.ext_modules[:] = extensions(objects() / "generated")
    from torch.utils.cpp_extension import BuildExtension

    worker = BuildExtension(command.distribution)
    for option in ("build_lib", "inplace", "editable_mode", "debug", "parallel"):
        setattr(worker, option, getattr(command, option))
    worker.build_temp = str(objects())
    worker.ensure_finalized()
    folder = Path(worker.get_ext_fullpath("flashattn._C")).parent
    for other in folder.glob("_sm*.so"):  # families of an earlier build
        other.unlink()
    worker.run()
    (folder / "_build_info.json").write_text(json.dumps({"torch": torch.__version__}))


def _cuda_mode() -> str:
    mode = os.environ.get("FLASHATTN_CUDA", "auto")
    if mode not in ("auto", "on", "off"):
        raise BuildError(f"FLASHATTN_CUDA={mode}: accepted are auto, on and off")
    return mode
