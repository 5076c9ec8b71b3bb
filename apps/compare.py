"""Compares finished or running runs: a table, and curves by epoch and by seconds.

    mpikfac compare runs/a runs/b --target 0.97 --png curves.png

Seconds are those spent in training steps; evaluation and checkpoints are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Curve:
    """A run's test accuracy (0 to 1) after each epoch, and when that was."""

    name: str
    epochs: list[float]
    seconds: list[float]
    accuracy: list[float]

    def reached(self, target: float) -> tuple[float, float] | None:
        """Epochs and seconds until the first evaluation at or above `target`."""
        for epoch, second, accuracy in zip(self.epochs, self.seconds, self.accuracy):
            if accuracy >= target:
                return epoch, second
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes the curves; 2 if a run cannot be read."""
    parser = argparse.ArgumentParser(prog="compare.py", description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--target", type=float, help="test accuracy to reach, such as 0.97")
    parser.add_argument("--png", type=Path, help="file for the curves")
    options = parser.parse_args(argv)
    if options.target is not None and not 0 < options.target <= 1:
        parser.error(f"--target {options.target} must be a fraction above 0 and at most 1")
    try:
        curves = [read(run) for run in options.runs]
        print(table(curves, options.target))
        if options.png:
            draw(curves, options.target, options.png)
    except (OSError, ValueError) as error:
        print(f"mpikfac: {error}", file=sys.stderr)
        return 2
    return 0


def read(run: Path) -> Curve:
    """The curve of a run directory.

    Raises:
        ValueError: it holds no metrics of a whole epoch, or a line is not JSON.
    """
    path = run / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{path} is missing; give the run_dir of a run")
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
        if "test_accuracy" in row:
            rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no complete epoch yet")
    columns = ("epoch", "seconds", "test_accuracy")
    return Curve(str(run), *([row[column] for row in rows] for column in columns))


def table(curves: Sequence[Curve], target: float | None) -> str:
    """One line per run, columns aligned."""
    lines = [["run", "epochs", "seconds", "final", "best"]]
    if target is not None:
        lines[0] += [f"epochs to {target:.4g}", f"seconds to {target:.4g}"]
    for curve in curves:
        ends = [f"{curve.epochs[-1]:g}", f"{curve.seconds[-1]:.1f}"]
        line = [curve.name, *ends, f"{curve.accuracy[-1]:.2%}", f"{max(curve.accuracy):.2%}"]
        if target is not None:
            when = curve.reached(target)
            line += [f"{when[0]:g}", f"{when[1]:.1f}"] if when else ["never", "never"]
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )


def draw(curves: Sequence[Curve], target: float | None, path: Path) -> None:
    """Test accuracy by epoch and by seconds, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_epoch, by_second) = pyplot.subplots(1, 2, sharey=True, figsize=(10, 4))
    for curve in curves:
        percent = [100 * accuracy for accuracy in curve.accuracy]
        by_epoch.plot(curve.epochs, percent, marker=".", label=curve.name)
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


if __name__ == "__main__":
    sys.exit(main())
