"""Measure messages and computations on this machine, for `mpikfac simulate`.

    mpirun -n 4 mpikfac calibrate --out machine.json --model resnet20

During every measurement, all ranks do the same work, as in training: ranks can share cores, and
communicators can share the link of a node. Other work on the machine distorts the measurement, so
use an idle machine. On GPUs, messages are sent as in training: directly if MPI accepts device
buffers, otherwise through the host. With MPIKFAC_CUDA_AWARE=0, they are always sent through the
host.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import mpikfac
from mpikfac import files
from mpikfac_apps.guard.ranks import run_on_ranks
from mpikfac_apps.guard.watchdog import Watchdog
from mpikfac_apps.lab.predict.options import CALIBRATE, CalibrateOptions
from mpikfac_apps.place import environment, share_cores
from mpikfac_apps.problems import models, own

ELEMENTS = [2**k for k in range(8, 25, 2)]  # sizes of messages, 1 KiB to 64 MiB in float32
PRIMITIVES = ("Allreduce", "Reduce_scatter", "Alltoall", "Allgatherv", "Reduce", "Bcast")
ENCODED: list[tuple[str, mpikfac.plan.Codec]] = [
    ("Allreduce", mpikfac.plan.BFloat16Codec()),
    ("Allgatherv", mpikfac.plan.BFloat16Codec()),
    (mpikfac.plan.IN_SHARDS, mpikfac.plan.Int8Codec(feedback=True)),
]
PRECONDITIONERS = ("inverse", "eva")
DECOMPOSED: dict[str, Callable[[Tensor], object]] = {
    "inverse": lambda factor: mpikfac.numerics.damped_inverse(factor, 0.03),
    "eigen": mpikfac.numerics.eigenbasis,
    "shampoo": lambda factor: mpikfac.preconditioners.Shampoo().decompose(factor, 1e-3, None),
}
CUBES = [2**k for k in range(4, 12)]  # orders of the matrices that are multiplied
LONGEST = 0.5  # seconds; once a message or factor takes longer, larger ones are not measured
BUDGET = 0.1  # seconds for the repetitions of one measurement
STEPS_BUDGET = 5.0  # seconds for the steps of one network, per measurement
TURNS, STEPS = 6, 4  # rounds of overlapped and of plain steps, and steps per round
STAGE = "calibrate"


def main(argv: list[str] | None = None) -> int:
    """Measure the machine, and write the machine file; return the exit code.

    Collective over: world.

    Raises:
        SystemExit: with code 2, after a one-line message about an error that the user can correct.
    """
    return run_on_ranks(lambda ranks: parse(argv, ranks), calibrate)


def parse(argv: list[str] | None, ranks: int) -> CalibrateOptions:
    """Return the options in the arguments, after checking them.

    Raises:
        ValueError: an option is invalid, or the job has a single rank.
    """
    options = CALIBRATE.read(argv)
    if options.out.is_dir():
        raise ValueError(f"out={options.out} is a directory; use the name of a file")
    if not options.out.parent.is_dir():
        raise ValueError(f"out={options.out}: {options.out.parent} is not a directory")
    if options.input is None and not all(models.network(name).image for name in options.model):
        raise ValueError("your own model needs --input, such as 3,32,32")
    if ranks == 1:
        raise ValueError("a single rank sends no messages; use mpirun with at least 2 ranks")
    return options


def calibrate(comm: mpikfac.comm.Comm, options: CalibrateOptions, watchdog: Watchdog) -> int:
    """Measure the machine, and write the machine file; return 0.

    Collective over: comm.

    Raises:
        UserError: the machine file cannot be written.
    """
    machine = measured(comm, options, watchdog)
    with mpikfac.comm.together(comm, f"out={options.out}"):
        if comm.rank == 0:
            files.write_text(options.out, machine.to_json(), named=True)
            print(f"{options.out}: {machine.name}")
    return 0


def measured(
    comm: mpikfac.comm.Comm, options: CalibrateOptions, watchdog: Watchdog
) -> mpikfac.predict.Machine:
    """Return a description of the machine, as measured on the ranks of `comm` in five phases.

    Collective over: comm.
    """
    hosts = share_cores(comm, None)
    device = mpikfac.device(comm, options.device)
    with mpikfac.comm.together(comm, "measuring"):
        networks = [
            TimedNetwork(name, batch, options.input, options.tokens, device)
            for name in options.model
            for batch in options.batch_per_rank
        ]
    watchdog.enter("steps", 1)
    visit(comm, networks)
    watchdog.enter("messages", 1)
    samples = [
        sample for kind in groups(comm) for sample in message_samples(comm, device, hosts, *kind)
    ]
    watchdog.enter("steps", 2)
    visit(comm, networks)
    watchdog.enter("decompositions", 1)
    orders = sorted({order for network in networks for order in network.orders})
    decompositions = {name: ladder(comm, device, orders, work) for name, work in DECOMPOSED.items()}
    products = rates(ladder(comm, device, CUBES, squared))
    watchdog.enter("steps", 3)
    visit(comm, networks)
    levels = [
        mpikfac.predict.level_of(s) for s in samples if s.primitive == "Allgatherv" and s.nodes == 1
    ]
    across = [
        mpikfac.predict.level_of(s) for s in samples if s.primitive == "Allgatherv" and s.nodes > 1
    ]
    machine = mpikfac.predict.Machine(
        name=f"{comm.size} ranks on {', '.join(sorted(set(hosts)))}",
        inside=(levels or across)[-1],
        between=across[-1] if across else None,
        ranks_per_node=max(map(hosts.count, hosts)) if across else None,
        samples=tuple(samples),
        decompositions=decompositions,
        products=products,
        networks=tuple(network.seconds(comm) for network in networks),
        about=environment(hosts, device) | _way(device),
    )
    return dataclasses.replace(machine, hidden=hidden_part(comm, machine, networks[0]))


# -- messages ----------------------------------------------------------------------------------


def groups(comm: mpikfac.comm.Comm) -> Iterator[tuple[int, int]]:
    """Yield the sizes of communicators (rows and columns), and the distance between their ranks."""
    for size in mpikfac.plan.divisors(comm.size)[1:]:
        for distance in sorted({1, comm.size // size}):
            yield size, distance


def message_samples(
    comm: mpikfac.comm.Comm, device: torch.device, hosts: list[str], size: int, distance: int
) -> list[mpikfac.predict.Sample]:
    """Return measurements of each collective, which all groups of ranks run at the same time.

    A group has `size` ranks, `distance` apart.

    Collective over: comm.
    """
    colors = [rank // size if distance == 1 else rank % distance for rank in range(comm.size)]
    hosts_of = {c: {host for host, of in zip(hosts, colors) if of == c} for c in colors}
    nodes = max(map(len, hosts_of.values()))
    if distance > 1 and nodes == 1:
        return []  # these messages are as fast as those between neighbours
    sharing = max(sum(host in group_hosts for group_hosts in hosts_of.values()) for host in hosts)
    group = cast(mpikfac.comm.Comm, comm.Split(colors[comm.rank], comm.rank))
    grid = mpikfac.comm.Grid(group, 1, mpikfac.Trace())
    kinds: list[tuple[str, mpikfac.plan.Codec | None]] = [
        (primitive, None) for primitive in PRIMITIVES
    ]
    kinds += [("Send", None)] if size == 2 else []
    kinds += ENCODED if size == comm.size else []
    return [
        mpikfac.predict.Sample(
            primitive,
            size,
            nodes,
            sharing if nodes > 1 else 1,
            curve(comm, device, grid, primitive, codec),
            codec.name if codec else None,
        )
        for primitive, codec in kinds
    ]


def curve(
    comm: mpikfac.comm.Comm,
    device: torch.device,
    grid: mpikfac.comm.Grid,
    primitive: str,
    codec: mpikfac.plan.Codec | None,
) -> tuple[tuple[float, float], ...]:
    """Return the sizes and times of a collective that all groups run, up to the first slow one.

    Collective over: comm.
    """
    points: list[tuple[float, float]] = []
    for elements in ELEMENTS:
        size, work = collective(device, grid, primitive, elements, codec)
        seconds = seconds_of(comm, device, work)
        points.append((size, seconds / 2 if primitive == "Send" else seconds))
        if seconds > LONGEST:
            break
    return tuple(points)


def collective(
    device: torch.device,
    grid: mpikfac.comm.Grid,
    primitive: str,
    elements: int,
    codec: mpikfac.plan.Codec | None,
) -> tuple[int, Callable[[], object]]:
    """Return the bytes of a collective over about `elements` elements, and a function that runs it.

    The collective runs as in training. The group's ranks take turns as the root, because messages
    from a single root would overlap with each other.
    """
    group, ranks = grid.world, grid.world.size
    part = max(16, elements // ranks // 16 * 16)  # a multiple of 16, because layouts are aligned
    flat = torch.zeros(part * ranks, device=device)
    if primitive == "Send":  # such messages go to and from curvature servers, through the host
        host = flat.cpu().numpy()
        return flat.nbytes, lambda: there_and_back(group, host)
    spans = [(0, len(flat))]
    if primitive in ("Reduce_scatter", "Alltoall", "Allgatherv"):
        spans = [(part * rank, part * (rank + 1)) for rank in range(ranks)]
    stage = f"{STAGE} {len(flat)}"  # each stage has its own encoding residual
    roots = range(ranks) if primitive in ("Reduce", "Bcast") else range(-1, 0)
    messages = [
        mpikfac.plan.message(stage, primitive, "world", spans, ranks, 4, group.rank, root, codec)
        for root in roots
    ]
    turns = itertools.cycle(messages)
    return messages[0].size, lambda: grid.exchange([next(turns)], flat)


def there_and_back(pair: mpikfac.comm.Comm, buffer: np.ndarray) -> None:
    """Send a message from rank 0 to rank 1 and back."""
    if pair.rank == 0:
        pair.Send(buffer, dest=1)
        pair.Recv(buffer, source=1)
    else:
        pair.Recv(buffer, source=0)
        pair.Send(buffer, dest=0)


def hidden_part(
    comm: mpikfac.comm.Comm, machine: mpikfac.predict.Machine, network: TimedNetwork
) -> float:
    """Return the fraction of an overlapped message's time that does not lengthen a step.

    It is fitted, between -10 and 1, so that predictions reproduce the measured difference between
    steps with overlapped messages and steps that send the same messages without overlap.

    Collective over: comm.
    """
    transports = [mpikfac.Transport(fusion=3, overlap=way) for way in (True, False)]
    ways = [mpikfac.Strategy(transport=transport) for transport in transports]
    try:
        beside, in_turn = network.together(comm, ways)
    except ValueError:  # MPI must not be called from threads, so no message is overlapped
        return 1.0
    layers, others = models.shapes_of(network.name)
    plans = [mpikfac.make_plan(layers, comm.size, way, others) for way in ways]
    job = mpikfac.predict.Job(network.name, network.batch, inv_update_steps=10**6)

    def difference(hidden: float) -> float:
        chosen = dataclasses.replace(machine, hidden=hidden)
        steps = [mpikfac.predict.simulate(plan, chosen, job).factors.seconds for plan in plans]
        return steps[0] - steps[1]

    low, high = -10.0, 1.0  # the difference decreases from low to high
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if difference(middle) > beside - in_turn else (low, middle)
    return high


# -- computations --------------------------------------------------------------------------------


def ladder(
    comm: mpikfac.comm.Comm,
    device: torch.device,
    orders: Sequence[int],
    work: Callable[[Tensor], object],
) -> tuple[tuple[float, float], ...]:
    """Return the orders and times of `work` on factors, without orders that would take too long.

    Collective over: comm.
    """
    points: list[tuple[float, float]] = []
    for order in orders:
        if points and points[-1][1] * (order / points[-1][0]) ** 3 > LONGEST:
            break
        a = torch.randn(order, 2 * order, device=device)
        factor = a @ a.T / (2 * order)
        points.append((order, seconds_of(comm, device, partial(work, factor))))
    return tuple(points)


def squared(matrix: Tensor) -> Tensor:
    """Return the product of a matrix with itself, computed by mpikfac."""
    return mpikfac.numerics.product(matrix, matrix)


def rates(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Convert the times of matrix products, by order, to operations per second."""
    return tuple((order, 2 * order**3 / seconds) for order, seconds in points)


