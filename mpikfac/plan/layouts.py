"""The places of all numbers: layouts of a rank's arenas, from factors and layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mpikfac.plan.choices import Strategy
from mpikfac.plan.layout import Layout, Shape, lay_out
from mpikfac.plan.roles import Factor, PlannedLayer
from mpikfac.plan.shapes import count_of

Named = tuple[str, Shape]


@dataclass(frozen=True)
class Layouts:
    """The layouts of a rank's arenas.

    Attributes:
        statistics: a batch's factors, each a sum beside its number of examples; model order, or
            owner by owner if owners reduce.
        squares: statistics as square matrices, if squares travel; else nothing.
        averages: running averages.
        bases: decompositions: a segment per row of the column, and a segment of factors decomposed
            by every worker.
        denominators: damped products of eigenvalues of the layers to precondition.
        scales: running averages of scales, in the form of gradients.
        scale_sums: a batch's scales, each a sum beside its number of examples.
        gradients: all gradients: model order, or updater by updater if owners update.
        slices: gradients of split layers that travel in slices, slice by slice.
        directions: preconditioned gradients: column by column, or the rank's own if owners update.
        copies: the rank's copy of the model, if ranks exchange weights; else nothing.
    """

    statistics: Layout
    squares: Layout
    averages: Layout
    bases: Layout
    denominators: Layout
    scales: Layout
    scale_sums: Layout
    gradients: Layout
    slices: Layout
    directions: Layout
    copies: Layout


def of_statistics(
    factors: Iterable[Factor], ranks: int, strategy: Strategy, square: bool = False
) -> Layout:
    """Return the layout of sums of factors and of their counts.

    Args:
        square: factors are square matrices, not packed.
    """
    kept = by_share(factors)
    sums = [(factor.name, factor.block(2) if square else factor.packed) for factor in kept]
    counts: list[Named] = [(factor.counted, (1,)) for factor in kept]
    # Counts stand beside their sums, or behind all sums if sums travel encoded.
    encoded = strategy.transport.wires.factor_wire is not None
    blocks = sums + counts if encoded else [block for pair in zip(sums, counts) for block in pair]
    if strategy.reduction != "owners":
        return lay_out([blocks])
    owners = {name: f.owner for f in kept for name in (f.name, f.counted)}
    return lay_out(by_rank(blocks, owners, ranks))


def of_averages(factors: Iterable[Factor]) -> Layout:
    """Return the layout of running averages of factors."""
    return lay_out([[(factor.name, factor.packed) for factor in by_share(factors)]])


def of_blocks(segments: Iterable[Iterable[Factor]]) -> Layout:
    """Return the layout of the decompositions of factors, segment by segment."""
    return lay_out(
        [(block.name, block.shape) for factor in factors for block in factor.blocks]
        for factors in segments
    )


def of_requests(factors: Iterable[Factor]) -> Layout:
    """Return the layout of a request to a curvature rank: damping, then packed factors.

    The damping of a factor ("conv1.A+") may depend on the second factor of the layer.
    """
    factors = tuple(factors)
    # Beside the factor, its damping; or 1 if the decomposition needs float64, else 0.
    kept = (factor for factor in factors if factor.solver.damped or not factor.solver.vector)
    added = [(one.added, one.damping if one.solver.damped else (1,)) for one in kept]
    return lay_out([[*added, *((factor.name, factor.triangle) for factor in factors)]])


def of_denominators(layers: Iterable[PlannedLayer]) -> Layout:
    """Return the layout of damped products of eigenvalues."""
    kept = (layer for layer in layers if layer.solver.denominators)
    return lay_out([[(layer.name, layer.shape.denominators) for layer in kept]])


def of_gradients(layers: Iterable[PlannedLayer]) -> list[Named]:
    """Return name and shape of every layer's gradient."""
    return [(layer.name, layer.shape.gradient) for layer in layers]


def counted(blocks: Iterable[Named]) -> list[Named]:
    """Return the blocks, with the number of examples behind every block."""
    return [each for block in blocks for each in (block, (count_of(block[0]), (1,)))]


def by_rank(blocks: Iterable[Named], ranks_of: Mapping[str, int], ranks: int) -> list[list[Named]]:
    """Return the blocks as segments, a segment per rank."""
    segments: list[list[Named]] = [[] for _ in range(ranks)]
    for name, shape in blocks:
        segments[ranks_of[name]].append((name, shape))
    return segments


def by_share(factors: Iterable[Factor]) -> Sequence[Factor]:
    """Return factors in model order, but factors of an earlier share of a refresh first."""
    return sorted(factors, key=lambda factor: factor.share)
