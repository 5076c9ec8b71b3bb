"""Time a training step by kind, relative to plain PyTorch SGD in the same run.

    OMP_NUM_THREADS=1 mpirun -n 2 python -m mpi4py benchmarks/step_time.py --model resnet20

Every repetition runs one step of each kind, so that a change of the machine's speed affects all
kinds equally. Medians are over repetitions, of the slowest rank. Averages over intervals combine
the kinds: with (factor_update_steps, inv_update_steps) = (1, 10), nine factor steps and one
refresh. "Preconditioning" is the stage's mean time in ordinary steps. All models are in
channels-last format unless `--contiguous` is given.

At one rank and with `--contiguous`, kfac-pytorch is timed alternately with the library's kinds if
Python finds the package `kfac`. It supports contiguous images only.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import mpikfac
from mpikfac import HybridOpt, Refresh, Strategy
from mpikfac_apps.problems import models

NEVER = 10**9
Step = Callable[[torch.Tensor, torch.Tensor], None]
INTERVALS = ((1, 1), (1, 10), (10, 100))
KINDS = {"ordinary": (NEVER, NEVER), "factors": (1, NEVER), "factors and bases": (1, 1)}
BF16 = torch.bfloat16
ROUNDED = {"estimator": mpikfac.Estimator(statistics_dtype=BF16)}
VARIANTS: dict[str, dict[str, Any]] = {
    "eigen": {"preconditioner": "eigen"},
    "inverse": {},
    "inverse, adam": {"grafting": mpikfac.AdamGrafting(orthogonalize=False)},
    "momentum before": {"grafting": mpikfac.AdamGrafting(momentum=0.9)},
    "bfloat16": ROUNDED | {"preconditioner": mpikfac.Inverse(dtype=BF16)},
    "ekfac": {"preconditioner": "ekfac"},
    "eigen, bfloat16": {"preconditioner": mpikfac.Eigen(dtype=BF16)} | ROUNDED,
    "subsample 1": {"estimator": mpikfac.Estimator(subsample=1)},
    "eigen, delay 1": {"preconditioner": "eigen", "delay": 1},
}


def main() -> None:
    """Print a table of step times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--batch", type=int, default=128, help="images per rank")
    parser.add_argument("--size", type=int, default=32, help="image height and width")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--workers", type=int, help="gradient workers (default: all ranks)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
    parser.add_argument("--contiguous", action="store_true", help="models in NCHW format")
    parser.add_argument("--variants", default="eigen;inverse;bfloat16", help="separated by ;")
    parser.add_argument("--no-bases", action="store_true", help="leave out steps with new bases")
    options = parser.parse_args()
    comm = mpikfac.world()
    torch.manual_seed(comm.rank)
    options.device = mpikfac.device(comm, options.device)
    images = torch.randn(options.batch, 3, options.size, options.size).to(options.device)
    labels = torch.randint(10, (options.batch,)).to(options.device)

    kinds, traces = make_kinds(options, comm)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for repetition in range(options.repetitions + 2):
        for name, step in kinds.items():
            comm.Barrier()
            start = time.perf_counter()
            step(images, labels)
            if options.device.type != "cpu":
                torch.accelerator.synchronize()
            elapsed = comm.allreduce(time.perf_counter() - start, MPI.MAX)
            if repetition >= 2:
                seconds[name].append(elapsed)
    if comm.rank == 0:
        preconditioning = {
            name: trace.seconds["precondition"] / trace.calls["precondition"]
            for name, trace in traces.items()
        }
        medians = {name: statistics.median(s) for name, s in seconds.items()}
        report(options, comm.size, medians, preconditioning)


