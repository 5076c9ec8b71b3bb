"""Replace the optimizers of public scripts by K-FAC, and compare the results.

    OMP_NUM_THREADS=1 python benchmarks/scripts.py --scripts DIR
    python benchmarks/scripts.py --known

DIR contains public repositories, by the names in `SCRIPTS`; none of their lines is kept here. A
script runs in a copy of its repository, with small data of `script_data.py`, in a separate process
and thread. `torch.optim` is patched: the line of the script that creates its optimizer creates
`mpikfac.KFACOptimizer(model)`, and all other lines stay unchanged. K-FAC runs by default, with its
rate decaying linearly to 0. The script's own optimizer runs by default, and at five rates, with the
script's schedule and decaying linearly to 0. Runs of several lengths, as multiples of the script's,
show the results at equal CPU seconds: those of training, without imports and tests.

"cost" is the cost of a step relative to Adam's: two processes alternate, with `BLOCK` steps each; a
seed is a round.

Results are kept in `results/scripts.jsonl` next to this file, one line per run, and are not
repeated; `--again` forgets the selected ones. `--known` prints the tables.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import script_data
from script_run import Training, run

from mpikfac_apps.text import table

Job = tuple[str, str, str, float, int]
"""Script, optimizer or "cost", setting, length as a multiple of the script's, and seed."""
Result = dict[str, Any]

RESULTS = Path(__file__).parent / "results" / "scripts.jsonl"
STAND_INS = Path(__file__).parent / "stand_ins"
SEEDS = (0, 1, 2)
BY_DEFAULT = {"own": "", "kfac": "falling"}
RATES = ("rate=0.1", "rate=0.3", "", "rate=3", "rate=10")
SWEEP = tuple(f"{rate} {rest}".strip() for rate in RATES for rest in ("", "falling"))
LENGTHS = {"own": (0.25, 0.5, 1.0, 2.0, 4.0), "kfac": (0.25, 0.5, 1.0)}
BLOCK, GROWN, LAST = 20, 160, 360
"""Steps of a block; steps until K-FAC's intervals have grown; steps that are measured."""


@dataclass(frozen=True)
class Script:
    """A public script, and what makes it short.

    Attributes:
        path: the script in the folder of repositories; `{length}` in other texts is the number of
            epochs or iterations.
        arguments: of the command line.
        length: epochs or iterations of the script.
        steps: optimizer steps per epoch or iteration.
        score: regular expression of a printed test, with a group "score".
        better: `max` or `min`, of scores.
        edits: file, regular expression and replacement of each change of the copy.
        data: the location of the data in the repository, and the function that writes them.
        counted: tests at the end of a run whose mean is the run's score.
    """

    path: str
    arguments: str
    length: int
    steps: int
    score: str
    better: Callable[..., float]
    edits: tuple[tuple[str, str, str], ...] = ()
    data: tuple[str, Callable[[Path], None]] = ("", script_data.nothing)
    counted: int = 1

    def epochs(self, length: float) -> int:
        """Return the epochs or iterations of a multiple of the script's length."""
        return max(1, round(self.length * length))

    def prepare(self, scripts: Path, out: Path, epochs: int) -> Path:
        """Return the path of the script in a changed copy of its repository, with data."""
        repository, _, path = self.path.partition("/")
        shutil.copytree(scripts / repository, out, dirs_exist_ok=True)
        place, write = self.data
        write(out / place)
        for name, pattern, replacement in self.edits:
            file = out / name
            text = re.sub(pattern, replacement.format(length=epochs), file.read_text())
            file.write_text(text)
        shutil.copytree(STAND_INS, (out / path).parent, dirs_exist_ok=True)
        return out / path


