"""The operations of a step: passes, statistics, decompositions and directions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpikfac.plan.shapes import Form, LayerShape


@dataclass(frozen=True)
class Operations:
    """The multiplications of one or several layers, for the whole batch on a single rank.

    Attributes:
        passes: the multiplications of the forward and backward pass.
        statistics: the multiplications of a factor update.
        decomposition: the multiplications of a refresh.
        direction: the multiplications that compute a step's direction.
    """

    passes: int = 0
    statistics: int = 0
    decomposition: int = 0
    direction: int = 0

    def __add__(self, other: Operations) -> Operations:
        return Operations(*(a + b for a, b in zip(_values(self), _values(other))))

    def updates(self, factors: float, bases: float) -> float:
        """Return the multiplications of `factors` factor updates and `bases` refreshes together."""
        return factors * self.statistics + bases * self.decomposition


@dataclass(frozen=True)
class Seen:
    """The number of vectors that a layer processes in a batch.

    Attributes:
        vectors: the number of vectors in the passes; 0 for an embedding, which multiplies nothing.
        chosen: the number of vectors from which statistics are computed.
    """

    vectors: int = 0
    chosen: int = 0

    def __add__(self, other: Seen) -> Seen:
        return Seen(self.vectors + other.vectors, self.chosen + other.chosen)


@dataclass(frozen=True)
class CallSize:
    """The size of one layer call in a pass.

    Attributes:
        examples: the number of examples.
        vectors: the number of vectors of all examples.
        multiplies: whether the call multiplies vectors; an embedding does not.
    """

    examples: int
    vectors: int
    multiplies: bool = True


def operations(layer: LayerShape, form: Form, seen: Seen, orthogonal: bool) -> Operations:
    """Return the operations of a layer.

    Args:
        form: the description of the layer's preconditioner.
        seen: the vectors that all ranks together process.
        orthogonal: whether directions are made orthogonal.
    """
    elements, factors = math.prod(layer.gradient), layer.factors
    power = 1 if form.vector else 2
    return Operations(
        3 * elements * seen.vectors,
        seen.chosen * sum(factor.work(power) for factor in factors)
        if form.of == "statistics"
        else 0,
        0 if form.vector else sum(factor.work(form.work) for factor in factors if factor.order > 1),
        sum(products(layer, form, orthogonal)),
    )


def products(layer: LayerShape, form: Form, orthogonal: bool = True) -> Sequence[int]:
    """Return the number of multiplications in each product that computes a layer's direction."""
    with_factors = [] if form.vector else layer.products() * form.products
    return with_factors + (layer.orthogonalising() if orthogonal else [])


def _values(one: Operations) -> tuple[int, ...]:
    return one.passes, one.statistics, one.decomposition, one.direction
