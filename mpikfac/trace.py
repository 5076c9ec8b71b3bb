"""Seconds, calls and bytes of every stage of a step, as plain records."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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

    Once CUDA is in use, a stage is timed by events on the current stream: from when the GPU comes
    to it until it is done with it. The step does not wait for that; who reads `seconds` does.

    Attributes:
        calls: times each stage ran.
        sent: bytes handed to MPI by stage, counted where the collective is called.
        current: the innermost stage that runs now, or "".
    """

    def __init__(self) -> None:
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.sent: defaultdict[str, int] = defaultdict(int)
        self.current = ""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._running: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    @property
    def seconds(self) -> defaultdict[str, float]:
        """Seconds by stage."""
        for _, _, end in self._running:
            end.synchronize()
        self._collect()
        return self._seconds

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the body's time to stage `name`."""
        outer, self.current = self.current, name
        try:
            if torch.cuda.is_initialized():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                yield
                end.record()
                self._running.append((name, start, end))
                self._collect()
            else:
                began = time.perf_counter()
                yield
                self._seconds[name] += time.perf_counter() - began
            self.calls[name] += 1
        finally:
            self.current = outer

    def communication_seconds(self) -> float:
        """Seconds in stages that communicate, waiting for other ranks included."""
        seconds = self.seconds
        return sum(seconds[name] for name in COMMUNICATION if name in seconds)

    def clear(self) -> None:
        """Forgets everything recorded so far."""
        for records in (self._seconds, self._running, self.calls, self.sent):
            records.clear()

    def _collect(self) -> None:
        """Takes the times of stages that the GPU is done with, so that few events are kept."""
        while self._running and self._running[0][2].query():
            name, start, end = self._running.popleft()
            self._seconds[name] += start.elapsed_time(end) / 1e3
