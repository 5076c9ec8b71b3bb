"""Seconds of messages and of a rank's computations on a machine. Pure functions.

A collective over P ranks takes `steps(P) * latency + wire / bandwidth`: the wire bytes are those
that a rank sends in a ring, and small messages go along a tree [Thakur et al. 2005]. Where the
collective was measured, the measurement takes the place of both terms and the formula only carries
it over to other numbers of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from statistics import NormalDist

from mpikfac.plan import PIECE, FactorShape, LayerShape, Message, Plan, parent
from mpikfac.predict.machine import Level, Machine, Network, Sample, fitted, interpolated

IN_SHARDS = "Alltoall, Allgather"
IN_PARTS = ("Reduce_scatter", "Alltoall", "Allgatherv", "Allgather")
DRAWS = 512  # points of the quadrature over the slowest rank
CHAINED = 4 * PIECE  # bytes that a sum in order passes on at once, in float32


def message_seconds(message: Message, plan: Plan, rank: int, machine: Machine) -> float:
    """Seconds of a collective of `rank`, from when all its members have come to it.

    The member that gets most bounds a sum that is made in parts. A gather of unequal parts takes
    hardly longer than one of equal ones.
    """
    ranks, nodes, sharing = placed(plan.team(rank, message.over), plan, machine)
    codec = message.codec.name if message.codec else None

    def seconds(primitive: str, size: float) -> float:
        return collective_seconds(primitive, size, ranks, machine, nodes, sharing, codec)

    counts = [stop - start for start, stop in message.spans]
    per_element = message.size / max(1, sum(counts))
    if message.primitive == "Reduce_scatter" and sum(counts) > PIECE:
        return sum(seconds("Reduce", per_element * count) for count in counts)
    if message.primitive in ("Reduce_scatter", "Alltoall"):
        return seconds(message.primitive, per_element * len(counts) * max(counts))
    if message.primitive == "Send, Bcast":
        return seconds("Send", message.size) + seconds("Bcast", message.size)
    if message.over == "curvature" and message.primitive == "Send":
        return seconds("Recv", message.size)
    return seconds(message.primitive, message.size)


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
    per_node = machine.ranks_per_node or ranks.stop
    nodes = len({rank // per_node for rank in ranks})
    together = math.ceil(len(ranks) / nodes)  # members on one node
    sharing = math.ceil(min(per_node, plan.ranks) / together) if nodes > 1 else 1
    return len(ranks), nodes, sharing


def collective_seconds(
    primitive: str,
    size: float,
    ranks: int,
    machine: Machine,
    nodes: int = 1,
    sharing: int = 1,
    codec: str | None = None,
) -> float:
    """Seconds of a collective over `ranks` ranks on `nodes` nodes.

    Args:
        size: bytes of the whole buffer, as they travel.
        sharing: communicators that do the same at once and share the link of a node.
        codec: how numbers are encoded; to do so costs nothing if it was not measured.
    """
    if ranks == 1 or size == 0:
        return 0.0
    if primitive == "Send":  # piece by piece along a chain of all ranks
        pieces = math.ceil(size / CHAINED)
        piece = _hop_seconds(min(size, CHAINED), machine, nodes, sharing)
        return (ranks - 2 + pieces) * piece
    if primitive == "Recv":
        return _hop_seconds(size, machine, nodes, sharing)
    sample = nearest(machine, primitive, ranks, nodes, sharing, codec)
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
    machine: Machine,
    primitive: str,
    ranks: int,
    nodes: int,
    sharing: int,
    codec: str | None = None,
) -> Sample | None:
    """The measurement to start from: on one node or on several, as asked, of the nearest size."""

    def distance(sample: Sample) -> tuple[float, float]:
        return abs(math.log(sample.ranks / ranks)), abs(math.log(sample.sharing / sharing))

    alike = [
        sample
        for sample in machine.samples
        if (sample.primitive, sample.codec) == (primitive, codec)
        and (sample.nodes > 1) == (nodes > 1)
    ]
    if codec and not alike:
        return nearest(machine, primitive, ranks, nodes, sharing)
    return min(alike, key=distance, default=None)


def steps(primitive: str, ranks: int) -> int:
    """Messages one after the other in a collective of small messages."""
    return math.ceil(math.log2(ranks)) * (2 if primitive in ("Allreduce", IN_SHARDS) else 1)


def wire(primitive: str, ranks: int) -> float:
    """Bytes that a rank sends in a ring, per byte of the whole buffer."""
    share = (ranks - 1) / ranks
    twice = dict.fromkeys(("Allreduce", IN_SHARDS), 2 * share)
    shares = twice | dict.fromkeys(IN_PARTS, share)
    return shares.get(primitive, 1)


def _scaled(sample: Sample, size: float, ranks: int, sharing: int) -> float:
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


def _hop_seconds(size: float, machine: Machine, nodes: int, sharing: int) -> float:
    """Seconds of one message from a rank to the next."""
    sample = nearest(machine, "Send", 2, nodes, sharing)
    if sample is not None:
        return _scaled(sample, size, 2, sharing)
    level = machine.between if nodes > 1 and machine.between else machine.inside
    return level.latency + size / min(machine.inside.bandwidth, level.bandwidth / sharing)


def decompose_seconds(plan: Plan, rank: int, machine: Machine, share: int | None = None) -> float:
    """Seconds of the decompositions of a refresh on `rank`, of all layers or of a share."""
    factors = (plan.factors[name] for name in plan.decomposed(rank, share))
    # Reciprocals of diagonals are free.
    return sum(factor_seconds(factor, plan, machine) for factor in factors if factor.order > 1)


def factor_seconds(factor: FactorShape, plan: Plan, machine: Machine) -> float:
    """Seconds of one factor's decomposition; of low rank that of all, by the work of both."""
    if parent(factor.name) in plan.vectors:
        return 0.0
    whole = machine.decomposition(plan.solver_of(parent(factor.name)), factor.order)
    return whole * (factor.work() / factor.order**3)