def make_kinds(
    options: argparse.Namespace, comm: MPI.Intracomm
) -> tuple[dict[str, Step], dict[str, mpikfac.Trace]]:
    """Return a callable per kind of step, each with a model and an optimizer; traces by variant."""
    strategy = Strategy(HybridOpt(grad_workers=options.workers or comm.size))
    model, optimizer = fresh(options)
    baseline = mpikfac.FirstOrderTrainer(model, optimizer, comm)
    kinds = {
        "plain PyTorch SGD": plain(options, comm),
        "SGD": step_of(model, optimizer, baseline.step),
    }
    traces = {}
    for variant in options.variants.split(";"):
        for kind, (factor_update_steps, inv_update_steps) in KINDS.items():
            if options.no_bases and inv_update_steps == 1:
                continue
            model, optimizer = fresh(options)
            settings = {
                "factor_update_steps": factor_update_steps,
                "inv_update_steps": inv_update_steps,
                "damping": 0.03,
            }
            settings |= VARIANTS[variant]
            if "grafting" in settings and settings["grafting"].momentum:
                optimizer.param_groups[0]["momentum"] = 0
            chosen = replace(strategy, refresh=Refresh(staleness=settings.pop("delay", 0)))
            kfac = mpikfac.KFAC(model, optimizer, comm, chosen, **settings)
            kinds[f"{variant}: {kind}"] = step_of(model, optimizer, kfac.step)
            traces.setdefault(variant, kfac.trace)
    if comm.size == 1 and options.contiguous and importlib.util.find_spec("kfac") is not None:
        for kind, every in KINDS.items():
            kinds[f"kfac-pytorch: {kind}"] = peer(options, *every)
    return kinds, traces


def fresh(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same model and optimizer at every call."""
    torch.manual_seed(0)
    model = models.build(options.model, classes=10).to(options.device)
    if not options.contiguous:
        model = model.to(memory_format=torch.channels_last)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, finish: Callable[[], None]) -> Step:
    """Return a training step that ends with `finish`."""

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        finish()

    return step


def plain(options: argparse.Namespace, comm: MPI.Intracomm) -> Step:
    """Return a step of PyTorch alone: one flattened Allreduce of gradients, then the optimizer."""
    model, optimizer = fresh(options)
    parameters = list(model.parameters())

    def finish() -> None:
        flat = torch.cat([p.grad.flatten() for p in parameters]).cpu()
        comm.Allreduce(MPI.IN_PLACE, flat.numpy())
        flat = flat.to(options.device) / comm.size
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad.copy_(part.view_as(p))
        optimizer.step()

    return step_of(model, optimizer, finish)


def peer(options: argparse.Namespace, factor_update_steps: int, inv_update_steps: int) -> Step:
    """Return a step of kfac-pytorch on one rank."""
    from kfac.preconditioner import KFACPreconditioner

    model, optimizer = fresh(options)
    every = {"factor_update_steps": factor_update_steps, "inv_update_steps": inv_update_steps}
    preconditioner = KFACPreconditioner(model, lr=1e-3, **every)

    def finish() -> None:
        preconditioner.step()
        optimizer.step()

    return step_of(model, optimizer, finish)


def report(
    options: argparse.Namespace,
    ranks: int,
    median: dict[str, float],
    preconditioning: dict[str, float],
) -> None:
    """Print medians, ratios to the plain SGD step, and averages over intervals."""
    base = median["plain PyTorch SGD"]

    def line(name: str, seconds: float) -> None:
        print(f"{name:44s} {seconds * 1e3:9.1f} ms {seconds / base:7.3f} x")

    library = MPI.Get_library_version().split(",")[0]
    print(
        f"{options.model} on {options.device}, {options.size} x {options.size}, "
        f"batch {options.batch} per rank, {ranks} ranks, {torch.get_num_threads()} thread(s) each; "
        f"torch {torch.__version__}, Python {platform.python_version()}, {library}"
    )
    for name, seconds in median.items():
        line(name, seconds)
    for variant, seconds in preconditioning.items():
        line(f"{variant}: preconditioning", seconds)
    for variant in [*preconditioning, "kfac-pytorch"]:
        times = [median.get(f"{variant}: {kind}") for kind in KINDS]
        for factor_update_steps, inv_update_steps in INTERVALS if all(times) else ():
            ordinary, factors, refresh = times
            rest = inv_update_steps // factor_update_steps - 1
            average = (
                (inv_update_steps - rest - 1) * ordinary + rest * factors + refresh
            ) / inv_update_steps
            line(f"{variant}: ({factor_update_steps}, {inv_update_steps}) on average", average)


if __name__ == "__main__":
    main()
