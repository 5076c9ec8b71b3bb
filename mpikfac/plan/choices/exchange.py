"""What ranks exchange to train one model together, when, and how numbers of ranks are combined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mpikfac.plan.choices.checks import check_count, one_of


@dataclass(frozen=True)
class Outer:
    """The step that all ranks take together when copies of the model are combined [DiLoCo].

    The mean of the copies' changes since the last exchange takes the place of a gradient in SGD
    with Nesterov's momentum.

    Attributes:
        outer_lr: the learning rate of the step. 1, without a momentum: the copies become the mean
            of the copies [local SGD].
        outer_momentum: Nesterov's momentum.
    """

    outer_lr: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        if not self.outer_lr > 0:
            raise ValueError(f"outer_lr={self.outer_lr!r} must be above 0")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum={self.outer_momentum!r} must be from 0 to below 1")


@dataclass(frozen=True)
class Exchange:
    """What ranks exchange to train one model, and when.

    Attributes:
        exchanged: "gradients": ranks average gradients, and all ranks take the same step.
            "weights": each rank steps a copy of the model by the gradient of the rank alone, and
            ranks combine the copies every few steps [local SGD, Lin et al. 2020].
        exchange_every: the number of steps from one exchange of weights to the next. With 1, ranks
            average gradients: the result is the same but for rounding.
        exchange_from: the number of steps at the start in which ranks average gradients, in the
            place of weights [post-local SGD, Lin et al. 2020].
        outer: the step that combines copies of the model.
    """

    exchanged: Literal["gradients", "weights"] = "gradients"
    exchange_every: int = 1
    exchange_from: int = 0
    outer: Outer = field(default_factory=Outer)

    def __post_init__(self) -> None:
        one_of("exchanged", self.exchanged, ("gradients", "weights"))
        check_count("exchange_every", self.exchange_every, 1)
        check_count("exchange_from", self.exchange_from, 0)

    @property
    def of_copies(self) -> bool:
        """Whether ranks ever step copies of their own."""
        return self.exchanged == "weights" and self.exchange_every > 1

    def alone(self, step: int) -> bool:
        """Return whether each rank steps a copy of the model at `step`."""
        return self.of_copies and step >= self.exchange_from

    def due(self, step: int) -> bool:
        """Return whether copies are combined right after `step`."""
        return self.alone(step) and (step + 1 - self.exchange_from) % self.exchange_every == 0
