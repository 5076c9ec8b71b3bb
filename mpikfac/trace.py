"""Seconds, calls and bytes of every stage of a step, as plain records."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

COMMUNICATION = (
    "reduce scales",
    "reduce statistics",
    "send factors",
    "receive bases",
    "publish bases",
    "reduce gradients",
    "publish gradients",
    "clip",
    "publish weights",
)
"""Stages that communicate; the others only compute."""


class Event(NamedTuple):
    """A stage that ran once.

    Attributes:
        start: seconds of `time.perf_counter`, on this rank unless said otherwise.
        over: communicator of its collective, "world", "column" or "row", or a part of one with its
            number, as "world in node 3"; "curvature" of messages to curvature ranks and from there;
            "" if nothing is sent.
        bytes: what this rank handed to MPI.
        depth: stages around it on its thread.
        thread: "" for the training itself, otherwise the name of the thread beside it.
    """

    name: str
    start: float
    end: float
    over: str = ""
    bytes: int = 0
    depth: int = 0
    thread: str = ""


class Trace:
    """What each stage cost on this rank since the last `clear`.

    Once CUDA is in use, a stage is timed by events on the current stream: from when the GPU comes
    to it until it is done with it. The step does not wait for that; who reads `seconds` does.

    Threads started by Python have stages of their own beside those of the thread that made the
    trace.

    Args:
        events: record from the start, see `record`.

    Attributes:
        calls: times each stage ran; as "decompositions", factors that this rank decomposed.
        sent: bytes handed to MPI by stage.
        current: the innermost stage of the training that runs now, or "".
        beside: seconds by stage on other threads.
    """

    def __init__(self, events: bool = False) -> None:
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.sent: defaultdict[str, int] = defaultdict(int)
        self.current = ""
        self.beside: defaultdict[str, float] = defaultdict(float)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[Event] = []
        self._recording = events
        self._running: deque[_Running] = deque()
        self._origin: _Origin | None = None
        self._home = threading.current_thread()
        self._depths: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    @property
    def seconds(self) -> defaultdict[str, float]:
        """Seconds by stage, those of stages inside it included."""
        self._settle()
        return self._seconds

    @property
    def events(self) -> list[Event]:
        """Stages that ran while `record` was on, in the order of their ends."""
        self._settle()
        return self._events

    def record(self, on: bool) -> None:
        """Starts or stops to keep events, between two steps; waits for stages on a GPU."""
        self._settle()
        self._recording = on
        self._origin = None

    @contextmanager
    def stage(self, name: str, over: str = "", bytes: int = 0) -> Iterator[None]:
        """Adds the body's time to stage `name`, and the `bytes` that it sends `over` members."""
        thread = self._thread()
        outer, depth = self.current, self._depths[thread]
        self._depths[thread] += 1
        if not thread:
            self.current = name
        try:
            if torch.cuda.is_initialized():
                origin = self._gpu_origin()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                yield
                end.record()
                event = Event(name, 0.0, 0.0, over, bytes, depth, thread)
                self._finish(_Running(event, start, end, origin))
            else:
                began = time.perf_counter()
                yield
                now = time.perf_counter()
                self._finish(Event(name, began, now, over, bytes, depth, thread))
        finally:
            self._depths[thread] = depth
            if not thread:
                self.current = outer

    def communication_seconds(self) -> float:
        """Seconds in stages that communicate, waiting for other ranks included."""
        seconds = self.seconds
        return sum(seconds[name] for name in COMMUNICATION if name in seconds)

    def clear(self) -> None:
        """Forgets everything recorded so far."""
        with self._lock:
            for times in (self._seconds, self.beside, self.calls, self.sent):
                times.clear()
            self._events.clear()
            self._running.clear()

    def _thread(self) -> str:
        """The present thread as events name it."""
        thread = threading.current_thread()
        # Torch runs a GPU's backward pass on a thread of its own, while the training waits for it.
        if thread is self._home or isinstance(thread, threading._DummyThread):
            return ""
        return thread.name

    def _gpu_origin(self) -> _Origin | None:
        """What places the GPU's times on the host's clock, while events are recorded."""
        if self._recording and self._origin is None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            event.synchronize()
            self._origin = _Origin(event, time.perf_counter())
        return self._origin

    def _finish(self, done: Event | _Running) -> None:
        """Counts a stage that the host is through with."""
        event = done if isinstance(done, Event) else done.event
        with self._lock:
            self.calls[event.name] += 1
            if event.over:
                self.sent[event.name] += event.bytes
            if isinstance(done, Event):
                self._add(done, self._recording)
            else:
                self._running.append(done)
                self._collect()

    def _settle(self) -> None:
        """Waits until the GPU is through with all stages."""
        with self._lock:
            for running in self._running:
                running.end.synchronize()
            self._collect()

    def _collect(self) -> None:
        """Takes the times of stages that the GPU is done with, so that few events are kept."""
        while self._running and self._running[0].end.query():
            event, start, end, origin = self._running.popleft()
            began = origin.seconds + origin.event.elapsed_time(start) / 1e3 if origin else 0.0
            ended = began + start.elapsed_time(end) / 1e3
            self._add(event._replace(start=began, end=ended), origin is not None)

    def _add(self, event: Event, keep: bool) -> None:
        seconds = self.beside if event.thread else self._seconds
        seconds[event.name] += event.end - event.start
        if keep:
            self._events.append(event)


class _Origin(NamedTuple):
    """An event on the GPU, and what the host's clock showed then."""

    event: torch.cuda.Event
    seconds: float


class _Running(NamedTuple):
    """A stage that the GPU may not be through with; the event's times are still to come."""

    event: Event
    start: torch.cuda.Event
    end: torch.cuda.Event
    origin: _Origin | None
