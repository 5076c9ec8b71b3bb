"""Draw steps to a target by batch, and the predicted time by ranks, from the stored results.

    python benchmarks/batch.py

`mpikfac study jobs/studies/batch.yaml` measures and predicts them; see `results/batch.md`. The
table of its report is kept in `results/batch.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from mpikfac_apps.lab.study.report.style import (
    GRID,
    QUIET,
    WIDTH,
    bars_between,
    figure_file,
    hollow,
    legend,
    plain_ticks,
    styled,
    variant_style,
)

RESULTS = Path(__file__).parent / "results" / "batch.json"
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "at_ranks.svg"
NAMES = ("SGD", "AdamW", "Muon", "K-FAC")
MEASURED = 4  # the largest number of ranks whose messages were measured


def main() -> None:
    """Draw the picture."""
    known = json.loads(RESULTS.read_text())
    styles = {name: variant_style(place) for place, name in enumerate(NAMES)}
    with styled():
        figure = Figure(figsize=(WIDTH, 4.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        for panel in (left, right):
            panel.set(xscale="log", yscale="log")
        ideal = draw_steps(left, known["steps"]["rows"], styles)
        draw_seconds(right, known, styles)
        for panel in (left, right):
            panel.xaxis.set_minor_locator(NullLocator())
            plain_ticks(panel.yaxis)
        figure.suptitle(
            "Deep autoencoder of patches of 8x8 pixels, trained to a test error of 0.4",
            fontsize="medium",
        )
        legend(figure, {**styles, "half the steps for twice the batch, to 128": ideal}, columns=5)
    PICTURE.write_bytes(figure_file(figure, "svg"))


def draw_steps(
    panel: Axes, rows: Sequence[Sequence[str]], styles: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Draw mean steps by batch with the range of seeds; return the style of the quiet lines."""
    ideal: Any = {"color": QUIET, "linestyle": "-", "linewidth": 0.6}
    batches = [whole(row[0]) for row in rows]
    for place, (name, style) in enumerate(styles.items(), start=1):
        seeds = [steps_of(row[place]) for row in rows]
        along = [batch for batch, steps in zip(batches, seeds) if steps]
        heights = [(min(steps), fmean(steps), max(steps)) for steps in seeds if steps]
        panel.plot(along, [mean for _, mean, _ in heights], **style)
        bars_between(panel, along, heights, style)
        first = heights[0][1]
        panel.plot(along[:3], [first * along[0] / batch for batch in along[:3]], **ideal)
        for batch, row in zip(batches, rows):
            if limit := re.match(r"not in (\d+) steps", row[place]):
                draw_limit(panel, (batch, int(limit[1])), f"{name}: {limit[0]}", style)
    panel.set(title="measured: mean and range of three seeds", xlabel="batch (images)")
    panel.set(ylabel="steps to the target")
    panel.set_xticks(batches, [f"{batch:,}" for batch in batches])
    return ideal


def draw_limit(panel: Axes, place: tuple[int, int], text: str, style: dict[str, Any]) -> None:
    """Draw a hollow marker with an arrow upwards, where runs ended without reaching the target."""
    away: Any = {"xy": place, "textcoords": "offset points"}
    arrow = {"arrowstyle": "<-", "color": style["color"], "shrinkB": 4}
    panel.plot(*place, **hollow(style))
    panel.annotate("", xytext=(0, 22), arrowprops=arrow, **away)
    panel.annotate(text, xytext=(4, -12), ha="right", va="top", color=style["color"], **away)


def draw_seconds(panel: Axes, known: dict[str, Any], styles: dict[str, dict[str, Any]]) -> None:
    """Draw predicted seconds by ranks with the range of the steps; write batches beside them."""
    rows = known["predicted seconds"]["rows"]
    ranks = [whole(row[0]) for row in rows]
    seeds = {row[0]: [steps_of(cell) for cell in row[1:]] for row in known["steps"]["rows"]}
    for place, (name, style) in enumerate(styles.items()):
        heights = []
        above = name != "K-FAC"  # the lowest curve
        for at, row in zip(ranks, rows):
            seconds, note = forecast(row[1 + place])
            *strategy, batch = note.removeprefix("batch ").split(", ")
            steps = seeds[batch][place]
            low, high = (seconds * end / fmean(steps) for end in (min(steps), max(steps)))
            heights.append((low, seconds, high))
            panel.annotate(
                "\n".join([*strategy, batch]),
                (at, high if above else low),
                xytext=(0, 3 if above else -3),
                textcoords="offset points",
                ha="center",
                va="bottom" if above else "top",
            )
        panel.plot(ranks, [seconds for _, seconds, _ in heights], **style)
        bars_between(panel, ranks, heights, style)
    start = (MEASURED * ranks[1]) ** 0.5
    panel.axvspan(start, 2 * ranks[-1], color=GRID, zorder=0)
    panel.text(
        start * 1.1,
        0.98,
        "more ranks than the machine was calibrated with",
        transform=panel.get_xaxis_transform(),
        va="top",
    )
    panel.set(title="predicted at all ranks, for 1 Gbit/s (earlier model of messages)")
    panel.set(xlabel="ranks; beside points: batch, and K-FAC's strategy")
    panel.set(ylabel="seconds to the target; bars: range of steps")
    panel.set(xlim=(ranks[0] / 2.4, 2 * ranks[-1]), ylim=(0.6, 28))
    panel.set_xticks(ranks, [f"{count:,}" for count in ranks])


def whole(text: str) -> int:
    """Return a whole number such as "2,048"."""
    return int(text.replace(",", ""))


def steps_of(text: str) -> list[int]:
    """Return the steps of all seeds from a cell such as "80 (80, 72, 88)"; empty without any."""
    seeds = re.search(r"\((.*)\)", text)
    return [whole(part) for part in re.split(r", (?=\d)", seeds[1])] if seeds else []


def forecast(text: str) -> tuple[float, str]:
    """Return the seconds and the note of a cell such as "1.2 s (hybrid, 2,048)"."""
    found = re.fullmatch(r"([\d.]+) s \((.*)\)", text)
    if found is None:
        raise ValueError(f"{text!r} must have the form '1.2 s (note)'")
    return float(found[1]), found[2]


if __name__ == "__main__":
    main()
