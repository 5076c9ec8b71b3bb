"""Compute factors and second moments at a model's weights, in passes over data.

Gradients are computed for all labels of the model's own distribution (type-2), or for labels
sampled from it (mc), so both estimate the per-example Fisher matrix. The means of the squared
gradients are the best diagonal approximation of the Fisher matrix in the factors' eigenbases
[George et al. 2018].
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mpikfac.lab.curvature.eigenbasis import Eigenbasis
from mpikfac.lab.curvature.matrices import grouped
from mpikfac.lab.curvature.records import (
    Outputs,
    RecordedCall,
    Records,
    record_columns,
    rotated_inputs,
    sum_of_squares,
)
from mpikfac.layers import Layer
from mpikfac.numerics import Loss, exact, sampled

Fisher = Literal["type-2", "mc"]
Eigenvalues = Literal["squares", "products"]


@dataclass(frozen=True)
class Passes:
    """Backward passes over a rank's data; the gradients' second moment is the Fisher matrix.

    Attributes:
        layers: the covered layers of the model.
        outputs: returns the outputs of a batch, `[examples, outputs]`.
        batches: the data; `factors` and `squares` each read them once.
        loss: the loss of the outputs; see `KFAC.record`.
        fisher_type: see `Estimator`.
    """

    model: nn.Module
    layers: Sequence[Layer]
    outputs: Outputs
    batches: Collection[Any]
    loss: Loss
    fisher_type: Fisher

    def factors(self) -> dict[str, Tensor]:
        """Return each layer's factors, summed over examples, as a vector for `factors_of`."""
        sums = {layer.name: _Sums(layer) for layer in self.layers}
        for first, examples, records in self._records():
            for name, calls in records.items():
                sums[name].add(calls, examples, first)
        return {name: of_layer.flat() for name, of_layer in sums.items()}

    def squares(self, bases: Mapping[str, Eigenbasis]) -> dict[str, Tensor]:
        """Sum each layer's squared per-example gradients in its eigenbasis; return vectors.

        The last element of each vector is the number of examples.
        """
        sums = {name: torch.zeros_like(basis.values) for name, basis in bases.items()}
        count = 0
        inputs: dict[str, list[Tensor | None]] = {}
        for first, examples, records in self._records():
            if first:
                count += examples
                inputs = {n: rotated_inputs(bases[n], calls) for n, calls in records.items()}
            for layer in self.layers:
                arguments = records[layer.name], examples, inputs[layer.name]
                sums[layer.name] += sum_of_squares(bases[layer.name], layer, *arguments)
        return {n: torch.cat([s.flatten(), s.new_tensor([count])]) for n, s in sums.items()}

    def _records(self) -> Iterator[tuple[bool, int, Records]]:
        """Yield a tuple for each pass over a batch.

        It contains whether the pass is the batch's first, the number of examples in the batch, and
        the calls of each layer.
        """
        for batch in self.batches:
            passes = record_columns(self.model, self.layers, self.outputs, batch, self._columns)
            for number, (examples, records) in enumerate(passes):
                yield number == 0, examples, records

    def _columns(self, outputs: Tensor) -> Iterator[Tensor]:
        """Yield gradients of the per-example losses with respect to the outputs."""
        if self.fisher_type == "mc":
            yield len(outputs) * sampled(outputs, self.loss)
        else:
            yield from (len(outputs) * root for root in exact(outputs, self.loss))


class _Sums:
    """A layer's factors, summed over calls.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer, like = layer, layer.parameters[0]
        self._sums = {
            side: [
                torch.zeros(f.count, f.order, f.order, dtype=torch.float64, device=like.device)
                for f in layer.shape.side(side)
            ]
            for side in layer.shape.sides
        }
        self._vectors = self._examples = 0

    def add(self, calls: Sequence[RecordedCall], examples: int, first: bool) -> None:
        """Add the calls of a pass; the batch's inputs are added only in its `first` pass."""
        self._examples += examples if first else 0
        for call in calls:
            x, g = call.prepared()
            if first and not call.layer.group:
                self._vectors += call.layer.positions(g)
            for side in self.layer.shape.sides:
                if first or side in self.layer.quadratic:
                    self._add(side, call.layer, x, g)

    def _add(self, side: str, layer: Layer, x: Tensor, g: Tensor) -> None:
        orders = [factor.order for factor in self.layer.shape.side(side)]
        blocks = [slice(*ends) for ends in pairwise(accumulate(orders, initial=0))]
        for total, moment in zip(
            self._sums[side], layer.second_moments(side, x, g, blocks), strict=True
        ):
            place = total
            if layer.group is not None:
                place = total.unflatten(0, (self.layer.shape.groups, -1))[layer.group]
            place += moment.reshape(place.shape)

    def flat(self) -> Tensor:
        """Return a vector of all sums, followed by the numbers of vectors and examples."""
        parts = [total.flatten() for of_side in self._sums.values() for total in of_side]
        return torch.cat([*parts, parts[0].new_tensor([self._vectors, self._examples])])


def factors_of(layer: Layer, flat: Tensor) -> dict[str, list[Tensor]]:
    """Return the blocks of a layer's factors A and G from their sums over all ranks.

    Raises:
        ValueError: no batch calls the layer.
    """
    *_, vectors, examples = flat.tolist()
    if not vectors:
        raise ValueError(
            f"the batches do not call layer {layer.name!r}; leave it out with `coverage` and `skip`"
        )
    scales = layer.scales("expand", int(examples), int(vectors), vectors=False)
    shapes = [(side, factor) for side in layer.shape.sides for factor in layer.shape.side(side)]
    sizes = [factor.count * factor.order**2 for _, factor in shapes]
    found: dict[str, list[Tensor]] = {"A": [], "G": []}
    for (side, factor), part in zip(shapes, flat[:-2].split(sizes)):
        # `scales` assumes gradients of a loss averaged over the examples.
        scale = scales[side] / (examples**2 if side in layer.quadratic else 1)
        found[side].append(scale * part.view(factor.count, factor.order, factor.order))
    return found


def values_of(layer: Layer, flat: Tensor) -> Tensor:
    """Return a layer's eigenvalues `[groups, outputs, inputs]` from all ranks' sum of `squares`."""
    return flat[:-1].view(grouped(layer)) / flat[-1]
