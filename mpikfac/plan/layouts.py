"""The layouts of the arenas in which a rank stores its values, given its factors and layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mpikfac.plan.choices import Strategy
from mpikfac.plan.layout import Layout, Shape, lay_out
from mpikfac.plan.roles import Factor, PlannedLayer
from mpikfac.plan.shapes import count_of

Block = tuple[str, Shape]
"""The name and shape of a block."""
Item = TypeVar("Item")
Key = TypeVar("Key")


@dataclass(frozen=True)
class Layouts:
    """The layouts of a rank's arenas.

    Attributes:
        statistics: the factors of a batch, each as a sum with its number of examples; sorted with
            `by_form`, in one segment per rank if factors are reduced to owners.
        squares: statistics as square matrices, if these are sent; otherwise empty.
        averages: running averages, sorted with `by_form`.
        bases: the decompositions. If they are sent, there is one segment per row of the rank's
            column, and one for the factors that every worker decomposes; otherwise, there is a
            single segment.
        denominators: the damped products of eigenvalues of the layers that the rank preconditions.
        gradients: all gradients, with layers of the same form next to each other; one segment per
            rank if owners update layers. In a sharded model, there are two segments: the means
            over ranks, and the gradients that the rank receives.
        directions: preconditioned gradients, column by column; only those that this rank computes
            if owners update layers.

    In decompositions, denominators and directions, layers of the same kind are neighbours.
    """

    statistics: Layout
    squares: Layout
    averages: Layout
    bases: Layout
    denominators: Layout
    gradients: Layout
    directions: Layout


def of_statistics(
    factors: Iterable[Factor], ranks: int, strategy: Strategy, square: bool = False
) -> Layout:
    """Return the layout of the sums of factors, and of the number of examples in each sum.

    Args:
        square: whether factors are square matrices instead of packed triangles.
    """
    factors = by_form(factors)
    sums = [(factor.name, factor.block(2) if square else factor.packed) for factor in factors]
    counts: list[Block] = [(factor.counted, (1,)) for factor in factors]
    # Each count follows its sum; if sums are encoded, all counts follow all sums.
    encoded = strategy.compression.factors is not None
    blocks = sums + counts if encoded else [block for pair in zip(sums, counts) for block in pair]
    if strategy.assignment.factor_reduction != "reduce_scatter":
        return lay_out([blocks])
    owners = {name: f.owner for f in factors for name in (f.name, f.counted)}
    return lay_out(by_rank(blocks, owners, ranks))


def of_averages(factors: Iterable[Factor]) -> Layout:
    """Return the layout of running averages of factors."""
    return lay_out([[(factor.name, factor.packed) for factor in by_form(factors)]])


def of_blocks(segments: Iterable[Iterable[Factor]]) -> Layout:
    """Return the layout of the decompositions of factors, segment by segment."""
    return lay_out(
        [(block.name, block.shape) for factor in factors for block in factor.blocks]
        for factors in segments
    )


def of_requests(factors: Iterable[Factor]) -> Layout:
    """Return the layout of a request to a curvature server: dampings or flags, then packed factors.

    The damping of a factor (in the block "conv1.A+") can depend on the layer's other factor.
    """
    factors = tuple(factors)
    # For each factor, the damping, or a flag: 1 if the decomposition needs float64, otherwise 0.
    added = [
        (factor.added, factor.damping if factor.preconditioner.damped else (1,))
        for factor in factors
        if factor.preconditioner.damped or not factor.preconditioner.vector
    ]
    return lay_out([[*added, *((factor.name, factor.triangle) for factor in factors)]])


def of_denominators(layers: Iterable[PlannedLayer]) -> Layout:
    """Return the layout of the damped products of eigenvalues of `layers`."""
    eigen = (layer for layer in by_kind(layers) if layer.preconditioner.denominators)
    return lay_out([[(layer.name, layer.shape.denominators) for layer in eigen]])


def of_gradients(layers: Iterable[PlannedLayer]) -> list[Block]:
    """Return the name and the shape of every layer's gradient."""
    return [(layer.name, layer.shape.gradient) for layer in layers]


def counted(blocks: Iterable[Block]) -> list[Block]:
    """Return the blocks, each followed by a block for its number of examples."""
    return [entry for block in blocks for entry in (block, (count_of(block[0]), (1,)))]


def by_rank(
    blocks: Iterable[Block], ranks_of: Mapping[str, int], ranks: int
) -> list[Sequence[Block]]:
    """Return the blocks as segments, one per rank."""
    of_rank = grouped(blocks, lambda block: ranks_of[block[0]])
    return [of_rank.get(rank, ()) for rank in range(ranks)]


def by_kind(
    layers: Iterable[PlannedLayer],
    kind: Callable[[PlannedLayer], Hashable] = lambda layer: layer.kind,
) -> list[PlannedLayer]:
    """Return the layers sorted by kind, in the order in which the kinds first occur."""
    return [layer for alike in grouped(layers, kind).values() for layer in alike]


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, Sequence[Item]]:
    """Return the items by key; items with the same key stay in order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return {**groups}


def by_form(factors: Iterable[Factor]) -> Sequence[Factor]:
    """Return the factors sorted by slot and message, and within a message by form.

    Neighbouring factors of the same form are a stack, which a single GPU kernel can process.
    """
    factors = list(factors)
    first = {factor.packed: place for place, factor in reversed(list(enumerate(factors)))}
    return sorted(factors, key=lambda f: (f.turn, f.fused, first[f.packed]))
