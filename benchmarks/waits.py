"""Count the waits of the host and the kernels of K-FAC's steps, by kind of step.

    python tests/emulated/build.py
    PYTHONPATH=tests/emulated OMP_NUM_THREADS=1 python benchmarks/waits.py resnet20 inverse eigen

On the emulated GPU, the lines also show where the host waits. On a real GPU (without `PYTHONPATH`),
torch's profiler counts the calls of the driver.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from timing import COUNTS, calls
from torch.profiler import profile

import mpikfac
from mpikfac_apps.problems import models

KINDS = {5: "ordinary", 6: "with factors", 4: "with decompositions"}


def main() -> None:
    """Print a line for each preconditioner and kind of step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("preconditioners", nargs="+")
    parser.add_argument("--size", type=int, default=32, help="pixels of a side of the images")
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    count = emulated if "emulated" in sys.modules else profiled
    for preconditioner in options.preconditioners:
        for kind, found in count(options, preconditioner):
            print(f"{options.model} {preconditioner}, {kind}: {found}", flush=True)


def emulated(options: argparse.Namespace, preconditioner: str) -> Iterator[tuple[str, str]]:
    """Yield the kinds of steps and their counts on the emulated GPU."""
    from counting import steps_of  # of tests/emulated

    steps = steps_of(options.model, options.size, options.batch, preconditioner=preconditioner)
    for kind, step in steps.items():
        waits = ", ".join(f"{count} x {where}" for where, count in step.waits.items())
        counts = f"{step.kernels} kernels, {step.of_model} of them in the passes"
        yield kind, f"{counts}; {step.waits.total()} waits: {waits}"


def profiled(options: argparse.Namespace, preconditioner: str) -> Iterator[tuple[str, str]]:
    """Yield the kinds of steps and their counts on a real GPU."""
    comm = mpikfac.world()
    device = mpikfac.device(comm)
    torch.manual_seed(0)
    model = models.build(options.model, classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kfac = mpikfac.KFAC(
        model,
        optimizer,
        comm,
        factor_update_steps=2,
        inv_update_steps=4,
        preconditioner=preconditioner,
    )
    images = torch.randn(options.batch, 3, options.size, options.size, device=device)
    labels = torch.randint(10, (options.batch,), device=device)
    for step in range(max(KINDS) + 1):
        optimizer.zero_grad()
        with profile() as profiler:
            F.cross_entropy(model(images), labels).backward()
            kfac.step()
        if step in KINDS:
            yield KINDS[step], shown(calls(Counter(event.name for event in profiler.events())))


def shown(counts: Counter[str]) -> str:
    """Return the counts of launches, copies and waits as text."""
    return ", ".join(f"{counts[what]} {what}" for what in COUNTS)


if __name__ == "__main__":
    main()
