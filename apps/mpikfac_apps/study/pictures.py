"""Draw the pictures of a study's report, each as the bytes of an SVG file.

Every function takes complete cells, and leaves out cells without the data for the picture. A
function returns None if no cell is left.
"""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from mpikfac_apps.study.results import GROUPS, OTHER, WAITING, Measured
from mpikfac_apps.text import MIB, number

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

WIDTH = 11.0  # inches, of every picture
# Cold colours are computing, warm colours are messages.
COLOURS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "statistics": "#41ab5d",
    "decomposition": "#006d2c",
    "preconditioning": "#a1d99b",
    "optimizer": "#6a51a3",
    "factor messages": "#d94801",
    "basis messages": "#fdae6b",
    "gradient messages": "#a50f15",
    WAITING: "#d9d9d9",
    OTHER: "#f2f2f2",
}
STAGE_COLOURS = {stage: COLOURS[group] for group, stages in GROUPS.items() for stage in stages}
STYLE: dict[RcKeyType, Any] = {
    **{"font.size": 9, "axes.titlesize": 9, "axes.titleweight": "bold"},
    **{"axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": "#e8e8e8"},
    **{"legend.frameon": False, "svg.hashsalt": "mpikfac"},
}
SHOWN = 6  # timelines


def breakdown(all_cells: Sequence[Measured]) -> bytes | None:
    """Draw the time of a step by stage: a bar per variant, a panel per number of ranks."""
    cells = [cell for cell in all_cells if cell.breakdown]
    if not cells:
        return None
    ranks, variants = _ranks(cells), _variants(cells)
    rows = -(-len(ranks) // 3)
    height = rows * (0.24 * len(variants) + 0.6) + 0.8
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots(rows, min(3, len(ranks)), sharey=True, squeeze=False).ravel()
        for panel, count in zip(axes, ranks):
            _bars(panel, [cell for cell in cells if cell.cell.ranks == count], variants)
            panel.set(title=number(count, "rank"), xlabel="ms per step")
        for panel in axes[len(ranks) :]:
            panel.remove()
        keys = [Patch(facecolor=c, edgecolor="#999", linewidth=0.4) for c in COLOURS.values()]
        figure.legend(keys, COLOURS, loc="outside lower center", ncols=6)
        return _svg(figure)


def _bars(panel: Axes, cells: Sequence[Measured], variants: Sequence[str]) -> None:
    for row, variant in enumerate(variants):
        found = [cell.breakdown for cell in cells if cell.cell.variant == variant]
        left = 0.0
        for group in COLOURS if found else ():
            width = 1e3 * fmean(parts[group] for parts in found)
            colour = COLOURS[group]
            panel.barh(row, width, 0.75, left, color=colour, edgecolor="#999", linewidth=0.4)
            left += width
    panel.set_yticks(range(len(variants)), variants)
    panel.set_ylim(len(variants) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")


def timeline(all_cells: Sequence[Measured]) -> bytes | None:
    """Draw a step with and a step without a refresh of cells on most ranks; a rank is a line."""
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
    with matplotlib.rc_context(STYLE):
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
        used = {name: c for name, c in COLOURS.items() if name != OTHER}
        keys = [Patch(facecolor=colour) for colour in used.values()]
        figure.legend(keys, used, loc="outside lower center", ncols=5)
        return _svg(figure)


def _typical(all_cells: Sequence[Measured]) -> list[Measured]:
    """Return cells on most ranks: all variants in the study's order, or some from fast to slow."""
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
    """Return the run's timeline file; None if missing."""
    return next(
        (path for path in (run / "trace.json.gz", run / "trace.json") if path.exists()), None
    )


def _trace(run: Path) -> list[dict[str, Any]]:
    """Return slices of the run's timeline; nothing if the file is missing or damaged."""
    path = _trace_file(run)
    if path is None:
        return []
    try:
        content = path.read_bytes()
        found = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except (EOFError, OSError, ValueError):
        return []
    return [event for event in found["traceEvents"] if event["ph"] == "X"]


def _traced_steps(events: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the events of each step on all ranks; time 0 is the first begin of the step."""
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
    """Return whether an event's middle lies in its rank's step; rounding may move the ends."""
    start, end = spans.get(event["pid"], (0.0, 0.0))
    return start <= event["ts"] + event["dur"] / 2 < end


def _curvature(step: Sequence[Mapping[str, Any]]) -> bool:
    return any(event["name"] == "statistics" for event in step)


def _lanes(panel: Axes, step: Sequence[Mapping[str, Any]], ranks: int) -> None:
    """Draw one line per rank: inner stages over outer stages, background threads below."""
    for event in sorted(step, key=lambda event: -event["dur"]):
        beside = event.get("tid", 1) > 1
        colour = COLOURS.get(event["name"]) or STAGE_COLOURS.get(event["name"], COLOURS[OTHER])
        place = {"y": event["pid"] + 0.3, "height": 0.3} if beside else {"y": event["pid"]}
        place.setdefault("height", 0.8)
        width, left = event["dur"] / 1e3, event["ts"] / 1e3
        panel.barh(width=width, left=left, color=colour, linewidth=0, **place)
    panel.set_ylim(ranks - 0.4, -0.6)
    panel.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    panel.set(ylabel="rank")
    panel.grid(visible=False, axis="y")


def curves(all_cells: Sequence[Measured], target: float | None) -> bytes | None:
    """Draw test accuracy by epochs, seconds and bytes sent: a row for each number of ranks."""
    cells = [cell for cell in all_cells if cell.curve.steps]
    if not cells:
        return None
    ranks = _ranks(cells)
    low = min(cell.curve.accuracy[len(cell.curve.accuracy) // 2] for cell in cells)
    with matplotlib.rc_context(STYLE):
        height = 2.5 * len(ranks) + 0.2 * -(-len(_variants(cells)) // 4) + 0.3
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        grid = figure.subplots(len(ranks), 3, sharey=True, squeeze=False)
        for row, count in zip(grid, ranks):
            for cell in (cell for cell in cells if cell.cell.ranks == count):
                _three_curves(row, cell, _style(cell.cell.variant, all_cells))
            row[0].set(title=number(count, "rank"), ylabel="test accuracy (%)")
            for panel in row:
                if target is not None:
                    panel.axhline(100 * target, color="#666", linewidth=0.8, linestyle=":")
                panel.set_xlim(left=0)
                panel.set_ylim(100 * low - 3, 100.5)
            if count == 1:
                middle = {"ha": "center", "transform": row[2].transAxes}
                row[2].text(0.5, 0.5, "one rank sends nothing", **middle)
                row[2].set(xlim=(0, 1), xticks=[])
        for panel, what in zip(grid[-1], ("epochs", "seconds of training", "MiB sent per rank")):
            panel.set_xlabel(what)
        _legend(figure, all_cells)
        return _svg(figure)


def _three_curves(row: Sequence[Axes], cell: Measured, style: Mapping[str, Any]) -> None:
    curve = cell.curve
    sent = [step * cell.wire / MIB for step in curve.steps]
    percent = [100 * accuracy for accuracy in curve.accuracy]
    for panel, along in zip(row, (curve.epochs, curve.seconds, sent if cell.wire else ())):
        if along:
            panel.plot(along, percent, markersize=3, linewidth=1.1, **style)


def scaling(all_cells: Sequence[Measured]) -> bytes | None:
    """Draw images per second by number of ranks, and efficiency against the fewest ranks."""
    paces = _paces(all_cells)
    if not paces:
        return None
    counts = sorted({ranks for pace in paces.values() for ranks in pace})
    best = max(pace.get(counts[0], 0.0) for pace in paces.values())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for variant, pace in paces.items():
            ranks, style = sorted(pace), _style(variant, all_cells)
            left.plot(ranks, [pace[r] for r in ranks], linewidth=1.1, **style)
            alone = pace[ranks[0]] / ranks[0]
            right.plot(ranks, [100 * pace[r] / r / alone for r in ranks], linewidth=1.1, **style)
        ideal = {"color": "#999", "linestyle": "--", "linewidth": 0.8, "label": "ideal"}
        left.plot(counts, [best * r / counts[0] for r in counts], **ideal)
        right.plot(counts, [100] * len(counts), **ideal)
        left.set(yscale="log", ylabel="images per second")
        _plain(left.yaxis)
        right.set(ylabel="efficiency against fewest ranks (%)", ylim=(0, None))
        for panel in (left, right):
            panel.set(xscale="log", xlabel="ranks")
            panel.set_xticks(counts, map(str, counts))
            panel.xaxis.set_minor_locator(NullLocator())
        _legend(figure, all_cells)
        return _svg(figure)


def _paces(cells: Sequence[Measured]) -> dict[str, dict[int, float]]:
    """Return the mean images per second over seeds by ranks, of variants on several rank counts."""
    found: dict[str, dict[int, list[float]]] = {}
    for cell in cells:
        if cell.images_per_second:
            by_ranks = found.setdefault(cell.cell.variant, {})
            by_ranks.setdefault(cell.cell.ranks, []).append(cell.images_per_second)
    return {
        variant: {ranks: fmean(paces) for ranks, paces in by_ranks.items()}
        for variant, by_ranks in found.items()
        if len(by_ranks) > 1
    }


def predicted(cells: Sequence[Measured], predictions: Mapping[str, float]) -> bytes | None:
    """Draw measured against predicted seconds of a step; predictions by the cells' labels."""
    pairs = [
        (cell, predictions[cell.cell.label], cell.step)
        for cell in cells
        if cell.step and cell.cell.label in predictions
    ]
    if not pairs:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
        panel = figure.subplots()
        for cell, expected, found in pairs:
            style = _style(cell.cell.variant, cells) | {"linestyle": ""}
            panel.plot(1e3 * expected, 1e3 * found, markersize=5, **style)
            at = (1e3 * expected, 1e3 * found)
            panel.annotate(f" {cell.cell.ranks}", at, fontsize=7, color="#666")
        ends = [1e3 * f(x for _, *xs in pairs for x in xs) for f in (min, max)]
        panel.plot(ends, ends, color="#999", linewidth=0.8)
        panel.set(xscale="log", yscale="log", xlabel="predicted ms", ylabel="measured ms")
        panel.set(xlim=(ends[0] / 1.3, ends[1] * 1.3), ylim=(ends[0] / 1.3, ends[1] * 1.3))
        panel.set_box_aspect(1)
        for axis in (panel.xaxis, panel.yaxis):
            _plain(axis)
        _legend(figure, cells)
        return _svg(figure)


# -- helpers of several pictures -----------------------------------------------------------------


def _ranks(cells: Sequence[Measured]) -> list[int]:
    return sorted({cell.cell.ranks for cell in cells})


def _variants(cells: Sequence[Measured]) -> list[str]:
    return list(dict.fromkeys(cell.cell.variant for cell in cells))


def _plain(axis: Axis) -> None:
    """Set ticks of a logarithmic axis at 1, 2 and 5, as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())


def _style(variant: str, cells: Sequence[Measured]) -> dict[str, Any]:
    """Return colour and marker of a variant, the same in all pictures of a study."""
    variants = _variants(cells)
    place = variants.index(variant)
    colours = matplotlib.colormaps["tab10" if len(variants) <= 10 else "tab20"]
    return {
        "color": colours(place % colours.N),
        "marker": "osv^D<>pPX"[(place + place // 10) % 10],
        "label": variant,
    }


def _legend(figure: Figure, cells: Sequence[Measured]) -> None:
    keys: dict[str, Any] = {}
    for panel in figure.axes:
        for line, name in zip(*panel.get_legend_handles_labels()):
            keys.setdefault(name, line)
    ordered = [name for name in [*_variants(cells), "ideal"] if name in keys]
    figure.legend([keys[name] for name in ordered], ordered, loc="outside lower center", ncols=4)


def _svg(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return re.sub(rb"\n +", b"\n", file.getvalue())  # indentation would be a twelfth of the file
