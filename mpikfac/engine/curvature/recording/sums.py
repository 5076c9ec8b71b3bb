"""The sums of a batch's moments, each bound to its place in the arena of statistics."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpikfac.engine.curvature.factors import Factors
from mpikfac.layers import SIDE_BY_SIDE, Layer
from mpikfac.numerics import ADDED_IN_FLOAT32, add_triangle
from mpikfac.plan import Factor, PlannedLayer
from mpikfac.settings import Estimator, Subsample


@dataclass(frozen=True)
class Sum:
    """The sum for a factor, bound to its place in the arena of statistics.

    Attributes:
        block: the range of the factor within the moment of its side.
        total: the sum, which is a triangle or a vector.
        count: `[1]`, the number of examples in the sum.
    """

    factor: Factor
    block: slice
    total: Tensor
    count: Tensor

    def add(self, moment: Tensor, weight: float) -> None:
        """Add the moment of a call, times `weight`."""
        total = self.total
        if self.factor.preconditioner.vector:
            total.add_(moment.view_as(total), alpha=weight)
        else:
            shape = (*total.shape[:-2], self.factor.order, self.factor.order)
            add_triangle(total, moment.reshape(shape), weight)


@dataclass(frozen=True)
class SideSums:
    """The sums for A or for G of a layer.

    Attributes:
        quadratic: whether the sums are computed from gradients; otherwise, from inputs only.
        vector: whether the sums are sums of vectors; otherwise, of second moments.
    """

    layer: Layer
    side: str
    quadratic: bool
    vector: bool
    sums: Sequence[Sum]

    def moments(self, layer: Layer, x: Tensor, g: Tensor) -> list[Tensor]:
        """Return the moment of a call for each sum.

        Args:
            layer: the layer, or several layers as the groups of one layer.
        """
        blocks = [each.block for each in self.sums]
        if not self.vector:
            return layer.second_moments(self.side, x, g, blocks)
        moment = layer.first_moment(self.side, x, g)
        return [moment[..., block] for block in blocks]


@dataclass
class ExampleCounts:
    """The numbers of examples, vectors and forward passes in a layer's sums."""

    examples: int = 0
    vectors: int = 0
    passes: int = 0
    last_pass: int = -1

    def add(self, examples: int, vectors: int, forward_pass: int) -> None:
        """Count one call of the layer."""
        # A repeated call in the same pass has the same examples, at more positions.
        if forward_pass != self.last_pass:
            self.examples += examples
            self.passes += 1
        self.vectors += vectors
        self.last_pass = forward_pass


@dataclass
class LayerSums:
    """The sums of a layer, or of one of its groups, with their counts.

    Attributes:
        subsample: selects the examples of a call that are used.
        rounded: dtypes that are multiplied without conversion; others are converted to the dtype of
            the sums.
        complete: whether the last of a call's backward passes has left the layer.
    """

    layer: Layer
    vector: bool
    subsample: Subsample
    rounded: Collection[torch.dtype]
    sides: Sequence[SideSums]
    counts: ExampleCounts = field(default_factory=ExampleCounts)
    complete: bool = False

    def start_over(self) -> None:
        """Start counting the next batch."""
        self.counts, self.complete = ExampleCounts(), False


def bound_layers(
    layers: Iterable[Layer], factors: Factors, estimator: Estimator
) -> dict[str, list[LayerSums]]:
    """Return, for each layer with statistics on this rank, the sums of each of its groups."""
    planned = {layer.name: layer for layer in factors.plan.layers}
    shares = factors.plan.pooled
    of_layers = {
        layer.name: [
            bound(
                *(member, planned[layer.name], factors.statistics),
                estimator.subsampled(planned[layer.name], shares),
            )
            for member in layer.members
        ]
        for layer in layers
    }
    return {name: sums for name, sums in of_layers.items() if sums[0].sides}


def bound(
    layer: Layer, planned: PlannedLayer, statistics: Mapping[str, Tensor], subsample: Subsample
) -> LayerSums:
    """Return the sums of a layer, or of one of its groups, as views of the rank's statistics."""
    sides, vector = [], planned.preconditioner.vector
    for side in layer.shape.sides:
        factors, start, sums = planned.side(side), 0, []
        for factor in factors:
            block = slice(start, start + factor.order) if len(factors) > 1 else slice(None)
            start += factor.order
            if factor.name in statistics:
                total, count = statistics[factor.name], statistics[factor.counted]
                if layer.group is not None:
                    total = total.unflatten(0, (planned.shape.groups, -1))[layer.group]
                sums.append(Sum(factor, block, total, count))
        if sums:
            sides.append(SideSums(layer, side, side in layer.quadratic, vector, sums))
    products = layer.shape.kfac_approx == "expand" and layer.shape.maps_vectors and not vector
    exact = products and type(layer) in SIDE_BY_SIDE and layer.parameters[0].is_cuda
    rounded = ADDED_IN_FLOAT32 if exact and not planned.rescaled else ()
    return LayerSums(layer, vector, subsample, rounded, sides)


def changed_in_place(layer: Layer, what: str, before: str) -> RuntimeError:
    """Return the error for a tensor that was changed in place before K-FAC had used it."""
    return RuntimeError(
        f"layer {layer.name!r}: {what} was changed in place after the call, and before {before}; "
        f"give the layer a clone, or change a clone"
    )
