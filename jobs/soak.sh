#!/usr/bin/env bash
# Runs the reliability tests with full counts, one after the other, in about two hours. Each test
# leaves a log in the folder of the first argument, by default soak/. MINUTES (30) is the length of
# the last test, which injects faults.
set -uo pipefail
# shellcheck source=jobs/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
LOGS=$(mkdir -p "${1:-soak}" && cd "${1:-soak}" && pwd) || exit 2
set_up test
cd "$ROOT" || exit 2
export MPIKFAC_SOAK=1

summary=
failed=0

# stage NAME COMMAND...: runs the command, writes the output to the log NAME.txt, and records the
# result.
stage() {
    local name=$1 start=$SECONDS result=passed code=0 log=$LOGS/$1.txt
    shift
    echo "== $name: $log"
    "$@" >"$log" 2>&1 </dev/null || code=$?
    [ "$code" = 0 ] || result="FAILED: exit code $code" failed=1
    summary+=$(printf '%-14s %6d s  %-24s %s' \
        "$name" $((SECONDS - start)) "$result" "$(tail -n 1 "$log")")$'\n'
}

# tests NAME FILE...: runs test files; a test may take half an hour.
tests() {
    local name=$1
    shift
    stage "$name" "$PYTHON" -m pytest -v -s -rs --timeout 1800 "$@"
}

tests kills tests/faults/test_kills.py tests/unit/test_writer.py
tests crash-points tests/faults/test_crash_points.py
tests damage tests/faults/test_damage.py
tests attacks tests/hostile
tests full-disk tests/faults/test_disk.py
tests faults tests/apps/test_faults.py
tests stopping tests/apps/test_stopping.py
tests restart tests/apps/test_restart.py
tests shrink tests/apps/test_shrink.py
tests slurm tests/jobs/test_slurm.py
PYTHONPATH=$ROOT/tests${PYTHONPATH:+:$PYTHONPATH} \
    stage chaos "$PYTHON" tests/programs/soak.py "$LOGS/chaos" --minutes "${MINUTES:-30}"

echo
echo "$summary"
exit "$failed"
