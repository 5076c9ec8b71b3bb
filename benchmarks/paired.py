"""Compare CPU time, wall time and peak memory of a training step between two checkouts.

    python benchmarks/paired.py OLD NEW [--rounds 7] [--ranks 1]

The checkouts alternate, each in a separate job with its library: ResNet-20 with K-FAC takes 2 steps
that do not count, then `--steps` steps with new factors at each step and new bases at every 10th.
On emulated hosts (jobs/emulated_cluster.sh), with overlapped messages:

    export MPIRUN=env MPIRUN_FLAGS="-u MPIRUN bash $PWD/jobs/emulated_cluster.sh run"
    python benchmarks/paired.py OLD NEW --ranks 4 --strategy spd-kfac --batch 32

Results are those of the rank with the most: CPU time and wall time of a mean step, and the largest
resident set of the process. The ratio is the median over rounds, and in brackets minimum and
maximum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from checkouts import run_in
from memory import MB, peak_resident
from mpi4py import MPI
from step_time import fresh, step_of
from training import by_turns

import mpikfac

FACTOR_EVERY, BASIS_EVERY = 1, 10
Costs = dict[str, float]


def main() -> None:
    """Print the costs of both checkouts and their ratios, or measure a turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="OLD NEW")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20, help="of a turn; a multiple of 10")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--batch", type=int, default=64, help="images per rank")
    parser.add_argument("--strategy", default="comm-opt", help="a named strategy")
    parser.add_argument("--turn", type=Path, help="measure this checkout, in the present job")
    options = parser.parse_args()
    if options.turn:
        measure(options)
        return
    places = {}
    for name, place in zip(("old", "new"), options.checkouts):
        places[name] = place.resolve()
        if not (place / "mpikfac" / "__init__.py").is_file():
            sys.exit(
                f"{place} is no checkout of mpikfac: name a folder that holds mpikfac/ and apps/"
            )
    turns = by_turns(lambda name: turn(places[name], options.ranks), tuple(places), options.rounds)
    report(options, turns)


def turn(checkout: Path, ranks: int) -> Costs:
    """Return the costs of a turn of a checkout."""
    job = run_in(checkout, ranks, __file__, *sys.argv[1:], "--turn", str(checkout), output=True)
    costs: Costs = json.loads(job.stdout.splitlines()[-1])
    return costs


def measure(options: argparse.Namespace) -> None:
    """Train, and print the costs of a step on rank 0.

    Collective over: world.
    """
    comm = mpikfac.world()
    if options.turn not in Path(mpikfac.__file__).parents:
        sys.exit(f"{mpikfac.__file__} is not the library of {options.turn}")
    options.device, options.contiguous = "cpu", False
    model, optimizer = fresh(options)
    strategy, _ = mpikfac.get_strategy(options.strategy)
    kfac = mpikfac.KFAC(
        *(model, optimizer, comm, strategy),
        damping=0.03,
        factor_update_steps=FACTOR_EVERY,
        inv_update_steps=BASIS_EVERY,
    )
    step = step_of(model, optimizer, kfac.step)
    torch.manual_seed(comm.rank)
    images = torch.randn(options.batch, 3, 32, 32)
    labels = torch.randint(10, (options.batch,))
    for count in (2, options.steps):
        comm.Barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(count):
            step(images, labels)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    costs = {
        "CPU time, ms": 1e3 * cpu / options.steps,
        "wall time, ms": 1e3 * wall / options.steps,
        "peak memory, MB": peak_resident() / MB,
    }
    costs = {name: comm.allreduce(cost, MPI.MAX) for name, cost in costs.items()}
    if comm.rank == 0:
        print(json.dumps(costs))


def report(options: argparse.Namespace, turns: dict[str, list[Costs]]) -> None:
    """Print a table of medians, and of ratios of rounds."""
    print(
        f"{options.model}, {options.strategy}, batch {options.batch} per rank, "
        f"{options.ranks} ranks, "
        f"({FACTOR_EVERY}, {BASIS_EVERY}), {options.steps} steps, {options.rounds} rounds; "
        f"torch {torch.__version__}\n\n"
        "| of a step | old | new | new / old |\n|---|---|---|---|"
    )
    for name in turns["old"][0]:
        before, after = ([costs[name] for costs in turns[side]] for side in ("old", "new"))
        ratios = [late / early for early, late in zip(before, after)]
        print(
            f"| {name} | {statistics.median(before):.1f} | {statistics.median(after):.1f} "
            f"| {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |"
        )


if __name__ == "__main__":
    main()
