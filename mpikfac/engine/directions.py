"""Preconditioned gradients: made by workers, sent to all, and how far a step goes along them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpikfac.comm import Grid, summed
from mpikfac.engine.bases import Bases
from mpikfac.engine.gradients import Gradients
from mpikfac.engine.state import groups_of
from mpikfac.layers import Layer
from mpikfac.numerics import Arena, all_finite, not_finite
from mpikfac.plan import Plan, count_of, lay_out
from mpikfac.settings import DECAY, EPSILON, Graft, LevenbergMarquardt, Settings


class Directions(Arena):
    """The directions that one rank holds, by layer.

    Attributes:
        scale: what the last step's directions were multiplied by, `[1]`.
        expected: by how much the loss of all ranks would change by the quadratic model, as far as
            layers are stepped from here, `[1]`.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        plan: Plan,
        grid: Grid,
        gradients: Gradients,
        bases: Bases,
        optimizer: Optimizer,
        settings: Settings,
        graft: Graft | None,
    ) -> None:
        """See `KFAC` for `graft`."""
        like = gradients.arena.flat
        rank = grid.world.rank
        super().__init__(plan.directions(rank), like.dtype, like.device)
        self.layers, self.plan, self.grid = layers, plan, grid
        self.gradients, self.bases, self.optimizer = gradients, bases, optimizer
        self.settings, self.graft = settings, graft
        adam = graft == "adam"
        self._adam = Squares(plan, rank, like.dtype, like.device) if adam else None
        damping = settings.damping
        self._adaptive = damping if isinstance(damping, LevenbergMarquardt) else None
        self._groups = groups_of(layers, optimizer)
        self._messages = plan.publish_directions(rank)
        self._bound = plan.clip()
        self.scale = like.new_ones(1)
        self.expected = like.new_zeros(1)

    def precondition(self, step: int) -> None:
        """Preconditions the gradients of the layers that this rank works on."""
        with self.grid.trace.stage("precondition"):
            self.bases.damp(self.settings.at("damping", step))
            for name in self.plan.preconditioned(self.grid.world.rank):
                direction, gradient = self[name], self.gradients.arena[name]
                direction.copy_(self.bases.precondition(name, gradient))
                if self.graft:  # at that length also where there are no bases: see `check`
                    usable = torch.where(direction.isfinite().all(), direction, gradient)
                    direction.copy_(grafted(usable, self._length(name, gradient)))

    def publish(self) -> None:
        """Sends directions to the ranks that did not compute them.

        Collective over: row.
        """
        self.grid.exchange(self._messages, self.flat)

    def check(self) -> None:
        """A direction that is not finite, as its layer has no bases, becomes the gradient."""
        if not all_finite(self.flat):
            for name in not_finite(self):
                gradient = self.gradients.arena[name]
                usable = gradient if all_finite(gradient) else torch.zeros_like(gradient)
                self[name].copy_(usable)

    def clip(self, step: int) -> None:
        """Bounds the step's Fisher norm, or its norm.

        Collective over: world where no rank holds all directions, else none.
        """
        if not self.settings.clipped or not self.layers:
            return
        by_norm = self.settings.norm_clip is not None
        square = self._square() if by_norm else self._along_gradient(2)
        self.grid.exchange(self._bound, square)
        bound = self.settings.at("norm_clip" if by_norm else "kl_clip", step)
        self.scale = clip_scale(square, bound**2 if by_norm else bound)
        self.flat *= self.scale

    def predict(self) -> None:
        """What the quadratic model says of the step."""
        self.expected = self.scale * self._along_gradient(2) / 2 - self._along_gradient(1)

    def reduction_ratio(self, loss_before: float, loss_after: float) -> float | None:
        """What the mean loss over ranks changed by, relative to what was predicted; None for 0.

        Collective over: world.
        """
        # What every rank has, each counts in part.
        mine = self.expected.item() / (1 if self.gradients.owner_updates else self.plan.ranks)
        change = (loss_after - loss_before) / self.plan.ranks
        change, expected = summed(self.grid.world, [change, mine])
        return change / expected if expected else None

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What grafting keeps from step to step, and the damping where it is adapted."""
        kept: dict[str, Any] = {f"graft/{n}": block for n, block in (self._adam or {}).items()}
        return kept | ({"damping": self._adaptive.damping} if self._adaptive else {})

    def complete(self, names: Collection[str]) -> set[str]:
        """Names of what all ranks together have in a state of `names`."""
        if self.graft != "adam":
            return set()
        return {f"graft/{n}" for name in self.plan.shapes for n in (name, count_of(name))}

    def needed(self, names: Collection[str]) -> dict[str, Any]:
        """What this rank takes from a state of `names`; each with a value of its kind."""
        kinds = {"graft": _grafted(names), "damping": "damping" in names}
        kept = self.state_dict().items()
        return {name: value for name, value in kept if kinds[name.partition("/")[0]]}

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Takes what is `needed` from the state of all; grafting starts anew without it."""
        self.expected.zero_()
        for name, value in (self._adam or {}).items():
            value.copy_(state[f"graft/{name}"]) if _grafted(names) else value.zero_()
        if self._adaptive and "damping" in names:
            self._adaptive.damping = state["damping"]

    # -- details ---------------------------------------------------------------------------------

    def _length(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """The norm that a layer's direction is given, `[]`."""
        if self._adam is None:
            return gradient.norm()
        if name not in self.gradients.broken:
            self._adam.add(name, gradient)
        return self._adam.length(name, gradient)

    def _along_gradient(self, power: int) -> torch.Tensor:
        """`sum lr^power <direction, gradient>` `[1]` over the layers that are stepped from here."""
        total = self.flat.new_zeros(1)
        for layer in self._finite():
            products = self[layer.name] * self.gradients.arena[layer.name]
            for part, group in zip(layer.parts(products), self._groups[layer.name]):
                total += part.sum() * self.optimizer.param_groups[group]["lr"] ** power
        return total

    def _square(self) -> torch.Tensor:
        """`sum <direction, direction>` `[1]` over the same layers."""
        total = self.flat.new_zeros(1)
        for layer in self._finite():
            total += self[layer.name].square().sum()
        return total

    def _finite(self) -> list[Layer]:
        """The layers whose directions are here.

        But for those whose gradients are not finite, which are not stepped: sums would be so, too.
        """
        broken = self.gradients.broken
        return [x for x in self.layers if x.name in self and x.name not in broken]


def _grafted(names: Collection[str]) -> bool:
    """Whether a state of `names` has what grafting keeps."""
    return any(name.startswith("graft/") for name in names)


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


def grafted(direction: Tensor, length: Tensor) -> Tensor:
    """The direction at that length `[]` [Agarwal et al. 2020]; one of zeros as it is."""
    own = direction.norm()
    return direction * torch.where(own > 0, length / own, 1.0)


def clip_scale(square: Tensor, bound: float) -> Tensor:
    """Factor `[1]` that keeps the square of a step's norm at `bound` at most.

    Args:
        square: that of a norm, `[1]`: `sum <direction, direction>` over layers, or for the KL clip
            `sum lr^2 <direction, gradient>`, which rounding may make negative [SC20, eq. 18].
    """
    return torch.sqrt(bound / square.abs()).clamp_(max=1.0)
