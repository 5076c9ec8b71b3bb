"""Draw the pictures of a study's report, each as a figure.

Every function receives complete cells, ignores those without the data for its picture, and returns
None if none are left.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from mpikfac_apps.lab.study.measures import Measure
from mpikfac_apps.lab.study.report.findings import CROWDED, MARK
from mpikfac_apps.lab.study.report.style import (
    GRID,
    QUIET,
    STAGES,
    WIDTH,
    bar_style,
    bars_between,
    legend,
    plain_ticks,
    styled,
    variant_style,
)
from mpikfac_apps.lab.study.results import Measured
from mpikfac_apps.lab.study.seeds import LEAST, SeedMean, mean_of
from mpikfac_apps.text import MIB, number

SHOWN = 5  # maximum number of curves in a panel
FEW = 3  # maximum number of curves with bands; more curves have bars at the end
SHIFT = 0.06  # distance, in epochs, between the bars of different variants


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
        shape = rows, min(3, len(ranks))
        axes = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False).ravel()
        for panel, count in zip(axes, ranks):
            _bars(panel, [cell for cell in cells if cell.cell.ranks == count], variants)
            panel.set(title=_title(cells, count), xlabel="ms per step")
        for panel in axes[len(ranks) :]:
            panel.remove()
        keys = [Patch(**bar_style(part)) for part in STAGES]
        figure.legend(keys, list(STAGES), loc="outside lower center", ncols=6)
        return figure


def _bars(panel: Axes, cells: Sequence[Measured], variants: Sequence[str]) -> None:
    for row, variant in enumerate(variants):
        seeds = [cell for cell in cells if cell.cell.variant == variant]
        breakdowns = [cell.breakdown for cell in seeds]
        left = 0.0
        for part in STAGES if breakdowns else ():
            width = 1e3 * fmean(parts[part] for parts in breakdowns)
            panel.barh(row, width, 0.75, left, **bar_style(part))
            left += width
        panel.text(left, row, _mark(seeds), va="center")
    panel.set_yticks(range(len(variants)), variants)
    panel.set_ylim(len(variants) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")


def curves(
    all_cells: Sequence[Measured], letters: Mapping[str, str], target: float | None
) -> Figure | None:
    """Plot test results against epochs, seconds and bytes sent, with a row per number of ranks.

    Args:
        letters: a letter for each variant; of variants with the same letter, which have the same
            results, only one is drawn.
    """
    cells = [cell for cell in all_cells if cell.curve.steps]
    if not cells:
        return None
    groups = {count: distinct(cells, letters, count) for count in _ranks(cells)}
    styles = _styles(all_cells)
    measure = cells[0].curve.measure
    limits = measure.limits([cell.curve.values[len(cell.curve.values) // 2] for cell in cells])
    with styled():
        figure = Figure(figsize=(WIDTH, 2.9 * len(groups) + 0.7), layout="constrained")
        grid = figure.subplots(len(groups), 3, sharey=True, squeeze=False)
        for row, (count, shown) in zip(grid, groups.items()):
            for place, (name, seeds) in enumerate(shown.items()):
                _three_curves(row, seeds, styles[name], place if len(shown) > FEW else None)
            row[0].set(title=_title(cells, count), ylabel=measure.axis)
            for panel, what in zip(row, ("epochs", "seconds of training", "MiB sent per rank")):
                if target is not None:
                    panel.axhline(measure.scale * target, color=QUIET, linewidth=0.8, linestyle=":")
                panel.set_xlim(left=0)
                panel.set_ylim(limits)
                panel.set_xlabel(what)
            if count == 1:
                middle = {"ha": "center", "transform": row[2].transAxes}
                row[2].text(0.5, 0.5, "one rank sends nothing", **middle)
                row[2].set(xlim=(0, 1), xticks=[], xlabel="")
        legend(figure, _with_letters(groups.values(), styles, letters))
        return figure


def distinct(
    all_cells: Sequence[Measured], letters: Mapping[str, str], ranks: int
) -> dict[str, list[Measured]]:
    """Return, by variant, the cells of each letter's first variant on the given number of ranks.

    Variants with the same letter have the same curve over epochs. If there are more than `SHOWN`
    variants, the best ones are returned, including one without K-FAC if there is any.
    """
    first: dict[str, str] = {}
    variants: dict[str, list[Measured]] = {}
    for cell in all_cells:
        name = cell.cell.variant
        if cell.cell.ranks == ranks and first.setdefault(letters[name], name) == name:
            variants.setdefault(name, []).append(cell)

    def distance(name: str) -> float:
        return fmean(abs(c.curve.measure.perfect - c.curve.best) for c in variants[name])

    order = sorted(variants, key=distance)
    plain = [n for n in order if variants[n][0].cell.options.optimizer != "kfac"][:1]
    kept = [*plain, *(name for name in order if name not in plain)][:SHOWN]
    return {name: seeds for name, seeds in variants.items() if name in kept}


def bounds(all_cells: Sequence[Measured], letters: Mapping[str, str]) -> Figure | None:
    """Plot the factor by which a clip shortens steps, with a panel per number of ranks.

    Args:
        letters: a letter for each variant; of variants with the same letter, which have the same
            results, only one is drawn.
    """
    cells = [cell for cell in all_cells if cell.curve.scales]
    if not any(cell.curve.shortened for cell in cells):
        return None
    groups = {count: distinct(cells, letters, count) for count in _ranks(cells)}
    styles = _styles(all_cells)
    with styled():
        figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
        panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
        for panel, (count, shown) in zip(panels, groups.items()):
            for place, (name, seeds) in enumerate(shown.items()):
                _scales(panel, [cell.curve.scales for cell in seeds], styles[name], place)
            panel.set(title=_title(cells, count), xlabel="epochs", ylim=(0, 1.05))
            panel.set_xlim(left=0)
        panels[0].set_ylabel("step length relative to that\nwithout the clip")
        legend(figure, _with_letters(groups.values(), styles, letters))
        return figure


def _with_letters(
    groups: Iterable[Collection[str]],
    styles: Mapping[str, Mapping[str, Any]],
    letters: Mapping[str, str],
) -> dict[str, Mapping[str, Any]]:
    """Return the styles of all variants in a picture, by name and letter."""
    drawn = {name for group in groups for name in group}
    return {f"{name} ({letters[name]})": styles[name] for name in styles if name in drawn}


def _scales(
    panel: Axes, runs: Sequence[Sequence[tuple[float, float]]], style: Mapping[str, Any], place: int
) -> None:
    """Draw the mean clip factor over a variant's runs, with bars from the lowest to the highest."""
    values = [[scale for _, scale in run] for run in runs]
    along = [epoch + SHIFT * place for epoch, _ in min(runs, key=len)]
    means = _line_of_means(panel, along, values, style)
    if len(runs) > 1:
        bars_between(panel, along, [(m.low, m.mean, m.high) for m in means], style)


