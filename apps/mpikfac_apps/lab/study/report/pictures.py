"""Draw the pictures of a study's report, each as a figure.

Every function receives complete cells, ignores those without the data for its picture, and returns
None if none are left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from mpikfac_apps.lab.study.report.style import (
    QUIET,
    STAGES,
    WIDTH,
    bar_style,
    legend,
    plain_ticks,
    styled,
    variant_style,
)
from mpikfac_apps.lab.study.results import Measured
from mpikfac_apps.lab.study.seeds import LEAST, mean_of
from mpikfac_apps.text import MIB, number


def breakdown(all_cells: Sequence[Measured]) -> Figure | None:
    """Draw the time of a step by stage, with a bar per variant and a panel per number of ranks."""
    cells = [cell for cell in all_cells if cell.breakdown]
    if not cells:
        return None
    ranks, variants = _ranks(cells), _variants(cells)
    rows = -(-len(ranks) // 3)
    height = rows * (0.24 * len(variants) + 0.6) + 0.8
    with styled():
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots(rows, min(3, len(ranks)), sharey=True, squeeze=False).ravel()
        for panel, count in zip(axes, ranks):
            _bars(panel, [cell for cell in cells if cell.cell.ranks == count], variants)
            panel.set(title=number(count, "rank"), xlabel="ms per step")
        for panel in axes[len(ranks) :]:
            panel.remove()
        keys = [Patch(**bar_style(part)) for part in STAGES]
        figure.legend(keys, list(STAGES), loc="outside lower center", ncols=6)
        return figure


def _bars(panel: Axes, cells: Sequence[Measured], variants: Sequence[str]) -> None:
    for row, variant in enumerate(variants):
        breakdowns = [cell.breakdown for cell in cells if cell.cell.variant == variant]
        left = 0.0
        for part in STAGES if breakdowns else ():
            width = 1e3 * fmean(parts[part] for parts in breakdowns)
            panel.barh(row, width, 0.75, left, **bar_style(part))
            left += width
    panel.set_yticks(range(len(variants)), variants)
    panel.set_ylim(len(variants) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")


def curves(all_cells: Sequence[Measured], target: float | None) -> Figure | None:
    """Plot test results against epochs, seconds and bytes sent, with a row per number of ranks."""
    cells = [cell for cell in all_cells if cell.curve.steps]
    if not cells:
        return None
    ranks, styles = _ranks(cells), _styles(all_cells)
    measure = cells[0].curve.measure
    limits = measure.limits([cell.curve.values[len(cell.curve.values) // 2] for cell in cells])
    with styled():
        height = 2.5 * len(ranks) + 0.2 * -(-len(_variants(cells)) // 4) + 0.3
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        grid = figure.subplots(len(ranks), 3, sharey=True, squeeze=False)
        for row, count in zip(grid, ranks):
            for variant in _variants(cells):
                same = [c for c in cells if (c.cell.variant, c.cell.ranks) == (variant, count)]
                if same:
                    _three_curves(row, same, styles[variant])
            row[0].set(title=number(count, "rank"), ylabel=measure.axis)
            for panel in row:
                if target is not None:
                    panel.axhline(measure.scale * target, color=QUIET, linewidth=0.8, linestyle=":")
                panel.set_xlim(left=0)
                panel.set_ylim(limits)
            if count == 1:
                middle = {"ha": "center", "transform": row[2].transAxes}
                row[2].text(0.5, 0.5, "one rank sends nothing", **middle)
                row[2].set(xlim=(0, 1), xticks=[])
        for panel, what in zip(grid[-1], ("epochs", "seconds of training", "MiB sent per rank")):
            panel.set_xlabel(what)
        legend(figure, {variant: styles[variant] for variant in _variants(cells)})
        return figure


def bounds(cells: Sequence[Measured]) -> Figure | None:
    """Plot the factor by which a clip shortens steps against epochs, with a line per run."""
    shortened = [cell for cell in cells if cell.curve.shortened]
    if not shortened:
        return None
    styles = _styles(cells)
    with styled():
        figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
        panel = figure.subplots()
        for cell in shortened:
            style = styles[cell.cell.variant] | {"marker": ""}
            panel.plot(*zip(*cell.curve.scales), **style)
        panel.set(xlabel="epochs", ylabel="kl_scale", ylim=(0, 1.05))
        legend(figure, {variant: styles[variant] for variant in _variants(shortened)})
        return figure


def _three_curves(row: Sequence[Axes], seeds: Sequence[Measured], style: Mapping[str, Any]) -> None:
    """Draw a variant's runs with all seeds, up to the last epoch that all of them completed."""
    runs, wire = [cell.curve for cell in seeds], seeds[0].wire
    ends = min(len(run.steps) for run in runs)
    values = [[run.measure.scale * value for value in run.values[:ends]] for run in runs]
    seconds = [fmean(run.seconds[epoch] for run in runs) for epoch in range(ends)]
    sent = [step * wire / MIB for step in runs[0].steps[:ends]] if wire else []
    for panel, along in zip(row, (runs[0].epochs[:ends], seconds, sent)):
        if along:
            line_of_seeds(panel, along, values, style)