def visit(comm: mpikfac.comm.Comm, networks: Sequence[TimedNetwork]) -> None:
    """Time further steps of all networks, with each preconditioner.

    Collective over: comm.
    """
    for network in networks:
        for preconditioner in PRECONDITIONERS:
            network.look(comm, preconditioner)


class TimedNetwork:
    """Time a network's training steps, which all ranks take at the same time but independently.

    Attributes:
        orders: the orders of the network's factors.
    """

    def __init__(
        self,
        name: str,
        batch: int,
        inputs: tuple[int, ...] | None,
        tokens: int | None,
        device: torch.device,
    ) -> None:
        self.name, self.batch = name, batch
        usual = models.network(name)
        shape, words = inputs or usual.image, usual.tokens() if usual.image else tokens
        assert shape, "`parse` requires the shape"
        torch.manual_seed(0)
        self._model = models.channels_last(models.build(name, channels=shape[0]))
        self._covered = mpikfac.Coverage(covers=usual.covers)
        layers, _ = mpikfac.layers.covered_shapes(self._model, self._covered)
        seeded = torch.Generator().manual_seed(0)
        self._inputs = own.drawn((batch, *shape), words, seeded)
        if words is None:
            self._inputs = self._inputs.float()
        classes, *positions = own.outputs_of(self._model, self._inputs).shape[1:]
        self._labels = torch.randint(classes, (batch, *positions), generator=seeded)
        self._model.to(device)
        self._inputs, self._labels = self._inputs.to(device), self._labels.to(device)
        self.orders = {factor.order for layer in layers for factor in layer.factors}
        self._plain: dict[str, list[dict[str, float]]] = {
            preconditioner: [] for preconditioner in PRECONDITIONERS
        }
        self._factors: dict[str, list[dict[str, float]]] = {
            preconditioner: [] for preconditioner in PRECONDITIONERS
        }

    def look(self, comm: mpikfac.comm.Comm, preconditioner: str) -> None:
        """Take and time some steps, of which every second one computes new factors.

        The first two steps are not counted.

        Collective over: comm.
        """
        alone = cast(mpikfac.comm.Comm, comm.Split(comm.rank))
        kfac, images, labels = self._trainer(
            alone, preconditioner=preconditioner, factor_update_steps=2
        )
        steps: list[dict[str, float]] = []
        deadline = time.monotonic() + STEPS_BUDGET
        while len(steps) < 8 or (len(steps) < 40 and comm.bcast(time.monotonic() < deadline)):
            comm.Barrier()
            steps.append(timed_step(kfac, images, labels))
        self._plain[preconditioner] += steps[3::2]
        self._factors[preconditioner] += steps[2::2]

    def together(self, comm: mpikfac.comm.Comm, ways: Sequence[mpikfac.Strategy]) -> list[float]:
        """Return, for each strategy, the time of a step with new factors, in seconds.

        The strategies take turns, with `STEPS` steps per round. The times are medians over rounds,
        without the first one.

        Collective over: comm.

        Raises:
            ValueError: this MPI does not support a strategy.
        """
        trainers = [self._trainer(comm, strategy=way) for way in ways]
        taken: list[list[float]] = [[] for _ in ways]
        for _ in range(TURNS):
            for (kfac, images, labels), times in zip(trainers, taken):
                comm.Barrier()
                start = now(images.device)
                for _ in range(STEPS):
                    timed_step(kfac, images, labels)
                times.append(max(comm.allgather((now(images.device) - start) / STEPS)))
        for kfac, _, _ in trainers:
            kfac.close()
        return [median(times[1:]) for times in taken]

    def _trainer(
        self, comm: mpikfac.comm.Comm, **settings: Any
    ) -> tuple[mpikfac.KFAC, Tensor, Tensor]:
        """Return a K-FAC trainer, images and labels; the trainer decomposes factors only once."""
        model = copy.deepcopy(self._model)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9, weight_decay=5e-4)
        arguments = {
            "damping": 0.03,
            "inv_update_steps": 10**9,
            "coverage": self._covered,
            **settings,
        }
        once = mpikfac.KFAC(model, optimizer, comm, **arguments)
        return once, self._inputs, self._labels

    def seconds(self, comm: mpikfac.comm.Comm) -> mpikfac.predict.Network:
        """Return the median times of the parts of all steps so far, each on its slowest rank.

        Collective over: comm.
        """
        plain, factors, statistics = {}, {}, {}
        for preconditioner in PRECONDITIONERS:
            plain[preconditioner] = medians(self._plain[preconditioner])
            factors[preconditioner] = medians(self._factors[preconditioner])
            differences = [
                factors[preconditioner][part] - plain[preconditioner][part]
                for part in ("backward", "others")
            ]
            statistics[preconditioner] = max(0.0, sum(differences))
        matrices, vectors = PRECONDITIONERS
        times = {
            "forward": plain[matrices]["forward"],
            "backward": plain[matrices]["backward"],
            "statistics": statistics[matrices],
            "gradients": plain[matrices]["others"],
            "optimizer": plain[matrices]["optimizer"],
            "precondition": plain[matrices]["precondition"],
            "vector_statistics": statistics[vectors],
            "vector_precondition": plain[vectors]["precondition"],
        }
        everyone = comm.allgather(times)
        slowest = {part: max(seconds[part] for seconds in everyone) for part in times}
        return mpikfac.predict.Network(self.name, self.batch, **slowest)


def medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median time of each part of a step, over all steps."""
    return {part: median(step[part] for step in steps) for part in steps[0]}


def timed_step(kfac: mpikfac.KFAC, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Take a training step, and return the times of its parts, in seconds.

    "others" is the time of `KFAC.step` without preconditioning and the optimizer.
    """
    kfac.trace.clear()
    kfac.optimizer.zero_grad()
    start = now(images.device)
    loss = F.cross_entropy(kfac.model(images), labels)
    middle = now(images.device)
    loss.backward()
    end = now(images.device)
    kfac.step()
    finished = now(images.device)
    stages = {stage: kfac.trace.seconds[stage] for stage in ("precondition", "optimizer")}
    others = finished - end - sum(stages.values())
    return {"forward": middle - start, "backward": end - middle, "others": others, **stages}


def now(device: torch.device) -> float:
    """Return the current time in seconds, once the device has finished all work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _way(device: torch.device) -> dict[str, str]:
    """Return how a GPU's messages were sent: directly, or through the host."""
    if device.type == "cpu":
        return {}
    return {"device buffers": "direct" if mpikfac.comm.cuda_aware() else "staged"}


def seconds_of(comm: mpikfac.comm.Comm, device: torch.device, work: Callable[[], object]) -> float:
    """Return the time of `work` in seconds: a median over repetitions, on the slowest rank.

    Ranks start each measurement together.

    Collective over: comm.
    """

    def slowest(times: int) -> float:
        comm.Barrier()
        start = now(device)
        for _ in range(times):
            work()
        return max(comm.allgather((now(device) - start) / times))

    work()
    first = slowest(1)
    at_once = min(50, max(1, int(2e-3 / first)))  # repetitions of short work are timed together
    count = min(15, max(3, int(BUDGET / (first * at_once))))
    return median(slowest(at_once) for _ in range(count))
