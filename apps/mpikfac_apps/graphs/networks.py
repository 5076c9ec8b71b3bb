"""Graph networks: linear layers between sums over neighbours, so that K-FAC covers all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpikfac_apps.graphs.data import Places
from mpikfac_apps.graphs.parts import Weights, of_convolution, of_means

Aggregate = Callable[[Tensor], Tensor]
"""Maps rows `[own nodes, width]` to sums over each node's neighbours, in the same shape."""


class Kind(NamedTuple):
    """A kind of graph network.

    Attributes:
        weights: returns the weights of the sums, given the edges and the number of nodes.
        join: combines the nodes' rows and the sums over their neighbours into a layer's input.
        times: the width of a layer's input, as a multiple of the width of the rows.
    """

    weights: Callable[[Places, int], Weights]
    join: Callable[[Tensor, Tensor], Tensor]
    times: int


KINDS = {
    "gcn": Kind(of_convolution, lambda _, sums: sums, 1),
    "sage": Kind(of_means, lambda rows, sums: torch.cat([rows, sums], 1), 2),
}
"""Graph convolutions [Kipf & Welling 2017], and GraphSAGE with means [Hamilton et al. 2017]."""


class GraphNetwork(nn.Module):
    """A graph network; for its linear layers, the nodes are the examples.

    Args:
        kind: a name in `KINDS`.
        widths: the widths of the features and of the hidden layers, and the number of classes.
    """

    def __init__(self, kind: str, widths: Sequence[int]) -> None:
        super().__init__()
        self.kind = KINDS[kind]
        self.layers = nn.ModuleList(nn.Linear(self.kind.times * a, b) for a, b in pairwise(widths))

    def inputs(self, features: Tensor, aggregate: Aggregate) -> Tensor:
        """Return the input of the first layer, which is the same in all steps."""
        return self.kind.join(features, aggregate(features))

    def forward(self, inputs: Tensor, aggregates: Sequence[Aggregate]) -> Tensor:
        """Return logits `[own nodes, classes]`.

        Collective over: the same ranks as the aggregates.

        Args:
            inputs: the result of the method `inputs`.
            aggregates: for each layer except the first, the function that sums over neighbours.
        """
        first, *layers = self.layers
        rows = first(inputs)
        for layer, aggregate in zip(layers, aggregates, strict=True):
            rows = rows.relu()
            rows = layer(self.kind.join(rows, aggregate(rows)))
        return rows
