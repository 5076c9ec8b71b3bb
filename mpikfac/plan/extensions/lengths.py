"""The state of lengths by Adam's steps: averages of squared gradients, and momenta."""

from __future__ import annotations

from mpikfac.plan import layouts
from mpikfac.plan.layout import Layout, lay_out
from mpikfac.plan.of_rank import RankPlan


def layout(rank: RankPlan) -> Layout:
    """Return the layout of averages, and of momenta: of all that the rank makes directions of.

    Uncovered parameters that the rank steps count as layers.
    """
    trained = [block for block in rank.uncovered if block[0] not in rank.means]
    stepped = [(name, shape) for name, shape in trained if rank.steps(name)]
    return lay_out([[*layouts.of_gradients(layouts.by_kind(rank.preconditioned)), *stepped]])


def memory_of_lengths(rank: RankPlan, momentum: bool) -> dict[str, int]:
    """Return the bytes that a rank keeps for lengths "adam" and "orthogonal", by kind.

    Args:
        momentum: whether the length takes the momentum of gradients: momenta are kept, and what
            the next direction is made of.
    """
    size = layout(rank).size * rank.itemsizes.numbers
    return {"lengths": size, "momenta": 2 * size * momentum}
