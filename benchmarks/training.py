"""Start the training program, and read the metrics of a run.

Other benchmarks use these functions. MPIRUN and MPIRUN_FLAGS set the launcher.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SEEDS = (0, 1, 2)
CIFAR10 = {
    "data.name": "cifar10",
    "data.train_images": "10000",
    "data.augment": "true",
    "model": "resnet20",
    "batch": "256",
    "epochs": "5",
    "schedule": "linear",
    "weight_decay": "0.0005",
}


def launch(
    options: argparse.Namespace,
    name: str,
    optimizer: str,
    settings: dict[str, str],
    seed: int,
    shown: Callable[[Path], str] = lambda metrics: f"{by_epoch(metrics)[-1]['test_accuracy']:.2%}",
) -> Path:
    """Train, and return the metrics file of the run, under `options.out`; print the result.

    The momentum of K-FAC is of directions unless `settings` say otherwise, as in most kept results.
    A run that was stopped goes on from its last checkpoint.
    """
    directory = options.out / name
    usual = {"data.path": str(options.data), "kfac.momentum_of": "directions"}
    settings = {**usual, **settings, "optimizer": optimizer}
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
