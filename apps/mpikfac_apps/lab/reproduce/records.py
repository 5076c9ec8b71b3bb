"""Compare published values with results that commands of this repository have recorded."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpikfac import files
from mpikfac_apps.lab.reproduce.entry import Row

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
SGD = "50000-sgd-15-128-0.1-0.0005-"
"""The prefix of the names of SGD's runs in `time_to_accuracy.json`."""


def text_of(name: str) -> str:
    """Return the text of a file in benchmarks/results.

    Raises:
        ValueError: the file is missing.
    """
    try:
        return files.read_text(RESULTS / name, files.LIMIT)
    except FileNotFoundError as error:
        raise ValueError(
            f"{RESULTS / name} is missing; recorded results need a clone of the repository, "
            f"installed with pip install -e"
        ) from error


def record(name: str) -> Any:
    """Return the content of a JSON file in benchmarks/results.

    Raises:
        ValueError: the file is missing.
    """
    return json.loads(text_of(name))


def time_to_accuracy() -> Iterator[Row]:
    """Yield K-FAC's test accuracy minus that of SGD after about twice as many epochs, in points."""
    runs = record("time_to_accuracy.json")
    sgd = [run[-1] for name, run in runs.items() if name.startswith(SGD)]
    kfac = [of["test_accuracy"] for of in defaults("resnet20, all images")]
    gained = 100 * (statistics.mean(kfac) - statistics.mean(sgd))
    where = "7 epochs instead of 15; published: 100 instead of 200"
    yield Row("test accuracy in %, K-FAC minus SGD", where, 92.52 - 92.74, gained)


def defaults(network: str) -> list[dict[str, float]]:
    """Return K-FAC's results on a network with its default settings, sorted by seed."""
    rows = map(json.loads, text_of("defaults.jsonl").splitlines())
    of_seed = {
        seed: row["result"]
        for row in rows
        for *job, seed in [row["job"]]
        if job == [network, "kfac", ""]
    }
    return [of_seed[seed] for seed in sorted(of_seed)]
