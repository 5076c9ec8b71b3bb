"""The data that enter factors, and how, as a value."""

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
from mpikfac.settings.schedule import Schedule, in_force


@dataclass(frozen=True)
class Turn:
    """One of several backward passes through a forward pass, and its weight in the sums."""

    weight: float = 1.0
    first: bool = True
    last: bool = True


@dataclass(frozen=True)
class Estimator:
    """How factors are estimated: from which gradients, and averaged how.

    Args:
        decay: the coefficient of the running average of factors, in [0, 1), or a schedule.
        start: an average starts at the "first" factor or at the "identity".
        normalization: the scaling of factors, see `numerics.moments`.
        fisher: the gradients that make up G. "empirical": gradients of the loss at the labels of
            the data; at labels of the model, drawn ("sampled") or all ("exact"): both need calls of
            `KFAC.record`; "forward-only": none, and G is the identity.
        samples: how often labels are drawn.
        subsample: a batch's factors are estimated from every n-th of its examples.
        statistics_dtype: inputs of convolutions are rounded to the dtype before the product.
        factor_dtype: running averages of factors are kept in the dtype; sums over a batch are not.

    Raises:
        ValueError: a choice out of its bounds.
    """

    decay: float | Schedule = 0.95
    start: Literal["first", "identity"] = "first"
    normalization: Normalization = "expand"
    fisher: Fisher = "empirical"
    samples: int = 1
    subsample: int = 1
    statistics_dtype: torch.dtype | None = None
    factor_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        in_force("decay", self.decay, 0, below=1)
        one_of("start", self.start, ("first", "identity"))
        one_of("normalization", self.normalization, NORMALIZATIONS)
        one_of("fisher", self.fisher, FISHERS)
        check_count("samples", self.samples, 1)
        check_count("subsample", self.subsample, 1)
        one_of("statistics_dtype", self.statistics_dtype, (None, torch.bfloat16))
        one_of("factor_dtype", self.factor_dtype, (None, torch.bfloat16))

    @property
    def of_loss(self) -> bool:
        """Whether the backward passes of the loss count, or the passes of `turns` alone."""
        return self.fisher in ("empirical", "forward-only")

    def turns(self, outputs: Tensor, loss: Loss) -> Iterator[tuple[Turn, Tensor]]:
        """Yield backward passes in the place of the pass of the loss, with gradients of outputs.

        Raises:
            ValueError: an unknown loss, or outputs with positions and all labels.
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
