"""Predict the times of messages and of a rank's computations on a machine, with pure functions.

The MPI library chooses an algorithm for each collective (`algorithms`). Each of its rounds takes a
latency plus the bytes of the busiest link divided by the bandwidth. If the collective was measured,
the measurement is used, and the rounds only convert it to other numbers of ranks and to unequal
parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from mpikfac.plan import (
    BATCH,
    IN_TWO_SUMS,
    PASSED,
    PIECE,
    Factor,
    Message,
    Plan,
    passed,
    products,
)
from mpikfac.predict import algorithms
from mpikfac.predict.algorithms import Parts, Round
from mpikfac.predict.machine import Level, Machine, Network, Sample, fitted, interpolated

UNEQUAL = ("Reduce_scatter", "Alltoall", "Allgatherv")
BLOCKING = {"Iallreduce": "Allreduce", "Ireduce": "Reduce"}
MEASURED_AS = BLOCKING | {"Alltoallv": "Alltoall"}
DRAWS = 512  # points of the quadrature for the slowest rank's time
CHAINED = 4 * PIECE  # bytes per piece of a message, in float32
PIECES = dict.fromkeys(("Allreduce", "Reduce", "Reduce_scatter", "Alltoall"), CHAINED)
PIECES |= dict.fromkeys(BLOCKING, 4 * BATCH)
"""The bytes per piece of collectives that are sent in pieces."""


def message_seconds(message: Message, plan: Plan, rank: int, machine: Machine) -> float:
    """Return the time of a message of `rank` once all members have arrived, in seconds."""
    ranks, nodes, sharing = placed(plan.grid.team(rank, message.over), plan, machine)
    codec = message.codec.name if message.codec else None

    def seconds(primitive: str, size: float, parts: Parts = ()) -> float:
        return collective_seconds(primitive, size, ranks, machine, nodes, sharing, codec, parts)

    if message.primitive in UNEQUAL:
        counts = [stop - start for start, stop in message.spans]
        per_element = message.size / max(1, sum(counts))
        return seconds(message.primitive, message.size, [per_element * count for count in counts])
    if message.primitive == "Alltoallv":
        return seconds("Alltoallv", max(map(sum, message.sizes)), message.sizes)
    if message.primitive == PASSED:
        moves = passed(message.spans, message.to)
        per_element = message.size / sum(move.size for move in moves)
        sent = ((move.source, move.target, per_element * move.size) for move in moves)
        one = algorithms.transfer(sent, math.ceil(ranks / nodes))
        return sum(round_seconds(one, machine, sharing))
    if message.codec and message.primitive == IN_TWO_SUMS:
        return sum(seconds("Allreduce", plan.itemsize * size) for size in message.codec.reductions)
    if message.primitive == "Send, Bcast":
        return seconds("Send", message.size) + seconds("Bcast", message.size)
    if message.over == "curvature" and message.primitive == "Send":
        return seconds("Recv", message.size)
    return seconds(message.primitive, message.size)


def overlapped_seconds(message: Message, plan: Plan, rank: int, machine: Machine) -> float:
    """Return the seconds of a message sent during computations, with non-blocking reductions."""
    if message.primitive in BLOCKING.values():
        message = replace(message, primitive=f"I{message.primitive.lower()}")
    return message_seconds(message, plan, rank, machine)


def agreement_seconds(plan: Plan, machine: Machine) -> float:
    """Return the seconds of the 1-byte reduction with which ranks agree to send a message."""
    ranks, nodes, sharing = placed(plan.grid.team(0, "world"), plan, machine)
    return collective_seconds("Iallreduce", 1, ranks, machine, nodes, sharing)


def basis_seconds(size: int, plan: Plan, machine: Machine) -> float:
    """Return the seconds to gather bases, `size` bytes in equal parts, on a layer's workers."""
    ranks, nodes, sharing = placed(plan.grid.team(0, "column"), plan, machine)
    return collective_seconds("Allgatherv", size, ranks, machine, nodes, sharing)


