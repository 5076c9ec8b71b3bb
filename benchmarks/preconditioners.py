"""Compare what preconditioners learn on four problems, with equal grids of learning rates.

    for p in autoencoder language resnet20 vit_small; do
        mpikfac study jobs/studies/preconditioners_$p.yaml --run_dir runs/preconditioners/$p
    done
    python benchmarks/preconditioners.py

The program copies the runs of the studies to `results/preconditioners.json`, prints the rates,
writes the table of `results/preconditioners.md` and draws the picture; `--known` reads no runs. The
rates of each method are tried with seed 0. The rate with the best final result is repeated with
seeds 1 and 2: `--further PROBLEM` prints the lines that the study's file lacks. The target is
AdamW's final result, the mean over seeds; steps are those until the mean over a method's seeds
reaches it. `--seconds ROUNDS` times steps of all methods alternately, on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter
from training import SEEDS, by_turns

from mpikfac_apps.lab.study import results
from mpikfac_apps.lab.study.measures import MEASURES, Measure
from mpikfac_apps.lab.study.report.style import (
    WIDTH,
    bars_between,
    figure_file,
    legend,
    styled,
    variant_style,
)
from mpikfac_apps.lab.study.spec import Cell, Study, inv_update_steps, read, short
from mpikfac_apps.text import listed, table

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "preconditioners.json"
PAGE = RESULTS.with_suffix(".md")
PICTURE = ROOT / "docs" / "pictures" / "preconditioners.svg"
RUNS = Path("runs/preconditioners")
PROBLEMS = {  # title and measure
    "autoencoder": ("autoencoder of the digits", MEASURES["error"]),
    "language": ("small GPT", MEASURES["bits per byte"]),
    "resnet20": ("ResNet-20", MEASURES["accuracy"]),
    "vit_small": ("vision transformer", MEASURES["accuracy"]),
}
METHODS = {
    **{"sgd": "SGD", "adamw": "AdamW", "kfac": "K-FAC", "newton-muon": "Newton-Muon"},
    **{"muon": "Muon", "normuon": "NorMuon", "shampoo": "Shampoo", "kl-shampoo": "KL-Shampoo"},
    "soap": "SOAP",
}
BASE = "adamw"  # has the target
AXES = ("lr", "seed")
"""Axes of the grids; further axes change a usual number."""
STEPS = 60, 10  # of a timed run, and those before the clock starts
Run = dict[str, Any]


class Choice(NamedTuple):
    """The runs of a learning rate of a method, by seed."""

    rate: float
    runs: Sequence[Run]

    @property
    def final(self) -> float:
        """The mean of the last tests."""
        return statistics.mean(run["values"][-1] for run in self.runs)


def main() -> int:
    """Take over the runs of the studies, print the rates, write the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder with a folder a problem")
    parser.add_argument("--known", action="store_true", help="read no runs")
    parser.add_argument("--further", choices=PROBLEMS, help="print missing matrices, nothing else")
    parser.add_argument("--seconds", type=int, metavar="ROUNDS", help="time steps, nothing else")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    options = parser.parse_args()
    if options.seconds:
        for problem in options.problems:
            compare_seconds(options, problem)
        return 0
    if not options.known:
        for problem in [options.further] if options.further else options.problems:
            take_over(problem, options.runs)
    if options.further:
        print("\n".join(further(options.further)))
        return 0
    for problem in options.problems:
        report(problem)
    write_table([*summary()])
    draw()
    return 0


def study_of(problem: str) -> Study:
    """Return the study of a problem."""
    return read(ROOT / "jobs" / "studies" / f"preconditioners_{problem}.yaml")


# -- results -------------------------------------------------------------------------------------


def take_over(problem: str, runs: Path) -> None:
    """Add the complete runs of a problem to the file of results."""
    measured = results.read(study_of(problem), runs / problem)
    taken = {name_of(run): run for run in (run_of(cell) for cell in measured if cell.complete)}
    print(f"{problem}: {len(taken)} of {len(measured)} runs", file=sys.stderr)
    if taken:
        everything = known()
        everything[problem] = everything.get(problem, {}) | taken
        lines = (
            f"{json.dumps(name)}: {{\n"
            + ",\n".join(f"{json.dumps(key)}: {json.dumps(run)}" for key, run in found.items())
            + "}"
            for name, found in everything.items()
        )
        RESULTS.write_text("{" + ",\n".join(lines) + "}\n")


def run_of(cell: results.Measured) -> Run:
    """Return what is kept of a run."""
    options, axes = cell.cell.options, cell.cell.axes
    others = [f"{short(key)} {value}" for key, value in axes.items() if key not in AXES]
    return {
        **{"method": cell.cell.strategy, "lr": options.rate, "seed": options.seed},
        **{"changed": ", ".join(others), "steps": cell.curve.steps},
        "values": [float(f"{value:.5g}") for value in cell.curve.values],
    }


