"""Show the predicted time to the target on many ranks: a table, a picture and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from mpikfac_apps.lab.study import scaling
from mpikfac_apps.lab.study.measures import Measure
from mpikfac_apps.lab.study.report.style import (
    QUIET,
    WIDTH,
    bars_between,
    legend,
    name_at_the_right,
    plain_ticks,
    styled,
    variant_style,
)
from mpikfac_apps.lab.study.report.table import Column, Group, Row, by_ranks, column
from mpikfac_apps.lab.study.results import Measured
from mpikfac_apps.lab.study.scaling import Forecast, Steps
from mpikfac_apps.lab.study.spec import Study
from mpikfac_apps.text import ms, number

NOTHING = (
    "No time to the target is predicted: no optimizer reached the target with all seeds and a "
    "batch that the ranks of predict_ranks can share, or the machine has no times for the network."
)
THIN = {"linewidth": 0.7, "markersize": 2.5, "alpha": 0.55}


@dataclass(frozen=True)
class Section:
    """The part of the page about many ranks; without forecasts, only `sentences` can have entries.

    Attributes:
        table: the texts of the rows and the values to sort by, grouped by number of ranks.
    """

    rows: Sequence[Row] = ()
    columns: Sequence[Column] = ()
    table: Sequence[Group] = ()
    picture: Figure | None = None
    sentences: Sequence[str] = ()


def section(study: Study, cells: Sequence[Measured], target: float | None) -> Section:
    """Return the part of the page for the study's `predict_ranks`."""
    if study.machine is None or not study.predict_ranks or target is None:
        return Section()
    forecasts = scaling.forecasts(study.machine, study.predict_ranks, cells, target)
    if not forecasts:
        return Section(sentences=[NOTHING])
    forecast_rows, steps = rows(forecasts), scaling.steps_to_target(cells, target)
    return Section(
        rows=forecast_rows,
        columns=columns(),
        table=by_ranks(forecast_rows, columns()),
        picture=draw(steps, forecasts),
        sentences=[*sentences(forecasts, study.measure, target), *efficiency(steps)],
    )


def rows(forecasts: Sequence[Forecast]) -> list[Row]:
    """Return a row for each forecast, sorted by number of ranks and then by time."""
    forecast_rows = []
    for forecast in sorted(forecasts, key=lambda each: (each.ranks, each.seconds)):
        sgd = _of(forecasts, "sgd", forecast.ranks)
        forecast_rows.append(
            {
                **{"name": forecast.name, "ranks": forecast.ranks},
                **{"batch": forecast.measured.batch, "steps": forecast.measured.steps.mean},
                **{"seeds": forecast.measured.steps.count, "step_seconds": forecast.step},
                "seconds": forecast.seconds,
                "against_sgd": forecast.seconds / sgd.seconds if sgd else None,
            }
        )
    return forecast_rows


def columns() -> list[Column]:
    """Return the columns of the table of forecasts."""
    return [
        Column("optimizer", lambda row: str(row["name"])),
        column("batch", "batch", lambda batch: f"{batch:,}"),
        column("steps to the target, measured", "steps", lambda steps: f"{steps:,.0f}"),
        column("seeds", "seeds", str),
        column("ms per step, predicted", "step_seconds", ms),
        column("s to the target", "seconds", lambda seconds: f"{seconds:.3g}"),
        column("against SGD", "against_sgd", lambda ratio: f"{ratio:.2f} x"),
    ]


def sentences(forecasts: Sequence[Forecast], measure: Measure, target: float) -> Iterator[str]:
    """Compare optimizers in one sentence, at the most ranks for which several are forecast."""
    shared = [
        ranks
        for ranks in {forecast.ranks for forecast in forecasts}
        if len({_optimizer(each) for each in forecasts if each.ranks == ranks}) > 1
    ]
    if not shared:
        return
    ranks = max(shared)
    best: dict[str, Forecast] = {}
    for each in sorted(forecasts, key=lambda each: each.seconds):
        if each.ranks == ranks:
            best.setdefault(_optimizer(each), each)
    claims = [
        f"{each.name} after {each.seconds:.3g} s with a batch of {each.measured.batch:,}"
        for each in best.values()
    ]
    aim = f"a test {measure.name} of {measure.text(target)}"
    yield f"Predicted for {number(ranks, 'rank')}: {aim} is reached by {'; by '.join(claims)}."


def efficiency(steps: Sequence[Steps]) -> Iterator[str]:
    """Yield a sentence about the largest batch that each kind of optimizer uses efficiently."""
    if largest := scaling.efficient_batches(steps):
        batches = ", ".join(f"{batch:,} ({kind})" for kind, batch in largest.items())
        yield (
            "The largest measured batches that reach the target with at most twice as many images "
            f"as the optimizer's best batch: {batches}."
        )


def draw(steps: Sequence[Steps], forecasts: Sequence[Forecast]) -> Figure:
    """Plot the steps to the target against batch size, and the time against the number of ranks.

    K-FAC's thick line follows its fastest strategy at each number of ranks.
    """
    names = list(dict.fromkeys(each.kind for each in steps))
    styles = {name: variant_style(place) for place, name in enumerate(names)}
    with styled():
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        ends: dict[str, tuple[float, float]] = {}
        for name in names:
            points = sorted((each.batch, each.steps.around) for each in steps if each.kind == name)
            batches, heights = zip(*points)
            left.plot(batches, [mean for _, mean, _ in heights], **styles[name])
            bars_between(left, batches, heights, styles[name])
            own = [each for each in forecasts if each.measured.kind == name]
            ends |= _times(right, own, styles[name])
        smallest, largest = (f(each.batch for each in steps) for f in (min, max))
        most = max(each.steps.mean for each in steps)
        ideal: Any = {"color": QUIET, "linestyle": "-", "linewidth": 0.8}
        left.plot((smallest, largest), (most, most * smallest / largest), **ideal)
        left.set(xlabel="batch", ylabel="steps to the target, measured")
        right.set(xlabel="ranks", ylabel="seconds to the target, predicted")
        sizes = sorted({each.batch for each in steps})
        ranks = sorted({each.ranks for each in forecasts})
        for panel, ticks in ((left, sizes), (right, ranks)):
            panel.set(xscale="log", yscale="log")
            panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            panel.xaxis.set_minor_locator(NullLocator())
            plain_ticks(panel.yaxis)
        name_at_the_right(right, ends)
        legend(figure, {**styles, "half the steps for twice the batch": ideal})
        return figure


def _times(
    panel: Axes, forecasts: Sequence[Forecast], style: dict[str, Any]
) -> dict[str, tuple[float, float]]:
    """Draw a thin line for each strategy, and a line through the fastest; return the last points.

    The points are keyed by the name of the line. With a single strategy, none is returned, because
    the legend names the line.
    """
    by_name: dict[str, list[tuple[int, float]]] = {}
    best: dict[int, float] = {}
    for each in forecasts:
        by_name.setdefault(each.name, []).append((each.ranks, each.seconds))
        best[each.ranks] = min(best.get(each.ranks, each.seconds), each.seconds)
    if len(by_name) == 1:
        by_name = {}
    for line in by_name.values():
        panel.plot(*zip(*sorted(line)), **style | THIN)
    panel.plot(*zip(*sorted(best.items())), **style)
    return {name: max(line) for name, line in by_name.items()}


def _optimizer(forecast: Forecast) -> str:
    return forecast.measured.optimizer


def _of(forecasts: Sequence[Forecast], name: str, ranks: int) -> Forecast | None:
    return next((f for f in forecasts if (f.name, f.ranks) == (name, ranks)), None)
