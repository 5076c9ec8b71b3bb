"""Join the events of all ranks to a timeline: waiting, means by stage, a picture for a browser.

All functions are pure functions of a `Trace`'s events. docs/trace.md describes the two formats.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from mpikfac.trace import Event

MEANS = ("seconds", "calls", "bytes", "waiting")
Stages = dict[str, dict[str, float]]  # MEANS by stage


class Recorded(NamedTuple):
    """Hold the records of a rank.

    Attributes:
        steps: start and end by step, in seconds of the same clock as the events.
        events: `Trace.events` of the steps.
    """

    steps: dict[int, tuple[float, float]]
    events: list[Event]

    def later(self, seconds: float) -> Recorded:
        """Return the records with all times later by `seconds`."""
        steps = {n: (start + seconds, end + seconds) for n, (start, end) in self.steps.items()}
        events = [e._replace(start=e.start + seconds, end=e.end + seconds) for e in self.events]
        return Recorded(steps, events)


# -- seconds of events alone, and waiting --------------------------------------------------------


def self_seconds(events: Sequence[Event]) -> list[float]:
    """Return the seconds of every event without the seconds of inner events."""
    inside: defaultdict[tuple[str, int], float] = defaultdict(float)
    own = []
    for event in events:  # inner events end before the outer event
        seconds = event.end - event.start
        own.append(seconds - inside.pop((event.thread, event.depth + 1), 0.0))
        inside[event.thread, event.depth] += seconds
    return own


def waiting(ranks: Sequence[Sequence[Event]], columns: int) -> list[list[float]]:
    """Return by rank and event the seconds before the last member arrived at the collective.

    Starts and ends are of the same clock. An event that sends nothing never waits. For background
    threads waiting is unknown and counts as 0: messages are under way when the recording starts,
    and ranks are not equally far.
    """
    named = [list(_collectives(events, rank, columns)) for rank, events in enumerate(ranks)]
    arrived: dict[tuple[str, ...], float] = {}
    for names, events in zip(named, ranks):
        for name, event in zip(names, events):
            arrived[name] = max(arrived.get(name, event.start), event.start)
    return [
        [
            min(arrived[n], e.end) - e.start if e.over and not e.thread else 0.0
            for n, e in zip(names, events)
        ]
        for names, events in zip(named, ranks)
    ]


def _collectives(events: Sequence[Event], rank: int, columns: int) -> Iterator[tuple[str, ...]]:
    """Yield for every event a name of the collective, equal on all members.

    The n-th collective of a kind is the same on all members, because all members issue collectives
    in the same order.
    """
    teams = {"": "", "world": "", "column": f"{rank % columns}", "row": f"{rank // columns}"}
    teams["curvature"] = f"{rank}"  # ranks do not wait for one another in messages to curvature
    count: Counter[tuple[str, ...]] = Counter()
    for event in events:
        kind = event.thread, event.name, event.over, teams[event.over.partition(" ")[0]]
        count[kind] += 1
        yield *kind, str(count[kind])


# -- means by stage ------------------------------------------------------------------------------


def stage_means(ranks: Sequence[Recorded], columns: int) -> dict[str, Any]:
    """Return every stage's mean seconds, calls, bytes and waiting per step: for `stages.json`.

    A stage's seconds leave out inner stages, so that all stages add up to the step; seconds outside
    of all stages are "other".
    """
    waits = waiting([recorded.events for recorded in ranks], columns)
    rows = [_rank_means(recorded, waited) for recorded, waited in zip(ranks, waits)]
    return {
        "steps": list(ranks[0].steps),
        "rows": len(ranks) // columns,
        "columns": columns,
        "seconds": fmean(row["seconds"] for row in rows),
        "ranks": rows,
    }


def _rank_means(recorded: Recorded, waited: Sequence[float]) -> dict[str, Any]:
    totals: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * len(MEANS))
    for event, own, wait in zip(recorded.events, self_seconds(recorded.events), waited):
        for index, value in enumerate((own, 1, event.bytes, wait)):
            totals[event.thread, event.name][index] += value
    whole = sum(end - start for start, end in recorded.steps.values())
    training = sum(seconds for (thread, _), (seconds, *_) in totals.items() if not thread)
    totals["", "other"][0] = whole - training
    steps = len(recorded.steps)
    threads: defaultdict[str, Stages] = defaultdict(dict)
    for (thread, stage), values in totals.items():
        threads[thread][stage] = {key: value / steps for key, value in zip(MEANS, values)}
    return {"seconds": whole / steps, "stages": threads.pop(""), "beside": dict(threads)}


def stage_table(means: Mapping[str, Any]) -> list[list[str]]:
    """Return `stage_means` as rows of cells: means over ranks, and the slowest rank's time.

    Waiting is subtracted from the stages, and has its own row.
    """
    step, ranks = means["seconds"], means["ranks"]
    training = _by_stage([rank["stages"] for rank in ranks])
    waited, sent = (sum(_mean(t, key) for t in training.values()) for key in ("waiting", "bytes"))
    slowest = max(rank["seconds"] for rank in ranks)
    rows = [["stage", "ms", "share", "slowest", "waiting", "MB sent"]]
    rows += [_row(stage, totals, step) for stage, totals in training.items()]
    rows += [["waiting", f"{waited * 1e3:.2f}", f"{waited / step:.1%}", "", "", ""]]
    rows += [_cells("step", step, step, slowest, waited, sent)]
    for thread in dict.fromkeys(thread for rank in ranks for thread in rank["beside"]):
        sending = _by_stage([rank["beside"].get(thread, {}) for rank in ranks])
        rows += [
            _row(f"beside, {thread}: {stage}", totals, step) for stage, totals in sending.items()
        ]
    return rows


def _by_stage(ranks: Sequence[Stages]) -> dict[str, list[dict[str, float]]]:
    """Return by stage the means of all ranks, 0 on a rank without the stage."""
    names = dict.fromkeys(stage for stages in ranks for stage in stages)
    return {
        name: [stages.get(name, dict.fromkeys(MEANS, 0.0)) for stages in ranks] for name in names
    }


def _row(stage: str, totals: Sequence[Mapping[str, float]], step: float) -> list[str]:
    busy = [of_rank["seconds"] - of_rank["waiting"] for of_rank in totals]
    waited, sent = _mean(totals, "waiting"), _mean(totals, "bytes")
    return _cells(stage, fmean(busy), step, max(busy), waited, sent)


def _cells(
    name: str, seconds: float, step: float, slowest: float, waited: float, sent: float
) -> list[str]:
    numbers = [f"{seconds * 1e3:.2f}", f"{seconds / step:.1%}", f"{slowest * 1e3:.2f}"]
    return [name, *numbers, f"{waited * 1e3:.2f}", f"{sent / 1e6:.3f}"]


def _mean(totals: Iterable[Mapping[str, float]], key: str) -> float:
    return fmean(of_rank[key] for of_rank in totals)


# -- a picture -----------------------------------------------------------------------------------


def chrome_trace(ranks: Sequence[Recorded], columns: int) -> dict[str, Any]:
    """Return the timeline in Chrome's trace format for Perfetto: a process per rank.

    A process has rows for the steps, the training, and background threads. Times are in
    microseconds from the first step on. If a rank waits in a collective, "waiting" lies inside the
    collective.
    """
    origin = min(start for recorded in ranks for start, _ in recorded.steps.values())
    waits = waiting([recorded.events for recorded in ranks], columns)
    found: list[dict[str, Any]] = []
    for rank, (recorded, waited) in enumerate(zip(ranks, waits)):
        place = f"rank {rank} (row {rank // columns}, column {rank % columns})"
        found.append(_label("process_name", rank, 0, place))
        found += _slices(recorded.later(-origin), waited, rank)
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def _slices(recorded: Recorded, waited: Sequence[float], rank: int) -> Iterator[dict[str, Any]]:
    background = sorted({event.thread for event in recorded.events} - {""})
    for row, name in enumerate(["steps", "training", *background]):
        yield _label("thread_name", rank, row, name)
    for step, (start, end) in recorded.steps.items():
        yield _slice(f"step {step}", rank, 0, start, end)
    for event, wait in zip(recorded.events, waited):
        row = ["", *background].index(event.thread) + 1
        sent = {"over": event.over, "bytes": event.bytes} if event.over else {}
        yield _slice(event.name, rank, row, event.start, event.end) | {"args": sent}
        if wait:
            yield _slice("waiting", rank, row, event.start, event.start + wait)


def _label(kind: str, rank: int, row: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": text}}


def _slice(name: str, rank: int, row: int, start: float, end: float) -> dict[str, Any]:
    ts, dur = round(start * 1e6, 3), round((end - start) * 1e6, 3)
    return {"ph": "X", "name": name, "pid": rank, "tid": row, "ts": ts, "dur": dur}
