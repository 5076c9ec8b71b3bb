"""Compare optimizers on the small programs and on volumes: equal grids of rates, three seeds.

    python benchmarks/programs.py detection --out runs/programs

The rates of each optimizer are tried with seed 0. The rate with the best last test is repeated with
the other seeds. The program prints the table, and writes all runs into `results/PROBLEM.json`. A
run that was stopped is continued.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from training import SEEDS, run_program

from mpikfac_apps.text import table

RESULTS = Path(__file__).parent / "results"
RATES = {"kfac": (0.001, 0.003, 0.01), "sgd": (0.01, 0.03, 0.1), "adamw": (0.001, 0.003, 0.01)}
OF_GRAPHS = {"kfac": (0.003, 0.01, 0.03), "sgd": (0.2, 0.5, 1.0), "adamw": (0.01, 0.03, 0.1)}


class Problem(NamedTuple):
    """What is trained.

    Attributes:
        program: the program of `mpikfac`.
        options: the options beside optimizer, rate and seed.
        measure: the key of the last test in metrics.jsonl.
        least: whether the least value is the best.
        rates: the rates of each optimizer.
    """

    program: str
    options: Mapping[str, str]
    measure: str
    least: bool = False
    rates: Mapping[str, Sequence[float]] = RATES


VOLUMES = {"data.name": "volume", "model": "segmenter3d", "batch": "16", "threads": "1"}
PROBLEMS = {
    "detection": Problem(
        "train-detection",
        {"size": "48", "images": "128", "test_images": "32", "epochs": "4"},
        "test_AP50_of_boxes",
        rates={"kfac": (0.0001, 0.0003, 0.001), "sgd": (0.05, 0.1, 0.2)},
    ),
    "volumes": Problem(
        "train",
        VOLUMES | {"epochs": "5"},
        "test_dice",
        rates={
            **{"kfac": (0.003, 0.0075, 0.02), "sgd": (0.001, 0.003, 0.01)},
            "adamw": (0.001, 0.003, 0.01),
        },
    ),
    "volumes_longer": Problem(  # about the seconds of K-FAC
        "train",
        VOLUMES | {"epochs": "10"},
        "test_dice",
        rates={"sgd": (0.01,), "adamw": (0.003,)},
    ),
    "recommendation": Problem(
        "train-recommendation",
        {},
        "test_AUC",
        rates={"kfac": (0.0003, 0.001, 0.003), "sgd": (0.3, 1, 3), "adamw": (0.01, 0.03, 0.1)},
    ),
    "graphs": Problem("train-graph", {}, "test_accuracy", rates=OF_GRAPHS),
    "graphs_surface": Problem(
        "train-graph", {"graph": "surface"}, "test_accuracy", rates=OF_GRAPHS
    ),
}


def main() -> int:
    """Run what is missing, print the table and write the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problem", choices=PROBLEMS)
    parser.add_argument("--out", type=Path, default=Path("runs/programs"), help="folder of runs")
    parser.add_argument("--ranks", default="1", help="ranks of a run")
    options = parser.parse_args()
    problem = PROBLEMS[options.problem]
    runs = {name: runs_of(options, problem, name) for name in problem.rates}
    (RESULTS / f"{options.problem}.json").write_text(json.dumps(runs, indent=1) + "\n")
    lines = [["optimizer", "rate", problem.measure, "seconds"]]
    for name, measured in runs.items():
        rate = best(problem, measured)
        chosen = [run for run in measured if run["lr"] == rate]
        values = [run[problem.measure] for run in chosen]
        span = f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"
        seconds = f"{statistics.median(run['seconds'] for run in chosen):.1f}"
        lines.append([name, f"{rate:g}", span, seconds])
    print("\n".join(table(lines)))
    return 0


def runs_of(options: argparse.Namespace, problem: Problem, optimizer: str) -> list[dict[str, Any]]:
    """Return the last tests of an optimizer: all rates with the first seed, the best with all."""
    first, *further = SEEDS
    runs = [run(options, problem, optimizer, rate, first) for rate in problem.rates[optimizer]]
    rate = best(problem, runs)
    return runs + [run(options, problem, optimizer, rate, seed) for seed in further]


def best(problem: Problem, runs: Sequence[Mapping[str, Any]]) -> float:
    """Return the rate of the best run with the first seed."""
    candidates = [run for run in runs if run["seed"] == SEEDS[0]]
    choose = min if problem.least else max
    return float(choose(candidates, key=lambda run: run[problem.measure])["lr"])


def run(
    options: argparse.Namespace, problem: Problem, optimizer: str, rate: float, seed: int
) -> dict[str, Any]:
    """Return the last test of a run, with rate and seed."""
    directory = options.out / options.problem / f"{optimizer}-{rate:g}-{seed}"
    chosen = {**problem.options, "optimizer": optimizer, "lr": f"{rate:g}", "seed": str(seed)}
    chosen |= {"run_dir": str(directory), "resume": "auto"}
    run_program(problem.program, options.ranks, chosen)
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    last = [row for row in rows if problem.measure in row][-1]
    tests = {key: value for key, value in last.items() if key.startswith("test_")}
    return {"seed": seed, "lr": rate, "seconds": last["seconds"], **tests}


if __name__ == "__main__":
    sys.exit(main())
