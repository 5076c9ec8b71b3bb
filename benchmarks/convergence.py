"""Train ResNet-20 on all images of CIFAR-10 for as many epochs as published recipes take.

    OMP_NUM_THREADS=1 nice python benchmarks/convergence.py --data DIR --ranks 1

The runs are trained in the order of `RUNS`, which takes days on two cores. A run that was stopped
continues from its last checkpoint. `--known` trains nothing; it copies the test accuracy after each
epoch so far to `results/convergence.json`, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from training import by_epoch, run_program

RESULTS = Path(__file__).parent / "results" / "convergence.json"
COMMON = {"data.name": "cifar10", "data.augment": "true", "model": "resnet20", "batch": "128"}
COMMON |= {"checkpoint_minutes": "5", "resume": "auto"}
KFAC = {"optimizer": "kfac", "weight_decay": "0.0005"}
RUNS = {
    "kfac30": {**KFAC, "epochs": "30"},
    "sgd200": {  # [He et al. 2016], whose 64,000 steps are 164 epochs
        "optimizer": "sgd",
        "epochs": "200",
        "lr": "0.1",
        "weight_decay": "0.0001",
        "schedule": "step",
        "decay_epochs": "[100,150]",
        "decay_factor": "0.1",
    },
    "kfac60": {**KFAC, "epochs": "60"},
    "kfac100": {**KFAC, "epochs": "100"},
}
SHOWN = (1, 5, 10, 20, 30, 60, 100, 150, 200)  # epochs


def main() -> int:
    """Train all runs, or keep what is known of them; then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of cifar-10-batches-bin")
    parser.add_argument("--out", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--known", action="store_true", help="train nothing")
    options = parser.parse_args()
    if options.data is None and not options.known:
        parser.error("--data: the folder of the images is missing")
    for name, settings in RUNS.items():
        directory = options.out / name
        if not options.known:
            places = {"data.path": options.data, "run_dir": str(directory)}
            run_program("train", options.ranks, {**COMMON, **settings, **places})
        if (metrics := directory / "metrics.jsonl").exists():
            keep(name, [line["test_accuracy"] for line in by_epoch(metrics)])
    report()
    return 0


def read() -> dict[str, list[float]]:
    """Return the test accuracy after each epoch of each run."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def keep(name: str, accuracies: list[float]) -> None:
    """Replace the accuracies of a run."""
    runs = read() | {name: accuracies}
    texts = (f"{json.dumps(run)}: {json.dumps(values)}" for run, values in runs.items())
    RESULTS.write_text("{" + ",\n".join(texts) + "}\n")


def report() -> None:
    """Print the test accuracy in % by run and epoch."""
    print(f"| run | epochs so far | last | {' | '.join(f'epoch {epoch}' for epoch in SHOWN)} |")
    print("|---" * (len(SHOWN) + 3) + "|")
    for name, values in read().items():
        cells = (f"{100 * values[at - 1]:.2f}" if at <= len(values) else "" for at in SHOWN)
        known = f"{len(values)} of {RUNS[name]['epochs']} | {100 * values[-1]:.2f}"
        print(f"| {name} | {known} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
