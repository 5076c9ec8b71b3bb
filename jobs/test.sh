#!/usr/bin/env bash
# Run the tests:
#   bash jobs/test.sh         the quick tests, those without a mark; 7 minutes on two idle cores
#   bash jobs/test.sh --lab   the quick tests of the laboratory (mpikfac/lab) and of its programs and
#                             examples, those marked lab; 10 minutes
#   bash jobs/test.sh --ci    the remaining tests that every change must pass: those marked gate, and
#                             a part of --device; 36 minutes
#   bash jobs/test.sh --all   all tests; an hour
#   bash jobs/test.sh --device   tests on an emulated GPU, which needs a C++ compiler; 20 minutes
#   bash jobs/test.sh --sizes   named strategies at 5, 7, 12 and 16 ranks, which take 6 GiB of
#                             memory; 10 minutes
#   bash jobs/test.sh --frameworks   installs Lightning, Accelerate and transformers, and trains
#                             with each of them; 5 minutes
#   bash jobs/test.sh --smpi  compares predicted messages with a simulation of MPI, which needs
#                             SimGrid with SMPI (Debian: libsimgrid-dev); 3 minutes
# Tests of one process come first, two at a time. Then tests/mpi runs on 2 and 3 ranks and, except
# for the quick tests, on 4: on 3 ranks, MPI adds numbers in a different order. CONTRIBUTING.md says
# which tests each of the lanes has. Two cores are enough: common.sh allows more ranks than cores and
# gives each rank one thread.
# With MPIKFAC_COVERAGE=1, tests/unit and tests/mpi also count lines of the library; `coverage combine
# --append` and `coverage report` then print them.
# Time limits only catch hangs. Before each stage, a start of two ranks is timed, and all limits of
# the stage grow with MPIKFAC_TEST_PACE, so that a machine that is ten times slower passes.
set -uo pipefail
HOUR=3600 # limit of a stage at pace 1 in seconds; on two idle cores, no stage takes half an hour
IDLE=3000 # the timed start takes at most so many milliseconds on an idle machine
extras=(test) counted=() measured=()
case ${1-} in
    "") chosen=(-m "not slow and not gate and not lab") ;;
    --lab) chosen=(-m "lab and not slow and not gate") ;;
    --device | --sizes | --smpi | --all) chosen=() ;;
    --frameworks) extras+=(frameworks) ;;
    --ci) chosen=(-m gate) ;;
    *)
        echo "usage: bash jobs/test.sh, with nothing, --lab, --ci, --all, --device, --sizes, --smpi or --frameworks" >&2
        exit 2
        ;;
esac
if [ -n "${MPIKFAC_COVERAGE-}" ]; then
    counted=(--cov=mpikfac --cov-report= --cov-append)
    measured=(-m coverage run --parallel-mode --source=mpikfac)
fi
# shellcheck source=jobs/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
set_up "${extras[@]}"
cd "$ROOT" || exit 2

# Open MPI gives its ranks a terminal even where the output goes to a file.
[ -t 1 ] || export NO_COLOR=1

summary=
failed=0

# time_a_start: sets MPIKFAC_TEST_PACE, how many times slower than an idle machine this machine now
# starts two ranks, and LIMIT, the seconds of a stage.
time_a_start() {
    local start=${EPOCHREALTIME/[.,]/} took
    LIMIT=$HOUR mpi 2 -c 'import torch, mpikfac
for _ in range(1000): mpikfac.world().Barrier()' ||
        die "two ranks do not start; see above"
    took=$(((${EPOCHREALTIME/[.,]/} - start) / 1000))
    export MPIKFAC_TEST_PACE=$((took > IDLE ? (took + IDLE - 1) / IDLE : 1))
    LIMIT=$((HOUR * MPIKFAC_TEST_PACE))
}

# stage NAME COMMAND...: runs the command and records the result.
stage() {
    local name=$1 start=$SECONDS result=passed code=0
    shift
    time_a_start
    echo
    echo "== $name, with time limits for pace $MPIKFAC_TEST_PACE"
    "$@" || code=$?
    case $code in
        0) ;;
        124 | 137) result="FAILED: time limit" failed=1 ;;
        *) result="FAILED: exit code $code" failed=1 ;;
    esac
    summary+=$(printf '%-22s %4d s  %s' "$name" $((SECONDS - start)) "$result")$'\n'
}

# shellcheck disable=SC2329  # `stage` calls the function
# one_process OPTION...: runs pytest. INT lets pytest print the failures so far; without the limit,
# xdist may wait forever for a worker that died.
one_process() {
    timeout --signal=INT --kill-after=30 "$LIMIT" \
        "$PYTHON" -m pytest -q -rfEs --durations=8 --durations-min=4 "$@" </dev/null
}

# on_device LANE...: runs the tests on the emulated device. A lane is a number of ranks, and either
# "staged", if buffers on the device are copied to the host for MPI, or "direct", if MPI accesses
# them on the device, as a CUDA-aware MPI does.
on_device() {
    local lane direct
    "$PYTHON" tests/emulated/build.py || exit 2
    export PYTHONPATH=$ROOT/tests/emulated${PYTHONPATH:+:$PYTHONPATH} MPIKFAC_TEST_DEVICE=cuda
    stage "the emulated device" one_process "${chosen[@]}" tests/emulated
    for lane in "$@"; do
        case $lane in *direct) direct=1 ;; *) direct=0 ;; esac
        MPIKFAC_CUDA_AWARE=$direct stage "ranks on device: $lane" \
            mpi "${lane% *}" -m pytest -q -x -m "not slow" tests/mpi
    done
}

# at_sizes RANKS...: trains with named strategies on numbers of ranks that divide nothing evenly.
at_sizes() {
    local ranks by_name=(
        tests/mpi/test_odd_sizes.py tests/mpi/test_exchange.py
        tests/mpi/test_asynchronous.py::test_updates_follow_the_rule_in_order_of_arrival
    )
    for ranks in "$@"; do
        stage "strategies, $ranks ranks" mpi "$ranks" -m pytest -q -x "${chosen[@]}" "${by_name[@]}"
    done
}

# Print the summary, and exit with its code.
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
    --sizes)
        at_sizes 5 7 12 16
        finish
        ;;
    --frameworks)
        stage "frameworks" one_process tests/frameworks
        finish
        ;;
    --smpi)
        stage "simulated messages" one_process tests/smpi
        finish
        ;;
esac

others=(--ignore=tests/unit tests) numbers=(2 3 4)
case ${1-} in
    "" | --lab) others+=(--ignore=tests/mpi) numbers=(2 3) ;;
esac
stage "unit tests" one_process -n 2 --max-worker-restart=0 "${counted[@]}" "${chosen[@]}" tests/unit
# Files start in the order of the folders: the long tests of apps/ come first.
stage "tests of one process" one_process -n 2 --dist loadfile --no-loadscope-reorder \
    --max-worker-restart=0 "${chosen[@]}" "${others[@]}"
for ranks in "${numbers[@]}"; do
    stage "tests of $ranks ranks" mpi "$ranks" "${measured[@]}" -m pytest -q -x "${chosen[@]}" tests/mpi
done
case ${1-} in
    --ci)
        at_sizes 5
        if type "${CXX:-g++}" >/dev/null 2>&1; then
            chosen=(-m "not slow or gate")
            on_device "2 direct"
        else
            echo "skipping the tests on an emulated GPU: no C++ compiler on PATH"
        fi
        ;;
    --all) at_sizes 5 7 12 16 ;;
esac
finish
