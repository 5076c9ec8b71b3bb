"""Compare finished or running runs: a table, means over seeds, and curves by epoch and by seconds.

    mpikfac compare runs/a runs/b --target 0.97 --figure curves.svg --table table.tex

Seconds include only training steps, not evaluations or checkpoints. Runs that differ only in the
seed are treated as one variant.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from mpikfac import files
from mpikfac_apps import cli
from mpikfac_apps.lab.study import curves
from mpikfac_apps.lab.study.curves import Curve
from mpikfac_apps.lab.study.measures import Measure, common
from mpikfac_apps.lab.study.seeds import SeedMean, by_seed, doubt, leaders, mean_of
from mpikfac_apps.options.command_line import CommandLine
from mpikfac_apps.options.fields import bounded, positional, read_by
from mpikfac_apps.text import as_csv, brief, latex, listed, show, table

UNITS = ("steps", "epochs", "seconds")
"""The units in which the training before a test is measured."""
Variants = Mapping[str, Sequence[Curve]]
"""The runs of each variant by its name: one run per seed."""


def table_file(text: str) -> Path:
    """Return `text` as the path of a file for a table.

    Raises:
        ValueError: the suffix is neither .csv nor .tex.
    """
    return cli.path_of(text, ".csv", ".tex")


@dataclass(frozen=True)
class CompareOptions:
    """Compare finished or running runs: a table, and curves by epoch and by seconds.

    Args:
        runs: the directories of the runs; runs that differ only in the seed are treated as one
            variant.
        target: the test accuracy for which times are reported, in per cent (97) or as a fraction
            (0.97); for autoencoders, the test error; for language models, bits per byte. null for
            no target.
        figure: a file for a plot of the curves, .pdf, .png or .svg; null for none.
        png: another name for `figure`.
        table: a file for the values: .csv with one line per run, or .tex with a LaTeX table, which
            contains means if a variant has several seeds; null for none.
    """

    runs: list[Path] = positional()
    target: float | None = bounded(None, "> 0")
    figure: Path | None = read_by(cli.picture, None)
    png: Path | None = read_by(cli.picture, None)
    table: Path | None = read_by(table_file, None)


COMPARE = CommandLine("mpikfac compare", CompareOptions)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table of runs, and write the requested files; return 0, or 2 after an error."""
    return cli.run(COMPARE.program, lambda: compare(COMPARE.read(argv)))


def compare(options: CompareOptions) -> int:
    """Print a table of runs, and write the requested files; return 0.

    Raises:
        ValueError: a run cannot be read.
        OSError: a file cannot be read or written.
    """
    run_curves = {str(run): curve_of(run) for run in options.runs}
    measure = common(curve.measure for curve in run_curves.values())
    target = None if options.target is None else measure.target(options.target)
    variants = variants_of(run_curves)
    by_variant = rows_of_means(variants, target) if len(variants) < len(run_curves) else []
    sections = [table(rows(run_curves, target)), table(by_variant) if by_variant else []]
    if target is not None and len(run_curves) > 1:
        sections.append(list(sentences(variants, target)))
    sections.append(list(about_bounds(run_curves)))
    show([section for section in sections if section])
    if figure := options.figure or options.png:
        write(figure, draw(variants, target, figure.suffix[1:]))
    if options.table and options.table.suffix == ".csv":
        write(options.table, as_csv(values(run_curves, variants, target)).encode())
    elif options.table:
        names = short_names(run_curves)
        by_run = rows({names[run]: curve for run, curve in run_curves.items()}, target)
        write(options.table, latex(by_variant or by_run).encode())
    return 0


