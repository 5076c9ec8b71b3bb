"""The length of a first-order optimizer's step, which the direction of a layer can be given."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mpikfac.arena import Arena
from mpikfac.layout import lay_out
from mpikfac.plan import Plan
from mpikfac.shapes import count_of

Graft = Literal["sgd", "adam"]
GRAFTS = (None, "sgd", "adam")
DECAY, EPSILON = 0.999, 1e-8  # of Adam, as it is usually set


class Squares(Arena):
    """Adam's running averages of squared gradients, of the layers that one rank preconditions.

    By layer; beside each, what its average's weights add up to, which is 1 in the end.
    """

    def __init__(self, plan: Plan, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        names = plan.preconditioned(rank)
        blocks = [(name, plan.shapes[name].gradient) for name in names]
        super().__init__(
            lay_out([blocks, [(count_of(name), (1,)) for name in names]]), dtype, device
        )

    def add(self, name: str, gradient: Tensor) -> None:
        """Takes the averaged gradient of a step into the average."""
        self[name].mul_(DECAY).addcmul_(gradient, gradient, value=1 - DECAY)
        self[count_of(name)].mul_(DECAY).add_(1 - DECAY)

    def length(self, name: str, gradient: Tensor) -> Tensor:
        """The norm `[]` of `gradient / (sqrt(v) + eps)`: Adam's step, but for its momentum.

        That is added by the optimizer that takes the step [Kingma & Ba 2015].
        """
        mean = self[name] / self[count_of(name)]
        return (gradient / (mean.sqrt_() + EPSILON)).norm()
