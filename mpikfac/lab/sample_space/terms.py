"""Define the terms of a loss: residuals at points, with a weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpikfac.plan import check_positive

Points = Tensor | tuple[Tensor, ...]
Residual = Callable[[nn.Module, Any], Tensor]
"""A function of the model and a term's points that returns residuals, `[points]` or `[points, k]`.
"""
MOST_ALIKE = 8
"""With more points than this, residuals `[points, points]` are considered a broadcasting mistake;
with fewer, there may be as many equations as points."""


@dataclass(frozen=True)
class Term:
    """A term of the loss: `weight / 2` times the mean of squared residuals over points.

        def border(model, x):
            return model(x) - exact(x)

        term = mpikfac.lab.Term(border, points, weight=100.0)

    Attributes:
        residual: a function of the model and the points that returns `[points]`, or `[points, k]`
            for k equations, whose squares are summed. A point's residual must not depend on other
            points. Use `mpikfac.lab.jet` for derivatives with respect to the inputs.
        points: the rank's points, a tensor `[points, ...]`, or a tuple of such tensors. Some ranks
            may have zero points.
        weight: the weight of the term in the loss, > 0.
    """

    residual: Residual
    points: Points
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_positive("weight", self.weight)
        parts = self.points if isinstance(self.points, tuple) else (self.points,)
        tensors = all(torch.is_tensor(part) and part.dim() for part in parts)
        if not parts or not tensors or len({len(part) for part in parts}) > 1:
            raise ValueError(
                f"the points of term {self.name!r} must be a tensor [points, ...], or a tuple of "
                f"tensors with equal numbers of points"
            )

    @property
    def name(self) -> str:
        """The name of the residual function."""
        return getattr(self.residual, "__name__", type(self.residual).__name__)

    @property
    def count(self) -> int:
        """The number of points on this rank."""
        return len(self.points[0]) if isinstance(self.points, tuple) else len(self.points)

    def values(self, model: nn.Module) -> Tensor:
        """Return the residuals at the rank's points, `[points, k]`.

        Raises:
            ValueError: the function does not return 1 or k residuals per point.
        """
        found: Any = self.residual(model, self.points)
        if not torch.is_tensor(found):
            raise ValueError(
                f"term {self.name!r} must return a tensor of residuals, not "
                f"{type(found).__name__}; return parts of a jet, such as u.value or u.second[:, 0]"
            )
        if found.dim() == 0:
            raise ValueError(
                f"term {self.name!r} must return residuals [points], which the step squares, "
                f"not one number, such as a loss"
            )
        if list(found.shape) == [self.count] * 2 and self.count > MOST_ALIKE:
            raise self._broadcast()
        if found.dim() > 2 or len(found) != self.count:
            raise ValueError(
                f"term {self.name!r} must return residuals [points] or [points, k], but returned "
                f"{list(found.shape)} for {self.count} points"
            )
        return found.flatten(1) if found.dim() == 2 else found[:, None]

    def check_alike(self, model: nn.Module, first: Tensor, parameters: Sequence[Tensor]) -> None:
        """Check that residuals `[points, points]` are equations, not a broadcasting mistake.

        The gradients of different equations differ, and a single point still has all equations.

        Args:
            first: the residuals of the first point.

        Raises:
            ValueError: the columns result from broadcasting, rather than from several equations.
        """
        one = (
            tuple(x[:1] for x in self.points) if isinstance(self.points, tuple) else self.points[:1]
        )
        gradients = [
            torch.autograd.grad(each, parameters, retain_graph=True, materialize_grads=True)
            for each in first
        ]
        differ = any(not torch.equal(g, own[0]) for own in zip(*gradients) for g in own)
        if not differ or list(self.residual(model, one).shape) == [1, 1]:
            raise self._broadcast()

    def _broadcast(self) -> ValueError:
        return ValueError(
            f"term {self.name!r} returned {[self.count] * 2} for {self.count} points: a dimension "
            f"of size 1 was broadcast to {self.count}; write model(x)[:, 0] and u.second[:, 0]"
        )
