"""Train by any launcher, and print weights as digests: process_group.py DIRECTORY [END].

DIRECTORY is for checkpoints: a run goes on from one that is there, and else writes one. MPI is
hidden from processes that torch.distributed connects. END is what rank 1 does in a step after that:
raise an error, or kill itself.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed

by_torch = "TORCHELASTIC_RUN_ID" in os.environ
if by_torch:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]

import mpikfac  # noqa: E402
from mpikfac import MemOpt, Strategy, Transport  # noqa: E402

STRATEGIES = {
    "overlapped": Strategy(MemOpt(), transport=Transport(fusion=1, overlap=True)),
    "late": "deferred-sharded",
}


def begun(comm, strategy):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.Flatten(), torch.nn.Linear(48, 7), torch.nn.Linear(7, 5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    intervals = {"factor_update_steps": 1, "inv_update_steps": 2}
    return mpikfac.KFAC(model, optimizer, comm, strategy, **intervals)


def train(kfac, comm, steps):
    for step in steps:
        made = torch.Generator().manual_seed(step)
        images, labels = torch.randn(16, 1, 6, 6, generator=made), torch.arange(16) % 5
        images, labels = (part.chunk(comm.size)[comm.rank] for part in (images, labels))
        kfac.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(kfac.model(images), labels).backward()
        kfac.step()


def main(root, end=""):
    if by_torch:
        distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    comm = mpikfac.world()
    if comm.rank == 0:
        print(f"{type(comm).__name__}, with mpi4py: {'mpi4py.MPI' in sys.modules}")
    for name, strategy in STRATEGIES.items():
        kfac = begun(comm, strategy)
        found = mpikfac.find_checkpoint(comm, Path(root) / name)
        if found:
            kfac.load_state_dict(found)
        else:
            train(kfac, comm, range(3))
            mpikfac.save_checkpoint(comm, Path(root) / name, kfac.state_dict(), 3)
        train(kfac, comm, range(3, 6))
        weights = torch.cat([value.flatten() for value in kfac.model.state_dict().values()])
        if comm.rank == 0:
            print(name, hashlib.sha256(weights.numpy().tobytes()).hexdigest(), flush=True)
        kfac.close()
    if end:
        kfac = begun(comm, None)
        with mpikfac.abort_on_error(comm):
            train(kfac, comm, range(1))
            if comm.rank == 1 and end == "raise":
                raise RuntimeError("rank 1 fails")
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            train(kfac, comm, range(1, 3))
    if by_torch:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
