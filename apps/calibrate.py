"""Measures the machine that it runs on, for `mpikfac simulate`: messages and computations.

    mpirun -n 4 python -m mpi4py apps/calibrate.py --out machine.json --model resnet20

Everything is measured while all ranks do the same, as in training: ranks may share cores, and
communicators the link of a node. It runs on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpikfac
from mpikfac_apps import models, record, show_plan
from mpikfac_apps.command import Parser
from mpikfac_apps.train_cnn import share_cores

SIZES = [2**k for k in range(10, 27, 2)]  # bytes of a message, 1 KiB to 64 MiB
ORDERS = [2**k for k in range(5, 13)]  # of factors and products, 32 to 4096
LONGEST = 1.0  # seconds after which no larger message or factor is tried
BUDGET = 0.1  # seconds for the repetitions of one measurement
STEPS_BUDGET = 15.0  # seconds for the steps of one network
STAGE = "calibrate"


class Strict(Parser):
    """A parser for one rank of many, which tells the others what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Raises ValueError."""
        raise ValueError(message)


def main(argv: list[str] | None = None) -> int:
    """Measures and writes the file; the exit code.

    Collective over: world.

    Raises:
        SystemExit: code 2 after one line about what the user can mend.
    """
    comm = mpikfac.world()
    with mpikfac.ending(comm):
        options = read_options(comm, argv)
        if options is None:
            return 0
        machine = measured(comm, options)
        with mpikfac.together(comm, f"out={options.out}"):
            if comm.rank == 0:
                options.out.write_text(machine.to_json())
    if comm.rank == 0:
        print(f"{options.out}: {machine.name}")
    return mpikfac.leaving(0)


def read_options(comm: Any, argv: list[str] | None) -> argparse.Namespace | None:
    """Rank 0's options on every rank; None if it was asked for help only.

    Collective over: comm.
    """
    options = None
    with mpikfac.together(comm, "options"):
        if comm.rank == 0:
            try:
                options = parse(argv)
                if not options.out.parent.is_dir():
                    raise ValueError(f"--out {options.out}: {options.out.parent} is no directory")
            except SystemExit as leave:
                if leave.code:
                    raise
        if comm.size == 1:
            raise ValueError("1 rank sends no messages; start it under mpirun with 2 or more")
    return comm.bcast(options)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options, checked one by one."""
    parser = Strict(prog="mpikfac calibrate", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--model", type=names, default=["resnet20"], help="such as resnet20,resnet32"
    )
    parser.add_argument("--batch-per-rank", type=show_plan.count, default=32, help="images")
    return parser.parse_args(argv)


def names(text: str) -> list[str]:
    """Names of networks, separated by commas."""
    for name in text.split(","):
        if name not in models.MODELS:
            raise argparse.ArgumentTypeError(
                f"model={name!r} is unknown; try one of {', '.join(models.MODELS)}"
            )
    return text.split(",")


def measured(comm: Any, options: argparse.Namespace) -> mpikfac.Machine:
    """The machine, as these ranks see it.

    Collective over: comm.
    """
    hosts = share_cores(comm, None)
    samples = [sample for kind in groups(comm) for sample in message_samples(comm, hosts, *kind)]
    levels = [mpikfac.level_of(s) for s in samples if s.primitive == "Allgatherv" and s.nodes == 1]
    across = [mpikfac.level_of(s) for s in samples if s.primitive == "Allgatherv" and s.nodes > 1]
    return mpikfac.Machine(
        name=f"{comm.size} ranks on {', '.join(sorted(set(hosts)))}",
        inside=(levels or across)[-1],
        between=across[-1] if across else None,
        ranks_per_node=max(map(hosts.count, hosts)) if across else None,
        samples=tuple(samples),
        decompositions={
            "inverse": ladder(comm, lambda a: mpikfac.damped_inverse(a, 0.03)),
            "eigen": ladder(comm, mpikfac.eigenbasis),
        },
        products=tuple(
            (order, 2 * order**3 / seconds) for order, seconds in ladder(comm, lambda a: a @ a)
        ),
        networks=tuple(network(comm, name, options.batch_per_rank) for name in options.model),
        about=record.environment(hosts, torch.device("cpu")),
    )


# -- messages ----------------------------------------------------------------------------------


