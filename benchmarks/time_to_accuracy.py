"""Count epochs of K-FAC until the final accuracy of tuned SGD on real CIFAR-10.

    OMP_NUM_THREADS=1 python benchmarks/time_to_accuracy.py --data DIR --out runs/time_to_accuracy

SGD and the other first-order optimizers train for 15 epochs, K-FAC for fewer. Each learning rate
falls linearly to 0 within the run's own budget. All settings of an optimizer run with seed 0, then
the best settings with further seeds. Test accuracies by epoch are kept in `time_to_accuracy.json`
beside this file. Runs in the file are not repeated: several sittings, or machines, can share the
work. Seconds follow from the epochs and from `--seconds ROUNDS`, which times short runs of the
first setting of each of `--grids` by turns: run this mode on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path

import learning

RESULTS = Path(__file__).with_suffix(".json")
COMMON = {key: value for key, value in learning.COMMON.items() if key != "data.train_images"}
SGD_GRID = [
    {"epochs": epochs, "lr": lr}
    for epochs, lr in (("15", "0.05"), ("15", "0.1"), ("15", "0.2"), ("8", "0.1"))
]
KFAC_GRID = [
    {
        **{"epochs": epochs, "lr": lr, "kfac.damping": damping, "kfac.kl_clip": clip},
        **{"kfac.factor_every": every, "kfac.basis_every": f"{every}0", "kfac.solver": solver},
        "kfac.subsample": "1",
    }
    for epochs, lr, damping, clip, every, solver in (
        ("8", "0.1", "0.03", "0.001", "10", "eigen"),
        ("8", "0.1", "0.03", "0.01", "5", "inverse"),
        ("8", "0.03", "0.005", "0.01", "10", "inverse"),
        ("11", "0.03", "0.005", "0.01", "10", "inverse"),
    )
]


RECIPE_GRID = [
    {
        **{"epochs": "7", "lr": "0.003", "weight_decay": "0.02"},
        **{"kfac.factor_every": every, "kfac.basis_every": f"{int(every) * 5}", **more},
    }
    for every, more in (
        ("5", {}),
        ("5", {"lr": "0.0015"}),
        ("5", {"lr": "0.006"}),
        ("5", {"weight_decay": "0.06"}),
        ("5", {"lr": "0.0015", "weight_decay": "0.12"}),
        ("5", {"kfac.length": "adam"}),
        ("10", {"kfac.subsample": "1", "kfac.length": "adam"}),
        ("20", {"kfac.subsample": "1", "batch": "128", "kfac.length": "adam"}),
        ("10", {"lr": "0.0015", "weight_decay": "0.06", "batch": "128"}),
    )
]
GRIDS = {
    "sgd": ("sgd", SGD_GRID),
    "kfac": ("kfac", KFAC_GRID),
    "recipe": ("kfac", RECIPE_GRID),
    "adamw": ("adamw", [{"epochs": "15", "lr": lr, "weight_decay": "0.02"} for lr in ("0.003",)]),
    "muon": ("muon", [{"epochs": "15", "lr": lr, "weight_decay": "0.02"} for lr in ("0.01",)]),
    "soap": ("soap", [{"epochs": "15", "lr": lr, "weight_decay": "0.02"} for lr in ("0.003",)]),
}


def main() -> int:
    """Run all missing runs, then print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of cifar-10-batches-bin")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--grids", nargs="+", default=list(GRIDS), choices=list(GRIDS))
    parser.add_argument("--known", action="store_true", help="print what is known, run nothing")
    parser.add_argument("--seconds", type=int, metavar="ROUNDS", help="time steps, train nothing")
    options = parser.parse_args()
    if options.seconds:
        compare_seconds(options)
        return 0
    for name in options.grids:
        optimizer, grid = GRIDS[name]
        for choice in grid:
            report(options, optimizer, choice, 0)
        known = [choice for choice in grid if epochs(options, optimizer, choice, 0)]
        if not known:
            continue
        best = max(known, key=lambda choice: epochs(options, optimizer, choice, 0)[-1])
        for seed in learning.SEEDS[1:]:
            report(options, optimizer, best, seed)
        runs = [epochs(options, optimizer, best, seed) for seed in learning.SEEDS]
        finals = [run[-1] for run in runs if run]
        print(f"{name}: best setting, {len(finals)} seed(s): mean {statistics.mean(finals):.2%}")
    return 0


def report(options: argparse.Namespace, optimizer: str, choice: dict[str, str], seed: int) -> None:
    """Print a run's test accuracy at the end."""
    found = epochs(options, optimizer, choice, seed)
    settings = ", ".join(f"{key.removeprefix('kfac.')} {value}" for key, value in choice.items())
    print(f"{optimizer} seed {seed}, {settings}: {f'{found[-1]:.2%}' if found else 'not run'}")


def epochs(
    options: argparse.Namespace, optimizer: str, choice: dict[str, str], seed: int
) -> list[float]:
    """Return the test accuracy after each epoch of a run; train only if the run is unknown."""
    name = "-".join([optimizer, *choice.values(), str(seed)])
    if name not in known() and not options.known:
        metrics = learning.launch(options, name, optimizer, {**COMMON, **choice}, seed)
        found = [line["test_accuracy"] for line in learning.by_epoch(metrics)]
        results = known() | {name: found}  # read anew: another program may have added a run
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return known().get(name, [])


def known() -> dict[str, list[float]]:
    """Return the test accuracies by epoch of all finished runs."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def compare_seconds(options: argparse.Namespace) -> None:
    """Print median seconds of a step of each optimizer, and the ratios to the first optimizer."""
    found: dict[str, list[float]] = {name: [] for name in options.grids}
    for _ in range(options.seconds):
        for name in options.grids:
            found[name].append(step_seconds(options, *GRIDS[name]))
    base = found[options.grids[0]]
    for name, values in found.items():
        ratio = statistics.median(one / other for one, other in zip(values, base))
        ends = f"{min(values):.3f} to {max(values):.3f}"
        print(f"{name}: {statistics.median(values):.3f} s a step ({ends}), ratio {ratio:.2f}")


def step_seconds(options: argparse.Namespace, optimizer: str, grid: list[dict[str, str]]) -> float:
    """Return the mean seconds of 50 steps, after 10 steps that do not count.

    In 50 steps, K-FAC at (10, 50) has one refresh of the bases.
    """
    short = {"max_steps": "60", "checkpoint_minutes": "null"}
    settings = {**COMMON, **grid[0], **short}
    name = f"seconds-{optimizer}"
    shutil.rmtree(options.out / name, ignore_errors=True)
    metrics = learning.launch(options, name, optimizer, settings, 0, shown=str)
    rows = map(json.loads, metrics.read_text().splitlines())
    after = {row["step"]: row["seconds"] for row in rows if "loss" in row}
    return (after[60] - after[10]) / 50


if __name__ == "__main__":
    sys.exit(main())