COMPARED = {
    "mnist": Script(
        *("examples/mnist/main.py", "--epochs={length}", 14, 24),
        *(r"Average loss: (?P<loss>[\d.]+), Accuracy: (?P<score>\d+)/", max),
    ),
    "vae": Script(
        *("examples/vae/main.py", "--epochs={length}", 20, 12, r"Test set loss: (?P<score>\S+)"),
        min,
    ),
    "nanogpt": Script(
        "nanoGPT/train.py",
        "config/train_shakespeare_char.py --device=cpu --compile=False --log_interval=1 "
        "--eval_iters=50 --eval_interval={length} --block_size=64 --batch_size=12 --n_layer=4 "
        "--n_head=4 --n_embd=128 --max_iters={length} --lr_decay_iters={length} --dropout=0.0",
        *(300, 1, r"val loss (?P<score>\S+)", min),
        data=("data/shakespeare_char", script_data.letters),
    ),
    "unet": Script(
        *("Pytorch-UNet/train.py", "--epochs={length}", 5, 90),
        *(r"Dice score: (?P<score>\S+)", max),
        edits=(
            ("unet/unet_model.py", r"\b(64|128|256|512|1024)\b", r"(\1 // 8)"),
            ("train.py", r"os\.cpu_count\(\)", "0"),
            (
                "utils/data_loading.py",
                r"multiprocessing import Pool",
                "multiprocessing.dummy import Pool",
            ),
        ),
        data=("data", script_data.drawings),
        counted=5,
    ),
    "pinn": Script(
        *("PINNs/train_pinn.py", "", 1000, 1, r"loss \d+ tensor\((?P<score>[^,]+)", min),
        edits=(
            ("train_pinn.py", r"\b10000\b", "{length} + 1"),
            ("train_pinn.py", r"\b250\b", "50"),
        ),
    ),
}
COMPARED["unet, image"] = replace(
    COMPARED["unet"],
    edits=(
        *COMPARED["unet"].edits,
        (
            "evaluate.py",
            r"net\.eval\(\)",
            "net.eval(); [setattr(module, 'training', True) for module in net.modules()]",
        ),
    ),
)
"""Tests with each image's own statistics, as in training with batches of one image."""
FURTHER = {
    "makemore": Script(
        *("makemore/makemore.py", "--type=gru --num-workers=0 --max-steps={length}", 1001, 1),
        *(r"test loss: (?P<score>\S+)", min),
    ),
    "pygcn": Script(
        *("pygcn/pygcn/train.py", "--epochs={length}", 200, 1),
        *(r"Test set results:.*accuracy= (?P<score>\S+)", max),
        data=("data/cora", script_data.citations),
    ),
    "cifar": Script(
        *("pytorch-cifar/main.py", "", 10, 12, r"Acc: (?P<score>[\d.]+)% .* 3/3", max),
        edits=(
            ("main.py", r"\+200\b", "+{length}"),
            ("main.py", r"num_workers=2", "num_workers=0"),
            ("main.py", r"\nnet = SimpleDLA\(\)", "\nnet = ShuffleNetV2(0.5)"),
            ("utils.py", r"os\.popen\('stty size', 'r'\)\.read\(\)", "'24 80'"),
        ),
    ),
}
"""Scripts that run only with their own optimizers."""
SCRIPTS = COMPARED | FURTHER


