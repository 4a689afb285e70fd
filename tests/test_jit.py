"""JIT-load: cached by content, compiled once however many ask, own operators beside the installed ones.

One row is compiled for all tests, and once more after an edit.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flashattn
from flashattn import _build, _load, jit

pytestmark = pytest.mark.xdist_group("jit")  # one process, so that the row is compiled once
ROOT = Path(__file__).resolve().parents[1]
ROW = "forward_cpu_baseline"
LOAD = f"""
import time, torch, flashattn, flashattn.jit
start = time.perf_counter()
build = flashattn.jit.load(rows=[{ROW!r}])
seconds = time.perf_counter() - start
q = torch.zeros(1, 2, 1, 8)
with flashattn.jit.use(build):
    assert torch.equal(flashattn.forward(q, q, torch.ones_like(q)), torch.ones_like(q))
print(build.namespace, build.path, seconds)
"""


def start(cache, cwd=ROOT, **environment):
    """A process that loads the build; a group of its own, so that it can be killed with its compilers."""
    return subprocess.Popen([sys.executable, "-c", LOAD], cwd=cwd, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, start_new_session=True,
                            env=os.environ | {"TORCH_EXTENSIONS_DIR": str(cache)} | environment)


def finish(process):
    """(namespace, path, seconds of the load, standard error)"""
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    namespace, path, seconds = out.split()
    return namespace, Path(path), float(seconds), err


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache that holds the build of ROW, after a bad start: a killed process, then two at once."""
    folder = tmp_path_factory.mktemp("extensions")
    killed = start(folder)
    wait_for(lambda: list(folder.glob("flashattn/*.build-*/*.d")) or killed.poll() is not None)
    os.killpg(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    left = list(folder.glob("flashattn/*.build-*"))
    both = [finish(process) for process in [start(folder), start(folder)]]
    return {"folder": folder, "left": left, "both": both}


@pytest.fixture(scope="module")
def build(cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(cache["folder"]))
        return jit.load(rows=[ROW])


def test_two_processes_compile_once_after_a_killed_one(cache):
    assert len(cache["left"]) == 1
    (name, path, _, first), (other_name, other_path, _, second) = cache["both"]
    assert (name, path) == (other_name, other_path)
    assert (first + second).count("flashattn.jit: compiling") == 1
    assert {file.name for file in (cache["folder"] / "flashattn").iterdir()} == {name, f"{name}.lock"}
    assert [path] == list((cache["folder"] / "flashattn" / name).iterdir())


def test_unchanged_sources_load_at_once_in_a_new_process(cache):
    name, path, seconds, err = finish(start(cache["folder"], CXX=shutil.which("c++")))
    assert (name, path) == cache["both"][0][:2]
    assert "compiling" not in err
    assert seconds < 0.5


def test_unchanged_sources_are_one_build_in_a_process(cache, build, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(cache["folder"]))
    with ThreadPoolExecutor(4) as pool:
        assert all(again is build for again in pool.map(lambda _: jit.load(rows=[ROW]), range(4)))


def test_a_build_beside_the_installed_one(build):
    assert build.namespace.startswith("flashattn_") and build.ops is getattr(torch.ops, build.namespace)
    assert [row["name"] for row in build.extension.instances()] == [ROW]
    q, k, v = (torch.randn(2, 5, 4, 16, requires_grad=True) for _ in range(3))
    installed = _load.ops()
    with flashattn.force_family("cpu_baseline"):
        wanted = flashattn.forward(q, k, v, causal=True)
    with jit.use(build):
        assert _load.ops() is _load.extension() is build.extension
        assert flashattn.explain(q, k, v).kernel == ROW
        ours = flashattn.forward(q, k, v, causal=True)
        with pytest.raises(RuntimeError, match="no kernel serves"):  # this build has no backward row
            ours.sum().backward()
    assert _load.ops() is installed
    assert torch.equal(ours, wanted)


def test_use_ends_with_an_exception(build):
    installed = _load.ops()
    with pytest.raises(ZeroDivisionError), jit.use(build):
        1 / 0  # noqa: B018
    assert _load.ops() is installed


def test_compiled_code_follows_use(build):
    seen = []

    def backend(graph, _):
        calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        seen.append({str(target).partition(".")[0] for target in calls})
        return graph

    compiled = torch.compile(lambda q: flashattn.forward(q, q, q), fullgraph=True, backend=backend)
    q = torch.randn(1, 4, 2, 8)
    wanted = compiled(q)
    with jit.use(build):
        torch.testing.assert_close(compiled(q), wanted)
    compiled(q)
    assert len(seen) == 2
    assert "flashattn" in seen[0] and build.namespace in seen[1]


@pytest.fixture
def copied(cache, tmp_path, monkeypatch):
    """Sources of our own to edit, with the cache that holds the build of the originals."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(cache["folder"]))
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    monkeypatch.setattr(_build, "csrc", lambda: tmp_path / "csrc")
    return tmp_path / "csrc"


def edit(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.slow
def test_an_edit_is_a_new_build(copied, build):
    assert jit.load(rows=[ROW]) is build, "the place of the sources must not matter"
    edit(copied / "python.cpp", '"compiler"', '"edited"')
    edited = jit.load(rows=[ROW])
    assert edited.namespace != build.namespace
    assert "edited" in edited.extension.build_info() and "compiler" in build.extension.build_info()
    edit(copied / "python.cpp", '"edited"', '"compiler"')
    assert jit.load(rows=[ROW]) is build
    (copied / "common" / "new.h").touch()
    assert jit._digest([ROW], _build.CXX_FLAGS) not in build.namespace


def test_an_edit_during_the_compilation_is_not_cached(copied, cache, monkeypatch):
    def load(name, sources, build_directory, **_):
        edit(copied / "dispatch.h", "#pragma once", "#pragma once  // edited again")
        library = Path(build_directory, f"{name}.so")
        library.touch()
        return SimpleNamespace(__file__=str(library))

    monkeypatch.setattr("torch.utils.cpp_extension.load", load)
    edit(copied / "dispatch.h", "#pragma once", "#pragma once  // edited")
    before = set(cache["folder"].rglob("*.so"))
    with pytest.raises(RuntimeError, match="was edited while it was compiled: load again"):
        jit.load(rows=[ROW])
    assert set(cache["folder"].rglob("*.so")) == before
    assert not list(cache["folder"].glob("flashattn/*.build-*"))


@pytest.mark.parametrize("what", ["flags", "rows", "torch", "compiler"])
def test_what_decides_the_build_is_in_its_name(what, monkeypatch):
    before = jit._digest([ROW], _build.CXX_FLAGS)
    flags, rows = list(_build.CXX_FLAGS), [ROW]
    if what == "flags":
        flags.append("-DEXTRA")
    elif what == "rows":
        rows = None
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    else:
        monkeypatch.setattr(_build, "compiler", lambda: "c++ (GCC) 99.0.0")
    assert jit._digest(rows, flags) != before
    monkeypatch.undo()
    assert jit._digest([ROW], list(_build.CXX_FLAGS)) == before


def test_home_that_cannot_be_written(tmp_path, monkeypatch):
    """Not even by root: the cache folder's parent is a file."""
    (tmp_path / "file").touch()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert jit._find("flashattn_0") is None
    root, lock = jit._lock("flashattn_0")
    lock.close()
    assert root == temporary / f"flashattn-{os.getuid()}"

    root.chmod(0o777)  # a folder where somebody else may have put a library is not used
    (root / "flashattn_0").mkdir()
    (root / "flashattn_0" / "flashattn_0.so").touch()
    assert jit._find("flashattn_0") is None
    with pytest.raises(RuntimeError, match="others can write there.*set TORCH_EXTENSIONS_DIR"):
        jit._lock("flashattn_0")
    root.chmod(0o755)
    assert jit._find("flashattn_0") == root / "flashattn_0" / "flashattn_0.so"


def test_arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="rows.*no_such_row.*forward_cpu_baseline"):
        jit.load(rows=["no_such_row"])
    with pytest.raises(NotImplementedError, match="rows has .*forward_sm80_f32_simt.*expected rows of CPU"):
        jit.load(rows=[ROW, "forward_sm80_f32_simt"])
    with pytest.raises(TypeError, match="rows='forward_cpu_baseline': expected a list"):
        jit.load(rows=ROW)
    with pytest.raises(TypeError, match="extra_cxx_flags='-g': expected a list"):
        jit.load(extra_cxx_flags="-g")
    assert not list(tmp_path.glob("flashattn/*.build-*"))
