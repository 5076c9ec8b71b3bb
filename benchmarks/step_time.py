"""Time of a training step by kind, against plain PyTorch SGD in the same run.

    OMP_NUM_THREADS=1 mpirun -n 2 python -m mpi4py benchmarks/step_time.py --model resnet20

Every repetition runs one step of each kind in turn, so that a drift of the machine's speed falls on
all of them; medians are over repetitions, of the slowest rank. Averages over intervals are composed
from the kinds: with (factor_every, basis_every) = (1, 10), nine factor steps and one refresh.

At one rank kfac-pytorch is timed in turn with the others if Python finds it (package `kfac`).
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import mpikfac
from mpikfac_apps import models

NEVER = 10**9
Step = Callable[[torch.Tensor, torch.Tensor], None]
INTERVALS = ((1, 1), (1, 10), (10, 100))


def main() -> None:
    """Prints a table of step times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--batch", type=int, default=128, help="images per rank")
    parser.add_argument("--size", type=int, default=32, help="image height and width")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--workers", type=int, help="gradient workers (default: all ranks)")
    options = parser.parse_args()
    comm = mpikfac.world()
    torch.manual_seed(comm.rank)
    images = torch.randn(options.batch, 3, options.size, options.size)
    labels = torch.randint(10, (options.batch,))

    kinds = make_kinds(options, comm)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for repetition in range(options.repetitions + 2):
        for name, step in kinds.items():
            comm.Barrier()
            start = time.perf_counter()
            step(images, labels)
            elapsed = comm.allreduce(time.perf_counter() - start, MPI.MAX)
            if repetition >= 2:
                seconds[name].append(elapsed)
    if comm.rank == 0:
        report(options, comm.size, {name: statistics.median(s) for name, s in seconds.items()})


def make_kinds(options: argparse.Namespace, comm: MPI.Intracomm) -> dict[str, Step]:
    """One callable per kind of step, each with its own model and optimizer."""
    strategy = mpikfac.Strategy.hybrid(comm.size, workers=options.workers or comm.size)

    def ours(factor_every: int, basis_every: int) -> Step:
        model, optimizer = fresh(options.model)
        every = {"factor_every": factor_every, "basis_every": basis_every}
        kfac = mpikfac.KFAC(model, optimizer, comm, strategy, damping=0.03, **every)
        return step_of(model, optimizer, kfac.step)

    model, optimizer = fresh(options.model)
    baseline = mpikfac.DataParallel(model, optimizer, comm)
    kinds = {
        "plain PyTorch SGD": plain(options.model, comm),
        "SGD": step_of(model, optimizer, baseline.step),
        "K-FAC, ordinary": ours(NEVER, NEVER),
        "K-FAC, factors": ours(1, NEVER),
        "K-FAC, factors and bases": ours(1, 1),
    }
    if comm.size == 1 and importlib.util.find_spec("kfac") is not None:
        kinds |= {
            "kfac-pytorch, ordinary": peer(options.model, NEVER, NEVER),
            "kfac-pytorch, factors": peer(options.model, 1, NEVER),
            "kfac-pytorch, both": peer(options.model, 1, 1),
        }
    return kinds


def fresh(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model and optimizer at every call."""
    torch.manual_seed(0)
    model = models.build(name, classes=10)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, finish: Callable[[], None]) -> Step:
    """A training step that ends with `finish`."""

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        finish()

    return step


def plain(name: str, comm: MPI.Intracomm) -> Step:
    """PyTorch alone: one flattened Allreduce of the gradients, then the optimizer."""
    model, optimizer = fresh(name)
    parameters = list(model.parameters())

    def finish() -> None:
        flat = torch.cat([p.grad.view(-1) for p in parameters])
        comm.Allreduce(MPI.IN_PLACE, flat.numpy())
        flat /= comm.size
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad.copy_(part.view_as(p))
        optimizer.step()

    return step_of(model, optimizer, finish)


def peer(name: str, factor_every: int, basis_every: int) -> Step:
    """kfac-pytorch on one rank."""
    from kfac.preconditioner import KFACPreconditioner

    model, optimizer = fresh(name)
    every = {"factor_update_steps": factor_every, "inv_update_steps": basis_every}
    preconditioner = KFACPreconditioner(model, lr=1e-3, **every)

    def finish() -> None:
        preconditioner.step()
        optimizer.step()

    return step_of(model, optimizer, finish)


def report(options: argparse.Namespace, ranks: int, median: dict[str, float]) -> None:
    """Prints medians, ratios to the plain SGD step, and averages over intervals."""
    base = median["plain PyTorch SGD"]
    print(
        f"{options.model}, batch {options.batch} per rank, {ranks} ranks, "
        f"{torch.get_num_threads()} thread(s) each; torch {torch.__version__}, "
        f"Python {platform.python_version()}, {MPI.Get_library_version().split(',')[0]}"
    )
    for name, seconds in median.items():
        print(f"{name:36s} {seconds * 1e3:9.1f} ms {seconds / base:6.2f} x")
    times = list(median.values())[2:]
    for who, kinds in (("K-FAC", times[:3]), ("kfac-pytorch", times[3:])):
        for factor_every, basis_every in INTERVALS if kinds else ():
            ordinary, factors, refresh = kinds
            rest = basis_every // factor_every - 1
            average = ((basis_every - rest - 1) * ordinary + rest * factors + refresh) / basis_every
            name = f"{who} ({factor_every}, {basis_every}) on average"
            print(f"{name:36s} {average * 1e3:9.1f} ms {average / base:6.2f} x")


if __name__ == "__main__":
    main()
