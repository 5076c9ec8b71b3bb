"""Time the recording of events: alternating training steps with and without, and a single stage.

    OMP_NUM_THREADS=1 mpirun -n 2 python -m mpi4py benchmarks/trace_cost.py

Steps are K-FAC's steps with new factors and bases, which have the most stages. The order within a
pair of steps alternates. The difference of a pair is smaller than the noise of a step, so the cost
of a single stage, times the number of stages in a step, is the better estimate.
"""

from __future__ import annotations

import argparse
import time
from statistics import median, quantiles

import torch
import torch.nn.functional as F

import mpikfac
from mpikfac_apps.problems import models

STAGES = 20000  # timed without steps, in a single interval


def main() -> None:
    """Print medians of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--batch", type=int, default=128, help="images per rank")
    parser.add_argument("--pairs", type=int, default=40)
    options = parser.parse_args()
    comm = mpikfac.world()
    torch.manual_seed(0)
    images, labels = torch.randn(options.batch, 3, 32, 32), torch.randint(10, (options.batch,))
    model = models.build(options.model, classes=10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    kfac = mpikfac.KFAC(model, optimizer, comm, damping=0.03, inv_update_steps=1)
    trace = kfac.trace

    def seconds(on: bool) -> float:
        """Return seconds of a step with or without recording."""
        trace.record(on)
        comm.Barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        with trace.stage("forward"):
            loss = F.cross_entropy(model(images), labels)
        with trace.stage("backward"):
            loss.backward()
        kfac.step()
        return time.perf_counter() - start

    pairs = []
    for pair in range(options.pairs + 2):
        order = (False, True) if pair % 2 else (True, False)
        pairs.append([taken for _, taken in sorted((on, seconds(on)) for on in order)])
    if comm.rank == 0:
        report(options, comm.size, pairs[2:], len(trace.events) / len(pairs))


def report(
    options: argparse.Namespace, ranks: int, pairs: list[list[float]], stages: float
) -> None:
    """Print the cost by both ways."""
    step = median(off for off, _ in pairs)
    low, middle, high = quantiles((on / off - 1 for off, on in pairs), n=4)
    off, on = by_itself(False), by_itself(True)
    print(
        f"{options.model}, batch {options.batch} per rank, {ranks} ranks, torch {torch.__version__}"
        f"\nstep without events    {step * 1e3:8.1f} ms, {stages:.0f} stages\n"
        f"a pair's difference    {middle:+8.2%} (quartiles {low:+.2%} to {high:+.2%})\n"
        f"a stage without events {off * 1e6:8.2f} us, all of a step's {off * stages / step:.4%}\n"
        f"a stage with them      {on * 1e6:8.2f} us, all of a step's {on * stages / step:.4%}"
    )


def by_itself(on: bool) -> float:
    """Return processor seconds of an empty stage; waiting for a core is left out."""
    trace = mpikfac.Trace(events=on)
    start = time.process_time()
    for _ in range(STAGES):
        with trace.stage("statistics"):
            pass
    return (time.process_time() - start) / STAGES


if __name__ == "__main__":
    main()
