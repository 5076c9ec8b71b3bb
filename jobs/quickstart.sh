#!/usr/bin/env bash
# Trains a deep autoencoder on handwritten digits on 2 ranks, with SGD, AdamW and K-FAC, and
# compares the three. Needs Linux and Python 3.11 or newer; everything else goes into .venv.
set -euo pipefail
# shellcheck source=jobs/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck disable=SC2119  # no extras
set_up
cd "$ROOT"

runs=runs/quickstart
rm -rf "$runs" # a run directory holds one run; remove the runs of an earlier quickstart
for optimizer in sgd adamw kfac; do
    echo
    echo "== $optimizer"
    mpi 2 -m mpikfac_apps train --config "jobs/configs/autoencoder_$optimizer.yaml" --run_dir "$runs/$optimizer"
done
echo
"$PYTHON" -m mpikfac_apps compare "$runs"/{sgd,adamw,kfac} --target 1.45 --png "$runs/curves.png"

cat <<END
The error of a deep autoencoder falls steeply in few directions of the weights, and slowly in most directions.
K-FAC divides a layer's gradient by the curvature of the whole layer, so the slow directions get long steps, too.

Curves: $runs/curves.png   Metrics: $runs/*/metrics.jsonl   Checkpoints: $runs/*/checkpoints
What to try next, from $ROOT:
  source .venv/bin/activate$([ "$(id -u)" != 0 ] || echo "; export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
  mpikfac plan --model resnet50 --ranks 64 --assignment hybrid-opt --assignment.grad_workers 8   # who computes and sends what
  mpikfac train --help                                        # options of a run; --help_all: every option
  $(basename "$MPIRUN") ${MPIRUN_FLAGS:+$MPIRUN_FLAGS }-n 4 mpikfac train \\
      --config jobs/configs/cifar10_budget_kfac.yaml --data.path DIR   # ResNet-20 on CIFAR-10 in DIR
  bash jobs/test.sh                                           # tests: 5 minutes; --all: an hour
END
