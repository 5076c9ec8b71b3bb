"""What DGC does beside sending the largest numbers [Lin et al. 2018]: warm-up and clipping.

Warm-up: the share of sent numbers sinks to `top_share` in equal stages, by the same factor from
stage to stage: with 0.001, 25 %, 6.3 %, 1.6 % and 0.4 % of the numbers.

Local clipping: a rank bounds the norm of what it adds to the sum, before the numbers wait. Of N
ranks, each has a bound of `top_clip / sqrt(N)`, for a sum with the bound `top_clip` if the ranks'
noise is independent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from mpikfac.comm import Sender, Turns
from mpikfac.engine import Gradients, OneModel, Site
from mpikfac.plan import Message, RankPlan, stages

STAGES = 4  # of the warm-up: in the paper, an epoch each


class GentleStart(OneModel):
    """Send more numbers in the first steps, and bound the rank's own gradient."""

    def __init__(self, site: Site, gradients: Gradients) -> None:
        super().__init__(site, gradients)
        wires = site.plan.strategy.transport.wires
        self._warmup = wires.top_warmup
        self._messages: list[Turns] = [{None: sums} for sums in _sums_of_stages(site.plan)]
        if wires.top_clip is not None:
            gradients.sender = Clipped(gradients, wires.top_clip)

    def begin_step(self, step: int) -> None:
        """Take the messages of the stage."""
        stage = STAGES * step // self._warmup if step < self._warmup else STAGES
        self.gradients.sender.messages = self._messages[stage]


class Clipped(Sender):
    """Average gradients, of which each rank adds no more than a norm."""

    def __init__(self, gradients: Gradients, bound: float) -> None:
        sender = gradients.sender
        super().__init__(sender.grid, sender.arena, sender.messages, sender.divided)
        self._trained = [sender.arena[b.name] for b in gradients.blocks if b.parameters]
        self._bound = bound * sender.grid.world.size**0.5  # of numbers before the division

    def add_up(self, turn: int | None = None) -> None:
        """Clip the rank's gradient, and average the arena over ranks.

        A gradient that is not finite stays as it is.

        Collective over: world.
        """
        scale = (self._bound / _norm(self._trained)).clamp(max=1.0)
        torch._foreach_mul_(self._trained, scale.where(scale > 0, 1.0))
        super().add_up(turn)


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the norm of all numbers together, `[]`."""
    return torch.stack([tensor.norm() for tensor in tensors]).norm()


def _sums_of_stages(plan: RankPlan) -> Iterator[list[Message]]:
    """Yield the messages with gradients of the stages of the warm-up, and behind the warm-up."""
    share = plan.strategy.transport.wires.top_share
    for stage in range(1, STAGES + 2):
        strategy = plan.strategy.changed(top_share=share ** (stage / (STAGES + 1)))
        yield stages.reduce_gradients(replace(plan, strategy=strategy))
