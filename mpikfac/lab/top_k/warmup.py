"""DGC's warm-up and clipping, in addition to sending the largest values [Lin et al. 2018].

Warm-up: the fraction of values that are sent decreases to `ratio` in stages of equal length, each
time by the same factor. For `ratio=0.001`, the fractions are 25 %, 6.3 %, 1.6 % and 0.4 %.

Local clipping: each rank bounds the norm of its contribution to the reduction before it adds the
unsent values from earlier steps. With N ranks, the bound per rank is `clip_norm / sqrt(N)`, which
bounds the sum of all contributions by about `clip_norm` if the ranks' noise is independent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from mpikfac.comm import Sender, Turns
from mpikfac.engine import Gradients, OneModel, Site
from mpikfac.lab.top_k.config import TopK
from mpikfac.plan import Message, RankPlan, stages

STAGES = 4  # stages of the warm-up; in the paper, each takes one epoch


class GentleStart(OneModel):
    """Send more values in the first steps, and bound the norm of each rank's gradient."""

    def __init__(self, site: Site, gradients: Gradients) -> None:
        super().__init__(site, gradients)
        top = cast(TopK, site.plan.strategy.compression.gradients)
        self._warmup = top.warmup_steps
        self._messages: list[Turns] = [{None: sums} for sums in _sums_of_stages(site.plan)]
        if top.clip_norm is not None:
            gradients.sender = Clipped(gradients, top.clip_norm)

    def begin_step(self, step: int) -> None:
        """Select the messages of the current warm-up stage, or those after the warm-up."""
        stage = STAGES * step // self._warmup if step < self._warmup else STAGES
        self.gradients.sender.messages = self._messages[stage]


class Clipped(Sender):
    """Average gradients after bounding the norm of each rank's contribution."""

    def __init__(self, gradients: Gradients, bound: float) -> None:
        sender = gradients.sender
        super().__init__(sender.grid, sender.arena, sender.messages, sender.divided)
        self._trained = [sender.arena[b.name] for b in gradients.blocks if b.parameters]
        self._bound = bound * sender.grid.world.size**0.5  # gradients are not yet divided by N

    def add_up(self, turn: int | None = None) -> None:
        """Clip the rank's gradient, and average the arena over ranks.

        A gradient with NaN or infinity is left unchanged.

        Collective over: world.
        """
        scale = (self._bound / _norm(self._trained)).clamp(max=1.0)
        torch._foreach_mul_(self._trained, scale.where(scale > 0, 1.0))
        super().add_up(turn)


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the norm `[]` of the vector that contains all tensors' elements."""
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


def _sums_of_stages(plan: RankPlan) -> Iterator[list[Message]]:
    """Yield the messages that reduce gradients, for each stage of the warm-up and after it."""
    strategy, compression = plan.strategy, plan.strategy.compression
    top = cast(TopK, compression.gradients)
    for stage in range(1, STAGES + 2):
        of_stage = replace(top, ratio=top.ratio ** (stage / (STAGES + 1)))
        compressed = replace(compression, gradients=of_stage)
        yield stages.reduce_gradients(
            replace(plan, strategy=replace(strategy, compression=compressed))
        )
