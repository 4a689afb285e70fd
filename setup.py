"""Thin: metadata is in pyproject.toml, every decision about the build in flashattn/_build.py."""

import importlib.util
import shutil
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.dist_info import dist_info

path = Path(__file__).parent / "flashattn" / "_build.py"
spec = importlib.util.spec_from_file_location("flashattn_build", path)
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


class Metadata(dist_info):
    """pip asks for metadata first: refuse a hopeless build before it downloads the dependencies."""

    def run(self):
        run_or_exit(build.check)
        super().run()


class BuildPython(build_py):
    """setuptools leaves files of earlier builds in build_lib, and a wheel would contain them."""

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "flashattn"), ignore_errors=True)
        super().run()


class BuildExtension(build_ext):
    """Stands in for torch's BuildExtension, so that metadata and sdist need no torch."""

    def run(self):
        run_or_exit(build.build_extension, self)


def run_or_exit(function, *args):
    try:
        function(*args)
    except build.BuildError as error:
        raise SystemExit(f"flashattn: {error}") from None


setup(
    packages=[*find_packages(include=["flashattn", "flashattn.*"]), "flashattn._csrc"],
    package_dir={"flashattn._csrc": "csrc"},  # flashattn.jit compiles an installed package from them
    package_data={"flashattn._csrc": ["**/*"]},
    exclude_package_data={"flashattn._csrc": ["**/*.pyc"]},
    ext_modules=[Extension("flashattn._C", sources=[])],  # build_extension fills it in
    cmdclass={"dist_info": Metadata, "build_py": BuildPython, "build_ext": BuildExtension},
)
