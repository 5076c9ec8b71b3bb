"""Parle: replicas coupled by a spring [Chaudhari et al. 2018]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mpikfac.lab.local_sgd.config import OF_NODES, Replicas
from mpikfac.plan import Combination, check_fraction, check_positive, check_share, check_size

if TYPE_CHECKING:
    from mpikfac.lab.local_sgd.merges import Merge
    from mpikfac.lab.local_sgd.messages import PlannedCopies


@dataclass(frozen=True, kw_only=True, repr=False)
class Parle(Replicas):
    """Move each replica to its average over steps, and towards the mean of all averages.

    Attributes:
        replicas: "rank" or "node": who trains a replica; see `LocalSGD`.
        gamma: the strength of the pull between exchanges: each step adds to the gradient
            `gamma` times the change of the weights since the last exchange.
        rho: the strength of the pull towards the mean in the outer step at an exchange, which also
            moves the replica to its own average.
        growth: the relative growth of both strengths per exchange; in the paper, it is 1 / (2 B)
            for B batches per epoch.
        max_gamma, max_rho: the maximum values of `gamma` and `rho`.
        alpha: the weight of earlier steps in the running average of a replica's weights.
        outer_lr: the learning rate of the outer step.
        outer_momentum: the Nesterov momentum of the outer step.
    """

    name: ClassVar[str] = "parle"
    needs: ClassVar[tuple[Combination, ...]] = (
        OF_NODES,
        Combination(
            "sync",
            ("parle",),
            {"compression.gradients": None},
            "ranks exchange averages of their replicas' steps, which are never merged into one",
        ),
    )

    sync_every: int = 25
    replicas: Literal["rank", "node"] = "rank"
    gamma: float = 0.01
    rho: float = 0.1
    growth: float = 0.0
    max_gamma: float = 1.0
    max_rho: float = 10.0
    alpha: float = 0.75
    outer_lr: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gamma", "rho", "growth", "max_gamma", "max_rho"):
            check_size(name, getattr(self, name))
        for name in ("gamma", "rho"):
            value, most = getattr(self, name), getattr(self, f"max_{name}")
            if value > most:
                raise ValueError(f"{name}={value} must be at most max_{name}={most}")
        check_share("alpha", self.alpha)
        check_positive("outer_lr", self.outer_lr)
        check_fraction("outer_momentum", self.outer_momentum)

    def vectors(self, copies: PlannedCopies) -> int:
        """Return the number of vectors that a rank stores.

        These are the replica, the weights after the last exchange, the average over steps and, if
        used, the outer momentum.
        """
        return 3 + (self.outer_momentum > 0)

    def merge(self, site: Any, gradients: Any) -> Merge:
        """Return the rule by which an exchange changes the rank's replica."""
        from mpikfac.lab.local_sgd.merges import Elastic

        return Elastic(site, gradients)

    def described(self) -> dict[str, str]:
        """Return the method's values on the axes of `mpikfac.plan.axes`."""
        return {**super().described(), "combination": "towards the mean of averages of steps"}
