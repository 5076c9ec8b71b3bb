"""Seconds, calls and bytes of every stage of a step, as plain records."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

COMMUNICATION = (
    "reduce statistics",
    "publish bases",
    "reduce gradients",
    "publish gradients",
    "clip",
    "publish weights",
)
"""Stages that communicate; the others only compute."""


class Trace:
    """What each stage cost on this rank since the last `clear`.

    Attributes:
        seconds: wall-clock time by stage; on a GPU, stages that do not wait for it only launch.
        calls: times each stage ran.
        sent: bytes handed to MPI by stage, counted where the collective is called.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.sent: defaultdict[str, int] = defaultdict(int)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the body's wall-clock time to stage `name`."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start
        self.calls[name] += 1

    def communication_seconds(self) -> float:
        """Wall-clock seconds in stages that communicate, waiting for other ranks included."""
        return sum(self.seconds[name] for name in COMMUNICATION if name in self.seconds)

    def clear(self) -> None:
        """Forgets everything recorded so far."""
        for records in (self.seconds, self.calls, self.sent):
            records.clear()
