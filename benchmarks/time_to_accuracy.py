"""Epochs and seconds of K-FAC to where tuned SGD ends on real CIFAR-10.

    OMP_NUM_THREADS=1 python benchmarks/time_to_accuracy.py --data DIR --out runs/time_to_accuracy

SGD trains for 15 epochs, K-FAC for 8, each with its learning rate falling linearly to 0 within its
own budget. Stage 1 runs a grid of equal size for both with seed 0; stage 2 repeats the best of each
with further seeds. Epochs by run are kept in `time_to_accuracy.json` beside this file, and what is
there is not run again: several sittings, or machines, can share the work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from learning import by_epoch, launch

RESULTS = Path(__file__).with_suffix(".json")
SEEDS = (0, 1, 2)
COMMON = {
    "data.name": "cifar10",
    "data.augment": "true",
    "model": "resnet20",
    "batch": "256",
    "schedule": "linear",
    "weight_decay": "0.0005",
}
BUDGETS = {"sgd": "15", "kfac": "8"}
GRIDS = {
    "sgd": [{"lr": lr} for lr in ("0.05", "0.1", "0.2")],
    "kfac": [
        {"lr": lr, "kfac.damping": damping, "kfac.kl_clip": clip}
        for lr, damping, clip in (
            ("0.1", "0.03", "0.001"),
            ("0.1", "0.03", "0.01"),
            ("0.1", "0.1", "0.03"),
        )
    ],
}
INTERVALS = {"kfac.factor_every": "5", "kfac.basis_every": "50"}


def main() -> int:
    """Runs what is missing, then prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of cifar-10-batches-bin")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", default="2")
    options = parser.parse_args()
    best = {}
    for optimizer, grid in GRIDS.items():
        for choice in grid:
            print(f"{optimizer} {choice}: {epochs(options, optimizer, choice, 0)[-1]:.2%}")
        best[optimizer] = max(grid, key=lambda c: epochs(options, optimizer, c, 0)[-1])
    final = [epochs(options, "sgd", best["sgd"], seed)[-1] for seed in SEEDS]
    target = statistics.mean(final)
    print(f"SGD {best['sgd']}: {[f'{value:.2%}' for value in final]}, mean {target:.2%}")
    for seed in SEEDS:
        found = epochs(options, "kfac", best["kfac"], seed)
        reached = [number for number, value in enumerate(found, 1) if value >= target]
        share = f"in epoch {reached[0]} of SGD's {BUDGETS['sgd']}" if reached else "not reached"
        print(f"K-FAC {best['kfac']}, seed {seed}: {found[-1]:.2%}; {target:.2%} {share}")
    return 0


def epochs(
    options: argparse.Namespace, optimizer: str, choice: dict[str, str], seed: int
) -> list[float]:
    """Test accuracy after each epoch of one run, made unless it is known."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    name = "-".join([optimizer, *choice.values(), str(seed)])
    if name not in results:
        settings = {**COMMON, **choice, "epochs": BUDGETS[optimizer]}
        settings |= INTERVALS if optimizer == "kfac" else {}
        metrics = launch(options, name, optimizer, settings, seed)
        results[name] = [line["test_accuracy"] for line in by_epoch(metrics)]
        RESULTS.write_text(json.dumps(results, indent=1))
    return results[name]


if __name__ == "__main__":
    sys.exit(main())