def main() -> None:
    """Run all missing runs, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scripts", type=Path, help="folder of the public repositories")
    parser.add_argument("--out", type=Path, default=Path("runs/scripts"), help="folder of copies")
    parser.add_argument("--names", nargs="+", default=list(COMPARED), choices=SCRIPTS)
    parser.add_argument("--optimizers", nargs="+", default=[*LENGTHS, "cost"])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--again", action="store_true", help="forget what is asked for")
    parser.add_argument("--known", action="store_true", help="print what is known, run nothing")
    options = parser.parse_args()
    if options.known:
        report(known())
        return
    if options.again:
        forget(options.names, options.optimizers, options.seeds)
    for name, optimizer in itertools.product(options.names, options.optimizers):
        for job in jobs(name, optimizer, options.seeds):
            if job not in known():
                keep(job, (cost if optimizer == "cost" else trained)(job, options))


def jobs(name: str, optimizer: str, seeds: Sequence[int]) -> Iterator[Job]:
    """Yield the runs of a script and an optimizer; the best rate of seed 0 runs with all seeds."""
    script = SCRIPTS[name]
    if optimizer == "cost":
        length = math.ceil((LAST + 1) / script.steps) / script.length
        yield from ((name, optimizer, "", length, seed) for seed in seeds)
        return
    for length, seed in itertools.product(
        LENGTHS[optimizer] if name in COMPARED else (1.0,), seeds
    ):
        yield name, optimizer, BY_DEFAULT[optimizer], length, seed
    if optimizer == "own" and name in COMPARED:
        yield from ((name, optimizer, setting, 1.0, SEEDS[0]) for setting in SWEEP)
        chosen = best(name, known())
        for length, seed in itertools.product(LENGTHS[optimizer], seeds):
            yield name, optimizer, chosen, length, seed


# -- runs ------------------------------------------------------------------------------------------


class Worker:
    """A process that runs a script, and that pauses if requested.

    Args:
        job: the run.
        options: of the command line.
        pauses: steps after which the process waits.
    """

    def __init__(self, job: Job, options: argparse.Namespace, pauses: Sequence[int] = ()) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, other = spawn.Pipe()
        folder = options.out.resolve() / job[0] / job[1]
        arguments = job, options.scripts, folder, other, pauses
        self.process = spawn.Process(target=work, args=arguments, daemon=True)
        self.process.start()
        other.close()

    def ask(self) -> Any:
        """Let the process continue; return what it sends next."""
        self.pipe.send(None)
        return self.pipe.recv()


def work(job: Job, scripts: Path, folder: Path, pipe: Connection, pauses: Sequence[int]) -> None:
    """Run a script in this process; send the seconds at each pause, then the result."""
    name, optimizer, setting, length, seed = job
    script, epochs = SCRIPTS[name], SCRIPTS[name].epochs(length)

    def pause(steps: int, seconds: float) -> None:
        if steps in pauses:
            pipe.send(seconds)
            pipe.recv()

    training = Training(optimizer, setting, epochs * script.steps, script.score, pause)
    path = script.prepare(scripts, folder, epochs)
    arguments = script.arguments.format(length=epochs).split()
    pipe.recv()
    error = {}
    try:
        run(training, path, folder, arguments, seed)
    except Exception as exception:  # a result, too
        error = {"error": f"{type(exception).__name__}: {exception}"}
    measured = {"steps": training.steps, "seconds": training.seconds_of_steps}
    pipe.send({**measured, "process": time.process_time(), "tests": training.tests, **error})


def trained(job: Job, options: argparse.Namespace) -> Result:
    """Train, and return the steps, CPU seconds and tests."""
    worker = Worker(job, options)
    result: Result = worker.ask()
    worker.process.join()
    return result


def cost(job: Job, options: argparse.Namespace) -> Result:
    """Return the CPU seconds of alternating blocks of Adam's and K-FAC's steps."""
    name, _, _, length, seed = job
    pauses = range(0, LAST + 1, BLOCK)
    workers = {
        optimizer: Worker((name, optimizer, "", length, seed), options, pauses)
        for optimizer in ("adam", "kfac")
    }
    marks: Result = {optimizer: [] for optimizer in workers}
    for _, (optimizer, worker) in itertools.product(pauses, workers.items()):
        mark = worker.ask()
        if isinstance(mark, dict):  # the end of a run that failed
            marks = mark
            break
        marks[optimizer].append(mark)
    for worker in workers.values():
        worker.process.terminate()
        worker.process.join()
    return marks


def forget(names: Sequence[str], optimizers: Sequence[str], seeds: Sequence[int]) -> None:
    """Remove results from the file."""
    results = known()
    RESULTS.write_text("")
    for job, result in results.items():
        if not (job[0] in names and job[1] in optimizers and job[4] in seeds):
            keep(job, result)


def keep(job: Job, result: Result) -> None:
    """Append a result to the file."""
    with RESULTS.open("a") as file:
        file.write(json.dumps({"job": job, "result": result}) + "\n")


def known() -> dict[Job, Result]:
    """Return all known results."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    rows: Iterator[Any] = map(json.loads, lines)
    return {tuple(row["job"]): row["result"] for row in rows}


