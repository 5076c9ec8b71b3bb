"""Measure the peak memory of a rank by kind of training, above plain PyTorch SGD.

    OMP_NUM_THREADS=1 python benchmarks/memory.py --model resnet50 --size 64

Every kind runs in separate processes and takes two steps with new factors and bases. A process's
peak is the peak of the resident set; on a GPU, also the peak of torch's allocations. Plain SGD
averages gradients in place, and therefore needs only model, optimizer and activations.

kfac-pytorch is measured if Python finds the package `kfac`, with its own communication over gloo.
MPIRUN and MPIRUN_FLAGS set the launcher.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import mpikfac
from mpikfac import CommOpt, Strategy
from mpikfac_apps.problems import models

MB = 1e6
Finish = Callable[[], None]
Peaks = dict[str, int]


def main() -> None:
    """Run every kind under mpirun and print a table, or run a single named kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, default=64, help="image height and width")
    parser.add_argument("--batch", type=int, default=32, help="images per rank")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kind", choices=KINDS, help="measure this one, in the present job")
    options = parser.parse_args()
    if options.kind:
        measure(options)
        return
    if importlib.util.find_spec("kfac") is None:
        KINDS.pop("kfac-pytorch")
        print("kfac-pytorch is left out: Python finds no package kfac")
    print(
        f"{options.model}, {options.size}x{options.size}, batch {options.batch} per rank, "
        f"{options.ranks} ranks; torch {torch.__version__}; MB of the highest rank (mean of ranks)"
    )
    base = run("SGD", options.ranks)
    for kind in KINDS:
        peaks = base if kind == "SGD" else run(kind, options.ranks)
        print(f"{kind:26s}{described(peaks, base)}", flush=True)


def run(kind: str, ranks: str) -> list[Peaks]:
    """Return the peaks of every rank of a job of the kind, in bytes."""
    launcher = [os.environ.get("MPIRUN", "mpirun"), *os.environ.get("MPIRUN_FLAGS", "").split()]
    program = [sys.executable, "-m", "mpi4py", __file__, *sys.argv[1:], "--kind", kind]
    job = subprocess.run(
        [*launcher, "-n", ranks, *program], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(job.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> None:
    """Train two steps of a kind; rank 0 prints the peaks of all ranks.

    Collective over: world.
    """
    comm = mpikfac.world()
    device = mpikfac.device(comm, options.device)
    torch.manual_seed(0)
    model = models.build(options.model, classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
    finish, planned = KINDS[options.kind](model, optimizer, comm)
    for _ in range(2):
        images = torch.randn(options.batch, 3, options.size, options.size, device=device)
        labels = torch.randint(10, (options.batch,), device=device)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        finish()
    peaks = comm.gather({"resident": peak_resident()} | peak_allocated() | planned)
    if comm.rank == 0:
        print(json.dumps(peaks))


def plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, comm: MPI.Intracomm
) -> tuple[Finish, Peaks]:
    """Return a step of PyTorch alone."""

    def finish() -> None:
        average(model, comm)
        optimizer.step()

    return finish, {}


def ours(
    reduction: str, model: nn.Module, optimizer: torch.optim.Optimizer, comm: MPI.Intracomm
) -> tuple[Finish, Peaks]:
    """Return a step with COMM-OPT, and the planned bytes."""
    strategy = Strategy(CommOpt(factor_reduction=reduction))
    kfac = mpikfac.KFAC(model, optimizer, comm, strategy, damping=0.03, inv_update_steps=1)
    return kfac.step, {"planned": sum(kfac.plan.memory(comm.rank).values())}


def peer(
    model: nn.Module, optimizer: torch.optim.Optimizer, comm: MPI.Intracomm
) -> tuple[Finish, Peaks]:
    """Return a step of kfac-pytorch with COMM-OPT and default settings."""
    from kfac.preconditioner import KFACPreconditioner

    meeting = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    torch.distributed.init_process_group(
        "gloo", f"file://{meeting}/ranks", world_size=comm.size, rank=comm.rank
    )
    preconditioner = KFACPreconditioner(model, damping=0.03, lr=1e-3)

    def finish() -> None:
        average(model, comm)
        preconditioner.step()
        optimizer.step()

    return finish, {}


KINDS = {
    "SGD": plain,
    "mpikfac": partial(ours, "allreduce"),
    "mpikfac, reduction owners": partial(ours, "reduce_scatter"),
    "kfac-pytorch": peer,
}


def average(model: nn.Module, comm: MPI.Intracomm) -> None:
    """Replace gradients by their means over ranks, one by one in place.

    Collective over: world.
    """
    for parameter in model.parameters():
        parameter.grad /= comm.size
        host = parameter.grad.cpu()  # no copy if the gradient is on the host
        comm.Allreduce(MPI.IN_PLACE, host)
        parameter.grad.copy_(host)


def peak_resident() -> int:
    """Return the bytes of the process's largest resident set."""
    status = Path("/proc/self/status").read_text()  # getrusage's maximum survives an exec
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])


def peak_allocated() -> Peaks:
    """Return torch's largest allocation of GPU memory in bytes; nothing without a GPU."""
    found = torch.accelerator.is_available()
    return {"allocated": torch.accelerator.max_memory_allocated()} if found else {}


def described(peaks: list[Peaks], base: list[Peaks]) -> str:
    """Return peaks in MB, and the difference to plain SGD's peaks."""
    text = ""
    for what in peaks[0]:
        found = [rank[what] / MB for rank in peaks]
        text += f"  {what} {max(found):7.1f}"
        if what != "planned":
            sgd = mean(rank[what] / MB for rank in base)
            text += f", above SGD {max(found) - sgd:7.1f} ({mean(found) - sgd:7.1f})"
    return text


if __name__ == "__main__":
    main()
