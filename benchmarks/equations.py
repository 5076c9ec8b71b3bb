"""Compare optimizers that solve differential equations at equal CPU seconds, and costs of steps.

    OMP_NUM_THREADS=1 PYTHONPATH=apps python benchmarks/equations.py
    PYTHONPATH=apps python benchmarks/equations.py --known
    OMP_NUM_THREADS=1 PYTHONPATH=apps python benchmarks/equations.py cost
    OMP_NUM_THREADS=1 PYTHONPATH=apps mpirun -n 2 python -m mpi4py benchmarks/equations.py step

The problems, networks and optimizers are those of `mpikfac equations`. With seed 0, optimizers with
a rate run with three rates on each problem, and with other seeds they take the best of these. All
methods start at the same weights and points of a seed. Results are kept in
`results/equations.jsonl` next to this file, one line per run, and are not repeated.

`cost` measures the products of all residuals' gradients, from rows by `torch.func` and from records
of one backward pass: CPU seconds, and the growth of the process's largest size.

`step` measures steps in sample space on the ranks of the job: bytes that ranks send, which must be
those planned, and CPU seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import multiprocessing
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap

import mpikfac
from mpikfac.lab.sample_space.messages import form_of, planned_messages
from mpikfac.lab.sample_space.parameters import Parameters
from mpikfac.lab.sample_space.products import gram
from mpikfac.lab.sample_space.records import record
from mpikfac_apps.lab.equations.equations import Solved, solve
from mpikfac_apps.lab.equations.optimizers import stepper
from mpikfac_apps.lab.equations.problems import PROBLEMS
from mpikfac_apps.lab.equations.task import EquationTask
from mpikfac_apps.text import table

Job = tuple[str, str, int]
"""Problem, setting and seed."""
RESULTS = Path(__file__).parent / "results" / "equations.jsonl"
POINTS, WIDTH, SECONDS = 600, 32, 6.0
RATES = {
    **{"adam": (0.003, 0.01, 0.03), "adam-lbfgs": (0.003, 0.01, 0.03)},
    **{"soap": (0.01, 0.03, 0.1), "kfac": (0.0075, 0.0225, 0.07)},
}
SETTINGS: dict[str, tuple[str, float | None]] = {
    **{"sample-space": ("sample-space", None), "lbfgs": ("lbfgs", None)},
    **{f"{name} {rate:g}": (name, rate) for name, rates in RATES.items() for rate in rates},
}
"""Optimizer and rate."""
METHODS = list(dict.fromkeys(name for name, _ in SETTINGS.values()))
COSTS = ((64, 512), (256, 512), (128, 1024))  # width, and points
STEPPED = ((32, 600), (64, 600), (128, 1200))  # width, and points
STEPS = 10


def main() -> int:
    """Run all missing runs, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", default="race", choices=("race", "cost", "step"))
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--known", action="store_true", help="print what is known, run nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("mpikfac").setLevel(logging.ERROR)  # K-FAC warns of derivatives
    if options.what == "cost":
        costs()
    elif options.what == "step":
        steps(mpikfac.world())
    elif options.known:
        report(known())
    else:
        for name in METHODS:  # a process's first steps take longer
            run("poisson", name, None, 0, points=16, seconds=0.01)
        for seed, problem in itertools.product(options.seeds, options.problems):
            for setting in settings_of(problem, seed):
                if (problem, setting, seed) not in known():
                    keep((problem, setting, seed), run(problem, *SETTINGS[setting], seed))
    return 0


# -- the race --------------------------------------------------------------------------------------


def run(
    problem: str,
    optimizer: str,
    rate: float | None,
    seed: int,
    points: int = POINTS,
    seconds: float = SECONDS,
) -> list[Solved]:
    """Return the progress of a run at ten times."""
    comm = mpikfac.world()
    task = EquationTask(PROBLEMS[problem], points, WIDTH, seed)
    return list(solve(task, stepper(optimizer, task, rate, comm), seconds, comm))


