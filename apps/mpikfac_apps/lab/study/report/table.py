"""Lay out the results of a study's cells as tables for the page, and as CSV, JSON and LaTeX.

Rows contain plain values in seconds, bytes and fractions. A `Column` formats them for the page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mpikfac_apps.lab.study.measures import Measure
from mpikfac_apps.lab.study.report.findings import CROWDED, MARK, against_sgd, baseline
from mpikfac_apps.lab.study.results import WAITING, Measured
from mpikfac_apps.lab.study.seeds import SeedMean, mean_of
from mpikfac_apps.text import NONE, brief, brief_mib, latex, ms, number, percent

Row = dict[str, Any]
Group = tuple[str, list[list[tuple[str, float | str]]]]
"""A heading, and rows of texts, each text with the value to sort by."""

MESSAGES = ("factor messages", "basis messages", "gradient messages")


@dataclass(frozen=True)
class Column:
    """A column of a table on the page.

    Attributes:
        show: formats the column's text in a row.
        key: the key of the value to sort by; "" for a column that is sorted by its text.
    """

    title: str
    show: Callable[[Row], str]
    key: str = ""

    def cell(self, row: Row) -> tuple[str, float | str]:
        """Return the column's text in a row, and the value to sort by, which is "" if missing."""
        value = row[self.key] if self.key else self.show(row)
        value = value.mean if isinstance(value, SeedMean) else value
        return self.show(row), "" if value is None else value


# -- rows ----------------------------------------------------------------------------------------


def rows(
    cells: Sequence[Measured],
    target: float | None,
    letters: Mapping[str, str],
    predictions: Mapping[str, float],
) -> list[Row]:
    """Return a row for each cell, sorted by number of ranks."""
    cell_rows = []
    for cell in sorted(cells, key=lambda cell: cell.cell.ranks):
        base = baseline(cells, cell)
        share, waiting = _collectives(cell)
        reached = cell.curve.reached(target) if target else None
        row = {
            "cell": cell.cell.label,
            "variant": cell.cell.variant,
            "ranks": cell.cell.ranks,
            "seed": cell.cell.options.seed,
            "state": cell.state,
            "numbers": letters[cell.cell.variant],
            "step_seconds": cell.step,
            "least_step_seconds": min(cell.step_seconds, default=None),
            "most_step_seconds": max(cell.step_seconds, default=None),
            "predicted_step_seconds": predictions.get(cell.cell.label),
            "images_per_second": cell.images_per_second,
            "against_sgd": against_sgd(cells, cell),
            "share_in_collectives": share,
            "share_waiting": waiting,
            "sent_bytes_per_step": cell.wire,
            "held_bytes": cell.memory,
            "first_train_loss": cell.train_loss,
            cell.curve.measure.key: cell.final,
            "epochs_to_target": reached.epochs if reached else None,
            "seconds_to_target": reached.seconds if reached else None,
            "steps_to_target": reached.steps if reached else None,
            "more_ranks_than_cores": cell.crowded,
            "other_work": cell.result and cell.result.others,
            "busy": cell.busy,
            "sgd_busy": base is not None and base.busy,
        }
        cell_rows.append(row)
    return cell_rows


def _collectives(cell: Measured) -> tuple[float | None, float | None]:
    """Return the fractions of a step spent in collectives, and in waiting for other ranks.

    A fraction is None if it is unknown.
    """
    parts, step = cell.breakdown, cell.traced_seconds
    if not parts or not step:
        return cell.communication, None
    waiting = parts[WAITING]
    share = (sum(parts[group] for group in MESSAGES) + waiting) / step
    return share, None if cell.overlaps else waiting / step


def means(
    rows: Sequence[Row], measure: Measure, best: Collection[tuple[str, int]]
) -> tuple[list[Row], list[Row]]:
    """Return rows of means over seeds, by variant and number of ranks, and the best of these rows.

    Cells that are not complete are ignored. A study without several seeds has no means.

    Args:
        best: the best variants, each with its number of ranks.
    """
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["variant"], row["ranks"]), []).append(row)
    to_target = ("steps_to_target", "epochs_to_target", "seconds_to_target")
    averaged = ("step_seconds", "against_sgd", measure.key, *to_target)
    mean_rows = []
    for (variant, ranks), group in groups.items():
        complete = [row for row in group if row["state"] == "complete"]
        about = {"variant": variant, "ranks": ranks, "numbers": group[0]["numbers"]}
        about |= {"seeds": len(group), "complete": len(complete)}
        marks = ("more_ranks_than_cores", "busy", "sgd_busy")
        about |= {mark: any(row[mark] for row in complete) for mark in marks}
        mean_rows.append(about | {key: mean_of(row[key] for row in complete) for key in averaged})
    several = any(len(group) > 1 for group in groups.values())
    chosen = [row for row in mean_rows if (row["variant"], row["ranks"]) in best]
    return mean_rows if several else [], chosen


# -- the page ------------------------------------------------------------------------------------


