"""First-order steps for many gradients in few calls: Adam without momentum, and Nesterov SGD."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from mpikfac.numerics.arena import Arena
from mpikfac.plan import count_of, lay_out

DECAY, EPSILON = 0.999, 1e-8  # Adam's defaults


class AdamSteps(dict[str, Tensor]):
    """Compute Adam's steps without momentum, and map names to averages of squared gradients.

    For each running average, the mapping also contains the sum of its weights, which tends to 1.
    Momentum is left to the optimizer [Kingma & Ba 2015].

    Attributes:
        even: whether all averages have the same sum of weights, as they do until a gradient is left
            out.
        gradients: the gradients that `take` squares, in the order of the names.
    """

    def __init__(self, gradients: Arena, names: Sequence[str], decay: float = DECAY) -> None:
        """Initialise averages for the `names` of the arena with zeros."""
        shapes = [(name, tuple(gradients[name].shape)) for name in names]
        averages = Arena(lay_out([shapes]), gradients.flat.dtype, gradients.flat.device)
        # The weights, which are part of the state, are on the host, which decides how to divide.
        weights = torch.zeros(len(names), dtype=gradients.flat.dtype, device="cpu")
        super().__init__(averages)
        self.update(zip(map(count_of, names), weights.split(1)))
        self._names, self._weights = names, weights
        self._divisors = weights.to(gradients.flat.device)
        self.gradients = [gradients[name] for name in names]
        self._averages = [averages[name] for name in names]
        self.even, self._decay = True, decay
        self._sound = list(range(len(names)))  # positions of the names in the last counted batch

    def count(self, broken: Collection[str]) -> None:
        """Count a batch in the weights of the averages, except for names in `broken`."""
        self._sound = [place for place, name in enumerate(self._names) if name not in broken]
        self._weights[self._sound] = self._decay * self._weights[self._sound] + (1 - self._decay)
        self._divisors.copy_(self._weights, non_blocking=True)
        self.even = len(set(self._weights.tolist())) <= 1

    def take(self, numerators: list[Tensor] | None = None) -> list[Tensor]:
        """Merge the gradients into the averages; return each `gradient / (sqrt(average) + eps)`.

        Call `count` for the batch first; the averages of names that it leaves out do not change.

        Args:
            numerators: tensors to divide instead of the gradients, such as momenta.
        """
        if not self._names:
            return []
        if self._sound:
            gradients = [self.gradients[place] for place in self._sound]
            averages = [self._averages[place] for place in self._sound]
            torch._foreach_mul_(averages, self._decay)
            torch._foreach_addcmul_(averages, gradients, gradients, 1 - self._decay)
        divisors: Any = self._divisors[0] if self.even else self._divisors.unbind()
        steps = torch._foreach_div(self._averages, divisors)
        torch._foreach_sqrt_(steps)
        torch._foreach_add_(steps, EPSILON)
        return list(torch._foreach_div(numerators or self.gradients, steps))


def elastic_gradient(anchor: Tensor, average: Tensor, mean: Tensor, pull: float) -> Tensor:
    """Return the gradient for updating a replica in an exchange [Chaudhari et al. 2018], `[n]`.

    Args:
        anchor: the replica's weights after the last exchange.
        average: the running average, over the steps since then, of the replica's weights.
        mean: the mean of all replicas' averages.
        pull: the weight of the difference between `anchor` and `mean`.
    """
    return (anchor - average) + pull * (anchor - mean)


def nesterov(gradients: list[Tensor], momenta: list[Tensor], momentum: float) -> None:
    """Replace gradients, in place, by the directions of SGD with Nesterov momentum.

    Args:
        momenta: a tensor for each gradient, initially zero, which becomes `momentum * momenta +
            gradients`.
    """
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, gradients)
    torch._foreach_add_(gradients, momenta, alpha=momentum)
