"""SOURCE for a K-FAC run: influence over the course of training, in the run's own eigenbases.

SOURCE [Bae et al. 2024] tracks how a change of an example's weight propagates through the steps of
training. The curvature is assumed to be constant within a segment of the training. Where the loss
has curvature s in the eigenbasis, a K-FAC step multiplies the gradient by `1 / (s + damping)`, and
the optimizer adds the weight decay to the result. A deviation of the weights is therefore
multiplied by `1 - lr q` with `q = s / (s + damping) + weight_decay`. After steps whose learning
rates sum to L, the multiplier is

    exp(-L q)                               for a deviation from before the segment
    (1 - exp(-L q)) / (q (s + damping))     for a constant change of the gradient

The damping is that of the run, so it need not be chosen, and momentum only changes L.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpikfac.lab.curvature.curvature import Curvature, damping_of
from mpikfac.lab.curvature.eigenbasis import Function
from mpikfac.lab.curvature.influence import inner_products, query_gradients
from mpikfac.lab.curvature.records import Losses
from mpikfac.plan import check_positive
from mpikfac.settings import Damping


@dataclass(frozen=True)
class Segment:
    """A part of a K-FAC run in which the curvature is assumed to be constant.

    Attributes:
        curvature: the curvature at one of the segment's checkpoints; each segment needs its own
            copy of the model.
        length: the sum of the steps' learning rates (each times the step's clip factor, if there is
            one), divided by 1 - momentum.
        damping: the damping of the run's preconditioner; see `damping_of` for relative damping.
        weight_decay: the weight decay, which the optimizer adds to the preconditioned gradient.
    """

    curvature: Curvature
    length: float
    damping: float | Damping
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_positive("length", self.length)

    def decay(self) -> Function:
        """Return the factor by which a deviation of the weights shrinks over the segment.

        The result maps the curvature's eigenvalues to factors.
        """
        return lambda values: torch.exp(-self.length * self._rates(values))

    def response(self) -> Function:
        """Return the deviation that a constant change of the gradient causes over the segment.

        The result maps the curvature's eigenvalues to factors that multiply the change.
        """

        def response(values: Tensor) -> Tensor:
            rates = self._rates(values)
            damped = values + damping_of(self.damping, values)
            # (1 - exp(-L q)) / q is L where q is 0, which can happen without weight decay.
            ratio = torch.where(rates > 0, -torch.expm1(-self.length * rates) / rates, self.length)
            return ratio / damped

        return response

    def _rates(self, values: Tensor) -> Tensor:
        return values / (values + damping_of(self.damping, values)) + self.weight_decay


def source(
    segments: Sequence[Segment],
    losses: Losses,
    examples: Collection[Any],
    queries: Any,
    *,
    measure: Losses | None = None,
) -> Tensor:
    """Return how much each training example lowered the loss of each query during training.

    Collective over: comm of the curvatures. Each rank passes its own examples and queries.

    Args:
        segments: the segments of the training, in order; the loss of queries is measured at the
            weights of the last segment.
        losses: see `influence`.
        examples: see `influence`; the batches are read once for each segment.
        queries: see `influence`.
        measure: see `influence`.

    Returns:
        Scores `[queries, examples]`, as returned by `influence`.

    Raises:
        ValueError: `segments` is empty; see also `influence`.
    """
    if not segments:
        raise ValueError("segments=[] must contain at least one segment of the training")
    vectors = query_gradients(segments[-1].curvature, measure or losses, queries)
    total: Tensor | None = None
    for segment in reversed(segments):
        curvature = segment.curvature
        answers = curvature.apply_to_matrices(vectors, segment.response())
        scores = inner_products(curvature, answers, losses, examples)
        total = scores if total is None else total + scores
        vectors = curvature.apply_to_matrices(vectors, segment.decay())
    assert total is not None
    return total
