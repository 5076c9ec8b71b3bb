#!/usr/bin/env bash
# All tests: the plain ones in two processes, those of tests/mpi at 1, 2, 3 and 4 ranks (sums are
# added in another order at 3). Two cores are enough: common.sh tells the launcher that ranks may
# outnumber cores and gives each one thread. Every stage has a time limit: 20 minutes for the plain
# tests, 15 for the others at each number of ranks.
set -uo pipefail
# shellcheck source=jobs/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
set_up test
cd "$ROOT" || exit 2

# Open MPI gives its ranks a terminal even where the output goes to a file.
[ -t 1 ] || export NO_COLOR=1

summary=
failed=0

# stage NAME COMMAND...: runs the command and notes how it ended.
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

# INT lets pytest say what has failed so far. Without a worker that died, xdist may wait for ever.
stage "plain tests" timeout --signal=INT --kill-after=30 1200 \
    "$PYTHON" -m pytest -q -rs -n 2 --dist loadfile --max-worker-restart=0 tests --ignore tests/mpi \
    </dev/null
for ranks in 1 2 3 4; do
    LIMIT=900 stage "MPI tests, ranks: $ranks" mpi "$ranks" -m pytest -q -x tests/mpi
done

echo
echo "$summary"
exit "$failed"