def _three_curves(
    row: Sequence[Axes], seeds: Sequence[Measured], style: Mapping[str, Any], place: int | None
) -> None:
    """Draw a variant's runs, one per seed, up to the last epoch that all runs completed.

    Args:
        place: the variant's position in the panel, to draw only a bar at the end of the curve;
            None to draw a band.
    """
    runs, wire = [cell.curve for cell in seeds], seeds[0].wire
    measure = runs[0].measure
    ends = min(len(run.steps) for run in runs)
    values = [[measure.scale * value for value in run.values[:ends]] for run in runs]
    seconds = [fmean(run.seconds[epoch] for run in runs) for epoch in range(ends)]
    sent = [step * wire / MIB for step in runs[0].steps[:ends]] if wire else []
    for panel, along in zip(row, (runs[0].epochs[:ends], seconds, sent)):
        if not along:
            continue
        if place is None:
            line_of_seeds(panel, along, values, style, measure)
        else:
            _line_with_an_end(panel, along, values, style, measure, place)
    row[1].text(seconds[-1], fmean(run[-1] for run in values), _mark(seeds))


def line_of_seeds(
    panel: Axes,
    along: Sequence[float],
    runs: Sequence[Sequence[float]],
    style: Mapping[str, Any],
    measure: Measure,
) -> None:
    """Draw the mean over runs, with a thin line for each of two runs, or a band for more runs.

    The band is the 95 % interval, up to the best possible value.

    Args:
        along: positions on the x-axis, the same for all runs.
        runs: the values of each run.
    """
    means = _line_of_means(panel, along, runs, style)
    if len(runs) >= LEAST:
        low, high = zip(*(map(measure.possible, mean.ends) for mean in means))
        panel.fill_between(along, low, high, color=style["color"], alpha=0.15, linewidth=0)
    elif len(runs) > 1:
        for values in runs:
            panel.plot(along, values, color=style["color"], linewidth=0.5, alpha=0.6)


def _line_of_means(
    panel: Axes, along: Sequence[float], runs: Sequence[Sequence[float]], style: Mapping[str, Any]
) -> list[SeedMean]:
    """Draw the mean over runs at each position; return the means."""
    means = [mean for values in zip(*runs) if (mean := mean_of(values))]
    panel.plot(along, [mean.mean for mean in means], markersize=4, **style)
    return means


