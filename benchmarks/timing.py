"""Time alternating training steps: wall time, the device's time, kernels, waits and memory."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import profile

import mpikfac

MB = 1e6
WARM = 2  # steps before a measurement
WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")

Step = Callable[[], None]
Row = dict[str, Any]


class Missing(Exception):
    """A case needs what is not available; the text says what."""


class Case(NamedTuple):
    """A kind of step to be timed.

    Attributes:
        make: creates the step. Raises `Missing` if a step of the kind cannot be created.
        base: the name of the case to compare with; "" for none.
        steps: of a block. The host does not wait inside of a block.
        profiled: whether a single step represents the case.
        shared: whether the case shares memory with others, so that its own memory is unknown.
    """

    name: str
    make: Callable[[], Step]
    base: str = ""
    steps: int = 1
    profiled: bool = True
    shared: bool = False


def timed(cases: Iterable[Case], rounds: int) -> list[Row]:
    """Return a row for each case; in each round, every case runs a block of steps.

    A sample is the mean step of a block in ms, of the slowest rank. The memory is what the case
    needs in addition to the previous cases.

    Collective over: world.
    """
    rows: list[Row] = []
    ready: list[tuple[Row, Case, Step]] = []
    for case in cases:
        row: Row = {"name": case.name, "base": case.base}
        rows.append(row)
        before = torch.accelerator.memory_allocated()
        try:
            step = case.make()
        except Missing as missing:
            row["missing"] = str(missing)
            continue
        for _ in range(WARM):
            step()
        torch.accelerator.reset_peak_memory_stats()
        step()
        torch.accelerator.synchronize()
        if not case.shared:
            row["memory_mb"] = (torch.accelerator.max_memory_allocated() - before) / MB
        row |= counted(step) if case.profiled else {}
        row |= {"steps": case.steps, "wall_ms": []}
        ready.append((row, case, step))
    for _ in range(rounds):
        for row, case, step in ready:
            row["wall_ms"].append(block(step, case.steps))
    return rows


def block(step: Step, steps: int, beside: bool = False) -> float:
    """Return the ms of a step: the mean of some steps, of the slowest rank.

    Collective over: world.

    Args:
        beside: work on other streams can continue.
    """
    stream = torch.accelerator.current_stream()
    wait = stream.synchronize if beside else torch.accelerator.synchronize
    comm = mpikfac.world()
    wait()
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return 1e3 * max(comm.allgather(time.perf_counter() - start)) / steps


class Work(NamedTuple):
    """What the device did: a kernel or a copy, with beginning and end in ms."""

    name: str
    start: float
    end: float


def counted(step: Step) -> Row:
    """Return the device's ms of a step, the longest kernels, and the calls of the driver.

    The ms are None if the profiler gives no times.
    """
    if "emulated" in sys.modules:
        return emulated(step)
    works, names = profiled(step)
    found = calls(names) - _calls_of_profiler()
    return {
        "device_ms": busy([(work.start, work.end) for work in works]) if works else None,
        **{what: found[what] for what in COUNTS},
        "longest_ms": longest(works),
    }


def emulated(step: Step) -> Row:
    """Return the counts of a step on the emulated device, which has no times."""
    import emulated  # of tests/emulated

    found: Counter[str] = Counter()
    with emulated.watched(lambda kind, name: found.update([f"{kind}s"])):
        step()
    return {"device_ms": None, **{what: found[what] for what in COUNTS}}


def profiled(step: Step) -> tuple[list[Work], Counter[str]]:
    """Return the works of the device in a step, and the names of all events."""
    with profile() as profiler:
        step()
        torch.accelerator.synchronize()
    events = profiler.events()
    works = [
        Work(event.name, event.time_range.start / 1e3, event.time_range.end / 1e3)
        for event in events
        if event.device_type != DeviceType.CPU and not event.is_user_annotation
    ]
    return works, Counter(event.name for event in events)


def longest(works: Sequence[Work], most: int = 12) -> dict[str, float]:
    """Return the names of the kernels with the most ms in all, and the ms."""
    ms: defaultdict[str, float] = defaultdict(float)
    for work in works:
        ms[work.name[:100]] += work.end - work.start
    return dict(sorted(ms.items(), key=lambda pair: -pair[1])[:most])


@cache
def _calls_of_profiler() -> Counter[str]:
    """Return what the driver counts of a step that does nothing: the profiler's own waits."""
    return calls(profiled(lambda: None)[1])


def busy(spans: Sequence[tuple[float, float]]) -> float:
    """Return the time in which at least one of the spans runs."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


COUNTS = ("kernels", "copies", "waits")


def calls(names: Counter[str]) -> Counter[str]:
    """Return the counts of launches, copies and waits among the calls of the driver."""
    found: Counter[str] = Counter()
    for name, count in names.items():
        if "LaunchKernel" in name or "GraphLaunch" in name:
            found["kernels"] += count
        elif "MemcpyAsync" in name or "MemsetAsync" in name:
            found["copies"] += count
        elif name.endswith(WAITS):
            found["waits"] += count
    return found
