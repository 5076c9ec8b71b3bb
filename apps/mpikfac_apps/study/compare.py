"""Compare finished or running runs: a table, and curves by epoch and by seconds.

    mpikfac compare runs/a runs/b --target 0.97 --png curves.png

Seconds count training steps only; evaluation and checkpoints are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpikfac_apps.cli import Parser
from mpikfac_apps.study import curves
from mpikfac_apps.study.curves import Curve
from mpikfac_apps.text import show, table


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and write the curves; return 2 if a run cannot be read."""
    parser = Parser(prog="mpikfac compare", description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--target", type=float, help="test accuracy to reach, such as 0.97")
    parser.add_argument("--png", type=Path, help="file for the curves")
    options = parser.parse_args(argv)
    if options.target is not None and not 0 < options.target <= 1:
        parser.error(f"--target {options.target} must be a fraction above 0 and at most 1")
    try:
        found = {str(run): read(run) for run in options.runs}
        show([table(rows(found, options.target))])
        if options.png:
            draw(found, options.target, options.png)
    except (OSError, ValueError) as error:
        print(f"mpikfac compare: {error}", file=sys.stderr)
        return 2
    return 0


def read(run: Path) -> Curve:
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
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
