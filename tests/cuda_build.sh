#!/usr/bin/env bash
# A CUDA build on a machine that needs no GPU: it compiles, imports, adds its families and still serves the CPU.
#   tests/cuda_build.sh FOLDER     FOLDER becomes an environment of 5.5 GB, and stays for the next run
# FLASHATTN_ARCHS (here 9.0 unless set), CUDA_HOME and MAX_JOBS are those of every build.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=${1:?usage: tests/cuda_build.sh FOLDER}
[ -x "$environment/bin/python" ] || python3 -m venv "$environment"
python=$(cd "$environment" && pwd)/bin/python
"$python" -m pip install --quiet torch==2.14.1 'setuptools>=77' wheel ninja numpy
FLASHATTN_CUDA=on FLASHATTN_ARCHS=${FLASHATTN_ARCHS:-9.0} \
  "$python" -m pip install --no-build-isolation --no-deps --force-reinstall .
tests=$PWD/tests
cd "$environment"
PYTHONPATH=$tests "$python" "$tests/cuda_build.py"
