#!/usr/bin/env bash
# Test and measure mpikfac on the GPUs of this machine, in at most 20 minutes:
#   bash benchmarks/gpu.sh FOLDER           writes a file of text for each part into FOLDER
#   TRIAL=1 bash benchmarks/gpu.sh FOLDER   tiny sizes: shows that all parts run
# Steps of kfac-pytorch are measured beside if Python finds the package `kfac`. The variables PYTHON,
# MPIRUN, MPIRUN_FLAGS and RANKS choose the interpreter, the launcher, its options, and the number of
# ranks (2). Ranks share GPUs if GPUs are fewer.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
[ $# = 1 ] || { echo "usage: [TRIAL=1] bash benchmarks/gpu.sh FOLDER" >&2 && exit 2; }
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
PYTHON=${PYTHON:-python} RANKS=${RANKS:-2} failed=0
export NO_COLOR=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# shellcheck disable=SC2086,SC2329  # options are separated by blanks; `part` calls the function
ranks() {
    ${MPIRUN:-mpirun} ${MPIRUN_FLAGS---oversubscribe} -n "$RANKS" "$PYTHON" -m mpi4py "$@"
}

# part NAME SECONDS COMMAND...: runs the command, and prints the command's output and result.
part() {
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    echo "== $name"
    export -f ranks
    export PYTHON RANKS MPIRUN_FLAGS=${MPIRUN_FLAGS---oversubscribe}
    timeout --kill-after=10 "$limit" bash -c '"$@"' part "$@" </dev/null >"$out/$name.txt" 2>&1
    local code=$?
    cat "$out/$name.txt"
    echo "== $name ended with code $code after $((SECONDS - start)) s"
    [ $code = 0 ] || failed=1
}

if [ "${TRIAL:-}" ]; then
    small=(--batch 4 --size 16) large=(--batch 2 --size 32) times=(--repetitions 1)
    networks=(--model digits_cnn --batch_per_rank 4) big=resnet20 pick=(-k "allocate")
else
    small=(--batch 128 --size 32) large=(--batch 32 --size 224) times=(--repetitions 7)
    networks=(--model "resnet20,resnet50" --batch_per_rank 32) big=resnet50 pick=()
fi
time=("$PYTHON" benchmarks/step_time.py --device auto --contiguous "${times[@]}")

"$PYTHON" -c 'import torch as t
assert t.accelerator.is_available(), "torch finds no GPU"
print(t.__version__, t.accelerator.current_accelerator(), t.accelerator.device_count(), "GPUs")' || exit 2
part tests 240 ranks -m pytest -q -rs tests/mpi/test_cuda.py "${pick[@]}"
part machine 240 ranks apps/calibrate.py --out "$out/machine.json" "${networks[@]}"
part steps_small 150 "${time[@]}" --model resnet20 "${small[@]}"
part steps_large 300 "${time[@]}" --model "$big" "${large[@]}" --variants "inverse;eigen"
part waits_small 60 "$PYTHON" benchmarks/waits.py resnet20 inverse eigen "${small[@]}"
part waits_large 60 "$PYTHON" benchmarks/waits.py "$big" inverse "${large[@]}"
part memory 150 "$PYTHON" benchmarks/memory.py --ranks "$RANKS" --model "$big" "${large[@]}"
exit $failed
