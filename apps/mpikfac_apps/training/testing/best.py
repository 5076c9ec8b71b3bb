"""Track a run's test results: keep the best weights, and count the tests since then."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from mpikfac import files
from mpikfac_apps.inspecting import export
from mpikfac_apps.problems.tasks import Task

FILE = "best.pt"
ITEMS = {"run/best": float, "run/since_best": int}

log = logging.getLogger("mpikfac.train")


class Best:
    """The best test result of a run so far; identical on all ranks, as test results are.

    Collective over: none; no method is collective.

    Attributes:
        value: the metric in the best test; NaN before the first test.
        since: the number of tests since the best one.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.value, self.since = math.nan, 0

    def follow(self, value: float) -> bool:
        """Count a test whose metric is `value`; return whether it is the best so far."""
        better = self.task.better(value, self.value) or math.isnan(self.value)
        self.value, self.since = (value, 0) if better else (self.value, self.since + 1)
        return better

    def state(self) -> dict[str, float | int]:
        """Return the items to store in a checkpoint; none before the first test."""
        values = self.value, self.since
        return {} if math.isnan(self.value) else dict(zip(ITEMS, values))

    def load(self, items: Mapping[str, Any]) -> None:
        """Load the result of `state`.

        Raises:
            ValueError: the items are not a number and a count >= 0.
        """
        values = {name: items[name] for name in ITEMS if name in items}
        if not values:
            return
        if not files.has_form(values, ITEMS) or values["run/since_best"] < 0:
            raise ValueError(f"items {', '.join(ITEMS)} must be a number and a count of tests")
        self.value, self.since = values.values()


def keep(model: nn.Module, run_dir: Path, result: str) -> None:
    """Save a network's weights as the best of the run; if that fails, only warn.

    Args:
        result: a description of the test's results, for the log.
    """
    tensors = {n: t.detach().cpu().contiguous() for n, t in model.state_dict().items()}
    try:
        export.write(run_dir / FILE, tensors)
    except ValueError as error:
        log.warning("%s; training continues, but the best weights are not saved", error)
    else:
        log.info("wrote %s: %s", run_dir / FILE, result)