def placed(ranks: range, plan: Plan, machine: Machine) -> tuple[int, int, int]:
    """Return the numbers of ranks, of nodes, and of like communicators that share a node's link."""
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
    parts: Parts = (),
) -> float:
    """Return the time of a collective over `ranks` ranks on `nodes` nodes, in seconds.

    Args:
        size: bytes of the whole buffer, as sent.
        sharing: the number of communicators that run the collective at the same time and share a
            node's link.
        codec: the encoding, which is assumed to take no time if it was not measured.
        parts: bytes of every member's part or, for Alltoallv, from every member to every member;
            equal parts by default.
    """
    if ranks == 1 or size == 0:
        return 0.0
    if primitive == "Send":  # piece by piece along a chain of all ranks
        pieces = math.ceil(size / CHAINED)
        hop = collective_seconds("Recv", min(size, CHAINED), 2, machine, nodes, sharing)
        return (ranks - 2 + pieces) * hop
    if primitive == "Recv":
        primitive, ranks = "Send", 2
    modelled = _modelled(primitive, parts or _equal(size, ranks), machine, nodes, sharing)
    sample = nearest(machine, MEASURED_AS.get(primitive, primitive), ranks, nodes, sharing, codec)
    return sum(modelled) if sample is None else _converted(sample, size, modelled, machine)


def round_seconds(one: Round, machine: Machine, sharing: int = 1) -> tuple[float, float]:
    """Return the seconds spent on latency and on bytes in the rounds of a collective."""
    inside, between = machine.inside, machine.between
    if between is None or not one.leaving:
        return one.times * inside.latency, one.times * one.size / inside.bandwidth
    of_node = one.leaving * sharing / between.bandwidth
    return one.times * between.latency, one.times * max(one.size / inside.bandwidth, of_node)


def algorithm_seconds(primitive: str, algorithm: str, parts: Parts, machine: Machine) -> float:
    """Return the predicted seconds of a collective if the library selected the given algorithm.

    Args:
        primitive: such as "Allreduce".
        algorithm: such as "ring".
        parts: the bytes of each rank's part.
    """
    together = machine.ranks_per_node or len(parts)
    found = algorithms.rounds(primitive, algorithm, parts, together)
    return sum(sum(round_seconds(one, machine)) for one in found)


def level_of(sample: Sample, library: str = "Open MPI") -> Level:
    """Return the network level fitted to a measured collective, to predict other collectives."""
    line = fitted(sample.points)
    largest = sample.points[-1][0]
    found = _rounds(sample.primitive, _equal(largest, sample.ranks), sample.nodes, library)
    busiest = (one.leaving * sample.sharing if sample.nodes > 1 else one.size for one in found)
    moved = sum(size * one.times for size, one in zip(busiest, found))
    count = sum(one.times for one in found)
    return Level(line.latency / count, line.bandwidth * moved / largest)


def nearest(
    machine: Machine,
    primitive: str,
    ranks: int,
    nodes: int,
    sharing: int,
    codec: str | None = None,
) -> Sample | None:
    """Return the measurement of a collective with the nearest number of ranks, or None.

    Collectives on a single node are compared only with measurements on a single node, and those on
    several nodes only with measurements on several nodes. If none of these used the codec, those
    without a codec are searched.
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


def _rounds(primitive: str, parts: Parts, nodes: int, library: str) -> list[Round]:
    """Return the rounds of a message, piece by piece; each piece has a fraction of every part."""
    together = math.ceil(len(parts) / nodes)
    found: list[Round] = []
    for name in primitive.split(", "):
        size = max(parts) * len(parts) if name == "Alltoall" else sum(np.ravel(parts))
        pieces = math.ceil(size / PIECES.get(name, size) - 1e-9)  # tolerates rounded sums of parts
        piece = list(np.asarray(parts, float) / pieces)
        way = algorithms.chosen(name, piece, library)
        of_piece = algorithms.rounds(name, way, piece, together)
        found += (one._replace(times=one.times * pieces) for one in of_piece)
    return found


def _modelled(
    primitive: str, parts: Parts, machine: Machine, nodes: int, sharing: int
) -> tuple[float, float]:
    """Return the seconds that a message spends on latency and on bytes, on the machine's levels."""
    found = _rounds(primitive, parts, nodes, machine.library)
    return _total(round_seconds(one, machine, sharing) for one in found)