def keep(job: Job, progress: Sequence[Solved]) -> None:
    """Append a result to the file."""
    end = progress[-1]
    result = {
        "error": end.error,
        "loss": end.loss,
        "steps": end.steps,
        "seconds": round(end.seconds, 3),
        "errors": [float(f"{at.error:.3g}") for at in progress],
        "coefficients": end.coefficients,
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps({"job": job, "result": result}) + "\n")
    print(
        *job, f"{end.error:.2e}", end.steps, f"{end.seconds:.1f} s", *end.coefficients, flush=True
    )


def known() -> dict[Job, dict[str, float]]:
    """Return all known results."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {tuple(row["job"]): row["result"] for row in map(json.loads, lines)}


def report(results: Mapping[Job, Mapping[str, float]]) -> None:
    """Print the median and the worst error of each method on each problem, with its best rate."""
    rows = [("L2 error: median (worst)", *METHODS)]
    for problem in PROBLEMS:
        cells = (errors(results, problem, setting) for setting in settings_of(problem, seed=1))
        rows.append((problem, *cells))
    print("\n".join(table(rows)), end="\n\n")
    for job, result in results.items():
        if job[:2] == ("inverse", "sample-space"):
            print("coefficients, seed", job[2], result["coefficients"])


def settings_of(problem: str, seed: int) -> list[str]:
    """Return all settings for seed 0; for others, each method's best with seed 0."""
    if seed == 0:
        return list(SETTINGS)
    results = known()
    tried = [setting for setting in SETTINGS if (problem, setting, 0) in results]

    def error(setting: str) -> float:
        return results[problem, setting, 0]["error"]

    return [
        min((each for each in tried if SETTINGS[each][0] == method), key=error)
        for method in METHODS
    ]


def errors(results: Mapping[Job, Mapping[str, float]], problem: str, setting: str) -> str:
    """Return the errors of a setting as a text, with its rate and the number of seeds."""
    runs = [run["error"] for job, run in results.items() if job[:2] == (problem, setting)]
    rate = "" if SETTINGS[setting][1] is None else f" {SETTINGS[setting][1]:g}"
    return f"{statistics.median(runs):.1e} ({max(runs):.1e}){rate}, {len(runs)}"


# -- the cost of J J^T -----------------------------------------------------------------------------


def laplacian(model: nn.Module, points: Tensor) -> Tensor:
    """Return the Laplacian by jets, `[points]`."""
    return model(mpikfac.lab.jet(points)).second.sum(1)


def from_records(model: nn.Module, points: Tensor) -> Tensor:
    """Return J J^T from the vectors that layers receive, without J."""
    term = mpikfac.lab.Term(laplacian, points)
    rows, _ = record(model, Parameters(model, ()), term, 1.0, False)
    parts = [rows]
    return gram(parts, parts)


