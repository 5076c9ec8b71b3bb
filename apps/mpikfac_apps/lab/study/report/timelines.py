"""Draw traced steps rank by rank, from the timeline files of runs."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mpikfac import files
from mpikfac_apps.lab.study.report.style import STAGES, WIDTH, bar_style, styled
from mpikfac_apps.lab.study.results import GROUPS, OTHER, Measured

SHOWN = 6  # maximum number of timelines
MOST_SLICES = 10**7  # maximum of slices times steps in a timeline that is drawn
TRACE = {"traceEvents": [{"ph": str}]}
SLICE = {"name": str, "pid": int, "ts": float, "dur": float}
GROUP_OF = {stage: group for group, stages in GROUPS.items() for stage in stages}


def timeline(all_cells: Sequence[Measured]) -> Figure | None:
    """Draw steps with and without a refresh on the largest number of ranks, one line per rank."""
    shown = []
    for cell in _typical(all_cells):
        traced = _traced_steps(_trace(cell.run))
        refresh = next((s for s in traced if any(e["name"] == "decompose" for e in s)), None)
        ordinary = next((s for s in traced if s and s is not refresh and not _curvature(s)), None)
        ordinary = ordinary or next((s for s in traced if s and s is not refresh), None)
        if refresh or ordinary:
            shown.append((cell, (ordinary, refresh)))
    if not shown:
        return None
    most = max(cell.cell.ranks for cell, _ in shown)
    with styled():
        height = len(shown) * (0.16 * min(most, 16) + 0.62) + 0.9
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        grid = figure.subplots(len(shown), 2, sharex="row", squeeze=False)
        for row, (cell, steps) in zip(grid, shown):
            for panel, step, kind in zip(row, steps, ("ordinary step", "step with a refresh")):
                _lanes(panel, step or (), cell.cell.ranks)
                panel.set(title=f"{cell.cell.label}: {kind}", visible=bool(step))
            ends = (event["ts"] + event["dur"] for step in steps for event in step or ())
            row[0].set_xlim(0, max(ends) / 1e3)
        for panel in grid[-1]:
            panel.set_xlabel("ms since the first rank began the step")
        keys = [Patch(**bar_style(name)) for name in STAGES]
        figure.legend(keys, list(STAGES), loc="outside lower center", ncols=6)
        return figure


def _typical(all_cells: Sequence[Measured]) -> list[Measured]:
    """Return a cell per variant on the largest number of ranks, but at most `SHOWN` cells.

    If there are more variants, the selection ranges from the fastest to the slowest.
    """
    traced = [cell for cell in all_cells if _trace_file(cell.run)]
    if not traced:
        return []
    most = max(cell.cell.ranks for cell in traced)
    first: dict[str, Measured] = {}
    for cell in traced:
        if cell.cell.ranks == most:
            first.setdefault(cell.cell.variant, cell)
    cells = list(first.values())
    if len(cells) <= SHOWN:
        return cells
    by_pace = sorted(cells, key=lambda cell: cell.step or 0.0)
    places = {round(i * (len(cells) - 1) / (SHOWN - 1)) for i in range(SHOWN)}
    return [by_pace[place] for place in sorted(places)]


def _trace_file(run: Path) -> Path | None:
    """Return the run's timeline file; None if it is missing."""
    return next(
        (path for path in (run / "trace.json.gz", run / "trace.json") if path.exists()), None
    )


def _trace(run: Path) -> list[dict[str, Any]]:
    """Return the slices of a run's timeline; none if the file is missing, damaged or too large."""
    path = _trace_file(run)
    if path is None:
        return []
    try:
        content = files.read_bytes(path, files.LIMIT)
        if path.suffix == ".gz":
            with gzip.open(io.BytesIO(content)) as packed:
                content = packed.read(files.LIMIT + 1)  # a small file can expand to a huge one
        trace = files.json_of(content[: files.LIMIT])
    except (EOFError, OSError, ValueError, zlib.error):
        return []
    if not files.has_form(trace, TRACE):
        return []
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    steps = {event["name"] for event in slices if str(event.get("name")).startswith("step ")}
    small = len(slices) * len(steps) <= MOST_SLICES
    return slices if small and files.has_form(slices, [SLICE]) else []


def _traced_steps(events: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the events of each step on all ranks; at time 0, the first rank begins the step."""
    spans: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        if event["name"].startswith("step "):
            spans.setdefault(event["name"], []).append(event)
    steps: list[list[Mapping[str, Any]]] = []
    for of_ranks in spans.values():
        begin = min(span["ts"] for span in of_ranks)
        ends = {span["pid"]: (span["ts"], span["ts"] + span["dur"]) for span in of_ranks}
        steps.append(
            [
                {**event, "ts": event["ts"] - begin}
                for event in events
                if not event["name"].startswith("step ") and _within(event, ends)
            ]
        )
    return steps


def _within(event: Mapping[str, Any], spans: Mapping[int, tuple[float, float]]) -> bool:
    """Return whether an event's middle is in its rank's step; rounding can shift its ends."""
    start, end = spans.get(event["pid"], (0.0, 0.0))
    return start <= event["ts"] + event["dur"] / 2 < end


def _curvature(step: Sequence[Mapping[str, Any]]) -> bool:
    return any(event["name"] == "statistics" for event in step)


def _lanes(panel: Axes, step: Sequence[Mapping[str, Any]], ranks: int) -> None:
    """Draw a line per rank, with inner stages on top of outer ones and background threads below."""
    for event in sorted(step, key=lambda event: -event["dur"]):
        beside, name = event.get("tid", 1) > 1, event["name"]
        style = bar_style(name if name in STAGES else GROUP_OF.get(name, OTHER))
        y, height = (event["pid"] + 0.3, 0.3) if beside else (event["pid"], 0.8)
        panel.barh(y, event["dur"] / 1e3, height, event["ts"] / 1e3, **style | {"linewidth": 0})
    panel.set_ylim(ranks - 0.4, -0.6)
    panel.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    panel.set(ylabel="rank")
    panel.grid(visible=False, axis="y")