def _converted(
    sample: Sample, size: float, modelled: tuple[float, float], machine: Machine
) -> float:
    """Scale a time measured with equal parts to another collective, using modelled times of both.

    The latency is scaled by the ratio of the modelled latencies, and the rest by the ratio of the
    modelled times for bytes.
    """
    line = fitted(sample.points)
    largest = sample.points[-1][0]
    seconds = interpolated(sample.points, size) + max(0.0, size - largest) / line.bandwidth
    latency = min(line.latency, seconds)
    equal = _equal(size, sample.ranks)
    measured = _modelled(sample.primitive, equal, machine, sample.nodes, sample.sharing)
    longer, more = (here / there for here, there in zip(modelled, measured))
    return latency * longer + (seconds - latency) * more


def _equal(size: float, ranks: int) -> list[float]:
    return [size / ranks] * ranks


def _total(seconds: Iterable[tuple[float, float]]) -> tuple[float, float]:
    latencies, of_bytes = zip(*seconds)
    return sum(latencies), sum(of_bytes)


def decompose_seconds(plan: Plan, rank: int, machine: Machine, turn: int | None = None) -> float:
    """Return the seconds of a refresh's decompositions on `rank`, for all slots or slot `turn`."""
    factors = plan.of(rank).decomposed(turn)
    # The reciprocals of diagonals are assumed to take no time.
    return sum(factor_seconds(factor, machine) for factor in factors if factor.order > 1)


def factor_seconds(factor: Factor, machine: Machine) -> float:
    """Return the time to decompose a factor, in seconds.

    For a low rank, the time of the full decomposition is scaled in proportion to the work.
    """
    if factor.preconditioner.vector:
        return 0.0
    preconditioner, timed = (
        factor.preconditioner.name,
        factor.preconditioner.timed_as or factor.preconditioner.name,
    )
    if timed not in machine.decompositions and timed != preconditioner:
        raise ValueError(
            f"machine {machine.name!r} has no times for preconditioner={timed!r}, whose "
            f"decompositions preconditioner={preconditioner!r} uses; measure them with mpikfac "
            f"calibrate"
        )
    full = machine.decomposition(timed, factor.order)
    return full * (factor.work() / factor.order**3)


def precondition_seconds(
    plan: Plan, rank: int, machine: Machine, network: Network, orthogonal: bool = True
) -> float:
    """Return the time that `rank` needs to precondition its layers, in seconds.

    The time is a fraction of the time measured for all layers: the fraction of multiplications or,
    for vectors, of elements. Without a measurement, it is the sum of the products' times. Measured
    times include making directions orthogonal.

    Args:
        orthogonal: whether the directions are made orthogonal.

    Raises:
        ValueError: the machine has no times for the vectors, or no rates for the products, that the
            plan needs.
    """
    layers = plan.of(rank).preconditioned
    seconds = 0.0
    if vectors := _preconditioner_of_vectors(plan):
        elements = sum(
            f.size for layer in layers if layer.preconditioner.vector for f in layer.factors
        )
        everything = sum(factor.size for factor in plan.factors.values())
        seconds = _of_vectors(network.vector_precondition, machine, vectors) * elements / everything
    products = directions(plan, rank, orthogonal)
    if network.precondition is None:
        return seconds + sum(product_seconds(product, machine) for product in products)
    measured = (replace(layer, sides="AG", largest=None, rank=None) for layer in plan.layers)
    everything = sum(sum(layer.products()) + sum(layer.orthogonalising()) for layer in measured)
    return seconds + network.precondition * sum(products) / everything


def directions(plan: Plan, rank: int, orthogonal: bool = True) -> list[int]:
    """Return the number of multiplications in each matrix product for the directions on `rank`.

    Args:
        orthogonal: whether the directions are made orthogonal.
    """
    layers = plan.of(rank).preconditioned
    matrices = [layer for layer in layers if not layer.preconditioner.vector]
    return [
        n for layer in matrices for n in products(layer.shape, layer.preconditioner, orthogonal)
    ]


