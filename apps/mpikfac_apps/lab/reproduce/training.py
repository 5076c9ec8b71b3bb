"""Trainings of seconds: a network with the default settings, and exchanges of weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpikfac_apps.lab.reproduce import rules
from mpikfac_apps.lab.reproduce.entry import Row
from mpikfac_apps.lab.reproduce.records import text_of

RANKS = 4
AUTOENCODER = {
    **{"model": "autoencoder", "data.name": "curves", "data.train_images": "10240"},
    **{"data.test_images": "1000", "batch": "512", "epochs": "15", "eval_every": "15"},
    **{"threads": "1", "watchdog_timeout": "null", "checkpoint_minutes": "null"},
}
"""The options of the autoencoder in `benchmarks/defaults.py`."""


def defaults() -> Iterator[Row]:
    """Yield the test error of an autoencoder that is trained with K-FAC's default settings.

    Raises:
        ValueError: the training fails.
    """
    rows = map(json.loads, text_of("defaults.jsonl").splitlines())
    job = ["autoencoder", "kfac", "", 0]
    recorded = next(row["result"]["test_error"] for row in rows if row["job"] == job)
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--{key}={value}" for key, value in AUTOENCODER.items()]
        run(["-m", "mpikfac_apps", "train", *options, f"--run_dir={folder}/run"])
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    tests = [line["test_error"] for line in map(json.loads, lines) if "test_error" in line]
    yield Row("squared error of a curve", "autoencoder, 300 steps", recorded, tests[-1])


def exchanges() -> Iterator[Row]:
    """Yield the norm of the weights of all ranks after steps with exchanges.

    Raises:
        ValueError: the ranks fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "norms.json"
        program = str(Path(rules.__file__).with_name("on_ranks.py"))
        run(["-m", "mpikfac_apps", "launch", "-n", f"{RANKS}", program, str(file)])
        norms = json.loads(file.read_text())
    for name, case in rules.CASES.items():
        where = f"{RANKS} ranks, after {rules.STEPS} steps"
        yield Row(f"norm of weights, {name}", where, rules.norm(case.expected(RANKS)), norms[name])


def run(arguments: Sequence[str]) -> None:
    """Run Python with arguments, one thread for each rank.

    Raises:
        ValueError: the program fails.
    """
    ran = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        lines = (ran.stderr.strip() or ran.stdout.strip() or "no output").splitlines()
        why = [line for line in lines if "Error: " in line] or lines
        raise ValueError(f"{' '.join(arguments[:3])} ended with code {ran.returncode}: {why[-1]}")
