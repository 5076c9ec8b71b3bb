"""Time checkpoints of ResNet-50 with factors and inverses, compared to plain writes and copies.

    OMP_NUM_THREADS=1 mpirun -n 2 python -m mpi4py benchmarks/checkpoint.py --root DIRECTORY

A plain write is a rank's part of the bytes as a single `write` and `fsync` to a new file, on all
ranks at once; then the previous file is deleted, as `save_checkpoint` with `keep=1` deletes the
previous checkpoint. Both therefore find the same free memory for the system's cache. Training means
steps without refreshes. The cost to training is the additional time of the same number of steps
while a checkpoint is written. Seconds are those of the slowest rank, medians over the repetitions.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from mpi4py import MPI

import mpikfac
from mpikfac_apps.problems import models

MB = 1e6
Body = Callable[[], Any]


def main() -> None:
    """Print the table.

    Collective over: world.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", required=True, type=Path, help="a directory on the disk to test")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, default=64, help="image height and width")
    parser.add_argument("--batch", type=int, default=16, help="images per rank")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    comm = mpikfac.world()
    root = options.root / "benchmark-checkpoint"
    try:
        trainer, step = make_training(options, comm)
        share = measure_saving(comm, trainer.state_dict(), root, options.repeat)
        measure_writer(comm, trainer, step, root, share, options.repeat)
        again = [seconds(comm, lambda: resume(comm, trainer, root)) for _ in range(options.repeat)]
        tell(comm, f"restart          {median(again):6.3f} s, all digests checked")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def make_training(options: argparse.Namespace, comm: MPI.Intracomm) -> tuple[mpikfac.KFAC, Body]:
    """Return a trainer with factors and inverses, and a step that refreshes neither.

    Collective over: comm.
    """
    torch.manual_seed(0)
    model = models.build(options.model, classes=1000).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)  # weights stay finite
    often = {"factor_update_steps": 10**6, "inv_update_steps": 10**6}
    trainer = mpikfac.KFAC(model, optimizer, comm, damping=0.03, **often)
    images = torch.randn(options.batch, 3, options.size, options.size)
    labels = torch.randint(1000, (options.batch,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        trainer.step()

    step()
    return trainer, step


def measure_saving(comm: MPI.Intracomm, items: Any, root: Path, repeat: int) -> int:
    """Print `save_checkpoint` compared to plain writes; return the bytes of this rank's part.

    Collective over: comm.
    """
    before = peak(reset=True)
    saved = mpikfac.checkpoint.read_checkpoint(mpikfac.save_checkpoint(comm, root, items, 0))
    more = comm.allreduce(peak() - before, MPI.MAX)
    share = saved.shards[f"shard-{comm.rank}.h5"]["size"]
    content = torch.empty(share, dtype=torch.uint8).random_().numpy()
    total = comm.allreduce(share) / MB
    file = root / f"plain-{comm.rank}"
    plain, save = [], []
    for number in range(repeat + 1):
        plain.append(seconds(comm, lambda: write_new(file, content)))
        step = 1 + number
        save.append(seconds(comm, lambda: mpikfac.save_checkpoint(comm, root, items, step, keep=1)))  # noqa: B023
    file.unlink()
    del plain[0], save[0]  # the first has no file to delete
    ratio = median(p / s for p, s in zip(plain, save))
    tell(comm, f"{total:.0f} MB in {len(saved)} items on {comm.size} ranks, {root.parent}")
    tell(comm, f"plain write      {median(plain):6.3f} s  {total / median(plain):6.0f} MB/s")
    tell(comm, f"save_checkpoint  {median(save):6.3f} s  {total / median(save):6.0f} MB/s")
    tell(comm, f"  rate against the plain write: {ratio:.2f} (median of pairs)")
    tell(comm, f"  memory at its peak: {more / MB:.0f} MB per rank above that before")
    return share


def measure_writer(
    comm: MPI.Intracomm, trainer: Any, step: Body, root: Path, share: int, repeat: int
) -> None:
    """Print the cost of a `CheckpointWriter` to training.

    Collective over: comm.
    """
    content, copy = torch.ones(share // 4), torch.ones(share // 4)
    copies = [seconds(comm, lambda: copy.copy_(content)) for _ in range(repeat)]
    alone = median(seconds(comm, step) for _ in range(2 * repeat))
    writer = mpikfac.CheckpointWriter(comm, root)
    begins, steps, losses, delays = [], [], [], []
    for number in range(repeat + 1):
        start = time.perf_counter()
        begins.append(seconds(comm, lambda: writer.begin(trainer.state_dict(), 100 + number)))  # noqa: B023
        begun, count = time.perf_counter(), 0
        while not comm.allreduce(writer.written, MPI.LAND):
            step()
            count += 1
        writer.commit()
        now = time.perf_counter()
        steps.append(count)
        delays.append(now - start)
        losses.append(now - begun - count * alone)
    tell(comm, f"plain copy       {median(copies):6.3f} s")
    tell(comm, f"begin            {median(begins[1:]):6.3f} s; the first time {begins[0]:.3f} s")
    tell(comm, f"  committed {median(delays):.2f} s later; {median(steps)} steps of {alone:.3f} s")
    tell(comm, f"  lost {median(losses):.2f} s meanwhile")


def resume(comm: MPI.Intracomm, trainer: Any, root: Path) -> None:
    """Resume the trainer from the newest checkpoint.

    Collective over: comm.
    """
    trainer.load_state_dict(mpikfac.find_checkpoint(comm, root))


def write_new(path: Path, content: Any) -> None:
    """Write and fsync a new file, and replace the previous one by it."""
    new = path.with_suffix(".new")
    with open(new, "wb", buffering=0) as file:
        done = 0
        while done < len(content):  # Linux writes at most 2 GiB per call
            done += file.write(content[done:])
        os.fsync(file.fileno())
    new.replace(path)


def seconds(comm: MPI.Intracomm, body: Body) -> float:
    """Return the time of the slowest rank.

    Collective over: comm.
    """
    comm.Barrier()
    start = time.perf_counter()
    body()
    return comm.allreduce(time.perf_counter() - start, MPI.MAX)


def peak(reset: bool = False) -> int:
    """Return the bytes of the process's largest resident set since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])


def tell(comm: MPI.Intracomm, line: str) -> None:
    """Print the line on rank 0."""
    if comm.rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