def statistics_seconds(plan: Plan, rank: int, machine: Machine, network: Network) -> float:
    """Return the time of a batch's statistics on `rank`, in proportion to its factors' elements.

    Measured times cover both factors of every layer.

    Raises:
        ValueError: the plan has factors that are squares of vectors, and the machine has no times
            for their statistics.
    """
    vectors = _preconditioner_of_vectors(plan)
    of_vectors = _of_vectors(network.vector_statistics, machine, vectors) if vectors else 0.0
    measured, total = [replace(layer, sides="AG") for layer in plan.layers], 0.0
    for vector, power, seconds in ((False, 2, network.statistics), (True, 1, of_vectors)):
        if factors := [f for f in plan.of(rank).recorded if f.preconditioner.vector == vector]:
            everything = sum(f.work(power) for layer in measured for f in layer.factors)
            total += seconds * sum(factor.work(power) for factor in factors) / everything
    return total


def moment_seconds(plan: Plan, rank: int, machine: Machine) -> float:
    """Return the time that `rank` needs for factors of the averaged gradient, in seconds.

    Raises:
        ValueError: the machine has no rates for products.
    """
    return sum(product_seconds(multiplications, machine) for multiplications in moments(plan, rank))


def moments(plan: Plan, rank: int) -> Iterator[int]:
    """Yield the multiplications in each product for factors of the averaged gradient on `rank`.

    Preconditioners that whiten the gradient first multiply it by the matrices of both sides.
    """
    of_rank = plan.of(rank)
    made = {factor.name for factor in of_rank.averaged if of_rank.of_gradient}
    for layer in of_rank.layers:
        opposite = {"A": layer.shape.outputs, "G": layer.shape.inputs}
        own = [factor for factor in layer.factors if factor.name in made]
        yield from (factor.work(2) * opposite[factor.side] for factor in own)
        yield from layer.shape.products() if own and layer.preconditioner.whitened else ()


def product_seconds(multiplications: int, machine: Machine) -> float:
    """Return the time of a matrix product, at the rate of a square product of the same cost.

    Raises:
        ValueError: the machine has no rates for products.
    """
    if not machine.products:
        raise ValueError(
            f"machine {machine.name!r} has no rates for products; "
            f"measure them with mpikfac calibrate"
        )
    return 2 * multiplications / interpolated(machine.products, multiplications ** (1 / 3))


def _preconditioner_of_vectors(plan: Plan) -> str:
    """Return the name of a preconditioner in the plan whose factors are vectors; "" without one."""
    return next(
        (layer.preconditioner.name for layer in plan.covered if layer.preconditioner.vector), ""
    )


def _of_vectors(seconds: float | None, machine: Machine, preconditioner: str) -> float:
    if seconds is None:
        raise ValueError(
            f"machine {machine.name!r} has no times for preconditioner={preconditioner!r}"
        )
    return seconds


def stepped_share(plan: Plan, rank: int) -> float:
    """Return the fraction of the model's elements that the optimizer on `rank` updates."""
    if sharding := plan.sharding:
        of_ranks = [sum(shards) for shards in zip(*(p.elements for p in sharding.parameters))]
        return of_ranks[rank] / sum(of_ranks[: sharding.shards])
    counts = plan.of(rank).layouts.gradients.counts()
    return counts[rank] / sum(counts) if len(counts) > 1 else 1.0


def expected_slowest(spread: float, ranks: int) -> float:
    """Return the expected maximum of `ranks` log-normal times of mean 1.

    `spread` is the standard deviation of the times' logarithms. The value is computed with the
    midpoint rule over the maximum's probability: `E = integral of F^-1(u^(1/ranks))`.
    """
    if spread == 0:
        return 1.0
    normal = NormalDist()
    draws = (normal.inv_cdf(((k + 0.5) / DRAWS) ** (1 / ranks)) for k in range(DRAWS))
    return math.fsum(math.exp(spread * z - spread**2 / 2) for z in draws) / DRAWS
