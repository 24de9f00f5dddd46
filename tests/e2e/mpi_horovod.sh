#!/usr/bin/env bash
# Make a second environment whose Horovod can use MPI; everything else in it is the first environment's.
#
#   tests/e2e/mpi_horovod.sh [FOLDER]      default: .venv/mpi-horovod
#
# Needs g++, make, mpicxx (Debian: libopenmpi-dev) and pip. Compiling takes about three minutes on two cores; done once,
# it only looks whether what it made still fits.
set -euo pipefail
cd "$(dirname "$0")/../.."
first=$PWD/.venv
second=${1:-$first/mpi-horovod}

fits() {
  [[ -x $second/bin/train ]] && "$second/bin/python" - "$second" >/dev/null 2>&1 <<'PYTHON'
import sys
import horovod.tensorflow as hvd
if not (hvd.__file__.startswith(sys.argv[1]) and hvd.mpi_built() and hvd.gloo_built()):
    sys.exit(1)
PYTHON
}

if fits; then
  echo "$second is there"
  exit
fi
command -v mpicxx >/dev/null || { echo "mpicxx is missing: apt-get install libopenmpi-dev openmpi-bin" >&2; exit 1; }
rm -rf "$second"
"$first/bin/python" -m venv --without-pip "$second"
folder() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# Comes after the folder of its own, and brings the first one's own .pth files (an editable hetero) along.
echo "import site; site.addsitedir('$(folder "$first")')" >"$(folder "$second")/first.pth"
pip() { python3 -m pip --python "$second/bin/python" --disable-pip-version-check install -q "$@"; }
# By name into this environment: its own setuptools must be the one that setup.py finds.
pip --ignore-installed --no-deps "setuptools<70" wheel
command -v cmake >/dev/null && cmake --version | grep -q 'version 3' || pip --ignore-installed --no-deps "cmake<4"
version=$("$first/bin/python" -c 'from importlib.metadata import version; print(version("horovod"))')
# Not optimised: it compiles in two thirds of the time, and tests move few bytes.
PATH="$second/bin:$PATH" HOROVOD_DEBUG=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITH_TENSORFLOW=1 \
  HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
  python3 -m pip --python "$second/bin/python" --disable-pip-version-check install -q --ignore-installed --no-deps \
  --no-build-isolation --no-cache-dir "horovod==$version"
printf '#!%s\nfrom sagemaker_training.cli.train import main\nmain()\n' "$second/bin/python" >"$second/bin/train"
chmod +x "$second/bin/train"
fits || { echo "Horovod was built in $second, but not for MPI and Gloo" >&2; exit 1; }
echo "$second is made"
