"""Which data enter factors, and how, as a value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mpikfac.numerics import (
    FISHERS,
    LOSSES,
    NORMALIZATIONS,
    Fisher,
    Loss,
    Normalization,
    exact,
    sampled,
)
from mpikfac.plan import check_count, one_of


@dataclass(frozen=True)
class Turn:
    """Which of several backward passes through one forward pass, and its weight in the sums."""

    weight: float = 1.0
    first: bool = True
    last: bool = True


@dataclass(frozen=True)
class Estimator:
    """What a batch's factors are estimated from; see `KFAC` for what the choices are."""

    normalization: Normalization = "expand"
    start: Literal["first", "identity"] = "first"
    fisher: Fisher = "empirical"
    samples: int = 1
    subsample: int = 1
    statistics_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        one_of("normalization", self.normalization, NORMALIZATIONS)
        one_of("start", self.start, ("first", "identity"))
        one_of("fisher", self.fisher, FISHERS)
        check_count("samples", self.samples, 1)
        check_count("subsample", self.subsample, 1)
        one_of("statistics_dtype", self.statistics_dtype, (None, torch.bfloat16))

    @property
    def of_loss(self) -> bool:
        """Whether the loss's own backward passes count, or those of `turns` alone."""
        return self.fisher in ("empirical", "forward-only")

    def turns(self, outputs: Tensor, loss: Loss) -> Iterator[tuple[Turn, Tensor]]:
        """The backward passes that stand for the loss's, each with the outputs' gradient.

        Raises:
            ValueError: another loss than these, or outputs that have positions and all labels.
        """
        one_of("loss", loss, LOSSES)
        precise = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if self.fisher == "exact":
            gradients, count, weight = exact(precise, loss), outputs.shape[1], 1.0
        else:
            gradients = (sampled(precise, loss) for _ in range(self.samples))
            count, weight = self.samples, 1 / self.samples
        for number, gradient in enumerate(gradients):
            yield Turn(weight, number == 0, number == count - 1), gradient.to(outputs.dtype)
