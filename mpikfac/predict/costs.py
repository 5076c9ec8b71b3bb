"""Compute seconds of messages and of a rank's computations on a machine, by pure functions.

A collective over P ranks takes `steps(P) * latency + wire / bandwidth`, where `wire` is the bytes
that a rank sends in a ring, and small messages go along a tree [Thakur et al. 2005]. If the
collective was measured, the measurement takes the place of both terms, and the formula only
converts the measurement to different numbers of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from statistics import NormalDist

from mpikfac.plan import IN_SHARDS, IN_TWO_SUMS, PIECE, Factor, LayerShape, Message, Plan
from mpikfac.predict.machine import Level, Machine, Network, Sample, fitted, interpolated

IN_PARTS = ("Reduce_scatter", "Alltoall", "Allgatherv", "Allgather")
DRAWS = 512  # points of the quadrature over the slowest rank
CHAINED = 4 * PIECE  # bytes of a piece of a sum in order, in float32


def message_seconds(message: Message, plan: Plan, rank: int, machine: Machine) -> float:
    """Return the seconds of a collective of `rank`, counted from the arrival of the last member.

    A sum made in parts takes as long as the member with the largest part. A gather of unequal parts
    takes hardly longer than a gather of equal parts.
    """
    ranks, nodes, sharing = placed(plan.grid.team(rank, message.over), plan, machine)
    codec = message.codec.name if message.codec else None

    def seconds(primitive: str, size: float) -> float:
        return collective_seconds(primitive, size, ranks, machine, nodes, sharing, codec)

    counts = [stop - start for start, stop in message.spans]
    per_element = message.size / max(1, sum(counts))
    if message.primitive == "Reduce_scatter" and sum(counts) > PIECE:
        return sum(seconds("Reduce", per_element * count) for count in counts)
    if message.primitive in ("Reduce_scatter", "Alltoall"):
        return seconds(message.primitive, per_element * len(counts) * max(counts))
    if message.codec and message.primitive == IN_TWO_SUMS:
        return sum(seconds("Allreduce", plan.itemsize * side) for side in message.codec.sides())
    if message.primitive == "Send, Bcast":
        return seconds("Send", message.size) + seconds("Bcast", message.size)
    if message.over == "curvature" and message.primitive == "Send":
        return seconds("Recv", message.size)
    return seconds(message.primitive, message.size)


def message_latency(plan: Plan, rank: int, machine: Machine) -> float:
    """Return the seconds of a sum of 1 byte over the world."""
    ranks, nodes, sharing = placed(plan.grid.team(rank, "world"), plan, machine)
    return collective_seconds("Allreduce", 1, ranks, machine, nodes, sharing)


def basis_seconds(size: int, plan: Plan, machine: Machine) -> float:
    """Return the seconds to send `size` bytes of a basis to the workers of a layer."""
    ranks, nodes, sharing = placed(plan.grid.team(0, "column"), plan, machine)
    return collective_seconds("Bcast", size, ranks, machine, nodes, sharing)


def placed(ranks: range, plan: Plan, machine: Machine) -> tuple[int, int, int]:
    """Return the numbers of ranks, of nodes, and of equal communicators that leave a node."""
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
    """Return the seconds of a collective over `ranks` ranks on `nodes` nodes.

    Args:
        size: bytes of the whole buffer, as sent.
        sharing: communicators that do the same at once and share the link of a node.
        codec: encoding of the numbers; encoding costs 0 s if not measured.
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
    """Return the network level that fits a measured collective, for unmeasured collectives."""
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
    """Return the measurement with the nearest number of ranks; None if nothing was measured.

    A collective on a single node is compared with measurements on a single node, a collective on
    several nodes with measurements on several nodes.
    """

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
    """Return the number of successive messages in a collective of small messages."""
    return math.ceil(math.log2(ranks)) * (2 if primitive in ("Allreduce", IN_SHARDS) else 1)


def wire(primitive: str, ranks: int) -> float:
    """Return the bytes that a rank sends in a ring, per byte of the whole buffer."""
    share = (ranks - 1) / ranks
    twice = dict.fromkeys(("Allreduce", IN_SHARDS), 2 * share)
    shares = twice | dict.fromkeys(IN_PARTS, share)
    return shares.get(primitive, 1)


def _scaled(sample: Sample, size: float, ranks: int, sharing: int) -> float:
    """Convert a measured time to `ranks` ranks: latency by `steps`, the rest by `wire` bytes."""
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
    """Return the seconds of a message from a rank to the next rank."""
    sample = nearest(machine, "Send", 2, nodes, sharing)
    if sample is not None:
        return _scaled(sample, size, 2, sharing)
    level = machine.between if nodes > 1 and machine.between else machine.inside
    return level.latency + size / min(machine.inside.bandwidth, level.bandwidth / sharing)


def decompose_seconds(plan: Plan, rank: int, machine: Machine, turn: int | None = None) -> float:
    """Return the seconds of a refresh's decompositions on `rank`, of all layers or of a turn."""
    factors = plan.of(rank).decomposed(turn)
    # Reciprocals of diagonals are free.
    return sum(factor_seconds(factor, machine) for factor in factors if factor.order > 1)