def columns(measure: Measure, target: float | None, predicted: bool) -> list[Column]:
    """Return the columns of the table of cells; `predicted` adds a column of predicted times."""
    aim = measure.text(target)
    predictions = [column("predicted", "predicted_step_seconds", ms)] if predicted else []
    return [
        Column("cell", _name),
        Column("results", lambda row: str(row["numbers"])),
        _timed(column("ms per step", "step_seconds", ms)),
        _timed(Column("range", _range, "least_step_seconds")),
        *predictions,
        _timed(column("images/s", "images_per_second", lambda pace: f"{pace:,.0f}")),
        _timed(column("against SGD", "against_sgd", lambda ratio: f"{ratio:.2f} x"), "sgd_busy"),
        column("in collectives", "share_in_collectives", lambda share: percent(share, 0)),
        column("waiting", "share_waiting", lambda share: percent(share, 0)),
        column("MiB sent per step", "sent_bytes_per_step", brief_mib),
        column("MiB kept", "held_bytes", brief_mib),
        column(f"test {measure.name}", measure.key, measure.text),
        column(f"steps to {aim}", "steps_to_target", lambda steps: f"{steps:,.0f}"),
        _timed(Column(f"s to {aim}", _reached, "seconds_to_target")),
    ]


def columns_of_means(measure: Measure, target: float | None) -> list[Column]:
    """Return the columns of the table of means over seeds."""
    aim = measure.text(target)
    return [
        Column("variant", lambda row: str(row["variant"])),
        Column("results", lambda row: str(row["numbers"])),
        Column("seeds", lambda row: f"{row['complete']} of {row['seeds']}", "complete"),
        _timed(_averaged("ms per step", "step_seconds", ms)),
        _timed(_averaged("against SGD", "against_sgd", "{:.2f}".format), "sgd_busy"),
        _averaged(f"test {measure.name}", measure.key, measure.text),
        _averaged(f"steps to {aim}", "steps_to_target", lambda mean: f"{mean:,.0f}"),
        _averaged(f"epochs to {aim}", "epochs_to_target", lambda mean: f"{mean:.1f}"),
        _timed(_averaged(f"s to {aim}", "seconds_to_target", brief)),
    ]


def column(title: str, key: str, show: Callable[[Any], str]) -> Column:
    """Return a column of the values under a key; a missing value is shown as a dash."""
    return Column(title, lambda row: NONE if row[key] is None else show(row[key]), key)


def _timed(plain: Column, *further: str) -> Column:
    """Return a column with a mark in the rows of busy cells, whose times are unreliable.

    Args:
        further: other keys whose values, if true, also mark a row.
    """

    def text(row: Row) -> str:
        shown = plain.show(row)
        known = row[plain.key] is not None
        return shown + MARK if known and any(row[key] for key in ("busy", *further)) else shown

    return replace(plain, show=text)


def _averaged(title: str, key: str, show: Callable[[Any], str]) -> Column:
    """Return a column of means; the text shows how many seeds have a value if some have none."""

    def text(row: Row) -> str:
        mean: SeedMean | None = row[key]
        if mean is None:
            return NONE
        missing = f" ({mean.count} of {row['complete']})" if mean.count < row["complete"] else ""
        return f"{mean.text(show)}{missing}"

    return Column(title, text, key)


def _name(row: Row) -> str:
    """Return a cell's name without the number of ranks, followed by its state if incomplete."""
    name = row["cell"].replace(f" on {number(row['ranks'], 'rank')}", "")
    return name if row["state"] == "complete" else f"{name} ({row['state']})"


def _range(row: Row) -> str:
    least, most = row["least_step_seconds"], row["most_step_seconds"]
    return NONE if least is None else NONE.join((ms(least), ms(most)))


def _reached(row: Row) -> str:
    if row["seconds_to_target"] is not None:
        return brief(row["seconds_to_target"])
    return "never" if row["state"] == "complete" else NONE


def by_ranks(rows: Sequence[Row], columns: Sequence[Column]) -> list[Group]:
    """Return the texts of all rows, and the values to sort by, grouped by number of ranks."""
    groups: dict[int, list[list[tuple[str, float | str]]]] = {}
    for row in rows:
        groups.setdefault(row["ranks"], []).append([column.cell(row) for column in columns])
    crowded = {row["ranks"] for row in rows if row.get("more_ranks_than_cores")}
    return [
        (number(ranks, "rank") + (CROWDED if ranks in crowded else ""), lines)
        for ranks, lines in groups.items()
    ]


# -- files ---------------------------------------------------------------------------------------


def parts_of_means(rows: Sequence[Row]) -> list[Row]:
    """Return rows of means with each mean split into plain values, such as "step_seconds_mean"."""
    averaged = {key for row in rows for key in row if isinstance(row[key], SeedMean)}
    parts = [field.name for field in fields(SeedMean)]
    plain = []
    for row in rows:
        values: Row = {}
        for key, value in row.items():
            named = {f"{key}_{part}": getattr(value, part, None) for part in parts}
            values |= named if key in averaged else {key: value}
        plain.append(values)
    return plain


def as_latex(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Return the texts of all rows as a LaTeX table whose second column is the number of ranks."""
    name, *further = columns
    shown = [name, Column("ranks", lambda row: str(row["ranks"])), *further]
    lines = [[column.show(row) for column in shown] for row in rows]
    return latex([[column.title for column in shown], *lines])


def as_json(about: Mapping[str, Any], tables: Mapping[str, Sequence[Row]]) -> str:
    """Return facts about the study, and the rows of tables by name, as JSON."""
    plain = {
        name: [
            {k: asdict(v) if isinstance(v, SeedMean) else v for k, v in row.items()} for row in rows
        ]
        for name, rows in tables.items()
    }
    return json.dumps({**about, **plain}, indent=1) + "\n"
