"""The state of lengths by Adam's steps: averages of squares, and momenta."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from mpikfac.plan import layouts
from mpikfac.plan.layout import Layout, lay_out
from mpikfac.plan.layouts import Block
from mpikfac.plan.of_rank import RankPlan

ByAdam = Literal["orthogonal", "rows", "rotated", "adam"]
BY_ADAM: tuple[ByAdam, ...] = ("orthogonal", "rows", "rotated", "adam")
"""The lengths that Adam's averages give, by the choice `Length(source)`."""


def memory_of_lengths(rank: RankPlan, source: str, momentum: bool) -> dict[str, int]:
    """Return the bytes that a rank keeps for the lengths of directions, by kind.

    Uncovered parameters that the rank steps count as layers. "rows" keeps a number for each row of
    a matrix, and "rotated" the gradients in eigenbases.

    Args:
        source: of the lengths, see `Length`.
        momentum: whether the length takes the momentum of gradients: momenta are kept, and what
            the next directions are made of.
    """
    if source not in BY_ADAM or not rank.layers:
        return {"lengths": 0, "momenta": 0}
    layers = layouts.of_gradients(layouts.by_kind(rank.preconditioned))
    trained = [block for block in rank.uncovered if block[0] not in rank.means]
    all_of_rank = _laid_out([*layers, *(block for block in trained if rank.steps(block[0]))])
    matrices = (layer for layer in rank.preconditioned if layer.shape.maps_vectors)
    further = {
        "rows": [(name, shape[:-1]) for name, shape in layouts.of_gradients(matrices)],
        "rotated": layers,
    }
    size, itemsize = all_of_rank.size, rank.itemsizes.numbers
    averages = size + _laid_out(further.get(source, ())).size
    return {"lengths": averages * itemsize, "momenta": 2 * size * itemsize * momentum}


def _laid_out(blocks: Iterable[Block]) -> Layout:
    return lay_out([blocks])
