#!/usr/bin/env bash
# Run the tests:
#   bash jobs/test.sh         tests that are not marked slow; at most 5 minutes on two idle cores
#   bash jobs/test.sh --all   all tests; 30 minutes
#   bash jobs/test.sh --device   tests on an emulated GPU, which needs a C++ compiler; 20 minutes
#   bash jobs/test.sh --frameworks   installs Lightning, Accelerate and transformers, and trains
#                             with each of them; 5 minutes
# Tests of one process come first, two at a time. Then tests/mpi runs at 2, 3 and 4 ranks: at 3
# ranks, MPI adds numbers in a different order. Two cores are enough: common.sh allows more ranks
# than cores and gives each rank one thread. The time limit is five times the expected time. Only
# hanging tests reach the limit: a slow machine passes.
set -uo pipefail
extras=(test)
case ${1-} in
    "" | --device) chosen=(-m "not slow") minutes=35 ;;
    --frameworks) extras+=(frameworks) minutes=25 ;;
    --all) chosen=() minutes=75 ;; # CI stops a change after 90 minutes
    *) echo "usage: bash jobs/test.sh, with nothing, --all, --device or --frameworks" >&2 && exit 2 ;;
esac
# shellcheck source=jobs/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
set_up "${extras[@]}"
cd "$ROOT" || exit 2

# Open MPI gives its ranks a terminal even where the output goes to a file.
[ -t 1 ] || export NO_COLOR=1

summary=
failed=0

# stage NAME COMMAND...: runs the command and notes the result.
stage() {
    local name=$1 start=$SECONDS result=passed code=0
    shift
    echo
    echo "== $name"
    "$@" || code=$?
    case $code in
        0) ;;
        124 | 137) result="FAILED: time limit" failed=1 ;;
        *) result="FAILED: exit code $code" failed=1 ;;
    esac
    summary+=$(printf '%-22s %4d s  %s' "$name" $((SECONDS - start)) "$result")$'\n'
}

# Print the seconds until the time limit.
left() { echo $((SECONDS < 60 * minutes ? 60 * minutes - SECONDS : 1)); }

# Buffers on the device go to MPI through the host, and directly: the emulated device lets MPI see
# the content, as a CUDA-aware MPI does.
on_device() {
    "$PYTHON" tests/emulated/build.py || exit 2
    export PYTHONPATH=$ROOT/tests/emulated${PYTHONPATH:+:$PYTHONPATH} MPIKFAC_TEST_DEVICE=cuda
    stage "the emulated device" timeout --kill-after=30 "$(left)" "$PYTHON" -m mpi4py -m pytest -q \
        tests/emulated </dev/null
    for ranks in 1 2 3 4; do
        MPIKFAC_CUDA_AWARE=0 LIMIT=$(left) \
            stage "$ranks ranks, staged" mpi "$ranks" -m pytest -q -x "${chosen[@]}" tests/mpi
        MPIKFAC_CUDA_AWARE=1 LIMIT=$(left) \
            stage "$ranks ranks, direct" mpi "$ranks" -m pytest -q -x "${chosen[@]}" tests/mpi
    done
}

# Print the summary, and end with its code.
finish() {
    echo
    echo "$summary"
    exit "$failed"
}

if [ "${1-}" = --device ]; then
    on_device
    finish
fi

if [ "${1-}" = --frameworks ]; then
    stage "frameworks" timeout --signal=INT --kill-after=30 "$(left)" "$PYTHON" -m pytest -q -rs \
        tests/frameworks </dev/null
    finish
fi

# INT lets pytest print the failures until then. If a worker died, xdist may wait for ever.
# Files start in the order of the folders: the long tests of apps/ come first.
stage "tests of one process" timeout --signal=INT --kill-after=30 "$(left)" "$PYTHON" -m pytest \
    -q -rs -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 "${chosen[@]}" tests \
    </dev/null
for ranks in 2 3 4; do
    LIMIT=$(left) stage "tests of $ranks ranks" mpi "$ranks" -m pytest -q -x "${chosen[@]}" tests/mpi
done
finish
