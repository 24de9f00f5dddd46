#!/usr/bin/env bash
# Gather, as wheels, what an image lacks to run hetero: hosts then install it in seconds, without network or compiler.
#
#   docker/sagemaker/wheels.sh FOLDER [REQUIREMENT...]
#
# leaves FOLDER/wheels/*.whl and FOLDER/requirements.txt; both belong into the source directory of the job. REQUIREMENTs
# are what the job's file needs beside that, as pip takes them: NAME, NAME==VERSION, -r FILE. Run it in the image that
# the job will run in (docs/sagemaker.md), or where Python and TensorFlow are the same: a wheel fits one Python, and one
# of Horovod one TensorFlow. Nothing is installed, and nothing is gathered that would replace a package of the image.
#
# From the environment: PYTHON, the image's Python (python); and whatever Horovod's own build reads, such as
# HOROVOD_GPU_OPERATIONS=NCCL for GPUs.
set -euo pipefail

[[ $# -gt 0 && $1 != -* ]] || { echo "usage: $0 FOLDER [REQUIREMENT...]" >&2; exit 2; }
folder=$1
shift
python=${PYTHON:-python}
repository=$(cd "$(dirname "$0")/../.." && pwd)
header="# Written by docker/sagemaker/wheels.sh"
list=$folder/requirements.txt
if [[ -e $list && $(head -n 1 "$list") != "$header"* ]]; then
  echo "$list is not of this script and would be overwritten: take another FOLDER, and -r $list to add its lines." >&2
  exit 2
fi
if "$python" -m pip show -q hetero 2>/dev/null; then
  echo "The image of $python has hetero already, and pip would keep that one: take the image without it." >&2
  exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

mkdir -p "$folder"
rm -rf "$folder/wheels" "$list"
pip wheel -q --no-deps --wheel-dir "$folder/wheels" "$repository"

# Horovod is not among what hetero depends on: it has to be compiled for the TensorFlow that it will run with. Without
# one, for framework="torch", only what brings ranks together is needed of it, and nothing of it runs on GPUs.
if "$python" -c 'import tensorflow' 2>/dev/null; then
  module=horovod.tensorflow
  export HOROVOD_WITH_TENSORFLOW=1
else
  module=horovod.runner
  export HOROVOD_WITHOUT_TENSORFLOW=1
  unset HOROVOD_GPU_OPERATIONS
fi
if ! "$python" -c "import $module" 2>/dev/null; then
  # Its build fails with newer setuptools or cmake than these; --no-build-isolation is what lets it see TensorFlow.
  pip install -q --no-warn-conflicts --target "$work/tools" \
    "setuptools<70" wheel "cmake<4" packaging pyyaml cffi cloudpickle psutil
  [[ ${HOROVOD_WITH_MPI:-} ]] || export HOROVOD_WITHOUT_MPI=1
  PATH=$work/tools/bin:$PATH PYTHONPATH=$work/tools \
    HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
    pip wheel -q --no-deps --no-build-isolation --no-cache-dir --wheel-dir "$folder/wheels" horovod==0.28.1
fi

# What pip would install in the image if it had to leave alone all that is there.
pip list --format=freeze --exclude horovod >"$work/image.txt"
pip install --dry-run --report "$work/plan.json" --constraint "$work/image.txt" "$folder"/wheels/*.whl "$@" \
  >"$work/plan.log" 2>&1 || {
  tail -n 20 "$work/plan.log" >&2
  echo "What hetero or the job needs does not go with the packages of this image: see above." >&2
  exit 1
}
"$python" - "$work/plan.json" >"$work/missing.txt" <<'END'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as report:
    plan = json.load(report)["install"]
print("\n".join(sorted("{name}=={version}".format(**each["metadata"]) for each in plan)))
END
# Those two are there already, and what an index has under their names is not asked for.
grep -Ev '^(hetero|horovod)==' "$work/missing.txt" >"$work/others.txt" &&
  pip wheel -q --no-deps --wheel-dir "$folder/wheels" -r "$work/others.txt"

{
  echo "$header for $("$python" --version)"
  printf -- '--no-index\n--find-links wheels\n'
  cat "$work/missing.txt"
} >"$list"
gathered=("$folder"/wheels/*.whl)
echo "$list and ${#gathered[@]} wheels, $(du -sk "$folder/wheels" | cut -f1) KB"
