"""Write the report of a study: a page with all results, and tables and pictures as files."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

import mpikfac
from mpikfac import files
from mpikfac_apps.lab.pages import rendered
from mpikfac_apps.lab.study import results
from mpikfac_apps.lab.study.measures import Measure
from mpikfac_apps.lab.study.report import at_ranks, pictures, table
from mpikfac_apps.lab.study.report.findings import MARK, distinct, findings
from mpikfac_apps.lab.study.report.style import figure_file, inline_svg
from mpikfac_apps.lab.study.report.timelines import SHOWN, timeline
from mpikfac_apps.lab.study.results import BUSY, Measured
from mpikfac_apps.lab.study.spec import Study, inv_update_steps
from mpikfac_apps.options.fields import flat
from mpikfac_apps.options.options import Options
from mpikfac_apps.options.strategy import job_of, training_ranks
from mpikfac_apps.text import as_csv, percent

KINDS = ("svg", "pdf")
"""The file types of each picture."""


class Picture(NamedTuple):
    """A picture of the report.

    Attributes:
        figure: the picture; None if the cells have no data for it.
        missing: the reason that is shown if the picture is missing.
    """

    title: str
    figure: Figure | None
    caption: str
    missing: str

    @property
    def name(self) -> str:
        """The name of the picture's heading and files."""
        return self.title.split(",")[0].lower().replace(" ", "-").replace("'", "")


def write(study: Study, directory: Path, command: Sequence[str]) -> Path:
    """Write the page, the tables and the pictures to a study's directory; return the page's path.

    The files are report.html; report.csv, report.json, report.tex and, with several seeds,
    means.csv; and figures/NAME.svg and figures/NAME.pdf.
    """
    cells = results.read(study, directory)
    predictions = predicted(study.machine, cells) if study.machine else {}
    measure, target = study.measure, study.target or _common_value(study.measure, cells)
    letters = results.estimators(study.cells)
    rows = table.rows(cells, target, letters, predictions)
    means, best = table.means(rows, measure, results.best_variants(cells))
    many = at_ranks.section(study, cells, target)
    about = {
        **{"study": study.name, "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"},
        **{"command": shlex.join(command), f"target_{measure.key}": target},
    }
    parts = {"cells": rows, "best": best, "means": means, "at_ranks": many.rows}
    columns = table.columns(measure, target, predicted=bool(predictions))
    averaged = table.columns_of_means(measure, target)
    latex = table.as_latex(means, averaged) if means else table.as_latex(rows, columns)
    tables = {"report.csv": as_csv(rows), "report.tex": latex}
    tables["report.json"] = table.as_json(about, parts)
    if means:
        tables["means.csv"] = as_csv(table.parts_of_means(means))
    complete = [cell for cell in cells if cell.complete]
    drawn = list(_pictures(complete, best, letters, measure, target, predictions))
    page = rendered(
        Path(__file__).with_name("page.html"),
        study=study,
        about=about,
        tables={name: base64.b64encode(text.encode()).decode() for name, text in tables.items()},
        facts=list(_facts(cells)),
        findings=[*findings(cells, target, letters), *many.sentences],
        busy=any(cell.busy for cell in complete),
        **{"mark": MARK, "limit": percent(BUSY, 0)},
        complete=len(complete),
        cells=len(cells),
        target=f"a test {measure.name} of {measure.text(target)}",
        columns=columns,
        groups=table.by_ranks(rows, columns),
        averaged=averaged,
        best=table.by_ranks(best, averaged),
        means=table.by_ranks(means, averaged),
        many=many,
        failures=[(c.cell.label, c.result.why) for c in cells if c.state == "failed" and c.result],
        unfinished=[cell.cell.label for cell in cells if cell.pending],
        variants=_variants(cells, letters),
        pictures=[picture for picture in drawn if picture.figure],
        missing=[picture for picture in drawn if not picture.figure],
        svg=inline_svg,
        shared=_shared(cells),
    )
    for name, text in {**tables, "report.html": page}.items():
        files.write_text(directory / name, text)
    figures = {"at-ranks": many.picture, **{picture.name: picture.figure for picture in drawn}}
    _write(figures, directory / "figures")
    return directory / "report.html"


def _write(figures: Mapping[str, Figure | None], directory: Path) -> None:
    """Write the files of all pictures, and remove those of pictures that are now missing."""
    directory.mkdir(exist_ok=True)
    for name, figure in figures.items():
        for kind in KINDS:
            path = directory / f"{name}.{kind}"
            if figure is None:
                path.unlink(missing_ok=True)
            else:
                files.write_bytes(path, figure_file(figure, kind))


