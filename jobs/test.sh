#!/usr/bin/env bash
# Tests: `jobs/test.sh` runs those that are not marked slow, in five minutes; `jobs/test.sh --all`
# all of them, in fifteen. First those of one process, in two processes: tests/mpi on one rank is
# among them. Then tests/mpi at 2, 3 and 4 ranks (at 3, sums are added in another order). Two cores
# are enough: common.sh tells the launcher that ranks may outnumber cores and gives each one thread.
# The whole has a time limit, with room for a machine that is four times slower.
set -uo pipefail
case ${1-} in
    "") chosen=(-m "not slow") minutes=25 ;;
    --all) chosen=() minutes=75 ;; # CI ends after 90
    *) echo "usage: bash jobs/test.sh [--all]" >&2 && exit 2 ;;
esac
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

# The seconds that are left of the time limit.
left() { echo $((SECONDS < 60 * minutes ? 60 * minutes - SECONDS : 1)); }

# INT lets pytest say what has failed so far. Without a worker that died, xdist may wait for ever.
# Files start in the order of their folders: those of apps/, whose tests are long, come first.
stage "tests of one process" timeout --signal=INT --kill-after=30 "$(left)" "$PYTHON" -m pytest \
    -q -rs -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 "${chosen[@]}" tests \
    </dev/null
for ranks in 2 3 4; do
    LIMIT=$(left) stage "tests of $ranks ranks" mpi "$ranks" -m pytest -q -x "${chosen[@]}" tests/mpi
done

echo
echo "$summary"
exit "$failed"
