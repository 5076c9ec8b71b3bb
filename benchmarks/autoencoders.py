"""Count updates and seconds of K-FAC until the final error of other optimizers on autoencoders.

    OMP_NUM_THREADS=1 python benchmarks/autoencoders.py digits patches --data DIR

SGD takes 5,000 updates, AdamW, Muon and SOAP 1,500, and K-FAC 330 and 660. Three learning rates,
which decay linearly to 0, are tried for every optimizer. "K-FAC, quadratic" takes length and
momentum of 330 steps from the quadratic model, and three initial dampings are tried. The best value
with seed 0 is repeated with two more seeds. The measure is the error of the training images, as in
the literature, or with `--measure test_error` the error of the test images. Errors, by updates and
seconds, are kept in `results/autoencoders.json`. Runs in the file are not repeated. `--known`
prints the table of the known runs. `--seconds ROUNDS` times steps of all `--ways` alternately, on
an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training import SEEDS, by_turns, launch, step_seconds

RESULTS = Path(__file__).parent / "results" / "autoencoders.json"
COMMON = {"schedule": "linear", "weight_decay": "0"}
MADE = {"data.path": "null"}  # no photos are read
PROBLEMS = {  # options, and updates of an epoch
    "digits": (
        {**MADE, "model": "autoencoder_small", "data.name": "digits", "batch": "356"},
        4,
    ),
    "patches": (
        {
            **{"model": "autoencoder_small", "data.name": "patches", "data.size": "8"},
            **{"data.train_images": "10240", "data.test_images": "2000", "batch": "512"},
        },
        20,
    ),
    "curves": (
        {
            **MADE,
            **{"model": "autoencoder", "data.name": "curves"},
            **{"data.train_images": "10240", "data.test_images": "1000", "batch": "512"},
        },
        20,
    ),
}
KFAC = {"optimizer": "kfac", "kfac.factor_update_steps": "5", "kfac.inv_update_steps": "10"}
OF_GRADIENTS = KFAC | {"kfac.momentum_of": "gradients"}
ADAM = KFAC | {"kfac.length": "adam"}
QUADRATIC = {
    **KFAC,
    **{"kfac.length": "quadratic", "kfac.fisher_type": "mc", "kfac.damping_adapt": "5"},
    **{"schedule": "constant", "momentum": "0", "kfac.factor_update_steps": "1"},
}
WAYS = {  # optimizer, updates, and the values of the tuned option
    "SGD": ({"optimizer": "sgd"}, 5000, "lr", ("0.1", "0.3", "1")),
    "AdamW": ({"optimizer": "adamw"}, 1500, "lr", ("0.001", "0.003", "0.01")),
    "Muon": ({"optimizer": "muon"}, 1500, "lr", ("0.003", "0.01", "0.03")),
    "SOAP": ({"optimizer": "soap"}, 1500, "lr", ("0.001", "0.003", "0.01")),
    "K-FAC, 660": (OF_GRADIENTS, 660, "lr", ("0.0025", "0.005", "0.01")),
    "K-FAC, momentum of directions, 660": (KFAC, 660, "lr", ("0.0005", "0.001", "0.002")),
    "K-FAC, Adam's length, 330": (ADAM, 330, "lr", ("0.0005", "0.001", "0.002")),
    "K-FAC, Adam's length, 660": (ADAM, 660, "lr", ("0.0005", "0.001", "0.002")),
    "K-FAC, quadratic": (QUADRATIC, 330, "kfac.damping", ("0.002", "0.02", "0.2")),
}
MEASURES = ("train_error", "test_error")  # errors of an epoch's steps; errors after the epoch
KEPT = ("step", "seconds", *MEASURES)
Line = dict[str, float]


def main() -> int:
    """Run all missing runs, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="+", choices=PROBLEMS)
    parser.add_argument("--data", type=Path, default=Path("data"), help="cifar-10-batches-bin")
    parser.add_argument("--out", type=Path, default=Path("runs/autoencoders"))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--measure", default=MEASURES[0], choices=MEASURES)
    parser.add_argument("--ranks", default="1")
    parser.add_argument("--known", action="store_true", help="print what is known, run nothing")
    parser.add_argument("--seconds", type=int, metavar="ROUNDS", help="time steps, train nothing")
    options = parser.parse_args()
    for problem in options.problems:
        if options.seconds:
            compare_seconds(options, problem)
            continue
        for way in () if options.known else options.ways:
            value = best_value(options, problem, way)
            for seed in SEEDS[1:]:
                lines_of(options, problem, way, value, seed)
        report(options, problem)
    return 0


