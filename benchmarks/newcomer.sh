#!/usr/bin/env bash
# Time the first steps of a newcomer: a clone, the installation, the tutorial's commands:
#   bash benchmarks/newcomer.sh IMAGES     IMAGES/train/CLASS/*.jpg and IMAGES/test/CLASS/*.jpg
# The commands are those of the page, in an empty folder, with two changes: the run on two ranks
# takes MODEL, timm:resnet18 unless given, and images lie in IMAGES. Everything is deleted at the end.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ $# = 1 ] && [ -d "$1/train" ] || { echo "usage: bash benchmarks/newcomer.sh IMAGES" >&2 && exit 2; }
images=$(cd "$1" && pwd) model=${MODEL:-timm:resnet18} table=
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
[ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# step NAME COMMAND...: runs the command, and notes the seconds.
step() {
    local name=$1 start=$SECONDS
    shift
    echo
    echo "== $name"
    "$@"
    table+="| $name | $((SECONDS - start)) |"$'\n'
}

# code LANGUAGE SECTION: prints the code of a section of the page, a command on each line.
code() {
    awk -v fence="\`\`\`$1" -v title="## $2. " '
        /^## / { here = index($0, title) == 1 }
        /^```/ { inside = here && $0 == fence; next }
        inside { if (sub(/\\$/, "")) printf "%s", $0; else print }' docs/start/tutorial.md
}

# typed SECTION: runs the commands of a section.
typed() {
    eval "$(code bash "$1")"
}

two_ranks() {
    eval "$(code bash 6 | sed -n "1s/my_model.py:build/$model/p")"
}

# The second command of the section stops the run as soon as the run has written a line.
stopped() {
    two_ranks &
    until [ -s runs/two/metrics.jsonl ]; do
        kill -0 $! # ends the script if the run has failed
        sleep 0.5
    done
    eval "$(code bash 6 | sed -n 2p)"
    wait $!
}

step "clone" git clone --quiet "$root" mpikfac
cd mpikfac
ln -s "$images" DIR
step "installation" bash -c '. jobs/common.sh && set_up'
step "1. SGD, AdamW and K-FAC on an autoencoder" typed 1
step "2. a first run" typed 2
code python 3 >my_model.py
step "3. the check of a model" typed 3
step "4. two runs of the model, and the comparison" typed 4
step "timm" pip install --quiet --constraint constraints.txt timm
step "5. images in a folder" typed 5
step "6. two ranks, until the stop" stopped
step "6. the way on, to the end" two_ranks
step "8. test and export" typed 8
echo
echo "| step | seconds |"
echo "|---|---|"
echo "$table| all | $SECONDS |"
