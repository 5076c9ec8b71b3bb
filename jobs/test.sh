#!/usr/bin/env bash
# Run the tests:
#   bash jobs/test.sh         tests that are not marked slow; 15 minutes on two idle cores
#   bash jobs/test.sh --all   all tests; an hour
#   bash jobs/test.sh --device   tests on an emulated GPU, which needs a C++ compiler; 20 minutes
#   bash jobs/test.sh --ci    the tests that every change must pass, and the coverage of the
#                             library: those not marked slow, those marked gate, and a part of
#                             --device; half an hour
#   bash jobs/test.sh --frameworks   installs Lightning, Accelerate and transformers, and trains
#                             with each of them; 5 minutes
# Tests of one process come first, two at a time, and tests/mpi with 1 rank is among these tests. Then
# tests/mpi runs at 2, 3 and 4 ranks: at 3 ranks, MPI adds numbers in a different order. Except with
# --all, a test of tests/mpi runs with one of the four numbers of ranks. Two cores are enough:
# common.sh allows more ranks than cores and gives each rank one thread. The time limit is twice the
# expected time or more. Only hanging tests reach the limit: a slow machine passes.
set -uo pipefail
extras=(test) covered=()
case ${1-} in
    "") chosen=(-m "not slow") minutes=60 ;;
    --device) chosen=() minutes=35 ;;
    --frameworks) extras+=(frameworks) minutes=25 ;;
    --all) chosen=() minutes=120 ;;
    --ci) extras+=(lint) chosen=(-m "not slow or gate") minutes=80 ;; # CI stops after 90 minutes
    *)
        echo "usage: bash jobs/test.sh, with nothing, --all, --device, --ci or --frameworks" >&2
        exit 2
        ;;
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

# shellcheck disable=SC2329  # `stage` calls the function
# one_process OPTION...: runs pytest. INT lets pytest print the failures until the end; without
# the limit, xdist may wait for ever for a worker that died.
one_process() {
    timeout --signal=INT --kill-after=30 "$(left)" "$PYTHON" -m pytest -q -rs "$@" </dev/null
}

# on_device LANE...: runs the tests on the emulated device. A lane is a number of ranks, and
# "staged", if buffers on the device go to MPI through the host, or "direct": the emulated device
# lets MPI see the content, as a CUDA-aware MPI does.
on_device() {
    local lane direct
    "$PYTHON" tests/emulated/build.py || exit 2
    export PYTHONPATH=$ROOT/tests/emulated${PYTHONPATH:+:$PYTHONPATH} MPIKFAC_TEST_DEVICE=cuda
    stage "the emulated device" timeout --kill-after=30 "$(left)" "$PYTHON" -m mpi4py -m pytest -q \
        "${chosen[@]}" tests/emulated </dev/null
    for lane in "$@"; do
        case $lane in *direct) direct=1 ;; *) direct=0 ;; esac
        MPIKFAC_CUDA_AWARE=$direct LIMIT=$(left) stage "ranks on device: $lane" \
            mpi "${lane% *}" -m pytest -q -x -m "not slow" tests/mpi
    done
}

# Print the summary, and end with its code.
finish() {
    echo
    echo "$summary"
    exit "$failed"
}

case ${1-} in
    --device)
        on_device {1..4}" staged" {1..4}" direct"
        finish
        ;;
    --frameworks)
        stage "frameworks" one_process tests/frameworks
        finish
        ;;
esac

if [ "${1-}" = --ci ]; then
    "$PYTHON" -m coverage erase
    covered=(--cov=mpikfac --cov-report=)
fi
stage "unit tests" one_process -n 2 --max-worker-restart=0 "${covered[@]}" "${chosen[@]}" tests/unit
# Files start in the order of the folders: the long tests of apps/ come first.
stage "tests of one process" one_process -n 2 --dist loadfile --no-loadscope-reorder \
    --max-worker-restart=0 "${chosen[@]}" --ignore=tests/unit tests
[ "${1-}" = --ci ] && covered=(-m coverage run --parallel-mode --source=mpikfac)
for ranks in 2 3 4; do
    LIMIT=$(left) stage "tests of $ranks ranks" mpi "$ranks" "${covered[@]}" -m pytest -q -x \
        "${chosen[@]}" tests/mpi
done
if [ "${1-}" = --ci ]; then
    "$PYTHON" -m coverage combine --append --quiet
    stage "coverage" "$PYTHON" -m coverage report --skip-covered --fail-under=94
    if type "${CXX:-g++}" >/dev/null 2>&1; then
        on_device "2 direct"
    else
        echo "skipping the tests on an emulated GPU: no C++ compiler on PATH"
    fi
fi
finish