def write(path: Path, content: bytes) -> None:
    """Write a file that the user named.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(path, content, named=True)


# -- runs ----------------------------------------------------------------------------------------


def curve_of(run: Path) -> Curve:
    """Return the test results over time of the run in a directory.

    Raises:
        ValueError: the metrics contain no complete epoch, or a line is not JSON.
    """
    rows = curves.read(run)
    curve = curves.curve(rows, curves.measure_of(rows))
    if not curve.epochs:
        raise ValueError(f"{run / 'metrics.jsonl'} has no complete epoch yet")
    return curve


def measure_of(variants: Variants) -> Measure:
    """Return the test metric that all runs have in common."""
    return next(curve.measure for runs in variants.values() for curve in runs)


def variants_of(run_curves: Mapping[str, Curve]) -> dict[str, list[Curve]]:
    """Return the runs of each variant by name; "sgd-*" is the variant of "sgd-0" and "sgd-1"."""
    names = short_names(run_curves)
    groups = [[str(run) for run in group] for group in by_seed(map(Path, run_curves))]
    patterns = [pattern([names[run] for run in group]) for group in groups]
    variants = {}
    for group, name in zip(groups, patterns):
        unique = patterns.count(name) == 1
        label = name if unique else ", ".join(names[run] for run in group)
        variants[label] = [run_curves[run] for run in group]
    return variants


def pattern(names: Sequence[str]) -> str:
    """Return the only name, or a pattern for the names, where * is the part that differs."""
    if len(names) == 1:
        return names[0]
    start = shared_start(names)
    ends = [name[len(start) :][::-1] for name in names]
    return f"{start}*{shared_start(ends)[::-1]}"


def shared_start(names: Sequence[str]) -> str:
    """Return the longest common prefix of the names."""
    equal = takewhile(lambda letters: len(set(letters)) == 1, zip(*names))
    return "".join(letters[0] for letters in equal)


def short_names(runs: Iterable[str]) -> dict[str, str]:
    """Return each run's path relative to the directory that contains all runs."""
    paths = {run: Path(run).resolve() for run in runs}
    parents = {str(path.parent) for path in paths.values()}
    if len(parents) == len(paths) == 1:
        return {run: path.name for run, path in paths.items()}
    common = os.path.commonpath(parents)
    return {run: os.path.relpath(path, common) for run, path in paths.items()}


# -- tables --------------------------------------------------------------------------------------


def rows(run_curves: Mapping[str, Curve], target: float | None) -> list[list[str]]:
    """Return the table of runs: a row of titles, and one row per run."""
    lines = [["run", "epochs", "seconds", "final", "best"]]
    if target is not None:
        lines[0] += titles(next(iter(run_curves.values())).measure, target)
    for name, curve in run_curves.items():
        ends = [f"{curve.epochs[-1]:g}", brief(curve.seconds[-1])]
        line = [name, *ends, *(curve.measure.text(v, 2) for v in (curve.values[-1], curve.best))]
        if target is not None:
            when = curve.reached(target)
            line += [f"{when.epochs:g}", brief(when.seconds)] if when else ["never", "never"]
        lines.append(line)
    return lines


def rows_of_means(variants: Variants, target: float | None) -> list[list[str]]:
    """Return the table of means over seeds: a row of titles, and one row per variant."""
    measure = measure_of(variants)
    lines = [["variant", "seeds", "seconds", "final", "best"]]
    if target is not None:
        lines[0] += titles(measure, target)
    for name, runs in variants.items():
        line = [name, str(len(runs)), over_seeds([curve.seconds[-1] for curve in runs], brief)]
        for numbers in ([curve.values[-1] for curve in runs], [curve.best for curve in runs]):
            line.append(over_seeds(numbers, lambda value: measure.text(value, 2)))
        if target is not None:
            reached = [curve.reached(target) for curve in runs]
            line.append(over_seeds([when.epochs if when else None for when in reached], rounded))
            line.append(over_seeds([when.seconds if when else None for when in reached], brief))
        lines.append(line)
    return lines


def titles(measure: Measure, target: float) -> list[str]:
    """Return the titles of the columns with the training needed to reach the target."""
    aim = measure.text(target)
    return [f"epochs to {aim}", f"seconds to {aim}"]


def over_seeds(numbers: Sequence[float | None], shown: Callable[[float], str]) -> str:
    """Format the mean and interval, or the range, of known values; note if some are missing."""
    mean = mean_of(numbers)
    if mean is None:
        return "never"
    counted = f" ({mean.count} of {len(numbers)})" if mean.count < len(numbers) else ""
    return f"{mean.text(shown)}{counted}"


def values(
    run_curves: Mapping[str, Curve], variants: Variants, target: float | None
) -> list[dict[str, Any]]:
    """Return each run's last and best test results, and the training needed to reach the target."""
    names = {id(curve): name for name, runs in variants.items() for curve in runs}
    plain = []
    for run, curve in run_curves.items():
        row: dict[str, Any] = {"run": run, "variant": names[id(curve)]}
        row |= {"measure": curve.measure.name}
        row |= {unit: getattr(curve, unit)[-1] for unit in UNITS}
        row |= {"final": curve.values[-1], "best": curve.best}
        if target is not None:
            when = curve.reached(target)
            row |= {"target": target}
            row |= {f"{unit}_to_target": getattr(when, unit, None) for unit in UNITS}
        plain.append(row)
    return plain


def rounded(epochs: float) -> str:
    """Round epochs to a hundredth."""
    return f"{round(epochs, 2):g}"


# -- sentences -----------------------------------------------------------------------------------