def line_of_seeds(
    panel: Axes, along: Sequence[float], runs: Sequence[Sequence[float]], style: Mapping[str, Any]
) -> None:
    """Draw the mean over runs; with two runs, also thin lines, and with three or more, a band.

    The band is the 95 % interval.

    Args:
        along: positions on the x-axis, the same for all runs.
        runs: the values of each run.
    """
    means = [mean for values in zip(*runs) if (mean := mean_of(values))]
    panel.plot(along, [mean.mean for mean in means], markersize=4, **style)
    if len(runs) >= LEAST:
        low, high = zip(*(mean.ends for mean in means))
        panel.fill_between(along, low, high, color=style["color"], alpha=0.15, linewidth=0)
    elif len(runs) > 1:
        for values in runs:
            panel.plot(along, values, color=style["color"], linewidth=0.5, alpha=0.6)


def scaling(all_cells: Sequence[Measured]) -> Figure | None:
    """Draw images per second by number of ranks, and efficiency relative to the fewest ranks."""
    paces = _paces(all_cells)
    if not paces:
        return None
    counts = sorted({ranks for pace in paces.values() for ranks in pace})
    best = max(pace.get(counts[0], 0.0) for pace in paces.values())
    styles = {variant: _styles(all_cells)[variant] for variant in paces}
    with styled():
        figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for variant, pace in paces.items():
            ranks, style = sorted(pace), styles[variant]
            left.plot(ranks, [pace[r] for r in ranks], **style)
            alone = pace[ranks[0]] / ranks[0]
            right.plot(ranks, [100 * pace[r] / r / alone for r in ranks], **style)
        ideal: Any = {"color": QUIET, "linestyle": "-", "linewidth": 0.8}
        left.plot(counts, [best * r / counts[0] for r in counts], **ideal)
        right.plot(counts, [100] * len(counts), **ideal)
        left.set(yscale="log", ylabel="images per second")
        plain_ticks(left.yaxis)
        right.set(ylabel="efficiency relative to the fewest ranks (%)", ylim=(0, None))
        for panel in (left, right):
            panel.set(xscale="log", xlabel="ranks")
            panel.set_xticks(counts, map(str, counts))
            panel.xaxis.set_minor_locator(NullLocator())
        legend(figure, {**styles, "ideal": ideal})
        return figure


def _paces(cells: Sequence[Measured]) -> dict[str, dict[int, float]]:
    """Return the mean images per second by number of ranks, for variants that have several."""
    pace_lists: dict[str, dict[int, list[float]]] = {}
    for cell in cells:
        if cell.images_per_second:
            by_ranks = pace_lists.setdefault(cell.cell.variant, {})
            by_ranks.setdefault(cell.cell.ranks, []).append(cell.images_per_second)
    return {
        variant: {ranks: fmean(paces) for ranks, paces in by_ranks.items()}
        for variant, by_ranks in pace_lists.items()
        if len(by_ranks) > 1
    }


def predicted(cells: Sequence[Measured], predictions: Mapping[str, float]) -> Figure | None:
    """Plot the measured against the predicted time of a step; predictions are keyed by label."""
    pairs = [
        (cell, predictions[cell.cell.label], cell.step)
        for cell in cells
        if cell.step and cell.cell.label in predictions
    ]
    if not pairs:
        return None
    styles = _styles(cells)
    with styled():
        figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
        panel = figure.subplots()
        for cell, expected, seconds in pairs:
            style = {**styles[cell.cell.variant], "linestyle": ""}
            panel.plot(1e3 * expected, 1e3 * seconds, markersize=5, **style)
            at = (1e3 * expected, 1e3 * seconds)
            panel.annotate(f" {cell.cell.ranks}", at, fontsize=7, color=QUIET)
        ends = [1e3 * f(x for _, *xs in pairs for x in xs) for f in (min, max)]
        panel.plot(ends, ends, color=QUIET, linewidth=0.8)
        panel.set(xscale="log", yscale="log", xlabel="predicted ms", ylabel="measured ms")
        panel.set(xlim=(ends[0] / 1.3, ends[1] * 1.3), ylim=(ends[0] / 1.3, ends[1] * 1.3))
        panel.set_box_aspect(1)
        for axis in (panel.xaxis, panel.yaxis):
            plain_ticks(axis)
        used = dict.fromkeys(cell.cell.variant for cell, *_ in pairs)
        legend(figure, {variant: {**styles[variant], "linestyle": ""} for variant in used})
        return figure


# -- helpers for several pictures ----------------------------------------------------------------


def _ranks(cells: Sequence[Measured]) -> list[int]:
    return sorted({cell.cell.ranks for cell in cells})


def _variants(cells: Sequence[Measured]) -> list[str]:
    return list(dict.fromkeys(cell.cell.variant for cell in cells))


def _styles(cells: Sequence[Measured]) -> dict[str, dict[str, Any]]:
    """Return the style of each variant, the same in all pictures of a study."""
    return {variant: variant_style(place) for place, variant in enumerate(_variants(cells))}
