"""Compare finished or running runs: a table, and curves by epoch and by seconds.

    mpikfac compare runs/a runs/b --target 0.97 --png curves.png

Seconds count training steps only; evaluation and checkpoints are left out.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpikfac import files
from mpikfac_apps import cli
from mpikfac_apps.options.command_line import read
from mpikfac_apps.options.fields import bounded, positional
from mpikfac_apps.study import curves
from mpikfac_apps.study.curves import Curve
from mpikfac_apps.text import show, table

PROGRAM = "mpikfac compare"


@dataclass(frozen=True)
class CompareOptions:
    """Compare runs, also unfinished runs: a table, and curves by epoch and by seconds.

    Args:
        runs: the directories of the runs.
        target: the test accuracy whose time is reported, such as 0.97; null for no target.
        png: a file to draw the curves into; null for none.
    """

    runs: list[Path] = positional()
    target: float | None = bounded(None, "> 0", "<= 1")
    png: Path | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and write the curves; return 0, or 2 after one line about a wrong option."""
    return cli.run(PROGRAM, lambda: compare(read(PROGRAM, CompareOptions, argv)))


def compare(options: CompareOptions) -> int:
    """Print the table and write the curves; return 0.

    Raises:
        ValueError: a run cannot be read.
        OSError: a file cannot be read or written.
    """
    found = {str(run): curve_of(run) for run in options.runs}
    show([table(rows(found, options.target))])
    if options.png:
        draw(found, options.target, options.png)
    return 0


def curve_of(run: Path) -> Curve:
    """Return the curve of a run directory.

    Raises:
        ValueError: the metrics hold no whole epoch, or a line is not JSON.
    """
    curve = curves.curve(curves.read(run))
    if not curve.epochs:
        raise ValueError(f"{run / 'metrics.jsonl'} holds no complete epoch yet")
    return curve


def rows(found: Mapping[str, Curve], target: float | None) -> list[list[str]]:
    """Return the table: one row per run."""
    lines = [["run", "epochs", "seconds", "final", "best"]]
    if target is not None:
        lines[0] += [f"epochs to {target:.4g}", f"seconds to {target:.4g}"]
    for name, curve in found.items():
        ends = [f"{curve.epochs[-1]:g}", f"{curve.seconds[-1]:.1f}"]
        line = [name, *ends, f"{curve.accuracy[-1]:.2%}", f"{max(curve.accuracy):.2%}"]
        if target is not None:
            when = curve.reached(target)
            line += [f"{when[0]:g}", f"{when[1]:.1f}"] if when else ["never", "never"]
        lines.append(line)
    return lines


def draw(found: Mapping[str, Curve], target: float | None, path: Path) -> None:
    """Draw test accuracy by epoch and by seconds, side by side, into a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_epoch, by_second) = pyplot.subplots(1, 2, sharey=True, figsize=(10, 4))
    for name, curve in found.items():
        percent = [100 * accuracy for accuracy in curve.accuracy]
        by_epoch.plot(curve.epochs, percent, marker=".", label=name)
        by_second.plot(curve.seconds, percent, marker=".")
    for axes in (by_epoch, by_second):
        if target is not None:
            axes.axhline(100 * target, color="grey", linewidth=0.8, linestyle="--")
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0)
    by_epoch.set(xlabel="epochs", ylabel="test accuracy (%)")
    by_second.set(xlabel="seconds of training")
    by_epoch.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format=path.suffix[1:] or None)
    files.write_bytes(path, image.getbuffer(), named=True)
    pyplot.close(figure)
