"""Installing: what a wrong environment is told, what archives hold, what an import without extension says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import boundaries
import pytest
import torch

import flashattn.__main__ as doctor
from flashattn import _build, _load

ROOT = Path(__file__).resolve().parents[1]
NEXT_COMMAND = "pip install --no-build-isolation ."
TOP_FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CMakeLists.txt",
             "Makefile")
NOT_SOURCES = shutil.ignore_patterns("__pycache__", "*.so", "_build_info.json", "*.egg-info")


def run(*command, cwd, **environment):
    """Run with these variables set (None: unset); the result has everything printed in ``output``."""
    env = {name: value for name, value in (os.environ | environment).items() if value is not None}
    result = subprocess.run([str(part) for part in command], cwd=cwd, env=env, text=True, timeout=600,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    result.output = result.stdout
    return result


@pytest.fixture
def tree(tmp_path):
    """A copy of the sources, never compiled."""
    root = tmp_path / "tree"
    root.mkdir()
    for name in TOP_FILES:
        shutil.copy(ROOT / name, root)
    for name in ("csrc", "flashattn", "tests", "bench", "docs", ".ci"):
        shutil.copytree(ROOT / name, root / name, ignore=NOT_SOURCES)
    return root


@pytest.fixture
def bare(tmp_path):
    """A site-packages folder with setuptools alone: use with ``python -S``."""
    site = tmp_path / "bare"
    site.mkdir()
    for name in ("setuptools", "wheel"):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files} - {".."}:
            (site / top).symlink_to(distribution.locate_file(top))
    return site


def tools(folder, *names):
    """A folder for PATH with these programs only."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(shutil.which(name))
    return folder


# ---- builds that must not start ----------------------------------------------------------------------------

def test_isolated_install_asks_for_the_next_command_before_it_downloads_torch(tree, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("setuptools", "wheel", "packaging", "ninja"):
        repack(metadata.distribution(name), wheels)
    pip = (sys.executable, "-m", "pip")
    result = run(*pip, "wheel", ".", "--no-index", "--find-links", wheels, "-w", tmp_path / "out", cwd=tree,
                 PIP_FIND_LINKS=None, FLASHATTN_CUDA=None)
    assert result.returncode != 0
    assert "this build sees no torch" in result.output
    assert f"pip install setuptools wheel ninja torch && {NEXT_COMMAND}" in result.output
    assert "Traceback" not in result.output.split("this build sees no torch")[0]
    assert "torch>=2.11" not in result.output, "pip looked for dependencies of a build that cannot succeed"


def repack(distribution, folder):
    """A wheel of what is installed, so that an isolated build needs no network."""
    name = f"{distribution.metadata['Name']}-{distribution.version}-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as archive:
        for file in distribution.files:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                archive.write(file.locate(), str(file))


def test_no_torch(tree, bare):
    result = run(sys.executable, "-S", "setup.py", "build_ext", cwd=tree, PYTHONPATH=str(bare))
    assert result.returncode == 1
    assert result.output.rstrip().endswith(f"pip install setuptools wheel ninja torch && {NEXT_COMMAND}")


def test_old_torch(tree, bare):
    info = bare / "torch-2.10.1+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.1+cpu\n")
    result = run(sys.executable, "-S", "setup.py", "build_ext", cwd=tree, PYTHONPATH=str(bare))
    assert result.returncode == 1
    assert "torch 2.10.1+cpu is too old: flashattn needs 2.11 or newer" in result.output
    assert result.output.rstrip().endswith(f"pip install 'torch>=2.11' && {NEXT_COMMAND}")


@pytest.mark.parametrize("environment, text", [
    ({"FLASHATTN_ARCHS": "8.0;sm_90"}, "FLASHATTN_ARCHS has 'sm_90': accepted are compute capabilities"),
    ({"FLASHATTN_ARCHS": "7.0"}, "FLASHATTN_ARCHS has '7.0': accepted are compute capabilities from 7.5 on"),
    ({"FLASHATTN_CUDA": "yes"}, "FLASHATTN_CUDA=yes: accepted are auto, on and off"),
    ({"CXX": "no-such-compiler"}, "no C++ compiler: no-such-compiler is not on PATH"),
    ({"CXX": "cat"}, "flashattn needs g++ 11 or newer"),
])
@pytest.mark.parametrize("command", ["build_ext", "dist_info"])
def test_refused(tree, command, environment, text):
    result = run(sys.executable, "setup.py", command, cwd=tree, **environment)
    assert result.returncode == 1
    assert text in result.output
    assert "Traceback" not in result.output
    assert not list(tree.rglob("*.so"))


