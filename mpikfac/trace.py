"""Record the time, the calls and the bytes of every stage of a step."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from mpikfac.plan import names

COMMUNICATION = (
    names.EXCHANGE_ACTIVATIONS,
    names.EXCHANGE_ACTIVATION_GRADIENTS,
    names.EXCHANGE_SPLIT_STATISTICS,
    names.REDUCE_SCALES,
    names.REDUCE_STATISTICS,
    names.SEND_FACTORS,
    names.RECEIVE_BASES,
    names.PUBLISH_BASES,
    names.REDUCE_GRADIENTS,
    names.GATHER_GRADIENTS,
    names.PUBLISH_DIRECTIONS,
    names.CLIP,
    names.SCATTER_DIRECTIONS,
    names.PUBLISH_WEIGHTS,
    names.EXCHANGE_IN_NODE,
    names.EXCHANGE_WEIGHTS,
    names.EXCHANGE_UPDATES,
)
"""Stages that communicate; all other stages only compute."""

ORIGINS = 5  # how many times the clocks of the host and the GPU are read together


class Event(NamedTuple):
    """Describe one run of a stage.

    Attributes:
        start: a reading of `time.perf_counter` in seconds, on this rank unless stated otherwise.
        over: the communicator of the stage's collective: "world", "column" or "row", or a numbered
            part such as "world in node 3"; "group" or "peers" for split layers; "curvature" and
            "servers" for messages to and from ranks that do not train; "" if the stage sends
            nothing.
        bytes: the number of bytes that this rank passed to MPI.
        depth: the number of enclosing stages on the same thread.
        thread: "" for the training itself, otherwise the name of the background thread.
        flight: the number of the overlapped message, if the stage sends a piece of one; otherwise
            0.
    """

    name: str
    start: float
    end: float
    over: str = ""
    bytes: int = 0
    depth: int = 0
    thread: str = ""
    flight: int = 0


class Trace:
    """Record the cost of every stage on this rank since the last `clear`.

    Once CUDA is in use, a stage is timed with events on the current stream, from the moment
    the GPU begins the stage's work until it finishes. The step does not wait for the GPU, but
    reading `seconds` does.

    Stages on background threads that Python has started are counted separately from those on the
    thread that created the trace.

    Args:
        events: whether to record events from the start; see `record`.

    Attributes:
        calls: by stage, the number of runs; under "decompositions", the number of factors that this
            rank decomposed.
        sent: by stage, the bytes passed to MPI.
        current: the innermost stage that the training is in, or "".
        background: by stage, the seconds on background threads.
    """

    def __init__(self, events: bool = False) -> None:
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.sent: defaultdict[str, int] = defaultdict(int)
        self.current = ""
        self.background: defaultdict[str, float] = defaultdict(float)
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
        """Return the seconds spent in each stage, including the stages nested in it."""
        self._synchronize()
        return self._seconds

    @property
    def events(self) -> list[Event]:
        """Return the stages that ran while recording was on, ordered by their end."""
        self._synchronize()
        return self._events

    def record(self, on: bool) -> None:
        """Start or stop recording events between steps, once the GPU has finished all stages."""
        self._synchronize()
        self._recording = on
        self._origin = None

    @contextmanager
    def stage(self, name: str, over: str = "", bytes: int = 0, flight: int = 0) -> Iterator[None]:
        """Add the body's time to stage `name`, and the `bytes` sent `over` a communicator."""
        thread = self._thread()
        outer, depth = self.current, self._depths[thread]
        self._depths[thread] += 1
        if not thread:
            self.current = name
        try:
            if _on_device():
                origin = self._gpu_origin()
                start, end = (torch.Event(enable_timing=True) for _ in range(2))
                start.record()
                yield
                end.record()
                event = Event(name, 0.0, 0.0, over, bytes, depth, thread, flight)
                self._finish(_Running(event, start, end, origin))
            else:
                began = time.perf_counter()
                yield
                now = time.perf_counter()
                self._finish(Event(name, began, now, over, bytes, depth, thread, flight))
        finally:
            self._depths[thread] = depth
            if not thread:
                self.current = outer

    def communication_seconds(self) -> float:
        """Return the seconds in stages that communicate, including waiting for other ranks."""
        seconds = self.seconds
        return sum(seconds[name] for name in COMMUNICATION if name in seconds)

    def clear(self) -> None:
        """Drop all records."""
        with self._lock:
            for times in (self._seconds, self.background, self.calls, self.sent):
                times.clear()
            self._events.clear()
            self._running.clear()

    def _thread(self) -> str:
        """Return the current thread's name for events, which is "" for the training."""
        thread = threading.current_thread()
        # Torch runs a GPU's backward pass on its own thread, while the training waits for it.
        if thread is self._home or isinstance(thread, threading._DummyThread):
            return ""
        return thread.name

    def _gpu_origin(self) -> _Origin | None:
        """Return a GPU event paired with the host's time, or None if no events are recorded."""
        if self._recording and self._origin is None:
            # The host can lose its core between the event and the clock reading, so the fastest
            # pair is used.
            self._origin = min(_origins(ORIGINS), key=lambda origin: origin.doubt)
        return self._origin

    def _finish(self, done: Event | _Running) -> None:
        """Record a stage that the host has left."""
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

    def _synchronize(self) -> None:
        """Wait until the GPU has finished all stages."""
        with self._lock:
            for running in self._running:
                running.end.synchronize()
            self._collect()

    def _collect(self) -> None:
        """Read the times of stages that the GPU has finished, so that few GPU events are kept."""
        while self._running and self._running[0].end.query():
            event, start, end, origin = self._running.popleft()
            began = origin.seconds + origin.event.elapsed_time(start) / 1e3 if origin else 0.0
            ended = began + start.elapsed_time(end) / 1e3
            self._add(event._replace(start=began, end=ended), origin is not None)

    def _add(self, event: Event, keep: bool) -> None:
        seconds = self.background if event.thread else self._seconds
        seconds[event.name] += event.end - event.start
        if keep:
            self._events.append(event)


class _Origin(NamedTuple):
    """Store a GPU event, and the host's time at which it occurred.

    Attributes:
        doubt: seconds between the readings of the host's clock before and after the event.
    """

    event: torch.Event
    seconds: float
    doubt: float


class _Running(NamedTuple):
    """Store a stage that the GPU might not have finished; `event` has no times yet."""

    event: Event
    start: torch.Event
    end: torch.Event
    origin: _Origin | None


def _origins(count: int) -> Iterator[_Origin]:
    """Yield GPU events, each with the midpoint of the host's times before and after it."""
    for _ in range(count):
        event = torch.Event(enable_timing=True)
        before = time.perf_counter()
        event.record()
        event.synchronize()
        after = time.perf_counter()
        yield _Origin(event, (before + after) / 2, after - before)


def _on_device() -> bool:
    """Return whether the process has begun to use a GPU."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and torch.get_device_module(accelerator).is_initialized()