def precondition_seconds(plan: Plan, rank: int, machine: Machine, network: Network) -> float:
    """Seconds in which `rank` preconditions its layers.

    Its share of a measurement of all layers, or product by product; of vectors, their share.

    Raises:
        ValueError: nothing is known of vectors, which the plan has.
    """
    own = [plan.shapes[name] for name in plan.preconditioned(rank)]
    seconds = 0.0
    if plan.vectors:
        mine = sum(f.size for layer in own if layer.name in plan.vectors for f in layer.factors)
        everything = sum(factor.size for factor in plan.factors.values())
        seconds = _of_vectors(network.vector_precondition, machine) * mine / everything
    others = [layer for layer in own if layer.name not in plan.vectors]
    products = list(_products(others, plan.eigenbases))
    if network.precondition is None:
        rates = ((flops, interpolated(machine.products, order)) for order, flops in products)
        return seconds + sum(flops / rate for flops, rate in rates)
    measured = (replace(layer, largest=None, rank=None) for layer in plan.layers)
    everything = sum(flops for _, flops in _products(measured))
    return seconds + network.precondition * sum(flops for _, flops in products) / everything


def statistics_seconds(plan: Plan, rank: int, machine: Machine, network: Network) -> float:
    """Seconds in which `rank` takes its statistics of a batch, by the elements of its factors.

    Raises:
        ValueError: nothing is known of vectors, which the plan has.
    """
    of_vectors = _of_vectors(network.vector_statistics, machine) if plan.vectors else 0.0
    found = 0.0
    for vectors, power, seconds in ((False, 2, network.statistics), (True, 1, of_vectors)):
        mine = [n for n in plan.recorded(rank) if (parent(n) in plan.vectors) == vectors]
        everything = sum(factor.work(power) for factor in plan.factors.values())
        found += seconds * sum(plan.factors[name].work(power) for name in mine) / everything
    return found


def _of_vectors(seconds: float | None, machine: Machine) -> float:
    if seconds is None:
        raise ValueError(f"machine {machine.name!r} has no times of solver='rank-one'")
    return seconds


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


def _products(
    layers: Iterable[LayerShape], eigenbases: Collection[str] = ()
) -> Iterable[tuple[float, int]]:
    """Order (of the cube of as many operations) and operations of each product of directions."""
    for layer in layers:
        times = 2 if layer.name in eigenbases else 1  # into the eigenbases and back
        for multiplications in layer.products():
            yield multiplications ** (1 / 3), times * 2 * multiplications