def test_no_ninja(tree, tmp_path):
    programs = tools(tmp_path / "programs", "c++")
    script = ("import runpy, sys, sysconfig\n"
              "real = sysconfig.get_path\n"
              "sysconfig.get_path = lambda name, *rest: '/none' if name == 'scripts' else real(name, *rest)\n"
              "sys.argv[1:] = ['build_ext']\n"
              "runpy.run_path('setup.py')")
    result = run(sys.executable, "-c", script, cwd=tree, PATH=str(programs))
    assert result.returncode == 1
    assert "ninja is missing" in result.output
    assert result.output.rstrip().endswith(f"pip install ninja && {NEXT_COMMAND}")


def test_ninja_of_an_environment_that_is_not_activated(tree, tmp_path):
    programs = tools(tmp_path / "programs", "c++")
    script = "import _build; _build.check(); print('checked')"
    result = run(sys.executable, "-c", script, cwd=tree / "flashattn", PATH=str(programs))
    assert result.output == "checked\n"


ALL = "sm75 (7.5), sm80 (8.0, 9.0, 12.0, PTX of 8.0), sm90 (9.0)"


@pytest.fixture
def toolkit(tmp_path):
    """CUDA 13.0 as far as the decision looks."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    (tmp_path / "cuda" / "include").mkdir()
    (tmp_path / "cuda" / "include" / "cuda_runtime.h").touch()
    return tmp_path / "cuda"


def decide(tree, cuda, *, cards=(), **environment):
    """What _build.decision() says where torch is of this CUDA version and sees these cards."""
    script = ("import _build, torch\n"
              f"torch.version.cuda, cards = {cuda!r}, {cards!r}\n"
              "torch.cuda.device_count = lambda: len(cards)\n"
              "torch.cuda.get_device_capability = cards.__getitem__\n"
              "print(_build.decision())")
    return run(sys.executable, "-c", script, cwd=tree / "flashattn",
               **{"FLASHATTN_CUDA": None, "FLASHATTN_ARCHS": None, **environment})


@pytest.mark.parametrize("cards, archs, families", [
    ((), None, f"{ALL}, for every card, because none is visible"),
    (((9, 0),), None, "sm80 (9.0), sm90 (9.0), for the visible cards"),
    (((8, 0),), "9.0+PTX", "sm80 (9.0, PTX of 9.0), sm90 (9.0), for FLASHATTN_ARCHS"),
    ((), "10.0;8.0+PTX", "sm80 (8.0, 10.0, PTX of 8.0), for FLASHATTN_ARCHS"),
    (((8, 6), (7, 5), (7, 0)), None, "sm75 (7.5), sm80 (8.6), for the visible cards"),
    (((9, 0),), "7.5+PTX", "sm75 (7.5, PTX of 7.5), for FLASHATTN_ARCHS"),
    ((), "10.0, 8.9+PTX;8.0+PTX", "sm80 (8.0, 8.9, 10.0, PTX of 8.0), for FLASHATTN_ARCHS"),
])
def test_decision_names_the_families(tree, toolkit, cards, archs, families):
    result = decide(tree, "13.2", cards=cards, FLASHATTN_ARCHS=archs, CUDA_HOME=str(toolkit))
    assert f"building the CPU kernels and {families}" in result.output
    assert f"with nvcc in {toolkit}" in result.output and "WARNING" not in result.output


def test_only_sm90_is_compiled_for_hopper_alone():
    assert _build.gencode("sm90", [90], 0) == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert _build.gencode("sm80", [80, 90], 80) == [
        "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_80,code=compute_80"]


@pytest.mark.parametrize("cuda, archs, mode, reason, warns", [
    (None, None, None, "torch {torch} is not a CUDA build", False),
    (None, "8.0", None, "torch {torch} is not a CUDA build", True),
    ("12.8", None, None, "nvcc in {home} is of CUDA 13.0, torch of CUDA 12.8", True),
    ("13.0", "8.0", "off", "of FLASHATTN_CUDA=off", False),
])
def test_decision_is_loud_where_cuda_kernels_are_expected(tree, toolkit, cuda, archs, mode, reason, warns):
    environment = {"FLASHATTN_ARCHS": archs, "CUDA_HOME": str(toolkit)}
    result = decide(tree, cuda, FLASHATTN_CUDA=mode, **environment)
    reason = reason.format(torch=torch.__version__, home=toolkit)
    assert f"building the CPU kernels only, because {reason}" in result.output
    assert ("WARNING: " in result.output) is warns
    if mode is None:
        result = decide(tree, cuda, FLASHATTN_CUDA="on", **environment)
        assert result.returncode and f"BuildError: FLASHATTN_CUDA=on, but {reason}" in result.output


def test_no_toolkit(tree, tmp_path):
    script = ("import _build; _build.shutil.which = lambda *_: None; _build.Path.exists = lambda _: False\n"
              "import torch; torch.version.cuda = '13.0'; print(_build.cuda_images())")
    result = run(sys.executable, "-c", script, cwd=tree / "flashattn", FLASHATTN_CUDA=None)
    assert "there is no CUDA toolkit: neither CUDA_HOME, nvcc on PATH nor" in result.output


# ---- archives ----------------------------------------------------------------------------------------------

def test_sdist_needs_no_torch_and_holds_all_sources(tree, bare, tmp_path):
    (tree / "flashattn" / "_build_info.json").write_text("{}")
    result = run(sys.executable, "-S", "setup.py", "sdist", cwd=tree, PYTHONPATH=str(bare))
    assert result.returncode == 0, result.output
    (archive,) = (tree / "dist").iterdir()
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {path.relative_to(tree).as_posix() for folder in ("csrc", "flashattn", "tests", "bench", "docs")
              for path in (tree / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    wanted |= {*TOP_FILES, ".ci/run"}
    assert wanted - names == {"flashattn/_build_info.json"}


def test_metadata(tree):
    result = run(sys.executable, "setup.py", "dist_info", cwd=tree, FLASHATTN_CUDA=None)
    assert result.returncode == 0, result.output
    (folder,) = tree.glob("*.dist-info")
    fields = metadata.PathDistribution(folder).metadata
    assert (fields["Name"], fields["Version"]) == ("flashattn", "0.1.0")
    assert fields["Requires-Python"] == ">=3.10"
    assert fields.get_all("Requires-Dist") == ["torch>=2.11"]
    assert fields["License-Expression"] == "BSD-3-Clause"
    (plugin,) = metadata.PathDistribution(folder).entry_points
    assert (plugin.group, plugin.value) == ("vllm.general_plugins", "flashattn.integrations.vllm:register")
    requires = (tree / "pyproject.toml").read_text().split("requires = ")[1].split("\n")[0]
    assert "torch" not in requires


@pytest.mark.slow
def test_wheel_works_away_from_the_source_tree(tmp_path):
    """Builds in the source tree, where the compiled objects are; what an older build left must not get in."""
    library = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    stale = ROOT / "build" / library / "flashattn" / "left_over.py"
    stale.parent.mkdir(parents=True, exist_ok=True)
    stale.touch()
    pip = (sys.executable, "-m", "pip")
    result = run(*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", tmp_path, ".", cwd=ROOT)
    assert result.returncode == 0, result.output
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    result = run(*pip, "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    assert result.returncode == 0, result.output
    assert files(site / "flashattn/_csrc") == files(ROOT / "csrc")
    assert not (site / "flashattn" / "left_over.py").exists()

    script = ("import flashattn, torch; from flashattn import _build\n"
              "q = torch.zeros(1, 2, 1, 8); v = torch.ones(1, 2, 1, 8)\n"
              "assert torch.equal(flashattn.forward(q, q, v), v)\n"
              "print(flashattn.__file__, _build.csrc())")
    result = run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=str(site))
    assert result.output.split() == [str(site / "flashattn/__init__.py"), str(site / "flashattn/_csrc")]

    (site / "flashattn/_build_info.json").write_text('{"torch": "2.11.0+cu130"}')
    result = run(sys.executable, "-m", "flashattn", "doctor", cwd=tmp_path, PYTHONPATH=str(site))
    assert result.returncode == 1
    assert (f"verdict     BROKEN: flashattn is compiled against torch 2.11.0+cu130, but torch "
            f"{torch.__version__} is running; C++ extensions do not carry over. Run in flashattn's source "
            "tree:\n  pip install setuptools wheel ninja && pip install --no-build-isolation "
            "--force-reinstall --no-deps .") in result.output


def files(folder):
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(folder): path.read_text() for path in paths}


# ---- imports -----------------------------------------------------------------------------------------------

CALLS = """
import torch, flashattn
from flashattn.__main__ import doctor
print(flashattn.__version__)
q = torch.zeros(1, 2, 1, 8)
for call in (lambda: flashattn.forward(q, q, q), lambda: flashattn.explain(q, q)):
    try:
        call()
    except ImportError as error:
        print(error)
