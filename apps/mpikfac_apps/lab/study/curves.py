"""Read a run's metrics: the lines of metrics.jsonl, and the test results after each epoch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mpikfac import files
from mpikfac_apps.lab.study.measures import MEASURES, Measure

LIMIT = 2**27
"""The maximum size in bytes of a file of metrics that is read: about a million lines."""
FORM = {"step": int, "epoch": float, "seconds": float}
NEARLY_ALL = 0.9
POSITIVE = ("images_per_second", "seconds")


class Reached(NamedTuple):
    """The epochs, seconds and steps of training until a test result reached a target."""

    epochs: float
    seconds: float
    steps: int


@dataclass(frozen=True)
class Curve:
    """The test results of a run after each epoch, and the steps and seconds until then.

    Attributes:
        scales: the epoch and `kl_scale` of each line of metrics that contains `kl_scale`.
    """

    measure: Measure
    steps: list[int] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    scales: list[tuple[float, float]] = field(default_factory=list)

    @property
    def shortened(self) -> int:
        """The number of lines of metrics whose step was shortened by K-FAC's clip."""
        return sum(scale < 1 for _, scale in self.scales)

    @property
    def bound(self) -> bool:
        """Whether K-FAC's clip shortened nearly all steps, as far as the metrics show."""
        return self.shortened >= NEARLY_ALL * max(1, len(self.scales))

    @property
    def best(self) -> float:
        """The best test result."""
        return self.measure.best(self.values)

    def reached(self, target: float) -> Reached | None:
        """Return when a test was as good as `target` for the first time; None if no test was."""
        for place, value in enumerate(self.values):
            if self.measure.reaches(value, target):
                return Reached(self.epochs[place], self.seconds[place], self.steps[place])
        return None


def read(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl; an incomplete last line is left out.

    Raises:
        ValueError: the file is missing, or a complete line is not a line of metrics.
        OSError: the file cannot be read.
    """
    path = run / "metrics.jsonl"
    rows = []
    try:
        with files.reading(path, LIMIT) as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    rows.append(_row(line, f"{path}, line {number}"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; pass the run_dir of a run") from None
    return rows


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (RecursionError, ValueError) as error:
        reason = getattr(error, "msg", "it is not JSON text")
        raise ValueError(f"{where} is not JSON: {reason}") from error
    if not files.has_form(row, FORM) or not all(map(_is_number, row.values())) or row["step"] < 1:
        raise ValueError(f"{where} is not a line of metrics")
    for key in POSITIVE:
        if key in row and not 0 < row[key] < files.HUGE:
            raise ValueError(f"{where} is not a line of metrics: {key} is {row[key]}")
    return row


def _is_number(value: object) -> bool:
    """Return whether a value is a number, including NaN or infinity in a run that diverges."""
    return isinstance(value, float) or files.has_form(value, int)


def curve(rows: Collection[Mapping[str, Any]], measure: Measure) -> Curve:
    """Return a run's curve, given its lines of metrics; empty before the first epoch has ended."""
    ends = [row for row in rows if measure.key in row]
    columns = {"steps": "step", "epochs": "epoch", "seconds": "seconds", "values": measure.key}
    scales = [(row["epoch"], row["kl_scale"]) for row in rows if "kl_scale" in row]
    values = {name: [row[column] for row in ends] for name, column in columns.items()}
    return Curve(measure, scales=scales, **values)


def measure_of(rows: Iterable[Mapping[str, Any]]) -> Measure:
    """Return a run's test metric, given its lines of metrics; accuracy if no epoch has ended."""
    keys = {key for row in rows for key in row}
    return next(
        (measure for measure in MEASURES.values() if measure.key in keys), MEASURES["accuracy"]
    )
