"""Write the report of a study: a single HTML file with all pictures, without need of a server."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

import mpikfac
from mpikfac_apps.options.fields import flat
from mpikfac_apps.options.options import Options
from mpikfac_apps.options.strategy import training_ranks
from mpikfac_apps.study import pictures, results
from mpikfac_apps.study.results import WAITING, Measured
from mpikfac_apps.study.sentences import baseline, distinct, findings
from mpikfac_apps.study.spec import Study, basis_every
from mpikfac_apps.text import NONE, brief_mib, ms, number, percent

MESSAGES = ("factor messages", "basis messages", "gradient messages")
COLUMNS = (
    *(
        "cell",
        "numbers",
        "ms per step",
        "range",
        "predicted",
        "images/s",
        "against SGD",
        "in collectives",
    ),
    *("waiting", "MiB sent per step", "MiB held", "test accuracy", "s to target"),
)


def write(study: Study, directory: Path, command: Sequence[str]) -> Path:
    """Write `report.html` from the cells in a study's directory; return the path of the file."""
    cells = results.read(study, directory)
    predictions = predicted(study.machine, cells) if study.machine else {}
    target = study.target or _common_accuracy(cells)
    letters = results.estimators(study.cells)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("report.html").read_text())
    text = template.render(
        study=study,
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        command=shlex.join(command),
        facts=list(_facts(cells)),
        findings=list(findings(cells, target, letters)),
        target=percent(target),
        columns=COLUMNS,
        groups=_table(cells, target, letters, predictions),
        failures=[(c.cell.label, c.result.why) for c in cells if c.result and c.state == "failed"],
        unfinished=[c.cell.label for c in cells if c.state in ("not run", "begun")],
        variants=_variants(cells, letters),
        pictures=list(_pictures([c for c in cells if c.complete], target, predictions)),
        shared=_shared(cells),
    )
    path = directory / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


# -- tables --------------------------------------------------------------------------------------


def _table(
    cells: Sequence[Measured],
    target: float | None,
    letters: Mapping[str, str],
    predictions: Mapping[str, float],
) -> list[tuple[str, list[list[str]]]]:
    """Return rows of all cells, by number of ranks."""
    groups: dict[int, list[list[str]]] = {}
    for cell in sorted(cells, key=lambda cell: cell.cell.ranks):
        base = baseline(cells, cell)
        ratio = cell.step / base.step if base and base.step and cell.step else None
        share, waiting = _collectives(cell)
        reached = cell.curve.reached(target) if target else None
        row = [
            _name(cell),
            letters[cell.cell.variant],
            ms(cell.step),
            NONE.join(ms(f(cell.step_seconds)) for f in (min, max)) if cell.step else NONE,
            ms(predictions.get(cell.cell.label)),
            f"{cell.images_per_second:,.0f}" if cell.images_per_second else NONE,
            f"{ratio:.2f} x" if ratio else NONE,
            percent(share, 0),
            percent(waiting, 0),
            brief_mib(cell.wire),
            brief_mib(cell.memory),
            percent(cell.accuracy),
            f"{reached[1]:.1f}" if reached else "never" if cell.complete else NONE,
        ]
        groups.setdefault(cell.cell.ranks, []).append(row)
    return [(number(ranks, "rank"), rows) for ranks, rows in groups.items()]


def _name(cell: Measured) -> str:
    """Return a cell's name without the number of ranks, with the state of an incomplete cell."""
    name = cell.cell.label.replace(f" on {number(cell.cell.ranks, 'rank')}", "")
    return name if cell.complete else f"{name} ({cell.state})"


def _collectives(cell: Measured) -> tuple[float | None, float | None]:
    """Return the share of a step in collectives, and the share of waiting for further ranks."""
    parts = cell.breakdown
    if not parts or not cell.traced_seconds:
        return cell.communication, None
    busy = sum(parts[group] for group in MESSAGES)
    return (busy + parts[WAITING]) / cell.traced_seconds, parts[WAITING] / cell.traced_seconds


def _variants(
    cells: Sequence[Measured], letters: Mapping[str, str]
) -> list[tuple[str, str, str, list[str]]]:
    """Return each variant's name, letter, explanation and options."""
    rows = {}
    for cell in cells:
        options, variant = cell.cell.options, cell.cell.variant
        steps = "AdamW" if options.optimizer == "adamw" else "SGD"
        what = f"Gradients are averaged, and {steps} steps: no K-FAC"
        if options.optimizer == "kfac":
            named = mpikfac.plan.NAMED.get(options.kfac.distribution.strategy)
            what = f"{named.what} [{named.source}]" if named else "The machine's quickest strategy"
        chosen = {key: value for key, value in cell.cell.chosen.items() if key != "seed"}
        words = [f"{key}={value}" for key, value in chosen.items()]
        rows[variant] = (variant, letters[variant], what, words)
    return list(rows.values())


