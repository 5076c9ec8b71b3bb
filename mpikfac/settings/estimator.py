"""Describe how factors are estimated, and from which data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from mpikfac import numerics
from mpikfac.plan import (
    FISHERS,
    NORMALIZATIONS,
    CallSize,
    Fisher,
    Normalization,
    PlannedLayer,
    Seen,
    check_count,
    make_plain,
    one_of,
)
from mpikfac.settings.schedule import Schedule, in_force

if TYPE_CHECKING:  # programs use this file to print help, and importing torch takes seconds
    import torch
    from torch import Tensor

    from mpikfac.numerics import Loss

# The minimum counts for estimating a layer's factors from a batch, over all ranks together.
LEAST_EXAMPLES = 32
LEAST_VECTORS = 3  # per row of the layer's largest factor


@lru_cache(maxsize=1024)  # nearly all calls of a layer have the same sizes
def usual_distance(examples: int, vectors: int, shares: int, order: int) -> int:
    """Return the default distance between the examples from which factors are estimated.

    It is the largest power of 2 that leaves at least 32 examples, and 3 vectors per row of the
    largest factor, or 1 if the batch has fewer. Martens & Grosse [2015, section 8] use an eighth of
    a batch.

    Args:
        examples: the number of examples in a shard of the batch.
        vectors: the number of vectors in the shard.
        shares: the number of shards of the batch, all with about the same number of examples.
        order: the number of rows of the largest factor.
    """
    enough = max(LEAST_EXAMPLES, math.ceil(LEAST_VECTORS * order * examples / max(1, vectors)))
    return 1 << max(0, (examples * shares // enough).bit_length() - 1)


@dataclass(frozen=True)
class Subsample:
    """The examples of a layer's calls from which its factors are estimated.

    Attributes:
        distance: the distance from one example to the next; None for `usual_distance`.
        order: the number of rows of the layer's largest factor.
        shares: the number of equal shards of a batch.
    """

    distance: int | None
    order: int
    shares: int

    def of(self, examples: int, vectors: int, begin: float) -> slice:
        """Return the selected examples of a call.

        Args:
            begin: the offset of the first example, as a fraction of the distance, in [0, 1).
        """
        distance = self.distance or usual_distance(examples, vectors, self.shares, self.order)
        return slice(int(begin * min(distance, examples)), None, distance)

    def seen(self, calls: Iterable[CallSize], begin: float) -> Seen:
        """Return the number of vectors in the calls, and the number of those selected."""
        total = Seen()
        for call in calls:
            of_call = self.of(call.examples, call.vectors, begin)
            chosen = call.vectors * len(range(call.examples)[of_call]) // call.examples
            total += Seen(call.vectors * call.multiplies, chosen)
        return total


@dataclass(frozen=True)
class Turn:
    """One of several backward passes for a forward pass, and its weight in the statistics.

    Attributes:
        rows: the number of rows of the outputs, by which gradients were divided.
        terms: the number of terms in the mean loss: rows times positions.
    """

    weight: float = 1.0
    rows: int = 1
    terms: int = 1
    first: bool = True
    last: bool = True


@dataclass(frozen=True)
class Estimator:
    """Choose from which gradients factors are estimated, and how they are averaged.

    `factor_decay` is a number or a schedule (a function of the step). Programs that use
    fisher_type="mc" or "type-2" call `KFAC.record`. The normalisations are defined in
    `numerics.moments`.

    Args:
        factor_decay: the coefficient of the running average of factors, in [0, 1).
        initial_factor: the first value of the running average: the "first" factor, or the
            "identity".
        normalization: the scaling of factors. "expand": `G (x) A` approximates the Fisher block of
            the mean loss; "sc20" and "kfac-pytorch": as in the code of SC20 or of kfac-pytorch. The
            same damping has a different meaning with each scaling.
        fisher_type: the gradients from which G is computed: of the loss at the labels of the data
            ("empirical"), at labels sampled from the model's distribution ("mc"), or at all labels
            of that distribution ("type-2"); "forward-only" uses none, and G is the identity.
        mc_samples: the number of labels that fisher_type="mc" samples per example.
        subsample: the distance between the examples in a batch from which factors are estimated:
            with 4, every fourth example is used, beginning with a different one in each step.
            None: the distance of each layer is chosen to leave at least 32 examples over all ranks,
            and 3 vectors per row of the layer's largest factor, assuming equal shards on all ranks;
            it is 1 for vectors, diagonals, and the preconditioner "ekfac".
        statistics_dtype: the dtype to which inputs of convolutions are rounded before they are
            multiplied; None for no rounding.
        factor_dtype: the dtype of the running averages of factors; None for the dtype of the
            statistics of a batch.
        num_per_example_loss_terms: the number of positions per example over which the loss is
            averaged, such as the tokens of a text or the pixels to segment. With
            fisher_type="empirical", G is multiplied by this number, so that the same damping has
            the same effect for all types of Fisher matrix; "mc" and "type-2" take the number from
            the outputs.

    Raises:
        ValueError: a choice is invalid.
    """

    factor_decay: float | Schedule = 0.95
    initial_factor: Literal["first", "identity"] = "first"
    normalization: Normalization = "expand"
    fisher_type: Fisher = "empirical"
    mc_samples: int = 1
    subsample: int | None = None
    statistics_dtype: torch.dtype | None = None
    factor_dtype: torch.dtype | None = None
    num_per_example_loss_terms: int = 1

    def __post_init__(self) -> None:
        make_plain(self)
        in_force("factor_decay", self.factor_decay, 0, below=1)
        one_of("initial_factor", self.initial_factor, ("first", "identity"))
        one_of("normalization", self.normalization, NORMALIZATIONS)
        one_of("fisher_type", self.fisher_type, FISHERS)
        check_count("mc_samples", self.mc_samples, 1)
        if self.subsample is not None:
            check_count("subsample", self.subsample, 1)
        for name in ("statistics_dtype", "factor_dtype"):
            if (dtype := getattr(self, name)) is not None:
                import torch

                one_of(name, dtype, (None, torch.bfloat16))
        check_count("num_per_example_loss_terms", self.num_per_example_loss_terms, 1)

    @property
    def of_loss(self) -> bool:
        """Whether the statistics use the loss's backward passes, not those that `turns` yields."""
        return self.fisher_type in ("empirical", "forward-only")

    def subsampled(self, layer: PlannedLayer, shares: int) -> Subsample:
        """Return the selection of a layer's examples from a batch in `shares` equal shards."""
        every = layer.preconditioner.vector or layer.shape.diagonal or layer.rescaled
        distance = 1 if self.subsample is None and every else self.subsample
        orders = [factor.order for side in layer.shape.sides for factor in layer.side(side)]
        return Subsample(distance, max(orders, default=1), shares)

    def turns(
        self, outputs: Sequence[Tensor], losses: Sequence[Loss]
    ) -> Iterator[tuple[Turn, list[Tensor]]]:
        """Yield backward passes that replace the loss's backward pass, and their initial gradients.

        Args:
            outputs: the outputs of each head.
            losses: the type of each head's loss; the total loss is the sum over heads.

        Raises:
            ValueError: the numbers of outputs and losses differ, or "type-2" is used for outputs
                with positions.
        """
        import torch

        heads = [
            (each.to(torch.promote_types(each.dtype, torch.float32)), loss)
            for each, loss in zip(outputs, losses, strict=True)
        ]
        if self.fisher_type == "type-2":  # head by head, because the heads' labels are independent
            count, weight = sum(each.shape[1] for each in outputs), 1.0
            passes = (
                [root if other is head else torch.zeros_like(other) for other, _ in heads]
                for head, loss in heads
                for root in numerics.exact(head, loss)
            )
        else:
            count, weight = self.mc_samples, 1 / self.mc_samples
            passes = ([numerics.sampled(*head) for head in heads] for _ in range(count))
        rows, terms = len(outputs[0]), outputs[0].numel() // max(1, outputs[0].shape[1])
        for number, gradients in enumerate(passes):
            turn = Turn(weight, rows, terms, number == 0, number == count - 1)
            yield turn, [g.to(each.dtype) for g, each in zip(gradients, outputs)]
