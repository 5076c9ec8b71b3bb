"""Combine all ranks' events into waiting times, means per stage and a picture.

All functions are pure functions of the events of `Trace`. docs/extensions/trace.md describes
`stages.json` and the picture's file.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from mpikfac.trace import COMMUNICATION, Event

MEANS = ("seconds", "calls", "bytes", "waiting")
SENT = ("bytes", "isolated", "in_flight", "exposed")
Stages = dict[str, dict[str, float]]  # the values named in MEANS or SENT, by stage
Spans = list[tuple[float, float]]  # starts and ends


class Recorded(NamedTuple):
    """The recorded steps and events of a rank.

    Attributes:
        steps: each step's start and end, in seconds on the same clock as the events.
        events: the rank's `Trace.events` during these steps.
    """

    steps: dict[int, tuple[float, float]]
    events: list[Event]

    def later(self, seconds: float) -> Recorded:
        """Return the records with all times shifted by `seconds`."""
        steps = {n: (start + seconds, end + seconds) for n, (start, end) in self.steps.items()}
        events = [e._replace(start=e.start + seconds, end=e.end + seconds) for e in self.events]
        return Recorded(steps, events)


# -- seconds of single events, and waiting -------------------------------------------------------


def self_seconds(events: Sequence[Event]) -> list[float]:
    """Return the duration of every event in seconds, excluding the events nested in it."""
    inside: defaultdict[tuple[str, int], float] = defaultdict(float)
    durations = []
    for event in events:  # inner events end before the outer event
        seconds = event.end - event.start
        durations.append(seconds - inside.pop((event.thread, event.depth + 1), 0.0))
        inside[event.thread, event.depth] += seconds
    return durations


def waiting(ranks: Sequence[Sequence[Event]], columns: int) -> list[list[float]]:
    """Return, by rank and event, how many seconds the rank waited for other ranks to arrive.

    In a collective, a rank waits until the last member of the communicator has arrived. An event
    that sends nothing never waits. All times must be on the same clock. On background threads, the
    waiting time is unknown and counts as 0: messages are already in flight when the recording
    starts, and some ranks are further along than others.
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
    """Yield, for every event, a name of its collective that is equal on all participating ranks.

    The n-th collective of a kind is the same on all members of a communicator, because they issue
    collectives in the same order.
    """
    teams = {"": "", "world": "", "column": f"{rank % columns}", "row": f"{rank // columns}"}
    # Ranks do not wait for each other when they exchange messages with servers of either kind. The
    # members of "group" and "peers", for split layers, are not known here, so waiting counts as 0.
    teams |= dict.fromkeys(("curvature", "servers", "group", "peers"), f"{rank}")
    count: Counter[tuple[str, ...]] = Counter()
    for event in events:
        kind = event.thread, event.name, event.over, teams[event.over.partition(" ")[0]]
        count[kind] += 1
        yield *kind, str(count[kind])


# -- means by stage ------------------------------------------------------------------------------


def stage_means(ranks: Sequence[Recorded], columns: int) -> dict[str, Any]:
    """Return every stage's mean seconds, calls, bytes and waiting per step, for `stages.json`.

    A stage's time excludes inner stages, so the times of all stages add up to the step's time; the
    time outside all stages is "other".
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
    for event, duration, wait in zip(recorded.events, self_seconds(recorded.events), waited):
        for index, value in enumerate((duration, 1, event.bytes, wait)):
            totals[event.thread, event.name][index] += value
    in_steps = sum(end - start for start, end in recorded.steps.values())
    training = sum(seconds for (thread, _), (seconds, *_) in totals.items() if not thread)
    totals["", "other"][0] = in_steps - training
    steps = len(recorded.steps)
    threads: defaultdict[str, Stages] = defaultdict(dict)
    for (thread, stage), values in totals.items():
        threads[thread][stage] = {key: value / steps for key, value in zip(MEANS, values)}
    return {"seconds": in_steps / steps, "stages": threads.pop(""), "beside": dict(threads)}


def stage_table(means: Mapping[str, Any]) -> list[list[str]]:
    """Return `stage_means` as table rows: means over ranks, and the time of the slowest rank.

    Waiting is subtracted from the times of stages, and has its own row.
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
            _row(f"background, {thread}: {stage}", totals, step)
            for stage, totals in sending.items()
        ]
    return rows


def _by_stage(ranks: Sequence[Stages]) -> dict[str, list[dict[str, float]]]:
    """Return each rank's means, by stage; they are 0 on a rank without the stage."""
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


# -- messages: alone, in flight, exposed, hidden -------------------------------------------------


