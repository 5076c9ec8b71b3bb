"""Open the trackers that `--metrics` names, and pass each line of metrics.jsonl to them.

If a tracker cannot start, the run does not start either. A tracker that raises an error later is
dropped with a warning, so that long runs do not depend on trackers.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from mpikfac_apps.problems import own
from mpikfac_apps.text import is_own
from mpikfac_apps.tracking import services
from mpikfac_apps.tracking.start import Start

SERVICES: dict[str, Callable[[Start], Tracker]] = {
    "tensorboard": services.TensorBoard,
    "wandb": services.Wandb,
    "mlflow": services.MLflow,
}
"""Trackers by name, which is also the name of the package that each needs."""

log = logging.getLogger("mpikfac.train")


class Tracker(Protocol):
    """Receive the metrics of a run, on rank 0.

    `close` is optional, so a function is a tracker, too.
    """

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the values that are written to metrics.jsonl after `step` steps."""

    def close(self) -> None:
        """Finish at the end of the run."""


class Trackers:
    """The open trackers of a run.

    Raises:
        ValueError: a tracker cannot start; the one-line message names the tracker.
    """

    def __init__(self, names: Sequence[str], start: Start) -> None:
        self._open = {name: opened(name, start) for name in names}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Pass values to all trackers."""
        self._call(lambda tracker: tracker(step, values))

    def close(self) -> None:
        """Close all trackers."""
        self._call(lambda tracker: getattr(tracker, "close", lambda: None)())
        self._open.clear()

    def _call(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            except Exception as error:
                del self._open[name]
                log.warning(
                    "metrics=%s raised %s; training continues without the tracker",
                    *(name, own.summary(error)),
                )


def check(names: Sequence[str]) -> None:
    """Check that every name is a known tracker whose package is installed, or an existing file.

    Raises:
        ValueError: a name is unknown, or a package or a file is missing.
    """
    for name in names:
        if is_own(name):
            own.check_file(name)
        elif name not in SERVICES:
            choices = ", ".join(SERVICES)
            raise ValueError(f"metrics={name} must be one of {choices}, or FILE.py:FUNCTION")
        elif importlib.util.find_spec(name) is None:
            raise ValueError(
                f"metrics={name} needs the package {name}, which is not installed; run pip install "
                f"{name}"
            )


def opened(name: str, start: Start) -> Tracker:
    """Start a tracker, and return it.

    Raises:
        ValueError: the tracker cannot start, or a user's function returns something that cannot be
            called.
    """
    with own.one_line_errors(f"metrics={name}"):
        make = SERVICES[name] if name in SERVICES else own.function_of(name)
        tracker = make(start)
    if not callable(tracker):
        raise ValueError(f"metrics={name} returned {type(tracker).__name__}, not a function")
    return tracker