def _line_with_an_end(
    panel: Axes,
    along: Sequence[float],
    runs: Sequence[Sequence[float]],
    style: Mapping[str, Any],
    measure: Measure,
    place: int,
) -> None:
    """Draw the mean over runs, and a bar for the interval or range beside the last point.

    The bar ends at the best possible value.

    Args:
        place: the variant's position in the panel, by which the bars of variants are moved apart.
    """
    means = _line_of_means(panel, along, runs, style)
    if len(runs) > 1:
        beside = along[-1] * (1 + 0.02 * (place + 1))
        low, middle, high = map(measure.possible, means[-1].around)
        bars_between(panel, [beside], [(low, middle, high)], style)


def scaling(all_cells: Sequence[Measured]) -> Figure | None:
    """Plot images per second, and the efficiency, against the number of ranks.

    The efficiency is relative to the smallest number of ranks of each variant, where it is 100 %
    by definition. Bars are intervals or ranges over seeds. Numbers of ranks that share cores are
    shaded.
    """
    paces = _paces(all_cells)
    if not paces:
        return None
    counts = sorted({ranks for pace in paces.values() for ranks in pace})
    best = max(pace[counts[0]].mean for pace in paces.values() if counts[0] in pace)
    styles = {variant: _styles(all_cells)[variant] for variant in paces}
    with styled():
        figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for place, (variant, pace) in enumerate(paces.items()):
            ranks, style = sorted(pace), styles[variant]
            along = [r * 1.03**place for r in ranks]
            per_rank = 100 * ranks[0] / pace[ranks[0]].mean
            for panel, scales, first in (
                (left, [1.0] * len(ranks), 0),
                (right, [per_rank / r for r in ranks], 1),  # the base has no bar
            ):
                means = [pace[r].scaled(scale) for r, scale in zip(ranks, scales)]
                panel.plot(along, [mean.mean for mean in means], **style)
                bars_between(panel, along[first:], [mean.around for mean in means[first:]], style)
            for at, r in zip(along, ranks):
                left.annotate(f" {_mark(_at(all_cells, variant, r))}", (at, pace[r].mean))
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
            _shade(panel, counts, {c.cell.ranks for c in all_cells if c.crowded})
        legend(figure, {**styles, "ideal": ideal})
        return figure


def _shade(panel: Axes, counts: Sequence[int], crowded: Collection[int]) -> None:
    """Shade the numbers of ranks that share cores, on a logarithmic axis of numbers of ranks."""
    if not crowded:
        return
    low, high = panel.get_xlim()
    free = max((count for count in counts if count < min(crowded)), default=0)
    start = math.sqrt(free * min(crowded)) if free else low
    panel.axvspan(start, high, color=GRID, zorder=0)
    place: Any = {"transform": panel.get_xaxis_transform(), "ha": "right", "va": "bottom"}
    panel.text(high, 0.01, "more ranks than cores ", fontsize=8, **place)
    panel.set_xlim(low, high)


def _paces(cells: Sequence[Measured]) -> dict[str, dict[int, SeedMean]]:
    """Return the mean images per second by number of ranks, for variants on several numbers."""
    pace_lists: dict[str, dict[int, list[float]]] = {}
    for cell in cells:
        if cell.images_per_second:
            by_ranks = pace_lists.setdefault(cell.cell.variant, {})
            by_ranks.setdefault(cell.cell.ranks, []).append(cell.images_per_second)
    return {
        variant: {ranks: mean for ranks, paces in by_ranks.items() if (mean := mean_of(paces))}
        for variant, by_ranks in pace_lists.items()
        if len(by_ranks) > 1
    }


def predicted(cells: Sequence[Measured], predictions: Mapping[str, float]) -> Figure | None:
    """Plot measured against predicted step times; predictions are keyed by cell label."""
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


def _at(cells: Sequence[Measured], variant: str, ranks: int) -> list[Measured]:
    """Return the cells of a variant on a number of ranks, with all seeds."""
    return [cell for cell in cells if (cell.cell.variant, cell.cell.ranks) == (variant, ranks)]


def _title(cells: Sequence[Measured], ranks: int) -> str:
    """Return the title of the panel for a number of ranks."""
    crowded = any(cell.crowded for cell in cells if cell.cell.ranks == ranks)
    return number(ranks, "rank") + (CROWDED if crowded else "")


def _mark(seeds: Sequence[Measured]) -> str:
    """Return the mark of unreliable times if any cell shared the machine with other work."""
    return MARK if any(cell.busy for cell in seeds) else ""


def _variants(cells: Sequence[Measured]) -> list[str]:
    return list(dict.fromkeys(cell.cell.variant for cell in cells))


def _styles(cells: Sequence[Measured]) -> dict[str, dict[str, Any]]:
    """Return the style of each variant, the same in all pictures of a study."""
    return {variant: variant_style(place) for place, variant in enumerate(_variants(cells))}
