"""Seconds of messages and of a rank's computations on a machine. Pure functions.

A collective over P ranks takes `steps(P) * latency + wire / bandwidth`: the wire bytes are those
that a rank sends in a ring, and small messages go along a tree [Thakur et al. 2005]. Where the
collective was measured, the measurement takes the place of both terms and the formula only carries
it over to other numbers of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import NormalDist

from mpikfac.machine import Level, Machine, Network, Sample, fitted, interpolated
from mpikfac.messages import Message
from mpikfac.plan import Plan

IN_PARTS = ("Reduce_scatter", "Alltoall", "Allgatherv", "Allgather")
DRAWS = 512  # points of the quadrature over the slowest rank
PIECE = 2**24  # bytes that `comm.Grid.sum_in_order` passes on at once


def message_seconds(message: Message, plan: Plan, rank: int, machine: Machine) -> float:
    """Seconds of a collective of `rank`, from when all its members have come to it."""
    ranks, nodes, sharing = placed(plan.team(rank, message.over), plan, machine)
    # One stage may be two collectives, one after the other: "Send, Bcast".
    primitives = message.primitive.split(", ")
    return sum(
        collective_seconds(name, message.size, ranks, machine, nodes, sharing)
        for name in primitives
    )


def message_latency(plan: Plan, rank: int, machine: Machine) -> float:
    """Seconds of a sum of next to nothing over the world."""
    ranks, nodes, sharing = placed(plan.team(rank, "world"), plan, machine)
    return collective_seconds("Allreduce", 1, ranks, machine, nodes, sharing)


def basis_seconds(size: int, plan: Plan, machine: Machine) -> float:
    """Seconds to send `size` bytes of a basis to the workers of a layer."""
    ranks, nodes, sharing = placed(plan.team(0, "column"), plan, machine)
    return collective_seconds("Bcast", size, ranks, machine, nodes, sharing)


def placed(ranks: range, plan: Plan, machine: Machine) -> tuple[int, int, int]:
    """How many ranks these are, on how many nodes, and how many such communicators leave a node."""
    per_node = machine.ranks_per_node or plan.ranks
    nodes = len({rank // per_node for rank in ranks})
    together = math.ceil(len(ranks) / nodes)  # members on one node
    sharing = math.ceil(min(per_node, plan.ranks) / together) if nodes > 1 else 1
    return len(ranks), nodes, sharing


def collective_seconds(
    primitive: str, size: int, ranks: int, machine: Machine, nodes: int = 1, sharing: int = 1
) -> float:
    """Seconds of a collective over `ranks` ranks on `nodes` nodes.

    Args:
        size: bytes of the whole buffer.
        sharing: communicators that do the same at once and share the link of a node.
    """
    if ranks == 1 or size == 0:
        return 0.0
    if primitive == "Send":  # piece by piece along a chain of all ranks
        pieces = math.ceil(size / PIECE)
        piece = _hop_seconds(min(size, PIECE), machine, nodes, sharing)
        return (ranks - 2 + pieces) * piece
    sample = nearest(machine, primitive, ranks, nodes, sharing)
    if sample is not None:
        return _scaled(sample, size, ranks, sharing)
    level = machine.between if nodes > 1 and machine.between else machine.inside
    bandwidth = min(machine.inside.bandwidth, level.bandwidth / sharing)
    return steps(primitive, ranks) * level.latency + wire(primitive, ranks) * size / bandwidth


def level_of(sample: Sample) -> Level:
    """What a measured collective says of the network, for those that were not measured."""
    line = fitted(sample.points)
    moved = wire(sample.primitive, sample.ranks) * sample.sharing
    return Level(line.latency / steps(sample.primitive, sample.ranks), line.bandwidth * moved)


def nearest(
    machine: Machine, primitive: str, ranks: int, nodes: int, sharing: int
) -> Sample | None:
    """The measurement to start from: on one node or on several, as asked, of the nearest size."""

    def distance(sample: Sample) -> tuple[float, float]:
        return abs(math.log(sample.ranks / ranks)), abs(math.log(sample.sharing / sharing))

    alike = [
        sample
        for sample in machine.samples
        if sample.primitive == primitive and (sample.nodes > 1) == (nodes > 1)
    ]
    return min(alike, key=distance, default=None)


def steps(primitive: str, ranks: int) -> int:
    """Messages one after the other in a collective of small messages."""
    return math.ceil(math.log2(ranks)) * (2 if primitive == "Allreduce" else 1)


def wire(primitive: str, ranks: int) -> float:
    """Bytes that a rank sends in a ring, per byte of the whole buffer."""
    share = (ranks - 1) / ranks
    shares = {"Allreduce": 2 * share} | dict.fromkeys(IN_PARTS, share)
    return shares.get(primitive, 1)


def _scaled(sample: Sample, size: int, ranks: int, sharing: int) -> float:
    """A measured time for another number of ranks: latency by steps, the rest by wire bytes."""
    line = fitted(sample.points)
    largest = sample.points[-1][0]
    seconds = interpolated(sample.points, size) + max(0.0, size - largest) / line.bandwidth
    if (ranks, sharing) == (sample.ranks, sample.sharing):
        return seconds
    primitive = sample.primitive
    latency = min(line.latency, seconds)
    moved = wire(primitive, ranks) * sharing / (wire(primitive, sample.ranks) * sample.sharing)
    longer = steps(primitive, ranks) / steps(primitive, sample.ranks)
    return latency * longer + (seconds - latency) * moved


def _hop_seconds(size: int, machine: Machine, nodes: int, sharing: int) -> float:
    """Seconds of one message from a rank to the next."""
    sample = nearest(machine, "Send", 2, nodes, sharing)
    if sample is not None:
        return _scaled(sample, size, 2, sharing)
    level = machine.between if nodes > 1 and machine.between else machine.inside
    return level.latency + size / min(machine.inside.bandwidth, level.bandwidth / sharing)


def decompose_seconds(plan: Plan, rank: int, machine: Machine, share: int | None = None) -> float:
    """Seconds of the decompositions of a refresh on `rank`, of all layers or of a share."""
    factors = (name for name in plan.decomposed(rank) if plan.in_share(name, share))
    orders = (plan.orders[name] for name in factors)
    return sum(machine.decomposition(plan.solver, order) for order in orders)


def precondition_seconds(plan: Plan, rank: int, machine: Machine, network: Network) -> float:
    """Seconds in which `rank` preconditions its layers.

    Its share of a measurement of all layers, or product by product.
    """
    times = 2 if plan.solver == "eigen" else 1  # into the eigenbases and back
    mine = list(_products(plan, plan.preconditioned(rank)))
    if network.precondition is None:
        return times * sum(flops / interpolated(machine.products, order) for order, flops in mine)
    everything = sum(flops for _, flops in _products(plan, (layer.name for layer in plan.layers)))
    return times * network.precondition * sum(flops for _, flops in mine) / everything


def statistics_share(plan: Plan, rank: int) -> float:
    """Which part of a batch's statistics `rank` takes, by the elements of its factors."""
    total = sum(order**2 for order in plan.orders.values())
    return sum(plan.orders[name] ** 2 for name in plan.recorded(rank)) / total if total else 0.0


def stepped_share(plan: Plan, rank: int) -> float:
    """Which part of the model `rank` steps."""
    counts = plan.gradients().counts()
    return counts[rank] / sum(counts) if len(counts) > 1 else 1.0


def expected_slowest(spread: float, ranks: int) -> float:
    """Expected maximum of `ranks` times of mean 1.

    `spread` is the standard deviation of their logarithms, which are normal. By the midpoint rule
    over the maximum's probability: `E = integral of F^-1(u^(1/ranks))`.
    """
    if spread == 0:
        return 1.0
    normal = NormalDist()
    draws = (normal.inv_cdf(((k + 0.5) / DRAWS) ** (1 / ranks)) for k in range(DRAWS))
    return math.fsum(math.exp(spread * z - spread**2 / 2) for z in draws) / DRAWS


def _products(plan: Plan, names: Iterable[str]) -> Iterable[tuple[float, int]]:
    """Order (of the cube of as many operations) and operations of each product of directions."""
    for name in names:
        a, g = plan.orders[f"{name}.A"], plan.orders[f"{name}.G"]
        for operations in (2 * g * g * a, 2 * g * a * a):
            yield (operations / 2) ** (1 / 3), operations
