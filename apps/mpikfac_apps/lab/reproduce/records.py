"""Results that commands of this repository have recorded, beside published numbers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpikfac_apps.lab.reproduce.entry import Row

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
BUDGETS = {"SGD": "50000-sgd-15-128-0.1-0.0005-", "K-FAC": "50000-kfac-7-128-0.0075-0.12-"}
"""Beginnings of the names of runs in `time_to_accuracy.json`."""


def text_of(name: str) -> str:
    """Return the text of a file of results.

    Raises:
        ValueError: the file is missing.
    """
    try:
        return (RESULTS / name).read_text()
    except FileNotFoundError as error:
        raise ValueError(
            f"{RESULTS / name} is missing; recorded results need a clone of the repository, "
            f"installed with pip install -e"
        ) from error


def record(name: str) -> Any:
    """Return the content of a file of results in JSON.

    Raises:
        ValueError: the file is missing.
    """
    return json.loads(text_of(name))


def time_to_accuracy() -> Iterator[Row]:
    """Yield the epochs that K-FAC needs, and the accuracy that it reaches, relative to SGD's."""
    runs = record("time_to_accuracy.json")
    sgd, kfac = (
        [run for name, run in runs.items() if name.startswith(begin)] for begin in BUDGETS.values()
    )
    epochs = [len(of[0]) for of in (sgd, kfac)]
    ends = [statistics.mean(run[-1] for run in of) for of in (sgd, kfac)]
    where = f"{epochs[1]} epochs instead of {epochs[0]}"
    yield Row("epochs over SGD's", where, 100 / 200, epochs[1] / epochs[0])
    yield Row("test accuracy over SGD's", where, 92.52 / 92.74, ends[1] / ends[0])
