"""Blocks bound to their places in an arena."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpikfac.engine.checks import Block
from mpikfac.engine.site import Site
from mpikfac.numerics import Arena
from mpikfac.plan import RankPlan


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
    found = (b for b in blocks if b.name in arena)
    return [Slot(b, b.parts(arena[b.name]), steps(b.name)) for b in found]


def share_out(arena: Arena, plan: RankPlan) -> None:
    """Divide by the number of ranks what messages add up; a rule takes numbers as they are."""
    if plan.strategy.exchange.robust.combine == "mean":
        arena.flat /= plan.grid.count
    else:
        torch._foreach_div_([arena[name] for name in plan.means], plan.grid.count)
