"""Compare options of K-FAC: test accuracy within a small budget, all tuned in the same way.

    OMP_NUM_THREADS=1 python benchmarks/curvature.py vit_small --data DIR --out runs/curvature

Three settings of each method are tried for a network with seed 0; the best setting is repeated with
seeds 1 and 2. Results are kept in `results/curvature_NETWORK.json`. Runs with results in the file
are not repeated. `--table` prints the existing results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from training import CIFAR10, SEEDS, by_epoch, launch

KNOWN = Path(__file__).parent / "results"
PLAIN = {
    "lr": "0.1",
    "kfac.preconditioner": "eigen",
    "kfac.damping": "0.03",
    "kfac.factor_update_steps": "5",
    "kfac.kl_clip": "0.001",
}
RECIPE = {
    "kfac.preconditioner": "eigen",
    "kfac.relative_damping": "0.1",
    "kfac.factor_update_steps": "5",
    "kfac.length": "adam",
}
RATES = [{**RECIPE, "lr": rate} for rate in ("0.001", "0.002", "0.003")]
ORTHOGONAL = [{**settings, "kfac.length": "orthogonal"} for settings in RATES]
BEFORE = [
    {**ORTHOGONAL[0], "lr": rate, "kfac.momentum_of": "gradients", "weight_decay": "0.002"}
    for rate in ("0.0025", "0.005", "0.0075")
]
CLIPS = [{"kfac.kl_clip": clip} for clip in ("0.01", "0.001", "0.0003")]

Settings = dict[str, str]


def kfac(*tried: Settings, **always: str | None) -> tuple[str, list[Settings]]:
    """Return settings of plain K-FAC, changed by `always` and by each of `tried`.

    None in `always` leaves a setting out.
    """
    changed = {**PLAIN, **{f"kfac.{key}": value for key, value in always.items()}}
    kept = {key: value for key, value in changed.items() if value is not None}
    return "kfac", [{**kept, **settings} for settings in tried]


def first_order(optimizer: str, rates: list[str], **always: str) -> tuple[str, list[Settings]]:
    """Return settings of an optimizer without K-FAC at several learning rates."""
    return optimizer, [{"lr": rate, **always} for rate in rates]


WAYS: dict[str, dict[str, tuple[str, list[Settings]]]] = {
    "resnet20": {
        "recipe": ("kfac", ORTHOGONAL),
        "momentum before": ("kfac", BEFORE),
        "length of Adam": ("kfac", RATES),
        "plain": kfac(*CLIPS),
        "damping adapted": kfac(
            *[{"kfac.damping": start} for start in ("0.01", "0.03", "0.1")], damping_adapt="5"
        ),
        "normalisations": kfac(*CLIPS, norms="true"),
        "relative damping": kfac(
            *[{"kfac.relative_damping": share} for share in ("0.1", "0.3", "1")], damping=None
        ),
        "grafted to SGD": kfac(
            *[{"lr": rate} for rate in ("0.05", "0.1", "0.2")], length="sgd", kl_clip=None
        ),
        "labels sampled": kfac(*CLIPS, fisher_type="mc"),
        "sharing reduced": kfac(*CLIPS, kfac_approx="reduce"),
    },
    "mobilenet_small": {
        "SGD": first_order("sgd", ["0.05", "0.1", "0.2"]),
        "AdamW": first_order("adamw", ["0.001", "0.003", "0.01"], weight_decay="0.05"),
        "recipe": ("kfac", ORTHOGONAL),
        "momentum before": ("kfac", BEFORE),
        "length of Adam": ("kfac", RATES),
        "plain": kfac(*CLIPS),
        "normalisations": kfac(*CLIPS, norms="true"),
    },
    "vit_small": {
        "SGD": first_order("sgd", ["0.02", "0.05", "0.1"]),
        "AdamW": first_order("adamw", ["0.0005", "0.001", "0.003"], weight_decay="0.05"),
        "recipe": ("kfac", ORTHOGONAL),
        "momentum before": ("kfac", BEFORE),
        "length of Adam": ("kfac", RATES),
        "plain": kfac(*CLIPS),
        "normalisations": kfac(*CLIPS, norms="true"),
    },
}


def main() -> int:
    """Run all missing runs of a network, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", choices=WAYS)
    parser.add_argument("--ways", nargs="+", help="some of its ways; else all")
    parser.add_argument("--data", type=Path, help="folder of cifar-10-batches-bin")
    parser.add_argument("--out", type=Path, default=Path("runs/curvature"))
    parser.add_argument("--ranks", default="1")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    known = Known(options)
    if not options.table:
        for way in options.ways or WAYS[options.network]:
            best = known.best(way)
            for seed in SEEDS:
                known.run(way, best, seed)
    known.report()
    return 0


class Known:
    """Results of the runs of a network, by optimizer, settings and seed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.options.out /= options.network
        self.file = KNOWN / f"curvature_{options.network}.json"
        self.runs = self.read()

    def read(self) -> dict[str, list[dict[str, float]]]:
        """Return the results in the file; a second process may add results."""
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def run(self, way: str, settings: Settings, seed: int) -> float:
        """Return a run's final test accuracy in percent; train only if the result is missing."""
        optimizer = WAYS[self.options.network][way][0]
        name = self.name(optimizer, settings, seed)
        if name not in self.runs:
            asked: dict[str, Any] = {**CIFAR10, "model": self.options.network, **settings}
            lines = by_epoch(launch(self.options, name, optimizer, asked, seed))
            kept = ("epoch", "seconds", "train_loss", "test_loss", "test_accuracy")
            self.runs = self.read() | {name: [{key: line[key] for key in kept} for line in lines]}
            self.file.write_text(json.dumps(self.runs, indent=1, sort_keys=True) + "\n")
        return 100 * self.runs[name][-1]["test_accuracy"]

    def name(self, optimizer: str, settings: Settings, seed: int) -> str:
        """Return a run's name: the settings that differ from the plain settings, and the seed."""
        said = [f"{k.rpartition('.')[2]}={v}" for k, v in settings.items() if PLAIN.get(k) != v]
        return ",".join([optimizer, *said, f"seed={seed}"])

    def tried(self, way: str) -> list[tuple[float, Settings]]:
        """Return the result of each setting with the first seed."""
        grid = WAYS[self.options.network][way][1]
        return [(self.run(way, settings, SEEDS[0]), settings) for settings in grid]

    def best(self, way: str) -> Settings:
        """Return the best setting with the first seed."""
        return max(self.tried(way), key=lambda found: found[0])[1]

    def report(self) -> None:
        """Print a row for each way with complete results."""
        for way, (optimizer, grid) in WAYS[self.options.network].items():
            first = [self.name(optimizer, settings, SEEDS[0]) for settings in grid]
            if not self.runs.keys() >= set(first):
                continue
            best = self.best(way)
            seeds = [self.name(optimizer, best, seed) for seed in SEEDS]
            ends = [100 * self.runs[n][-1]["test_accuracy"] for n in seeds if n in self.runs]
            values = ", ".join(f"{end:.2f}" for end in ends)
            tried = ", ".join(f"{value:.2f}" for value, _ in self.tried(way))
            said = ", ".join(self.name("", best, 0).split(",")[1:-1]) or "as plainly"
            print(f"| {way} | {tried} | {said} | {values} | {statistics.mean(ends):.2f} |")


if __name__ == "__main__":
    sys.exit(main())
