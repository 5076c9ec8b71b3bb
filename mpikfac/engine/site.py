"""The site of the parts of a step on a rank: the values that all parts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpikfac.comm import Grid, InOrder, Overlapped, Sender, Turns
from mpikfac.engine.nonfinite import Flags, Nonfinite
from mpikfac.numerics import Arena
from mpikfac.plan import Layout, RankPlan
from mpikfac.trace import Trace


@dataclass(frozen=True)
class Site:
    """The values that all parts of a step on a rank share.

    Attributes:
        plan: roles, layouts and messages, as the rank sees the plan.
        grid: the communicators.
        dtype: of sums, gradients and directions.
        nonfinite: the counter of numbers that are not finite.
        flags: facts on the device that the host reads together.
    """

    plan: RankPlan
    grid: Grid
    trace: Trace
    dtype: torch.dtype
    device: torch.device
    nonfinite: Nonfinite
    flags: Flags

    def arena(self, layout: Layout, dtype: torch.dtype | None = None) -> Arena:
        """Return an arena of zeros, by default in the dtype of sums."""
        return Arena(layout, dtype or self.dtype, self.device)

    def sender(
        self,
        stage: str,
        arena: Arena,
        messages: Turns,
        urgency: int,
        divided: Sequence[Tensor] = (),
    ) -> Sender:
        """Return the sender of an arena's sums that the strategy asks for.

        Collective over: world, if sums are overlapped.

        Args:
            urgency: orders overlapped messages; the lowest goes first.
            divided: the views of the arena whose sums become means over ranks.
        """
        arguments = self.grid, arena, messages, divided
        if self.plan.parts:
            return InOrder(*arguments, count=self.plan.parts, stage=stage)
        if self.plan.strategy.transport.overlap and messages[None]:
            return Overlapped(*arguments, urgency)
        return Sender(*arguments)