# -- tables --------------------------------------------------------------------------------------


def _variants(
    cells: Sequence[Measured], letters: Mapping[str, str]
) -> list[tuple[str, str, str, list[str]]]:
    """Return each variant's name, letter, explanation and options.

    The options include the settings that the named strategy implies, unless the study sets them.
    """
    rows = {}
    for cell in cells:
        options, variant = cell.cell.options, cell.cell.variant
        names = {"adamw": "AdamW", "muon": "Muon"}
        steps = names.get(options.optimizer, options.optimizer.upper())
        what = f"Gradients are averaged, and {steps} takes the step, without K-FAC"
        chosen = {key: value for key, value in cell.cell.chosen.items() if key != "seed"}
        if options.optimizer == "kfac":
            named = mpikfac.plan.NAMED.get(options.distribution.strategy)
            what = f"{named.what} [{named.source}]" if named else "The machine's fastest strategy"
            what = what.replace("`", "")
            own = named.settings if named else {}
            chosen |= {f"kfac.{key}": own[key] for key in own if getattr(options.kfac, key) is None}
        words = [f"{key}={value}" for key, value in chosen.items()]
        rows[variant] = (variant, letters[variant], what, words)
    return list(rows.values())


def _shared(cells: Sequence[Measured]) -> list[str]:
    """Return the options that all cells share and that differ from the program's defaults."""
    usual = flat(Options())
    options = [_options_of(cell).items() for cell in cells]
    return [
        f"{key}={value}"
        for key, value in options[0]
        if (key, value) not in usual.items() and all((key, value) in each for each in options)
    ]


def _options_of(cell: Measured) -> dict[str, Any]:
    values = flat(cell.cell.options)
    del values["run_dir"]
    return values


def predicted(machine: mpikfac.predict.Machine, cells: Sequence[Measured]) -> dict[str, float]:
    """Return predicted step times by cell label, for cells for which the machine file has times."""
    seconds = {}
    for cell in cells:
        options, ranks = cell.cell.options, cell.cell.ranks
        job = job_of(options, training_ranks(options, ranks), inv_update_steps(options, ranks))
        with suppress(ValueError):  # the machine file lacks the network or batch
            seconds[cell.cell.label] = mpikfac.predict.simulate(
                cell.cell.plan, machine, job
            ).mean.seconds
    return seconds


# -- text ----------------------------------------------------------------------------------------


def _facts(cells: Sequence[Measured]) -> Iterator[tuple[str, str]]:
    """Yield facts as names and values: the runs, the hosts, the versions and the cells' states."""
    environments = [cell.environment for cell in cells if cell.environment]
    states = [cell.state for cell in cells]
    yield "cells", ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
    jobs = {cell.run: cell.result.seconds for cell in cells if cell.result}  # cells can share a run
    yield "total time of each job's last start", f"{sum(jobs.values()) / 60:.1f} min"
    if environments:
        begun = sorted(about["started"] for about in environments)
        yield "runs started", begun[0] if len(begun) == 1 else f"{begun[0]} to {begun[-1]}"
    for key, name in (("ranks_per_host", "hosts"), ("device", "device"), ("commit", "commit")):
        if values := distinct(about.get(key) for about in environments):
            yield name, values
    if cores := distinct(cell.result.cores for cell in cells if cell.result):
        yield "cores where the study was started", cores
    if threads := distinct(about.get("threads_per_rank") for about in environments):
        yield "threads per rank", threads
    versions = [{"python": a.get("python"), **a.get("packages", {})} for a in environments]
    if versions:
        yield "versions", ", ".join(f"{k} {v}" for k, v in versions[-1].items())
        if any(version != versions[-1] for version in versions):
            yield "warning", "cells were run with different package versions"


def _common_value(measure: Measure, cells: Sequence[Measured]) -> float | None:
    """Return a value that all complete cells reached; None without a complete cell."""
    best = [cell.curve.best for cell in cells if cell.complete and cell.curve.values]
    return measure.reached_by_all(best) if best else None


# -- pictures ------------------------------------------------------------------------------------


