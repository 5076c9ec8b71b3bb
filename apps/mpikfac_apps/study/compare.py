"""Compare finished or running runs: a table, and curves by epoch and by seconds.

    mpikfac compare runs/a runs/b --target 0.97 --png curves.png

Seconds count training steps only; evaluation and checkpoints are left out.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpikfac import files
from mpikfac_apps import cli
from mpikfac_apps.options.command_line import CommandLine
from mpikfac_apps.options.fields import bounded, positional
from mpikfac_apps.study import curves
from mpikfac_apps.study.curves import Curve
from mpikfac_apps.study.measures import Measure, common
from mpikfac_apps.text import listed, show, table


@dataclass(frozen=True)
class CompareOptions:
    """Compare runs, also unfinished runs: a table, and curves by epoch and by seconds.

    Args:
        runs: the directories of the runs.
        target: the test accuracy whose time is reported, in per cent (97) or as a share (0.97); of
            autoencoders, the test error; of language models, bits per byte. null for no target.
        png: a file to draw the curves into; null for none.
    """

    runs: list[Path] = positional()
    target: float | None = bounded(None, "> 0")
    png: Path | None = None


COMPARE = CommandLine("mpikfac compare", CompareOptions)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and write the curves; return 0, or 2 after one line about a wrong option."""
    return cli.run(COMPARE.program, lambda: compare(COMPARE.read(argv)))


def compare(options: CompareOptions) -> int:
    """Print the table and write the curves; return 0.

    Raises:
        ValueError: a run cannot be read.
        OSError: a file cannot be read or written.
    """
    run_curves = {str(run): curve_of(run) for run in options.runs}
    measure = measure_of(run_curves)
    target = None if options.target is None else measure.target(options.target)
    sections = [table(rows(run_curves, target))]
    if target is not None and len(run_curves) > 1:
        sections.append(list(sentences(run_curves, target)))
    sections.append(list(about_bounds(run_curves)))
    show([section for section in sections if section])
    if options.png:
        draw(run_curves, target, options.png)
    return 0


def curve_of(run: Path) -> Curve:
    """Return the curve of a run directory.

    Raises:
        ValueError: the metrics hold no whole epoch, or a line is not JSON.
    """
    rows = curves.read(run)
    curve = curves.curve(rows, curves.measure_of(rows))
    if not curve.epochs:
        raise ValueError(f"{run / 'metrics.jsonl'} holds no complete epoch yet")
    return curve


def measure_of(run_curves: Mapping[str, Curve]) -> Measure:
    """Return the measure of all runs.

    Raises:
        ValueError: runs have different measures.
    """
    return common(curve.measure for curve in run_curves.values())


def rows(run_curves: Mapping[str, Curve], target: float | None) -> list[list[str]]:
    """Return the table: one row per run."""
    lines = [["run", "epochs", "seconds", "final", "best"]]
    if target is not None:
        aim = measure_of(run_curves).text(target)
        lines[0] += [f"epochs to {aim}", f"seconds to {aim}"]
    for name, curve in run_curves.items():
        ends = [f"{curve.epochs[-1]:g}", brief(curve.seconds[-1])]
        line = [name, *ends, *(curve.measure.text(v, 2) for v in (curve.values[-1], curve.best))]
        if target is not None:
            when = curve.reached(target)
            line += [f"{when.epochs:g}", brief(when.seconds)] if when else ["never", "never"]
        lines.append(line)
    return lines


def sentences(run_curves: Mapping[str, Curve], target: float) -> Iterator[str]:
    """Return sentences about the first run at the target: by epochs, and by seconds of training."""
    names, measure = short_names(run_curves), measure_of(run_curves)
    aim = measure.text(target)
    reached = {names[run]: when for run, c in run_curves.items() if (when := c.reached(target))}
    if not reached:
        yield f"No run reached a test {measure.name} of {aim}."
        return
    by_epochs = sorted(reached, key=lambda name: reached[name].epochs)
    epochs = listed(f"by {name} after {reached[name].epochs:g} epochs" for name in by_epochs)
    yield f"A test {measure.name} of {aim} was reached {epochs}."
    first, *others = sorted(reached, key=lambda name: reached[name].seconds)
    seconds = [f"{name} took {brief(reached[name].seconds)} s" for name in (first, *others)]
    if others:
        yield f"In seconds of training, {first} was first: {listed(seconds)}."
    if missing := [name for name in names.values() if name not in reached]:
        yield f"{listed(missing)} did not reach {aim}."


def about_bounds(run_curves: Mapping[str, Curve]) -> Iterator[str]:
    """Return a sentence about each run whose bound shortened nearly all steps."""
    for name, curve in zip(short_names(run_curves).values(), run_curves.values()):
        if curve.bound:
            yield (
                f"The bound shortened the step in {curve.shortened} of {len(curve.scales)} lines "
                f"of metrics of {name}: with kl_clip, the learning rate has no effect there."
            )


def brief(seconds: float) -> str:
    """Return seconds with three digits at least."""
    return f"{seconds:.{0 if seconds >= 100 else 1 if seconds >= 10 else 2}f}"


def short_names(runs: Iterable[str]) -> dict[str, str]:
    """Return the part of each path in which the paths differ."""
    paths = {run: Path(run).resolve() for run in runs}
    parents = {str(path.parent) for path in paths.values()}
    if len(parents) == len(paths) == 1:
        return {run: path.name for run, path in paths.items()}
    common = os.path.commonpath(parents)
    return {run: os.path.relpath(path, common) for run, path in paths.items()}


def draw(run_curves: Mapping[str, Curve], target: float | None, path: Path) -> None:
    """Draw the values of tests by epoch and by seconds, and `kl_scale` if a bound acts."""
    import matplotlib
    from matplotlib.figure import Figure

    from mpikfac_apps.study.report.style import QUIET, STYLE, legend, variant_style

    names, measure = short_names(run_curves), measure_of(run_curves)
    styles = {name: variant_style(place) for place, name in enumerate(names.values())}
    with matplotlib.rc_context(STYLE | {"figure.facecolor": "white"}):
        bounds = any(curve.shortened for curve in run_curves.values())
        figure = Figure(figsize=(14 if bounds else 10, 4.4), layout="constrained")
        by_epoch, by_second, *third = figure.subplots(1, 3 if bounds else 2)
        by_second.sharey(by_epoch)
        for run, curve in run_curves.items():
            values = [measure.scale * value for value in curve.values]
            for axes, along in ((by_epoch, curve.epochs), (by_second, curve.seconds)):
                axes.plot(along, values, markersize=5, **styles[names[run]])
            for axes in third:
                axes.plot(*zip(*curve.scales), **styles[names[run]] | {"marker": ""})
        for axes in (by_epoch, by_second):
            if target is not None:
                axes.axhline(measure.scale * target, color=QUIET, linewidth=0.8, linestyle=":")
            axes.set_xlim(left=0)
        by_epoch.set(xlabel="epochs", ylabel=measure.axis)
        by_second.set(xlabel="seconds of training")
        for axes in third:
            axes.set(xlabel="epochs", ylabel="kl_scale, the factor of the bound", ylim=(0, 1.05))
        aim = "" if target is None else f"; dotted: {measure.text(target)}"
        figure.suptitle(f"Test {measure.name} of {listed(styles)}{aim}")
        legend(figure, styles)
        image = io.BytesIO()
        figure.savefig(image, dpi=120, format=path.suffix[1:] or None)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(path, image.getbuffer(), named=True)