def name_of(run: Run) -> str:
    """Return the name of a run in the file of results."""
    changed = f", {run['changed']}" if run["changed"] else ""
    return f"{run['method']}, lr {run['lr']:g}{changed}, seed {run['seed']}"


def known() -> dict[str, dict[str, Run]]:
    """Return the known runs by problem and name."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def choices(problem: str, method: str) -> list[Choice]:
    """Return the rates of a method with its usual numbers."""
    runs = [run for run in of_method(problem, method) if not run["changed"]]
    return [
        Choice(rate, [run for run in runs if run["lr"] == rate])
        for rate in sorted({run["lr"] for run in runs})
    ]


def of_method(problem: str, method: str) -> list[Run]:
    """Return the known runs of a method."""
    return [run for run in known().get(problem, {}).values() if run["method"] == method]


def best(problem: str, method: str) -> Choice | None:
    """Return the rate with the best end of seed 0, and the runs of all seeds."""
    finals = {first(one)["values"][-1]: one for one in choices(problem, method)}
    finite = [final for final in finals if math.isfinite(final)]
    return finals[PROBLEMS[problem][1].best(finite)] if finite else None


def first(choice: Choice) -> Run:
    """Return the run of seed 0."""
    return next(run for run in choice.runs if run["seed"] == SEEDS[0])


def further(problem: str) -> Iterator[str]:
    """Yield the matrices of the best rates with the seeds that are missing."""
    for method in METHODS:
        if chosen := best(problem, method):
            tried = {run["seed"] for run in chosen.runs}
            if lacking := [seed for seed in SEEDS if seed not in tried]:
                rate = f"lr: [{chosen.rate}], ranks: [1], seed: {lacking}"
                yield f"  - {{strategy: [{method}], {rate}}}"


# -- tables and picture --------------------------------------------------------------------------


def report(problem: str) -> None:
    """Print the tests of all rates, and what each method needs until the target."""
    title, measure = PROBLEMS[problem]
    base = best(problem, BASE)
    if not base:
        return
    print(f"\n{title}: target {measure.text(base.final, 2)}, the mean end of {METHODS[BASE]}")
    rows = [("method", "end by rate, seed 0", "best rate, seeds", "mean", "steps to the target")]
    for method, name in METHODS.items():
        if not (chosen := best(problem, method)):
            continue
        rates = choices(problem, method)
        edge = " (edge)" if at_an_end(problem, method) else ""
        tried = (f"{one.rate:g}: {measure.text(first(one)['values'][-1], 2)}" for one in rates)
        ends = ", ".join(measure.text(run["values"][-1], 2) for run in chosen.runs)
        rows.append(
            (
                *(name, "; ".join(tried), f"{chosen.rate:g}{edge}: {ends}"),
                measure.text(chosen.final, 2),
                until(chosen.runs, measure, base.final),
            )
        )
    print("\n".join(table(rows)))
    for method, name in METHODS.items():
        for run in of_method(problem, method):
            if run["changed"]:
                end = measure.text(run["values"][-1])
                print(f"{name}, lr {run['lr']:g}, {run['changed']}: {end}")


def write_table(rows: Sequence[str]) -> None:
    """Replace the table of the page of results."""
    lines = PAGE.read_text().splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("|"))
    others = [line for line in lines if not line.startswith("|")]
    PAGE.write_text("\n".join([*others[:first], *rows, *others[first:]]) + "\n")


def shown() -> list[str]:
    """Return the problems with runs of all methods."""
    return [p for p in PROBLEMS if all(of_method(p, method) for method in METHODS)]


def summary() -> Iterator[str]:
    """Yield the rows of a table of Markdown: mean ends, and steps to the target."""
    titles = (PROBLEMS[problem] for problem in shown())
    heads = [f"{title}: {measure.name} | steps" for title, measure in titles]
    yield f"| | {' | '.join(heads)} |"
    yield "|---" * (1 + 2 * len(heads)) + "|"
    for method, name in METHODS.items():
        cells = [cell for problem in shown() for cell in ends(problem, method)]
        yield f"| {name} | {' | '.join(cells)} |"


def ends(problem: str, method: str) -> tuple[str, str]:
    """Return a method's mean end, bold if no method has a better, and the steps to the target."""
    measure = PROBLEMS[problem][1]
    chosen = {name: one for name in METHODS if (one := best(problem, name))}
    if method not in chosen or BASE not in chosen:
        return "", ""
    own, most = chosen[method].final, measure.best(one.final for one in chosen.values())
    text, steps = measure.text(own), until(chosen[method].runs, measure, chosen[BASE].final)
    return f"**{text}**" if own == most else text, steps


def until(runs: Sequence[Run], measure: Measure, target: float) -> str:
    """Return the steps until the first test whose mean over seeds is as good as the target."""
    pairs = zip(runs[0]["steps"], mean_curve(runs))
    reached = (step for step, value in pairs if measure.reaches(value, target))
    return str(next(reached, "never"))