def factor_seconds(factor: Factor, machine: Machine) -> float:
    """Return the seconds of a factor's decomposition.

    A decomposition of low rank takes the seconds of the full decomposition, scaled by the work.
    """
    if factor.solver.vector:
        return 0.0
    solver, timed = factor.solver.name, factor.solver.timed_as or factor.solver.name
    if timed not in machine.decompositions and timed != solver:
        raise ValueError(
            f"machine {machine.name!r} has no times of solver={timed!r}, whose decompositions "
            f"solver={solver!r} takes; calibrate a machine"
        )
    full = machine.decomposition(timed, factor.order)
    return full * (factor.work() / factor.order**3)


def precondition_seconds(
    plan: Plan, rank: int, machine: Machine, network: Network, orthogonal: bool = True
) -> float:
    """Return the seconds in which `rank` preconditions its layers.

    The seconds are the layers' share of a measurement of all layers, or else a sum over products.
    For vectors, the share is by the vectors' elements. A measurement is of orthogonal directions.

    Args:
        orthogonal: whether the directions are made orthogonal.

    Raises:
        ValueError: the plan has vectors, and the machine has no times of vectors.
    """
    layers = plan.of(rank).preconditioned
    seconds = 0.0
    if vectors := _solver_of_vectors(plan):
        elements = sum(f.size for layer in layers if layer.solver.vector for f in layer.factors)
        everything = sum(factor.size for factor in plan.factors.values())
        seconds = _of_vectors(network.vector_precondition, machine, vectors) * elements / everything
    matrices = (layer for layer in layers if not layer.solver.vector)
    products = [
        product
        for layer in matrices
        for product in _products(layer.shape, layer.solver.products, orthogonal)
    ]
    if network.precondition is None:
        rates = ((flops, interpolated(machine.products, order)) for order, flops in products)
        return seconds + sum(flops / rate for flops, rate in rates)
    measured = (
        replace(layer, sides=layer.sides or "AG", largest=None, rank=None) for layer in plan.layers
    )
    everything = sum(flops for layer in measured for _, flops in _products(layer))
    return seconds + network.precondition * sum(flops for _, flops in products) / everything


def statistics_seconds(plan: Plan, rank: int, machine: Machine, network: Network) -> float:
    """Return the seconds of a batch's statistics on `rank`, by the elements of the rank's factors.

    Factors of the averaged gradient take products of the gradient with itself instead.

    Raises:
        ValueError: the machine has no times of what the plan needs, vectors or products.
    """
    vectors = _solver_of_vectors(plan)
    of_vectors = _of_vectors(network.vector_statistics, machine, vectors) if vectors else 0.0
    total = 0.0
    for vector, power, seconds in ((False, 2, network.statistics), (True, 1, of_vectors)):
        if factors := [f for f in plan.of(rank).recorded if f.solver.vector == vector]:
            everything = sum(factor.work(power) for factor in plan.factors.values())
            total += seconds * sum(factor.work(power) for factor in factors) / everything
    return total + (_moment_seconds(plan, rank, machine) if plan.of(rank).of_gradient else 0.0)


def _moment_seconds(plan: Plan, rank: int, machine: Machine) -> float:
    """Return the seconds in which `rank` makes factors of the averaged gradient.

    Raises:
        ValueError: the machine has no times of products.
    """
    gradients = {layer.name: math.prod(layer.gradient) for layer in plan.layers}
    multiplications = [f.order * gradients[f.layer] for f in plan.of(rank).averaged]
    if multiplications and not machine.products:
        raise ValueError(
            f"machine {machine.name!r} has no times of solver={plan.solver!r}: of products, which "
            f"make factors of the gradient; calibrate again"
        )
    return sum(2 * n / interpolated(machine.products, n ** (1 / 3)) for n in multiplications)


def _solver_of_vectors(plan: Plan) -> str:
    """Return the name of a solver of the plan that keeps vectors; "" if no solver does."""
    return next((layer.solver.name for layer in plan.covered if layer.solver.vector), "")


def _of_vectors(seconds: float | None, machine: Machine, solver: str) -> float:
    if seconds is None:
        raise ValueError(f"machine {machine.name!r} has no times of solver={solver!r}")
    return seconds


def stepped_share(plan: Plan, rank: int) -> float:
    """Return the share of the model that `rank` steps."""
    counts = plan.of(rank).layouts.gradients.counts()
    return counts[rank] / sum(counts) if len(counts) > 1 else 1.0


def expected_slowest(spread: float, ranks: int) -> float:
    """Return the expected maximum of `ranks` log-normal times of mean 1.

    `spread` is the standard deviation of the times' logarithms. The value is computed by the
    midpoint rule over the maximum's probability: `E = integral of F^-1(u^(1/ranks))`.
    """
    if spread == 0:
        return 1.0
    normal = NormalDist()
    draws = (normal.inv_cdf(((k + 0.5) / DRAWS) ** (1 / ranks)) for k in range(DRAWS))
    return math.fsum(math.exp(spread * z - spread**2 / 2) for z in draws) / DRAWS


def _products(
    layer: LayerShape, times: int = 1, orthogonal: bool = True
) -> Iterable[tuple[float, int]]:
    """Yield order (of a cube of as many operations) and operations of a direction's products.

    Args:
        times: how many times as many products with factors a solver needs as with inverses.
        orthogonal: whether products make the direction orthogonal.
    """
    for multiplications in layer.products():
        yield multiplications ** (1 / 3), times * 2 * multiplications
    for multiplications in layer.orthogonalising() if orthogonal else ():
        yield multiplications ** (1 / 3), 2 * multiplications