def groups(comm: Any) -> Iterator[tuple[int, int]]:
    """Sizes of communicators and the distance of their ranks: rows and columns of grids."""
    for size in mpikfac.divisors(comm.size)[1:]:
        for distance in sorted({1, comm.size // size}):
            yield size, distance


def message_samples(comm: Any, hosts: list[str], size: int, distance: int) -> list[mpikfac.Sample]:
    """Each collective, while all groups of `size` ranks, `distance` apart, do it at once.

    Collective over: comm.
    """
    colors = [rank // size if distance == 1 else rank % distance for rank in range(comm.size)]
    hosts_of = {c: {host for host, of in zip(hosts, colors) if of == c} for c in colors}
    nodes = max(map(len, hosts_of.values()))
    if distance > 1 and nodes == 1:
        return []  # like neighbours
    sharing = max(sum(host in found for found in hosts_of.values()) for host in hosts)
    grid = mpikfac.Grid(comm.Split(colors[comm.rank], comm.rank), 1, mpikfac.Trace())
    primitives = ["Allreduce", "Reduce_scatter", "Alltoall", "Allgatherv", "Reduce", "Bcast"]
    primitives += ["Send"] if size == 2 else []
    return [
        mpikfac.Sample(
            primitive, size, nodes, sharing if nodes > 1 else 1, curve(comm, grid, primitive)
        )
        for primitive in primitives
    ]


def curve(comm: Any, grid: mpikfac.Grid, primitive: str) -> tuple[tuple[float, float], ...]:
    """Bytes and seconds of a collective of all groups, up to where it takes long.

    Collective over: comm.
    """
    points: list[tuple[float, float]] = []
    for size in SIZES:
        seconds = seconds_of(comm, collective(grid, primitive, size))
        points.append((size, seconds / 2 if primitive == "Send" else seconds))
        if seconds > LONGEST:
            break
    return tuple(points)


def collective(grid: mpikfac.Grid, primitive: str, size: int) -> Callable[[], object]:
    """The work of one collective over a buffer of `size` bytes, done as in training."""
    group = grid.world
    flat = torch.zeros(size // 4)
    if primitive == "Send":
        return lambda: there_and_back(group, flat.numpy())
    bounds = [len(flat) * rank // group.size for rank in range(group.size + 1)]
    in_parts = primitive in ("Reduce_scatter", "Alltoall", "Allgatherv")
    spans = tuple(zip(bounds, bounds[1:])) if in_parts else ((0, len(flat)),)
    message = mpikfac.Message(STAGE, primitive, "world", spans, 0, size, size, size)
    return lambda: grid.exchange([message], flat)


def there_and_back(pair: Any, buffer: Any) -> None:
    """Sends a message to the other rank of two, which returns it."""
    if pair.rank == 0:
        pair.Send(buffer, dest=1)
        pair.Recv(buffer, source=1)
    else:
        pair.Recv(buffer, source=0)
        pair.Send(buffer, dest=0)


# -- computations --------------------------------------------------------------------------------


def ladder(comm: Any, work: Callable[[Tensor], object]) -> tuple[tuple[float, float], ...]:
    """Orders and seconds of what is done to a factor, up to where it takes long.

    Collective over: comm.
    """
    points: list[tuple[float, float]] = []
    for order in ORDERS:
        a = torch.randn(order, 2 * order)
        factor = a @ a.T / (2 * order)
        points.append((order, seconds_of(comm, lambda: work(factor))))  # noqa: B023 (used at once)
        if 8 * points[-1][1] > LONGEST:
            break
    return tuple(points)


def network(comm: Any, name: str, batch: int) -> mpikfac.Network:
    """A network's seconds, of steps that each rank takes by itself, at the same time.

    Every other step takes new factors; the first one, with the decompositions, does not count.

    Collective over: comm.
    """
    classes, channels, size = image_shape(name)
    torch.manual_seed(0)
    model = models.build(name, classes, channels).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9, weight_decay=5e-4)
    alone = comm.Split(comm.rank)
    kfac = mpikfac.KFAC(model, optimizer, alone, damping=0.03, factor_every=2, basis_every=10**9)
    images = torch.randn(batch, channels, size, size)
    labels = torch.randint(classes, (batch,))
    steps: list[dict[str, float]] = []
    deadline = time.monotonic() + STEPS_BUDGET
    while len(steps) < 8 or (len(steps) < 40 and comm.bcast(time.monotonic() < deadline)):
        comm.Barrier()
        steps.append(timed_step(model, kfac, images, labels))
    plain, factors = (
        {part: median(step[part] for step in steps[first::2]) for part in steps[0]}
        for first in (3, 2)
    )
    both = factors["backward"] + factors["others"] - plain["backward"] - plain["others"]
    mine = {
        "forward": plain["forward"],
        "backward": plain["backward"],
        "statistics": max(0.0, both),
        "gradients": plain["others"],
        "optimizer": plain["optimizer"],
        "precondition": plain["precondition"],
    }
    everyone = comm.allgather(mine)
    return mpikfac.Network(
        name, batch, **{part: max(seconds[part] for seconds in everyone) for part in mine}
    )


def timed_step(
    model: nn.Module, kfac: mpikfac.KFAC, images: Tensor, labels: Tensor
) -> dict[str, float]:
    """Seconds of the parts of one training step; "others" is what KFAC.step does beside two."""
    kfac.trace.clear()
    kfac.optimizer.zero_grad()
    start = time.perf_counter()
    loss = F.cross_entropy(model(images), labels)
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    kfac.step()
    stages = {stage: kfac.trace.seconds[stage] for stage in ("precondition", "optimizer")}
    others = time.perf_counter() - end - sum(stages.values())
    return {"forward": middle - start, "backward": end - middle, "others": others, **stages}


def image_shape(name: str) -> tuple[int, int, int]:
    """Classes, channels and pixels of a side of what a network is made for."""
    if name in show_plan.IMAGENET:
        return 1000, 3, 224
    return (10, 1, 8) if name == "digits_cnn" else (10, 3, 32)


def seconds_of(comm: Any, work: Callable[[], object]) -> float:
    """Median seconds of the slowest rank, of repetitions that all begin together.

    Collective over: comm.
    """

    def slowest(times: int) -> float:
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(times):
            work()
        return max(comm.allgather((time.perf_counter() - start) / times))

    work()
    first = slowest(1)
    at_once = min(50, max(1, int(2e-3 / first)))  # what is short is timed several times together
    count = min(15, max(3, int(BUDGET / (first * at_once))))
    return median(slowest(at_once) for _ in range(count))


if __name__ == "__main__":
    sys.exit(main())