def mean_curve(runs: Sequence[Run]) -> list[float]:
    """Return the means over seeds of all tests."""
    return [statistics.mean(values) for values in zip(*(run["values"] for run in runs))]


def draw() -> None:
    """Draw the mean test by steps of each method with the best rate: a panel a problem.

    Bars beside the last points extend from the lowest to the highest seed.
    """
    styles = {name: variant_style(place) for place, name in enumerate(METHODS.values())}
    problems = shown()
    with styled():
        figure = Figure(figsize=(WIDTH, 9), layout="constrained")
        for panel, problem in zip(figure.subplots(2, 2).flat, problems):
            title, measure = PROBLEMS[problem]
            curves = {m: chosen for m in METHODS if (chosen := best(problem, m))}
            for place, (method, chosen) in enumerate(curves.items()):
                style, steps = styles[METHODS[method]], chosen.runs[0]["steps"]
                every = max(1, len(steps) // 8)
                means = [measure.scale * value for value in mean_curve(chosen.runs)]
                panel.plot(steps, means, **style, markersize=5, markevery=(place % every, every))
                ends = [measure.scale * run["values"][-1] for run in chosen.runs]
                beside = steps[-1] * (1.03 + 0.025 * place)
                bars_between(panel, [beside], [(min(ends), means[-1], max(ends))], style)
                panel.plot(beside, means[-1], **style, markersize=5)
                if at_an_end(problem, method):
                    panel.annotate("*", (beside, max(ends)), ha="center")
            seeds = {len(chosen.runs) for chosen in curves.values()}
            panel.set(title=f"{title}, {listed(map(str, sorted(seeds)))} seeds")
            panel.set_xticks(range(0, steps[-1] + 1, 60))
            panel.set(xlabel="steps", ylabel=f"{measure.axis}, mean over seeds", xlim=(0, None))
            panel.set_ylim(limits(measure, curves.values()))
            if measure.best is min:
                panel.set_yscale("log")
                panel.yaxis.set_major_locator(MaxNLocator(8))
                panel.yaxis.set_major_formatter(ScalarFormatter())
                panel.yaxis.set_minor_locator(NullLocator())
        figure.suptitle(
            "Bars: range of seeds at the last step. *: the best learning rate is at an end of the "
            "grid, so a better one may exist.",
            fontsize="medium",
        )
        legend(figure, styles, 5)
    PICTURE.write_bytes(figure_file(figure, "svg"))


def at_an_end(problem: str, method: str) -> bool:
    """Return whether the best rate of a method is the lowest or the highest of its grid."""
    chosen, rates = best(problem, method), choices(problem, method)
    return chosen is not None and chosen.rate in (rates[0].rate, rates[-1].rate)


def limits(measure: Measure, curves: Iterable[Choice]) -> tuple[float, float]:
    """Return the ends of an axis: from the worst test in the middle of runs to the best end."""
    runs = [run["values"] for one in curves for run in one.runs]
    worst = measure.scale * measure.worst(run[len(run) // 2] for run in runs)
    most = measure.scale * measure.best(run[-1] for run in runs)
    if measure.best is min:  # on a logarithmic axis
        return most / 1.04, worst * 1.04
    room = (most - worst) / 20
    return worst - room, most + room


# -- seconds -------------------------------------------------------------------------------------


def compare_seconds(options: argparse.Namespace, problem: str) -> None:
    """Print the seconds of a step of each method: the median of rounds by turns, and the ratio."""
    cells: dict[str, Cell] = {}
    for cell in study_of(problem).cells:
        cells.setdefault(METHODS[cell.strategy], cell)
    measured = by_turns(
        lambda name: step_seconds(cells[name], options.runs), [*cells], options.seconds
    )
    for name, values in measured.items():
        ratio = statistics.median(own / sgd for own, sgd in zip(values, measured["SGD"]))
        ends = f"{1e3 * min(values):.1f} to {1e3 * max(values):.1f}"
        print(f"{problem}, {name}: {1e3 * statistics.median(values):.1f} ms ({ends}), {ratio:.2f}")


def step_seconds(cell: Cell, out: Path) -> float:
    """Return the seconds of a step of a short run, with the intervals of a long run."""
    last, start = STEPS
    every = (
        cell.options.kfac.lasting_factor_update_steps,
        inv_update_steps(cell.options, cell.ranks),
    )
    lasting = [f"--kfac.factor_update_steps={every[0]}", f"--kfac.inv_update_steps={every[1]}"]
    short = [f"--max_steps={last}", f"--log_every={start}"]
    place = out / "seconds"
    shutil.rmtree(place, ignore_errors=True)
    program = [sys.executable, "-m", "mpikfac_apps", "train", *cell.arguments, *lasting, *short]
    subprocess.run([*program, f"--run_dir={place}"], check=True, stdout=subprocess.DEVNULL)
    rows = map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
    after = {row["step"]: row["seconds"] for row in rows if "loss" in row}
    return (after[last] - after[start]) / (last - start)


if __name__ == "__main__":
    sys.exit(main())