# -- tables ----------------------------------------------------------------------------------------


def report(results: dict[Job, Result]) -> None:
    """Print scores and seconds of all lengths, scores at equal seconds, and costs of steps."""
    runs = [("script", "optimizer", "setting", "seeds", "scores, and CPU seconds, by length")]
    equal = [("script", "K-FAC's length", "CPU seconds", "K-FAC", "own, default", "own, best")]
    costs = [("script", "step over Adam's, first steps", "later steps")]
    for name in SCRIPTS:
        lines = {"own, default": ("own", BY_DEFAULT["own"]), "K-FAC": ("kfac", BY_DEFAULT["kfac"])}
        if setting := best(name, results):
            lines["own, best"] = "own", setting
        curves = {line: curve(name, *job, results) for line, job in lines.items()}
        for line, (_, setting) in lines.items():
            cells = [f"{length:g}: {point}" for length, point in curves[line].items()]
            if seeds := {job[4] for job in results if job[:3] == (name, *lines[line])}:
                runs.append((name, line, setting, f"{len(seeds)}", *cells))
        for length, point in curves["K-FAC"].items():
            others = (curves.get(line, {}) for line in ("own, default", "own, best"))
            scores = [f"{at(point.seconds, other.values()):.4g}" for other in others]
            mine = f"{length:g}", f"{point.seconds:.1f}", f"{point.score:.4g}"
            equal.append((name, *mine, *scores))
        rounds = [result for job, result in results.items() if job[:2] == (name, "cost")]
        if rounds := [marks for marks in rounds if "error" not in marks]:
            costs.append((name, ratio(rounds, 0, GROWN), ratio(rounds, GROWN, LAST)))
    print("\n\n".join("\n".join(table(rows)) for rows in (runs, equal, costs)))


@dataclass(frozen=True)
class Point:
    """Means over seeds: CPU seconds of training, and the score."""

    seconds: float
    score: float

    def __str__(self) -> str:
        return f"{self.score:.4g} ({self.seconds:.1f} s)"


def score(name: str, result: Result) -> float:
    """Return the score of a run; not a number if the run failed."""
    tests = [test["score"] for test in result["tests"][-SCRIPTS[name].counted :]]
    return math.nan if "error" in result or not tests else statistics.mean(tests)


def best(name: str, results: dict[Job, Result]) -> str | None:
    """Return the best setting of the sweep; None if no run is known."""
    jobs = ((name, "own", setting, 1.0, SEEDS[0]) for setting in SWEEP)
    scores = {job[2]: score(name, results[job]) for job in jobs if job in results}
    scores = {setting: number for setting, number in scores.items() if not math.isnan(number)}
    return SCRIPTS[name].better(scores, key=scores.__getitem__) if scores else None


def curve(
    name: str, optimizer: str, setting: str, results: dict[Job, Result]
) -> dict[float, Point]:
    """Return a point for each length."""
    points = {}
    for length in LENGTHS[optimizer]:
        runs = [
            result
            for job, result in results.items()
            if job[:4] == (name, optimizer, setting, length)
        ]
        if runs:
            seconds = statistics.mean(run["seconds"] for run in runs)
            points[length] = Point(seconds, statistics.mean(score(name, run) for run in runs))
    return points


def at(seconds: float, points: Iterable[Point]) -> float:
    """Return the score at a number of seconds, interpolated between lengths; else NaN."""
    for before, after in itertools.pairwise(points):
        if before.seconds <= seconds <= after.seconds:
            part = (seconds - before.seconds) / (after.seconds - before.seconds)
            return before.score + part * (after.score - before.score)
    return math.nan


def ratio(rounds: Sequence[Result], start: int, stop: int) -> str:
    """Return K-FAC's seconds relative to Adam's between two steps: the median, and the range."""
    first, last = start // BLOCK, stop // BLOCK
    spent = [{kind: marks[last] - marks[first] for kind, marks in each.items()} for each in rounds]
    ratios = sorted(seconds["kfac"] / seconds["adam"] for seconds in spent)
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


if __name__ == "__main__":
    main()
