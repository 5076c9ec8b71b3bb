"""The state of grafting with Adam's steps: averages of squared gradients, and momenta."""

from __future__ import annotations

from collections.abc import Iterable

from mpikfac.plan import layouts
from mpikfac.plan.choices import Grafting
from mpikfac.plan.layout import Layout, lay_out
from mpikfac.plan.layouts import Block
from mpikfac.plan.of_rank import RankPlan


def memory_of_grafting(rank: RankPlan, grafting: Grafting) -> dict[str, int]:
    """Return the bytes that a rank keeps for the lengths of directions, by kind.

    Uncovered parameters that the rank updates count as layers. Normalised rows need one value per
    row of a matrix, and Adam's steps in eigenbases need the gradients in these bases. With
    momentum, the rank also keeps the momenta, and the means that determine the next directions.
    """
    if not grafting.by_adam or not rank.layers:
        return {"lengths": 0, "momenta": 0}
    layers = layouts.of_gradients(layouts.by_kind(rank.preconditioned))
    trained = [block for block in rank.uncovered if block[0] not in rank.means]
    all_of_rank = _laid_out([*layers, *(block for block in trained if rank.steps(block[0]))])
    further = layers if grafting.in_eigenbases else []
    if grafting.normalize_rows:
        matrices = (layer for layer in rank.preconditioned if layer.shape.maps_vectors)
        further = [(name, shape[:-1]) for name, shape in layouts.of_gradients(matrices)]
    size, itemsize = all_of_rank.size, rank.itemsizes.numbers
    averages = size + _laid_out(further).size
    momenta = 2 * size * bool(grafting.momentum)
    return {"lengths": averages * itemsize, "momenta": momenta * itemsize}


def _laid_out(blocks: Iterable[Block]) -> Layout:
    return lay_out([blocks])