raise SystemExit(doctor())
"""


def assert_calls_say(tree, text):
    """The import works; calls and the doctor give this text and a command that rebuilds in the tree."""
    result = run(sys.executable, "-c", CALLS, cwd=tree)
    version, *errors = result.output.split("\nflashattn   ")[0].splitlines()
    assert version == "0.1.0", result.output
    assert len(errors) == 4 and errors[:2] == errors[2:] and text in errors[0], result.output
    assert errors[1].startswith(f"  cd {tree} && pip install "), result.output
    assert result.returncode == 1
    assert f"verdict     BROKEN: {errors[0]}\n{errors[1]}" in result.output


def test_not_compiled(tree):
    assert_calls_say(tree, f"flashattn is not compiled in {tree / 'flashattn'}.")


def test_source_tree_hides_an_installed_one(tree, tmp_path):
    (tmp_path / "site/flashattn").mkdir(parents=True)
    (tmp_path / f"site/flashattn/_C{EXTENSION_SUFFIXES[0]}").touch()
    script = "import flashattn; print(flashattn._load.problem)"
    result = run(sys.executable, "-c", script, cwd=tree, PYTHONPATH=str(tmp_path / "site"))
    assert f"It hides the one in {tmp_path / 'site'}: start Python elsewhere" in result.output


def test_compiled_for_another_python(tree):
    (tree / "flashattn/_C.cpython-39-x86_64-linux-gnu.so").touch()
    assert_calls_say(tree, "flashattn is compiled for another Python (_C.cpython-39-x86_64-linux-gnu.so)")


def test_compiled_against_another_torch_is_not_even_loaded(tree):
    (tree / f"flashattn/_C{EXTENSION_SUFFIXES[0]}").write_text("not a library")
    (tree / "flashattn/_build_info.json").write_text('{"torch": "2.11.0+cu130"}')
    assert_calls_say(tree, f"compiled against torch 2.11.0+cu130, but torch {torch.__version__} is running")


def test_missing_symbol(tree, tmp_path):
    source = tmp_path / "broken.c"
    source.write_text("void nowhere(void); void *PyInit__C(void) { nowhere(); return 0; }")
    library = tree / f"flashattn/_C{EXTENSION_SUFFIXES[0]}"
    assert run("cc", "-shared", "-fPIC", source, "-o", library, cwd=tmp_path).returncode == 0
    assert_calls_say(tree, "undefined symbol: nowhere")


def test_doctor_is_content_with_this_installation():
    result = run(sys.executable, "-m", "flashattn", "doctor", cwd=ROOT)
    assert result.returncode == 0, result.output
    assert "verdict     all is well" in result.output
    for op in ("forward", "backward", "decode"):
        assert f"{op:11} float64   {op}_cpu_" in result.output


def test_doctor_shows_the_driver_and_misses_the_kernels_of_a_card(tmp_path, monkeypatch, capsys):
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    monkeypatch.setattr(doctor, "DRIVER", version)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda card: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda card: (9, 0))
    built = _load.extension().build_info()["cuda"]
    monkeypatch.setattr(doctor, "show_kernels", lambda extension, device: [])
    monkeypatch.setattr(doctor, "check_arithmetic", lambda device: [])
    assert doctor.doctor() == (not built)
    text = capsys.readouterr().out
    assert "driver      NVIDIA 580.95.05\n" in text
    assert "cuda:0      NVIDIA H200, compute capability 9.0\n" in text
    if not built:
        assert "no CUDA kernels were built. Run in flashattn's source tree:\n  FLASHATTN_CUDA=on pip" in text
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "nowhere")
    assert doctor.driver() == "none of NVIDIA's"


def test_explain_command():
    call = ("explain", "--causal", "--window", "5", "-1", "--dtype", "bfloat16")
    result = run(sys.executable, "-m", "flashattn", *call, cwd=ROOT)
    assert result.output.startswith("forward: forward_cpu_"), result.output


# ---- boundaries --------------------------------------------------------------------------------------------

def test_nothing_crosses_the_boundaries():
    assert list(boundaries.violations(ROOT)) == []


@pytest.mark.parametrize("path, line, rule", [
    ("csrc/dispatch.cpp", "#include <torch/library.h>", "torch headers"),
    ("csrc/cpu/forward.h", "#  include <ATen/Parallel.h>", "torch headers"),
    ("csrc/cpu/forward.h", '  asm volatile("nop");', "asm only"),
    ("csrc/cpu/forward.h", '  __asm__("nop");', "asm only"),
    ("csrc/sm90/forward.cuh", '  asm volatile("nop");', "asm only"),
    ("csrc/sm90/wgmma.cuh", '  asm volatile("nop");', "asm only"),
    ("csrc/instances.py", """NOP = 'asm volatile("nop");'""", "asm only"),
    ("csrc/instances.py", """def nop():\n    return 'asm volatile("nop");'""", "asm only"),
    ("csrc/sm90/schedule.cuh", "  forward_kernel<C><<<grid, block>>>(p);", "launches only"),
    ("csrc/mma/fwd.cuh", "  forward_kernel<C><<<grid, block>>>(p);", "launches only"),
    ("csrc/dispatch.h", "#include <cuda_runtime_api.h>", "no CUDA header"),
    ("csrc/instance.h", "#include <pybind11/pybind11.h>", "pybind11 only"),
    ("csrc/common/mask.h", "#define MIN(a, b) ((a) < (b) ? (a) : (b))", "function-like macro"),
    ("csrc/common/mask.h", "#ifdef WITH_DROPOUT", "#if for features"),
    ("csrc/common/mask.h", "#if defined(__x86_64__) && FLASHATTN_FAST", "#if for features"),
    ("csrc/dispatch.cpp", '  if (std::getenv("FLASHATTN_FORCE")) return;', "environment"),
    ("flashattn/functional.py", 'DEBUG = os.environ.get("FLASHATTN_DEBUG")', "environment"),
    ("csrc/sm90/fwd.cuh", '#include "mma/fwd.cuh"', "folder of kernels"),
    ("flashattn/jit.py", 'os.environ.get("FLASHATTN_SECRET")', "FLASHATTN_SECRET is not explained"),
    ("flashattn/jit.py", str([f"FLASHATTN_{name}" for name in "ABCDE"]), "at most 6"),
])
def test_a_planted_violation_is_found(tree, path, line, rule):
    file = tree / path
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as stream:
        stream.write(f"\n{line}\n")
    found = [text for text in boundaries.violations(tree) if rule in text]
    assert len(found) == 1, found


@pytest.mark.parametrize("path, line", [
    ("csrc/mma/launch.cuh", "  forward_kernel<C><<<grid, block>>>(p);"),
    ("csrc/common/ptx.cuh", '  asm volatile("cp.async.wait_all;");'),
    ("csrc/sm90/ptx.cuh", '  asm volatile("nop;");'),
    ("csrc/instances.py", """def wgmma():\n    return 'asm volatile("nop");'"""),
    ("csrc/sm90/launch.cuh", "  forward_kernel<C><<<grid, block>>>(p);"),
    ("csrc/sm90/forward.cuh", '#include "any/delta.cuh"'),
    ("csrc/common/ptx.cuh", "#define FLASHATTN_CUDA_CHECK(call) check(call)"),
    ("csrc/mma/fwd.cuh", '#include "common/mask.h"'),
    ("csrc/mma/fwd.cuh", "#if defined(__CUDACC__) && __GNUC__ > 11"),
])
def test_what_is_allowed_is_not_found(tree, path, line):
    file = tree / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{line}\n")
    assert not [text for text in boundaries.violations(tree) if text.startswith(path)]


@pytest.mark.skipif(not shutil.which("patch"), reason="no patch program")
@pytest.mark.parametrize("fault", sorted(path.name for path in ROOT.glob("tests/mutants/*.patch")))
def test_a_planted_fault_fits_the_sources(fault):
    """Whether the tests catch it, tests/mutants/run.py tells."""
    subprocess.run(["patch", "-p1", "--dry-run", "--silent", "--force", "-i", ROOT / "tests/mutants" / fault],
                   cwd=ROOT, check=True)