def lines_of(
    options: argparse.Namespace, problem: str, way: str, value: str, seed: int
) -> list[Line]:
    """Return updates, seconds and errors of a run, which is trained only if it is missing."""
    known, tuned = read(), WAYS[way][2]
    name = f"{problem}, {way}, {tuned.removeprefix('kfac.')} {value}, seed {seed}"
    if name not in known and not options.known:
        optimizer, settings = settings_of(problem, way, value)
        metrics = launch(options, name, optimizer, settings, seed, shown=error_of)
        lines = list(tests(metrics))
        kept = {key: [float(f"{line[key]:.6g}") for line in lines] for key in KEPT}
        known = read() | {name: kept}
        texts = (f"{json.dumps(run)}: {json.dumps(known[run])}" for run in sorted(known))
        RESULTS.write_text("{" + ",\n".join(texts) + "}\n")
    columns = known.get(name, {})
    return [dict(zip(columns, line)) for line in zip(*columns.values())]


def settings_of(problem: str, way: str, value: str) -> tuple[str, dict[str, str]]:
    """Return the optimizer and the options of the training program."""
    (shown, per_epoch), (given, updates, tuned, _) = PROBLEMS[problem], WAYS[way]
    settings = {**COMMON, **shown, **given, tuned: value, "epochs": str(updates // per_epoch)}
    return settings.pop("optimizer"), settings


def read() -> dict[str, dict[str, list[float]]]:
    """Return the known runs as columns; a second process may add runs."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def tests(metrics: Path) -> Iterator[Line]:
    """Yield the lines of a metrics file that have a test error."""
    for text in metrics.read_text().splitlines():
        line: dict[str, Any] = json.loads(text)
        if "test_error" in line:
            yield line


def error_of(metrics: Path) -> str:
    """Return the final test error as text."""
    return f"{[line['test_error'] for line in tests(metrics)][-1]:.3f}"


def best_value(options: argparse.Namespace, problem: str, way: str) -> str:
    """Return the value of the tuned option with the lowest final error of the first seed."""
    finals = {}
    for value in WAYS[way][3]:
        if lines := lines_of(options, problem, way, value, SEEDS[0]):
            finals[value] = lines[-1][options.measure]
    return min(finals, key=lambda value: finals[value], default="")


def compare_seconds(options: argparse.Namespace, problem: str) -> None:
    """Print median seconds of a step of each way with the best known value, and of all steps."""
    known = argparse.Namespace(**vars(options) | {"known": True})

    def seconds(way: str) -> float:
        return step_seconds(options, *settings_of(problem, way, best_value(known, problem, way)))

    for way, values in by_turns(seconds, options.ways, options.seconds).items():
        median, updates = statistics.median(values), WAYS[way][1]
        ends = f"{1000 * min(values):.1f} to {1000 * max(values):.1f}"
        whole = f"{updates} steps in {updates * median:.1f} s"
        print(f"{problem}, {way}: {1000 * median:.1f} ms a step ({ends}), {whole}")


def report(options: argparse.Namespace, problem: str) -> None:
    """Print final errors, and what K-FAC needs for the final error of each other optimizer."""
    options = argparse.Namespace(**vars(options) | {"known": True})
    runs = {}
    for way in WAYS:
        value = best_value(options, problem, way)
        found = [lines_of(options, problem, way, value, seed) for seed in SEEDS]
        if any(found):
            runs[way] = value, [lines for lines in found if lines]
    measure = options.measure
    print(f"\n{problem}: {measure} at the end, by seed; updates and seconds of K-FAC until then")
    for way, (value, seeds) in runs.items():
        finals = [lines[-1][measure] for lines in seeds]
        level = statistics.mean(finals)
        cells = [way, value, ", ".join(f"{final:.3f}" for final in finals), f"{level:.3f}"]
        cells.append(f"{seeds[0][-1]['step']:.0f} in {mean(seeds, -1, 'seconds'):.1f} s")
        for other in (name for name in WAYS if name.startswith("K-FAC")):
            known = other in runs and other != way
            cells.append(until(runs[other][1], measure, level) if known else "")
        print(f"| {' | '.join(cells)} |")


def mean(seeds: list[list[Line]], place: int, key: str) -> float:
    """Return the mean over seeds of a value of a test."""
    return statistics.mean(lines[place][key] for lines in seeds)


def until(seeds: list[list[Line]], measure: str, level: float) -> str:
    """Return the mean updates and seconds until the error is at most `level`."""
    first = [next((line for line in run if line[measure] <= level), None) for run in seeds]
    reached = [line for line in first if line]
    if len(reached) < len(seeds):
        return f"{len(reached)} of {len(seeds)} seeds"
    updates, seconds = (
        statistics.mean(line[key] for line in reached) for key in ("step", "seconds")
    )
    return f"{updates:.0f} in {seconds:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
