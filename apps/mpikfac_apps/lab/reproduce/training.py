"""Train briefly: a network with the default settings, and replicas that exchange weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpikfac import files
from mpikfac_apps.lab.reproduce import records, rules
from mpikfac_apps.lab.reproduce.entry import Row

RANKS = 4
LIMIT = 900.0  # seconds; a program takes less than a minute on idle cores
GRACE = 10.0  # seconds in which a terminated program can end its ranks
AUTOENCODER = {
    **{"model": "autoencoder", "data.name": "curves", "data.train_images": "10240"},
    **{"data.test_images": "1000", "batch": "512", "epochs": "15", "eval_every": "15"},
    **{"threads": "1", "watchdog_timeout": "null", "checkpoint_minutes": "null"},
}
"""The options with which `benchmarks/defaults.py` trains its autoencoder."""


def defaults() -> Iterator[Row]:
    """Yield the test error of an autoencoder that is trained with K-FAC's default settings.

    Raises:
        ValueError: the training fails.
    """
    recorded = records.defaults("autoencoder")[0]["test_error"]
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--{key}={value}" for key, value in AUTOENCODER.items()]
        run(["-m", "mpikfac_apps", "train", *options, f"--run_dir={folder}/run"])
        lines = files.read_text(Path(folder) / "run" / "metrics.jsonl").splitlines()
    tests = [line["test_error"] for line in map(json.loads, lines) if "test_error" in line]
    yield Row("squared error of a curve", "autoencoder, 300 steps", recorded, tests[-1])


def exchanges() -> Iterator[Row]:
    """Yield a projection of all ranks' weights after training with each exchange rule.

    Raises:
        ValueError: the training on the ranks fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.json"
        program = str(Path(rules.__file__).with_name("on_ranks.py"))
        run(["-m", "mpikfac_apps", "launch", "-n", f"{RANKS}", program, str(file)])
        weights = files.read_json(file)
    for name, case in rules.CASES.items():
        where = f"{RANKS} ranks, after {rules.STEPS} steps"
        expected, found = map(rules.projection, (case.expected(RANKS)[-1], weights[name]))
        yield Row(f"projection of weights, {name}", where, expected, found)


def run(arguments: Sequence[str], limit: float = LIMIT) -> None:
    """Run Python with the given arguments and one thread per rank.

    Raises:
        ValueError: the program fails, or takes longer than `limit` seconds.
    """
    program = " ".join(arguments[:3])
    with tempfile.TemporaryFile("w+") as output:  # not a pipe, which ranks could keep open
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{program} did not end within {limit:g} s") from None
        finally:
            end(process)
        output.seek(0)
        lines = (output.read().strip() or "no output").splitlines()
    if code:
        why = [line for line in lines if "Error: " in line] or lines
        raise ValueError(f"{program} ended with code {code}: {why[-1]}")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program that is still running, and its ranks."""
    process.terminate()  # mpirun ends its ranks
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