def _pictures(
    cells: Sequence[Measured],
    best: Sequence[table.Row],
    letters: Mapping[str, str],
    measure: Measure,
    target: float | None,
    predictions: Mapping[str, float],
) -> Iterator[Picture]:
    """Yield all pictures of complete cells, including missing ones.

    Args:
        best: the rows of the variants to show in the learning curves; if empty, all variants are
            shown.
    """
    names = {(row["variant"], row["ranks"]) for row in best}
    shown = [cell for cell in cells if not best or (cell.cell.variant, cell.cell.ranks) in names]
    yield from _of_steps(cells)
    yield from _of_learning(shown, letters, measure, target)
    yield from _of_pace(cells, predictions)


def _of_steps(cells: Sequence[Measured]) -> tuple[Picture, ...]:
    traced = "no cell has means of stages over whole intervals (stages.json, trace_steps)"
    return (
        Picture(
            "Where a step's time goes",
            pictures.breakdown(cells),
            "Means over seeds, ranks and traced steps, while ms per step in the tables is a median "
            "over all steps. The traced steps are whole intervals between two decompositions. "
            "Hatched parts are communication. Waiting is the time in a collective until the last "
            "rank enters it, and the bars for messages exclude it. For messages that overlap with "
            "computation, waiting is unknown, and the bars for messages include it. Other "
            "includes loading images, copying gradients and all work outside the named parts.",
            traced,
        ),
        Picture(
            "One step, rank by rank",
            timeline(cells),
            "Left: a step that only uses curvature or records statistics. Right: a step that "
            "refreshes curvature. Both steps of a row have the same scale, but rows differ in "
            "scale. A stage inside a longer stage is drawn on top of it. A thin bar is an "
            "overlapped message, and while a rank waits for one, it is drawn in the stage of the "
            "messages. Gaps are work outside all stages, such as that before the forward pass. "
            f"Of more than {SHOWN} variants, {SHOWN} are drawn, evenly spaced "
            "in the order from the fastest to the slowest step, on the largest number of ranks.",
            "no cell has a trace (trace.json.gz, written with trace_steps)",
        ),
    )


def _of_learning(
    cells: Sequence[Measured], letters: Mapping[str, str], measure: Measure, target: float | None
) -> tuple[Picture, ...]:
    return (
        Picture(
            f"{measure.name.capitalize()}, and the price in seconds and bytes",
            pictures.curves(cells, letters, target),
            f"Test {measure.name} after each epoch. Seconds count training steps only. Bytes are "
            "those that a rank sends if collectives are rings. The dotted line is the target "
            "of the table. For a strategy with several variants, the picture shows the best one. A "
            "line is the mean over seeds. Bands or, with more than three curves, bars beside the "
            "last point show the 95 % interval over three or more seeds; for two seeds, thin lines "
            "show the runs, and bars the range. Variants with the same letter have equal curves by "
            f"epochs, so only the first one is drawn, and at most {pictures.SHOWN} in total; the "
            "tables contain the seconds and bytes of all. Intervals are cut at the best possible "
            "value.",
            "no cell has completed an epoch",
        ),
        Picture(
            "How much a clip shortens steps",
            pictures.bounds(cells, letters),
            "The factor by which the clip multiplies a step (kl_scale), by epoch: at 1, it leaves "
            "the step as it is. Each line of metrics (log_every) contains the "
            "factor of its step. A point is the mean over seeds, and a bar extends from the lowest "
            "to the highest run; bars are moved apart. One variant per letter is drawn. While "
            "kl_clip shortens steps, the learning rate has no effect.",
            "no clip shortened a step",
        ),
    )


def _of_pace(cells: Sequence[Measured], predictions: Mapping[str, float]) -> tuple[Picture, ...]:
    batch = {cell.cell.options.step_batch for cell in cells}
    same = "strong scaling: the batch has the same size on any number of ranks"
    kind = same if len(batch) == 1 else "the batch grows with the number of ranks"
    return (
        Picture(
            "More ranks",
            pictures.scaling(cells),
            f"Left: images per second of all ranks together ({kind}). Right: images per second "
            "per rank, relative to the smallest number of ranks. Points are means over seeds. Bars "
            "show the 95 % interval over three or more seeds, or the range of two. The efficiency "
            "at the smallest number of ranks is 100 % by definition, and bars do not include the "
            "spread of this base. Points are moved apart sideways. On the left, the ideal line "
            "begins at the fastest variant.",
            "no variant was measured on two numbers of ranks",
        ),
        Picture(
            "Measured against predicted",
            pictures.predicted(cells, predictions),
            "Milliseconds per step. Points are labelled with the number of ranks. On the line, "
            "prediction and measurement are equal.",
            "the study does not name a machine, or the machine has no times for the networks and "
            "batches",
        ),
    )