def _shared(cells: Sequence[Measured]) -> list[str]:
    """Return options that all cells share and that differ from the program's defaults."""
    usual = flat(Options())
    options = [_given(cell) for cell in cells]
    return [
        f"{key}={value}"
        for key, value in options[0].items()
        if value != usual[key] and all(given[key] == value for given in options)
    ]


def _given(cell: Measured) -> dict[str, Any]:
    given = flat(cell.cell.options)
    del given["run_dir"]
    return given


def predicted(machine: mpikfac.predict.Machine, cells: Sequence[Measured]) -> dict[str, float]:
    """Return predicted seconds of a step by label, for cells whose times the machine file holds."""
    found = {}
    for cell in cells:
        options, ranks = cell.cell.options, cell.cell.ranks
        every = options.kfac.factor_every, basis_every(options, ranks)
        training = training_ranks(options, ranks)
        with suppress(ValueError):  # the machine file lacks the network or batch
            job = mpikfac.predict.Job(options.model, options.step_batch // training, *every)
            found[cell.cell.label] = mpikfac.predict.simulate(
                cell.cell.plan, machine, job
            ).mean.seconds
    return found


# -- text ----------------------------------------------------------------------------------------


def _facts(cells: Sequence[Measured]) -> Iterator[tuple[str, str]]:
    """Return names and values: the runs, the hosts, the versions and the states of cells."""
    known = [cell.environment for cell in cells if cell.environment]
    states = [cell.state for cell in cells]
    yield "cells", ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
    jobs = {cell.run: cell.result.seconds for cell in cells if cell.result}  # cells can share a run
    yield "time of all jobs, by last start", f"{sum(jobs.values()) / 60:.1f} min"
    if known:
        begun = sorted(about["started"] for about in known)
        yield "runs started", begun[0] if len(begun) == 1 else f"{begun[0]} to {begun[-1]}"
    for key, name in (("ranks_per_host", "hosts"), ("device", "device"), ("commit", "commit")):
        if values := distinct(about.get(key) for about in known):
            yield name, values
    if cores := distinct(cell.result.cores for cell in cells if cell.result):
        yield "cores where the study was started", cores
    if threads := distinct(about.get("threads_per_rank") for about in known):
        yield "threads per rank", threads
    versions = [{"python": a.get("python"), **a.get("packages", {})} for a in known]
    if versions:
        yield "versions", ", ".join(f"{k} {v}" for k, v in versions[-1].items())
        if any(version != versions[-1] for version in versions):
            yield "warning", "cells were run with different versions"


def _common_accuracy(cells: Sequence[Measured]) -> float | None:
    """Return the best accuracy common to all complete cells, rounded down to 0.1 %."""
    best = [max(cell.curve.accuracy) for cell in cells if cell.complete and cell.curve.accuracy]
    return int(min(best) * 1000) / 1000 if best else None


# -- pictures ------------------------------------------------------------------------------------


def _pictures(
    cells: Sequence[Measured], target: float | None, predictions: Mapping[str, float]
) -> Iterator[dict[str, str]]:
    """Return title, caption and data of each picture, or the reason for a missing picture."""
    batch = {cell.cell.options.batch for cell in cells}
    same = "strong scaling: all numbers of ranks share a batch of the same size"
    kind = same if len(batch) == 1 else "the batch grows with the number of ranks"
    traced = "no cell holds means of stages over whole intervals (stages.json, trace_steps)"
    for title, picture, caption, missing in (
        (
            "Where a step's time goes",
            pictures.breakdown(cells),
            "Means over ranks and over traced steps. The traced steps are whole intervals between "
            "two decompositions. Waiting is the time in a collective until the last rank enters "
            "the collective; the bars of messages leave out waiting.",
            traced,
        ),
        (
            "One step, rank by rank",
            pictures.timeline(cells),
            "Left: a step that only uses curvature or takes statistics. Right: a step that "
            "refreshes curvature. Both steps have the same scale. A stage inside a longer stage is "
            "drawn on top of the longer stage.",
            "no cell holds a trace (trace.json.gz, written with trace_steps)",
        ),
        (
            "Accuracy, and the price in seconds and bytes",
            pictures.curves(cells, target),
            "Test accuracy after each epoch. Seconds count training steps only. Bytes are the "
            "bytes that a rank sends if collectives are rings. The dotted line is the target of "
            "the table. Curves with the same letter are equal by epochs, and differ by seconds and "
            "bytes only.",
            "no cell has completed an epoch",
        ),
        (
            "More ranks",
            pictures.scaling(cells),
            f"Images per second of all ranks together ({kind}), and images per second of a rank as "
            "a share of the same figure on the fewest ranks.",
            "no variant was measured on two numbers of ranks",
        ),
        (
            "Measured against predicted",
            pictures.predicted(cells, predictions),
            "Milliseconds of a step. The number at a point is the number of ranks. On the line, "
            "prediction and measurement are equal.",
            "the study names no machine, or the machine has no times of the networks and batches",
        ),
    ):
        data = base64.b64encode(picture).decode() if picture else ""
        yield {"title": title, "caption": caption, "missing": missing, "data": data}
