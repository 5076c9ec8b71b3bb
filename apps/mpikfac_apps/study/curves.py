"""Read a run's metrics: the lines of the file, and test accuracy after each epoch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Curve:
    """Test accuracy (0 to 1) of a run after each epoch, and the steps and seconds until then."""

    steps: list[int] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)

    def reached(self, target: float) -> tuple[float, float] | None:
        """Return epochs and seconds of training until the first evaluation at or above `target`."""
        for epochs, seconds, accuracy in zip(self.epochs, self.seconds, self.accuracy):
            if accuracy >= target:
                return epochs, seconds
        return None


def read(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl; an incomplete last line is left out.

    Raises:
        ValueError: the file is missing, or a complete line is not JSON.
    """
    path = run / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{path} is missing; give the run_dir of a run")
    *lines, _ = path.read_text(errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
    return rows


def curve(rows: Iterable[Mapping[str, Any]]) -> Curve:
    """Return the curve of a run's lines; the curve is empty before the end of the first epoch."""
    ends = [row for row in rows if "test_accuracy" in row]
    columns = ("step", "epoch", "seconds", "test_accuracy")
    return Curve(*([row[column] for row in ends] for column in columns))