def from_rows(second: Callable[..., Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return a function that returns J J^T from J, one gradient of all weights per point."""

    def products(model: nn.Module, points: Tensor) -> Tensor:
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def residual(weights: dict[str, Tensor], point: Tensor) -> Tensor:
            return second(lambda x: functional_call(model, weights, x)[0], point)

        rows = vmap(grad(residual), (None, 0))(weights, points)
        matrix = torch.cat([row.flatten(1) for row in rows.values()], 1)
        return matrix @ matrix.T

    return products


def by_hessian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the trace of the Hessian."""
    return hessian(function)(x).trace()


def by_jvp(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the sum of second derivatives by nested forward mode."""

    def second(axis: Tensor) -> Tensor:
        first = lambda x: jvp(function, (x,), (axis,))[1]  # noqa: E731
        return jvp(first, (x,), (axis,))[1]

    return sum(second(axis) for axis in torch.eye(len(x), dtype=x.dtype))


WAYS = {
    "hessian of torch.func": from_rows(by_hessian),
    "nested jvp of torch.func": from_rows(by_jvp),
    "records": from_records,
}


def cost(way: str, width: int, points: int) -> tuple[float, float]:
    """Return the CPU seconds of J J^T and the growth of the process's size, in MiB."""
    torch.set_num_threads(1)
    small, large = (EquationTask(PROBLEMS["poisson"], count, width, 0) for count in (8, points))
    WAYS[way](small.model, small.terms[0].points)  # the first call takes longer
    before, start = peak(), time.process_time()
    WAYS[way](large.model, large.terms[0].points)
    return time.process_time() - start, peak() - before


def peak() -> float:
    """Return the largest size of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def costs() -> None:
    """Print the costs of all ways, each measured in three processes of their own."""
    rows = [("width, weights, points", *(f"{way}: seconds, MiB" for way in WAYS))]
    for width, points in COSTS:
        task = EquationTask(PROBLEMS["poisson"], points, width, 0)
        weights = sum(parameter.numel() for parameter in task.model.parameters())
        cells = []
        for way in WAYS:
            found = [in_process(way, width, points) for _ in range(3)]
            seconds, size = (statistics.median(values) for values in zip(*found))
            cells.append(f"{seconds:.2f}, {size:.0f}")
        rows.append((f"{width}, {weights:,}, {points:,}", *cells))
        print(*rows[-1], sep="; ", flush=True)
    print("\n".join(table(rows)))


def in_process(way: str, width: int, points: int) -> tuple[float, float]:
    """Return the cost in a copy of this process, which has computed nothing."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(cost, way, width, points).result()


# -- steps on several ranks ------------------------------------------------------------------------


def steps(comm: mpikfac.comm.Comm) -> None:
    """Print what a step sends and takes, by width and points.

    Collective over: comm.
    """
    for width, points in STEPPED:
        task = EquationTask(PROBLEMS["poisson"], points, width, 0, comm.rank, comm.size)
        space = mpikfac.lab.SampleSpace(task.model, task.terms, comm=comm)
        for _ in range(3):  # the first step is checked
            space.step()
        space.trace.clear()
        start = time.process_time()
        tries = sum(space.step().tries for _ in range(STEPS))
        seconds = comm.gather((time.process_time() - start) / STEPS)
        planned = bytes_planned(task, comm, tries, space.trace.calls["losses"] + STEPS)
        assert planned == {stage: n for stage, n in space.trace.sent.items() if n}, planned
        sent = comm.gather(planned)
        if comm.rank == 0:
            busiest = max(sent, key=lambda of_rank: sum(of_rank.values()))
            parts = ", ".join(f"{stage} {n / STEPS / 2**20:.2f}" for stage, n in busiest.items())
            print(
                f"{comm.size} ranks; width {width}, {points:,} points; "
                f"{sum(busiest.values()) / STEPS / 2**20:.2f} MiB ({parts}); of J J^T by columns "
                f"{by_columns(task, comm.size) / 2**20:.2f}; CPU seconds "
                f"{statistics.mean(seconds):.3f} of a rank, {max(seconds):.3f} of the slowest",
                flush=True,
            )
        space.close()


def bytes_planned(
    task: EquationTask, comm: mpikfac.comm.Comm, tries: int, losses: int
) -> dict[str, int]:
    """Return the bytes that this rank sends in `STEPS` steps, by stage.

    Collective over: comm.

    Args:
        tries, losses: their numbers in all steps.
    """
    parameters = Parameters(task.model)
    own = [record(task.model, parameters, term, 1.0, False)[0] for term in task.terms]
    forms, shapes = comm.allgather([form_of(rows) for rows in own]), parameters.shapes
    found: Counter[str] = Counter()
    for times, numbers in ((STEPS - 1, (0, 0)), (1, (tries, losses))):
        several = dict(zip(("tries", "losses"), numbers))
        for message in planned_messages(forms, shapes, comm.rank, **several, acceleration=True):
            found[message.stage] += times * message.bytes
    return {stage: n for stage, n in found.items() if n}


def by_columns(task: EquationTask, ranks: int) -> float:
    """Return the bytes that a rank would send if each multiplied columns of J for all residuals.

    Ranks exchange rows for columns, and sum half of their symmetric products for rank 0's solution.
    """
    residuals, weights = sum(task.counts), Parameters(task.model).size
    columns, products = residuals * weights / ranks, residuals**2 / 2
    return 8 * (columns + products) * (ranks - 1) / ranks


if __name__ == "__main__":
    sys.exit(main())
