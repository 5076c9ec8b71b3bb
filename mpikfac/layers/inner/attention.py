"""Cover the projections of `MultiheadAttention`, for self-attention and cross-attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from mpikfac.layers.inner.product import InnerLayer, Node, of_examples, saved_input
from mpikfac.layers.layer import Layer
from mpikfac.plan import LayerShape

SOURCES = ("query", "key", "value")


class ProjectionLayer(InnerLayer):
    """Cover a projection of the queries, keys or values, or (`source=""`) the output projection."""

    arguments = SOURCES
    module: nn.MultiheadAttention

    def input_of(self, arguments: Mapping[str, Any], product: Node) -> Tensor:
        """Return the input of the projection, `[batch, tokens, inputs]`."""
        x: Tensor = arguments[self.source or "query"]
        if x.dim() == 2:  # one example without a batch dimension
            x = x[None]
        elif not self.module.batch_first:
            x = x.transpose(0, 1)
        return x if self.source else of_examples(saved_input(product), len(x))


class ProjectionsLayer(Layer):
    """Cover query, key and value projections stored in one weight or bias, as one group each.

    The groups have separate factors and numbers of positions, like three linear layers.

    Args:
        watched: for each group, the weight whose product is to be found in autograd's graph, and
            the index of the group's part of this weight.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        tensors: Sequence[Tensor | None],
        watched: Sequence[tuple[Tensor, int]],
    ) -> None:
        super().__init__(name, module, tensors)
        self._tensors, self._watched = tensors, watched

    @property
    def members(self) -> list[Layer]:
        """The three projections, each with the statistics of one group."""
        return [self._member(group) for group in range(len(SOURCES))]

    def _member(self, group: int) -> Layer:
        source, watched = SOURCES[group], self._watched[group]
        member = ProjectionLayer(self.name, self.module, self._tensors, source, *watched)
        member.group, member.modules, member.path = group, self.modules, self.path
        member.of_batch, member.of_part = self.of_batch, self.of_part
        member.shape = replace(self.shape, groups=1)
        return member

    def whole_shape(self) -> LayerShape:
        """Return the shape of the three groups, without A if only the bias is covered."""
        groups, outputs, *inputs = self._arranged_shapes[0]
        if self.bias_alone:
            return LayerShape(self.name, 1, outputs, groups, sides="G")
        return LayerShape(self.name, inputs[0] + self.bias, outputs, groups)

    def arranged(self, parameter: Tensor) -> Tensor:
        """Return a view with separate rows for query, key and value, `[3, ...]`."""
        return parameter.unflatten(0, (len(SOURCES), -1))


def attention_layers(name: str, module: nn.Module) -> list[Layer]:
    """Return layers for an attention's trained query, key, value and output projections."""
    assert isinstance(module, nn.MultiheadAttention)
    prefix, packed, out = f"{name}." if name else "", module.in_proj_weight, module.out_proj
    layers: list[Layer] = []
    if packed is None:
        layers += _apart(prefix, module)
    elif packed.requires_grad:
        tensors, watched = (packed, module.in_proj_bias), [(packed, part) for part in range(3)]
        layers.append(ProjectionsLayer(f"{prefix}in_proj", module, tensors, watched))
    if out.weight.requires_grad:
        projection = f"{prefix}out_proj", module, (out.weight, out.bias)
        layers.append(ProjectionLayer(*projection, "", out.weight))
    return layers


def _apart(prefix: str, module: nn.MultiheadAttention) -> list[Layer]:
    """Return an attention's input projections with `kdim` or `vdim`: only the bias is joint."""
    weights = {source: getattr(module, f"{source[0]}_proj_weight") for source in SOURCES}
    trained = {source: weight for source, weight in weights.items() if weight.requires_grad}
    layers: list[Layer] = [
        ProjectionLayer(f"{prefix}{source[0]}_proj", module, (weight, None), source, weight)
        for source, weight in trained.items()
    ]
    bias = module.in_proj_bias
    if bias is not None and bias.requires_grad and len(trained) == len(SOURCES):
        watched = [(weight, 0) for weight in trained.values()]
        layers.append(ProjectionsLayer(f"{prefix}in_proj", module, (None, bias), watched))
    return layers