def sentences(variants: Variants, target: float) -> Iterator[str]:
    """Yield sentences about the first variant to reach the target: by epochs, and by seconds.

    A variant reaches the target if all of its seeds do.
    """
    measure = measure_of(variants)
    aim = measure.text(target)
    missing = {
        name: sum(curve.reached(target) is None for curve in runs)
        for name, runs in variants.items()
    }
    if all(missing[name] == len(runs) for name, runs in variants.items()):
        yield f"No run reached a test {measure.name} of {aim}."
        return
    epochs, seconds = (to_target(variants, target, unit) for unit in ("epochs", "seconds"))
    if epochs:
        after = (
            f"by {name} after {rounded(mean.mean)} epochs{' on average' if mean.count > 1 else ''}"
            for name, mean in epochs.items()
        )
        yield f"A test {measure.name} of {aim} was reached {listed(after)}."
    if len(seconds) > 1:
        took = listed(f"{name} took {brief(mean.mean)} s" for name, mean in seconds.items())
        first = leaders(seconds)
        claim = f"{first[0]} was first" if len(first) == 1 else "no variant is shown to be first"
        yield f"In seconds of training, {claim}: {took}.{doubt(seconds)}"
    if never := [name for name, runs in variants.items() if missing[name] == len(runs)]:
        yield f"{listed(never)} did not reach {aim}."
    for name, runs in variants.items():
        if 0 < missing[name] < len(runs):
            yield f"{missing[name]} of {len(runs)} seeds of {name} did not reach {aim}."


def to_target(variants: Variants, target: float, unit: str) -> dict[str, SeedMean]:
    """Return the mean training needed to reach the target by variant, shortest first.

    Variants with a seed that did not reach the target are left out.
    """
    means = {}
    for name, runs in variants.items():
        mean = mean_of(getattr(curve.reached(target), unit, None) for curve in runs)
        if mean is not None and mean.count == len(runs):
            means[name] = mean
    return dict(sorted(means.items(), key=lambda named: named[1].mean))


def about_bounds(run_curves: Mapping[str, Curve]) -> Iterator[str]:
    """Yield a sentence about each run in which K-FAC's clip shortened nearly all steps."""
    for name, curve in zip(short_names(run_curves).values(), run_curves.values()):
        if curve.bound:
            yield (
                f"The clip shortened the step in {curve.shortened} of {len(curve.scales)} lines "
                f"of metrics of {name}: with kl_clip, the learning rate has no effect there."
            )


# -- the figure ----------------------------------------------------------------------------------


def draw(variants: Variants, target: float | None, kind: str) -> bytes:
    """Plot test results against epochs and seconds, and `kl_scale` if a clip shortened a step.

    Args:
        kind: "pdf", "png" or "svg".
    """
    from matplotlib.figure import Figure

    from mpikfac_apps.lab.study.report.pictures import line_of_seeds
    from mpikfac_apps.lab.study.report.style import (
        QUIET,
        figure_file,
        legend,
        styled,
        variant_style,
    )

    measure = measure_of(variants)
    styles = {name: variant_style(place) for place, name in enumerate(variants)}
    with styled():
        bounds = any(curve.shortened for runs in variants.values() for curve in runs)
        figure = Figure(figsize=(14 if bounds else 10, 4.4), layout="constrained")
        by_epoch, by_second, *third = figure.subplots(1, 3 if bounds else 2)
        by_second.sharey(by_epoch)
        for name, runs in variants.items():
            ends = min(len(curve.values) for curve in runs)
            tests = [[measure.scale * value for value in curve.values[:ends]] for curve in runs]
            seconds = [fmean(times) for times in zip(*(curve.seconds[:ends] for curve in runs))]
            for axes, along in ((by_epoch, runs[0].epochs[:ends]), (by_second, seconds)):
                line_of_seeds(axes, along, tests, styles[name], measure)
            for axes, curve in ((axes, curve) for axes in third for curve in runs):
                axes.plot(*zip(*curve.scales), **styles[name] | {"marker": ""})
        for axes in (by_epoch, by_second):
            if target is not None:
                axes.axhline(measure.scale * target, color=QUIET, linewidth=0.8, linestyle=":")
            axes.set_xlim(left=0)
        by_epoch.set(xlabel="epochs", ylabel=measure.axis)
        by_second.set(xlabel="seconds of training")
        for axes in third:
            axes.set(xlabel="epochs", ylabel="kl_scale, the factor of the clip", ylim=(0, 1.05))
        aim = "" if target is None else f"; dotted: {measure.text(target)}"
        figure.suptitle(f"Test {measure.name} of {listed(styles)}{aim}")
        legend(figure, styles)
        return figure_file(figure, kind)
