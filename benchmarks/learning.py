"""Compare test accuracy of K-FAC and SGD within a small budget on real CIFAR-10, tuned alike.

    OMP_NUM_THREADS=1 python benchmarks/learning.py --data DIR --out runs/learning

Stage 1 runs a grid of equal size for both optimizers with seed 0, for 5 epochs. Stage 2 repeats the
best setting of each optimizer with further seeds. Stage 3 trains with the best setting for 15
epochs, with all seeds. Complete runs in `--out` are not repeated. Writes
`results.json` and `curves.png` to `--out`. MPIRUN and MPIRUN_FLAGS set the launcher.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SEEDS = (0, 1, 2)
COMMON = {
    "data.name": "cifar10",
    "data.train_images": "10000",
    "data.augment": "true",
    "model": "resnet20",
    "batch": "256",
    "epochs": "5",
    "schedule": "linear",
    "weight_decay": "0.0005",
}
SGD_GRID = [
    {"batch": batch, "lr": lr}
    for batch, lr in (("256", "0.1"), ("256", "0.2"), ("128", "0.1"), ("64", "0.05"), ("64", "0.1"))
]
KFAC_GRID = [
    {
        **{"batch": batch, "lr": "0.003", "weight_decay": decay},
        **{"kfac.factor_every": every, "kfac.basis_every": f"{2 * int(every)}"},
    }
    for batch, decay, every in (
        *(("256", "0.0005", "5"), ("256", "0.01", "5"), ("256", "0.02", "5")),
        *(("128", "0.02", "10"), ("64", "0.02", "20")),
    )
]
LONG = {"epochs": "15"}
COLOURS = {"sgd": ("SGD", "tab:gray"), "kfac": ("K-FAC", "tab:red")}


def main() -> int:
    """Run all missing runs, then write and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of cifar-10-batches-bin")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", default="2")
    options = parser.parse_args()
    results = {}
    for optimizer, grid in (("sgd", SGD_GRID), ("kfac", KFAC_GRID)):
        tried = [(accuracy(run(options, optimizer, choice, 0)), choice) for choice in grid]
        best = max(tried, key=lambda found: found[0])[1]
        results[optimizer] = {
            "grid": [{**choice, "test_accuracy": value} for value, choice in tried],
            "best": best,
            "epochs": curves(options, optimizer, best),
            "long": curves(options, optimizer, best | LONG),
        }
    (options.out / "results.json").write_text(json.dumps(results, indent=1))
    draw(results, options.out / "curves.png")
    report(results)
    return 0


def curves(
    options: argparse.Namespace, optimizer: str, choice: dict[str, str]
) -> list[list[dict[str, float]]]:
    """Return the tests of the runs of all seeds."""
    return [by_epoch(run(options, optimizer, choice, seed)) for seed in SEEDS]


def run(options: argparse.Namespace, optimizer: str, choice: dict[str, str], seed: int) -> Path:
    """Return the metrics file of a run; train unless the file is complete."""
    name, settings = "-".join([optimizer, *choice.values(), str(seed)]), COMMON | choice
    metrics = options.out / name / "metrics.jsonl"
    if metrics.exists() and len(by_epoch(metrics)) == int(settings["epochs"]):
        return metrics
    return launch(options, name, optimizer, settings, seed)


def launch(
    options: argparse.Namespace,
    name: str,
    optimizer: str,
    settings: dict[str, str],
    seed: int,
    shown: Callable[[Path], str] = lambda metrics: f"{accuracy(metrics):.2%}",
) -> Path:
    """Train, and return the metrics file of the run, under `options.out`; print the result.

    A run that was stopped goes on from its last checkpoint.
    """
    directory = options.out / name
    settings = {"data.path": str(options.data), **settings, "optimizer": optimizer}
    settings |= {"seed": str(seed), "run_dir": str(directory), "resume": "auto"}
    launcher = [os.environ.get("MPIRUN", "mpirun"), *os.environ.get("MPIRUN_FLAGS", "").split()]
    program = Path(__file__).parents[1] / "apps" / "train_cnn.py"
    command = [*launcher, "-n", options.ranks, sys.executable, "-m", "mpi4py", str(program)]
    for key, value in settings.items():
        command += [f"--{key}", value]
    print(name, flush=True)
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    metrics = directory / "metrics.jsonl"
    print(f"  {shown(metrics)}", flush=True)
    return metrics


def by_epoch(metrics: Path) -> list[dict[str, float]]:
    """Return the lines of a metrics file that hold a test accuracy."""
    lines = map(json.loads, metrics.read_text().splitlines())
    return [line for line in lines if "test_accuracy" in line]


def accuracy(metrics: Path) -> float:
    """Return the test accuracy at the end of a run."""
    return by_epoch(metrics)[-1]["test_accuracy"]


def draw(results: dict, path: Path) -> None:
    """Draw mean and range over seeds, by epoch and by seconds of training."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for optimizer, (label, colour) in COLOURS.items():
        for budget, style in (("epochs", "-"), ("long", "--")):
            columns = list(zip(*results[optimizer][budget]))
            values = [[100 * line["test_accuracy"] for line in column] for column in columns]
            for axis, key in zip(axes, ("epoch", "seconds")):
                x = [statistics.mean(line[key] for line in column) for column in columns]
                mean = [statistics.mean(value) for value in values]
                own = f"{label}, {len(columns)} epochs"
                axis.plot(x, mean, style, color=colour, marker="o", markersize=4, label=own)
                ends = zip(*[(min(value), max(value)) for value in values])
                axis.fill_between(x, *ends, color=colour, alpha=0.2)
    for axis, label in zip(axes, ("epoch", "seconds in training steps")):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy, %")
    axes[0].legend()
    figure.suptitle("ResNet-20, 10,000 images of CIFAR-10, learning rate annealed to 0")
    figure.savefig(path, dpi=120)


def report(results: dict) -> None:
    """Print both grids, and the means over seeds of each optimizer's best setting."""
    for optimizer, found in results.items():
        for point in found["grid"]:
            settings = ", ".join(f"{k}={v}" for k, v in point.items() if k != "test_accuracy")
            print(f"{optimizer:5s} {settings:50s} {point['test_accuracy']:.2%}")
        for runs in (found["epochs"], found["long"]):
            final = [100 * tests[-1]["test_accuracy"] for tests in runs]
            seconds = statistics.mean(tests[-1]["seconds"] for tests in runs)
            print(
                f"{optimizer:5s} best, {len(runs[0])} epochs, seeds {SEEDS}: "
                f"{statistics.mean(final):.2f} % ({', '.join(f'{value:.2f}' for value in final)}), "
                f"{seconds:.0f} s"
            )


if __name__ == "__main__":
    sys.exit(main())