def collective_means(
    ranks: Sequence[Recorded], isolated: Sequence[Mapping[str, float]]
) -> dict[str, dict[str, float | None]]:
    """Return each stage's bytes and times for `stages.json`, averaged over steps and ranks.

    All times are those of messages, which can be sent in pieces. A message is in flight from the
    start of its first piece to the end of its last piece. It is exposed while the training is in a
    communicating stage, and therefore does not compute; "hidden" is the fraction of the time in
    flight during which it is not exposed.

    Args:
        isolated: the time that a step's messages take in isolation, by rank and stage; for a stage
            without an entry on any rank, the time in isolation is None in the result.
    """
    rows = [_of_rank(recorded, alone) for recorded, alone in zip(ranks, isolated)]
    stages: dict[str, dict[str, float | None]] = {}
    for stage in dict.fromkeys(stage for row in rows for stage in row):
        of_ranks = [row.get(stage, dict.fromkeys(SENT, 0.0)) for row in rows]
        means = {key: _mean(of_ranks, key) for key in SENT}
        stages[stage] = {**means, "hidden": _hidden(means)}
        if not any(stage in times for times in isolated):
            stages[stage]["isolated"] = None
    return stages


def _of_rank(recorded: Recorded, isolated: Mapping[str, float]) -> Stages:
    """Return the values named in `SENT`, per step, by stage."""
    waits = [(e.start, e.end) for e in recorded.events if e.name in COMMUNICATION and not e.thread]
    busy, steps, stages = _covered(waits), recorded.steps.values(), {}
    for stage, flights in _flights(recorded.events).items():
        flown = _covered(flights)
        runs = sum(any(start <= begun < end for begun, _ in flights) for start, end in steps)
        values = {
            "bytes": sum(e.bytes for e in recorded.events if e.over and e.name == stage),
            "isolated": runs * isolated.get(stage, 0.0),
            "in_flight": flown,
            "exposed": flown - (_covered(flights + waits) - busy),
        }
        stages[stage] = {key: value / len(steps) for key, value in values.items()}
    return stages


def _hidden(values: Mapping[str, float]) -> float:
    return 1 - values["exposed"] / values["in_flight"] if values["in_flight"] else 0.0


def _flights(events: Sequence[Event]) -> dict[str, Spans]:
    """Return the start and end of every message, by stage; the pieces of a message are joined."""
    pieces: defaultdict[tuple[str, str, int], list[Event]] = defaultdict(list)
    for number, event in enumerate(events, start=1):
        if event.over:
            pieces[event.name, event.thread, event.flight or -number].append(event)
    flights: defaultdict[str, Spans] = defaultdict(list)
    for (stage, _, _), parts in pieces.items():
        flights[stage].append((parts[0].start, parts[-1].end))
    return flights


def _covered(spans: Spans) -> float:
    """Return the seconds covered by spans; time covered by several spans is counted once."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > last:
            total, last = total + end - max(start, last), end
    return total


def collective_table(means: Mapping[str, Mapping[str, float | None]]) -> list[list[str]]:
    """Return `collective_means` as table rows, in ms and MB, with a row of totals."""
    sums = {key: sum(values[key] or 0.0 for values in means.values()) for key in SENT}
    entries = [*means.items(), ("all", sums | {"hidden": _hidden(sums)})]
    rows = [["collective", "MB sent", "isolated", "in flight", "exposed", "hidden"]]
    for stage, values in entries:
        bytes, *times, hidden = (values[key] for key in (*SENT, "hidden"))
        ms = ["-" if seconds is None else f"{seconds * 1e3:.2f}" for seconds in times]
        rows.append([stage, f"{(bytes or 0) / 1e6:.3f}", *ms, f"{hidden or 0:.1%}"])
    return rows


# -- a picture -----------------------------------------------------------------------------------


def chrome_trace(ranks: Sequence[Recorded], columns: int) -> dict[str, Any]:
    """Return the timeline in Chrome's trace format for Perfetto, with one process per rank.

    A process has rows for the steps, the training, and background threads. Times are in
    microseconds since the first step. If a rank waits in a collective, a slice "waiting" is
    drawn inside the slice of the collective.
    """
    origin = min(start for recorded in ranks for start, _ in recorded.steps.values())
    waits = waiting([recorded.events for recorded in ranks], columns)
    events: list[dict[str, Any]] = []
    for rank, (recorded, waited) in enumerate(zip(ranks, waits)):
        place = f"rank {rank} (row {rank // columns}, column {rank % columns})"
        events.append(_label("process_name", rank, 0, place))
        events += _slices(recorded.later(-origin), waited, rank)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


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
