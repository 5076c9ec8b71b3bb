"""Blocks bound to their places in an arena."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mpikfac.engine.site import Site
from mpikfac.layers import Layer, Other
from mpikfac.numerics import Arena
from mpikfac.plan import RankPlan

Block = Layer | Other


@dataclass(frozen=True)
class Slot:
    """A layer or an uncovered block, bound to a place in an arena.

    Attributes:
        parts: views of the arena, shaped as the block's parameters.
        steps: whether the rank's optimizer steps the block.
    """

    block: Block
    parts: Sequence[Tensor]
    steps: bool


def slots_in(arena: Arena, blocks: Iterable[Block], site: Site) -> list[Slot]:
    """Return slots of the `blocks` with a place in the arena."""
    steps = site.plan.steps
    placed = (block for block in blocks if block.name in arena)
    return [Slot(b, b.parts(arena[b.name]), steps(b.name)) for b in placed]


def divided_by_ranks(arena: Arena, plan: RankPlan) -> list[Tensor]:
    """Return the views that sums turn into means; a robust rule takes vectors as they are."""
    if plan.strategy.exchange.robust.combine == "mean":
        return [arena.flat]
    return [arena[name] for name in plan.means]
