"""Start the training program, and read the metrics of a run.

Other benchmarks use these functions. MPIRUN and MPIRUN_FLAGS set the launcher.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

Measurement = TypeVar("Measurement")
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
BEFORE = {  # settings of K-FAC in the kept results; today's defaults are others
    **{"kfac.momentum_of": "directions", "kfac.relative_damping": "0.1", "kfac.trust": "1e9"},
    **{"kfac.factor_update_steps": "1", "kfac.inv_update_steps": "10"},
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

    Unless `settings` say otherwise, K-FAC has the settings of the kept results, `BEFORE`.
    A run that was stopped goes on from its last checkpoint.
    """
    directory = options.out / name
    usual = {**BEFORE, "data.path": str(options.data)}
    if "kfac.damping" in settings:
        del usual["kfac.relative_damping"]
    settings = {**in_words_of_the_program({**usual, **settings}), "optimizer": optimizer}
    settings |= {"seed": str(seed), "run_dir": str(directory), "resume": "auto"}
    print(name, flush=True)
    run_program("train", options.ranks, settings)
    metrics = directory / "metrics.jsonl"
    print(f"  {shown(metrics)}", flush=True)
    return metrics


def in_words_of_the_program(settings: Mapping[str, str]) -> dict[str, str]:
    """Return options of the training program for settings in the words of the kept results.

    The words are `kfac.length`, `kfac.kl_clip` and `kfac.trust`, a limit of lengths by Adam.
    """
    options = dict(settings)
    clip, trust = options.pop("kfac.kl_clip", None), options.pop("kfac.trust", None)
    length = options.pop("kfac.length", "orthogonal" if clip is None else "own")
    if clip is not None:
        options |= {"kfac.clip": "kl", "kfac.clip.kl_clip": clip}
    grafting = {"own": "none", "sgd": "sgd", "quadratic": "quadratic-model"}.get(length, "adam")
    options["kfac.grafting"] = grafting
    if grafting == "adam":
        options["kfac.grafting.orthogonalize"] = str(length == "orthogonal").lower()
        if trust is not None:
            options["kfac.grafting.max_trust_ratio"] = trust
    return options


def run_program(program: str, ranks: str, settings: Mapping[str, str]) -> None:
    """Run a program of `mpikfac` with options, without its output."""
    launcher = [os.environ.get("MPIRUN", "mpirun"), *os.environ.get("MPIRUN_FLAGS", "").split()]
    command = [*launcher, "-n", ranks, sys.executable, "-m", "mpi4py"]
    command += ["-m", "mpikfac_apps", program]
    command += [f"--{key}={value}" for key, value in settings.items()]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def step_seconds(options: argparse.Namespace, optimizer: str, settings: dict[str, str]) -> float:
    """Return the seconds of a step: the mean of 50 steps after 10 steps that do not count.

    In 50 steps, K-FAC at (10, 50) has one refresh of the bases.
    """
    settings = {**settings, "max_steps": "60", "checkpoint_minutes": "null"}
    shutil.rmtree(options.out / "seconds", ignore_errors=True)
    metrics = launch(options, "seconds", optimizer, settings, 0, shown=str)
    rows = map(json.loads, metrics.read_text().splitlines())
    after = {row["step"]: row["seconds"] for row in rows if "loss" in row}
    return (after[60] - after[10]) / 50


def by_turns(
    measure: Callable[[str], Measurement], names: Sequence[str], rounds: int
) -> dict[str, list[Measurement]]:
    """Return `rounds` measurements of each name; all names take turns."""
    measurements: dict[str, list[Measurement]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, values in measurements.items():
            values.append(measure(name))
    return measurements


def by_epoch(metrics: Path) -> list[dict[str, float]]:
    """Return the lines of a metrics file that hold a test accuracy."""
    lines = map(json.loads, metrics.read_text().splitlines())
    return [line for line in lines if "test_accuracy" in line]
