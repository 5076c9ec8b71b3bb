"""Choose a step's length and momentum with a quadratic model [Martens & Grosse 2015, 6.4 and 7]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mpikfac.plan import Combination, Grafting


@dataclass(frozen=True, kw_only=True, repr=False)
class QuadraticModel(Grafting):
    """Choose the length and momentum of a step to minimise a quadratic model of the batch's loss.

    The model uses the Gauss-Newton matrix of the batch plus the damping. The resulting length and
    momentum replace the optimizer's learning rate and momentum, and the clip.
    """

    name: ClassVar[str] = "quadratic-model"
    prescribes: ClassVar[bool] = False
    needs_batch: ClassVar[bool] = True
    needs: ClassVar[tuple[Combination, ...]] = tuple(
        Combination("grafting", ("quadratic-model",), needs, why)
        for needs, why in (
            (
                {"assignment.shard_optimizer": False},
                "the quadratic model needs the whole step on every rank, to multiply it by "
                "derivatives of the outputs",
            ),
            (
                {"clip": None},
                "the quadratic model sets the length of the step",
            ),
            (
                {"transport.virtual_ranks": None},
                "sums of products over ranks would depend on the number of ranks",
            ),
            (
                {"relative": False},
                "the quadratic model uses the same damping for all parameters",
            ),
        )
    )

    def attach(self, *parts: Any) -> Any:
        """Return the object that sets the lengths of directions."""
        from mpikfac.lab.quadratic_model.graft import QuadraticGraft

        return QuadraticGraft(self, *parts)
