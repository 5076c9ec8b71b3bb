"""The context that the parts of a step on one rank share."""

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
    """The values that all parts of a step on one rank share.

    Attributes:
        plan: roles, layouts and messages, from the rank's point of view.
        grid: the communicators.
        dtype: the dtype of statistics, gradients and directions.
        nonfinite: counts non-finite values.
        flags: values on the device that the host reads together.
    """

    plan: RankPlan
    grid: Grid
    trace: Trace
    dtype: torch.dtype
    device: torch.device
    nonfinite: Nonfinite
    flags: Flags

    def arena(self, layout: Layout, dtype: torch.dtype | None = None) -> Arena:
        """Return a zeroed arena, by default in the dtype of the statistics."""
        return Arena(layout, dtype or self.dtype, self.device)

    def sender(
        self,
        stage: str,
        arena: Arena,
        messages: Turns,
        urgency: int,
        divided: Sequence[Tensor] = (),
    ) -> Sender:
        """Return the sender that the strategy selects for an arena.

        Collective over: world, if reductions are overlapped.

        Args:
            urgency: determines the order of overlapped messages; those with the lowest urgency are
                sent first.
            divided: the views of the arena that receive means over ranks instead of sums.
        """
        arguments = self.grid, arena, messages, divided
        if self.plan.parts:
            return InOrder(*arguments, count=self.plan.parts, stage=stage)
        if self.plan.strategy.transport.overlap and messages[None]:
            return Overlapped(*arguments, urgency)
        return Sender(*arguments)
