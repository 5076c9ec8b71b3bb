"""A module that multiplies its inputs by a weight, as matrices: a linear layer, unless told else.

A covered layer's weight and bias are one matrix `[outputs, inputs]`, the bias its last column; with
groups, one for each, `[groups, outputs, inputs]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpikfac.layers.uncovered import read_gradient, write_gradient
from mpikfac.numerics import (
    Normalization,
    factor_scales,
    linear_input_sum,
    linear_input_vector,
    linear_output_sum,
    linear_output_vector,
    squares,
    vector_scales,
)
from mpikfac.plan import LayerShape

Call = tuple[Tensor, Callable[[Callable[[Tensor], None]], object]]
"""An input, and what has a function called with the gradient of its product with the weight."""


class Layer:
    """A module whose gradient K-FAC preconditions; as it is, for `Linear`.

    For modules of your own, derive from it what differs, often `inputs` and `outputs` alone, and
    give it to `KFAC(covers={YourModule: YourLayer})`.

    Attributes:
        name: the module's name in the model.
        modules: those that share the parameters, the first one under that name.
        parameters: the weight and the bias, of these those that are trained.
        bias: whether the matrix's last column is the bias.
        bias_alone: whether it is the only one.
        shape: its factors and the form of its gradient.
        spatial: whether positions are pixels, as normalisations other than "expand" ask.
        dimensions: of a batch of inputs, at least; an input of fewer is one example.
        quadratic: the sides whose sums are of squares of gradients; others are of inputs alone.
        rounded_to: what inputs of convolutions are rounded to before they are multiplied.
    """

    spatial = False
    dimensions = 2
    quadratic = "G"
    rounded_to: torch.dtype | None = None

    def __init__(
        self, name: str, module: nn.Module, given: Sequence[Tensor | None] | None = None
    ) -> None:
        """`given` are weight and bias, if they are not called so in the module."""
        self.name = name
        self.modules = [module]
        self.module: nn.Module = module
        given = given or [getattr(module, "weight", None), getattr(module, "bias", None)]
        trained = [p for p in given if p is not None and p.requires_grad]
        self.parameters: list[Tensor] = trained
        self.bias = trained[-1] is given[1]
        self.bias_alone = self.bias and len(trained) == 1
        self.shape = self.whole_shape()

    def whole_shape(self) -> LayerShape:
        """Orders of the whole factors; of a bias that is trained alone, G's."""
        outputs = self.parameters[0].shape[0]
        if self.bias_alone:
            return LayerShape(self.name, 1, outputs, sides="G")
        fan_in = self.parameters[0][0].numel()
        return LayerShape(self.name, fan_in + self.bias, outputs)

    # -- statistics ------------------------------------------------------------------------------

    def watch(self, given: Sequence[Any], named: dict[str, Any], output: Any) -> Call | None:
        """What a call of the module multiplies; None for one without a backward pass."""
        # The hook sits on the output tensor, not on the module: an in-place activation behind a
        # layer breaks module backward hooks, and a pass without a backward records nothing.
        if not output.requires_grad:
            return None
        return given[0] if given else named["input"], output.register_hook

    def inputs(self, x: Tensor) -> Tensor:
        """The vectors `a`, but for the 1 that a bias appends, `[batch, shared, inputs]`."""
        return x.reshape(len(x), -1, x.shape[-1])

    def outputs(self, g: Tensor) -> Tensor:
        """The vectors `g` `[batch, shared, outputs]` of the gradient at the module's output."""
        return g.reshape(len(g), -1, g.shape[-1])

    def prepared(self, x: Tensor, g: Tensor) -> Tensor:
        """What input statistics are taken from, of a whole batch of inputs."""
        return x

    def second_moment(self, side: str, x: Tensor, g: Tensor) -> Tensor:
        """`sum(a a^T)` or `sum(g g^T)` of a call, as `shape` has that side."""
        if self.shape.sharing == "reduce":
            rows = self.input_means(x) if side == "A" else self.output_totals(g)
            return squares(rows, side in self.shape.diagonal)
        if side in self.shape.diagonal:
            return self.first_moment(side, x.square(), g.square()).view(-1, 1, 1)
        return self.input_sum(x) if side == "A" else self.output_sum(g)

    def first_moment(self, side: str, x: Tensor, g: Tensor) -> Tensor:
        """`sum(a)` or `sum(g)` of a call; with sharing="reduce", of examples' means of `a`."""
        if side == "A" and self.shape.sharing == "reduce":
            return self.input_means(x).sum(0)
        return self.input_vector(x) if side == "A" else self.output_vector(g)

    def input_sum(self, x: Tensor) -> Tensor:
        """`sum(a a^T)` `[inputs, inputs]` of one forward call's input."""
        return linear_input_sum(self.inputs(x), self.bias)

    def output_sum(self, g: Tensor) -> Tensor:
        """`sum(g g^T)` `[outputs, outputs]` of the gradient at the call's output."""
        return linear_output_sum(self.outputs(g))

    def input_vector(self, x: Tensor) -> Tensor:
        """`sum(a)` `[inputs]` of one forward call's input."""
        return linear_input_vector(self.inputs(x), self.bias)

    def output_vector(self, g: Tensor) -> Tensor:
        """`sum(g)` `[outputs]` of the gradient at the call's output."""
        return linear_output_vector(self.outputs(g))

    def input_means(self, x: Tensor) -> Tensor:
        """Of each example, the mean of `a` over its positions, `[batch, inputs]`."""
        return self.with_ones(self.inputs(x).mean(1))

    def output_totals(self, g: Tensor) -> Tensor:
        """Of each example, the sum of `g` over its positions, `[batch, outputs]`."""
        return self.outputs(g).sum(1)

    def pairs(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors `a`, with the 1 that a bias appends, and `g`, position by position.

        `[batch, shared, inputs]` and `[batch, shared, outputs]`, of each group if there are
        several. The sum over positions of `g a^T` is an example's gradient.
        """
        rows = self.outputs(g)
        if self.bias_alone:
            return rows.new_ones(*rows.shape[:-1], 1), rows
        return self.with_ones(self.inputs(x)), rows

    def with_ones(self, vectors: Tensor) -> Tensor:
        """Vectors `a` `[..., inputs]`, the 1 that a bias appends included."""
        return F.pad(vectors, (0, 1), value=1.0) if self.bias else vectors

    def positions(self, g: Tensor) -> int:
        """Number of vectors `a` (and `g`) in a call: batch times shared positions."""
        if self.shape.sharing == "reduce":
            return len(g)
        return g.numel() // (self.shape.groups * self.shape.outputs)

    def scales(
        self, normalization: Normalization, batch: int, positions: int, vectors: bool
    ) -> dict[str, float]:
        """What to multiply the sums of each side by to get A and G, or their vectors."""
        scales = vector_scales if vectors else factor_scales
        examples = batch if self.spatial or normalization == "expand" else positions
        return dict(zip("AG", scales(normalization, examples, positions / examples)))

    # -- gradients and values --------------------------------------------------------------------

    def read_gradient(self, matrix: Tensor) -> None:
        """Copies the gradients of weight and bias into `matrix` `[outputs, inputs]`."""
        for part, parameter in zip(self.parts(matrix), self.parameters):
            read_gradient(part, parameter, self.arranged)

    def write_gradient(self, matrix: Tensor) -> None:
        """Makes `matrix` the gradients of weight and bias."""
        for part, parameter in zip(self.parts(matrix), self.parameters):
            write_gradient(parameter, part, self.arranged)

    def read_values(self, matrix: Tensor) -> None:
        """Copies weight and bias into `matrix`."""
        for part, parameter in zip(self.parts(matrix), self.parameters):
            part.copy_(self.arranged(parameter.detach()))

    def write_values(self, matrix: Tensor) -> None:
        """Makes `matrix` the weight and bias."""
        for part, parameter in zip(self.parts(matrix), self.parameters):
            self.arranged(parameter.detach()).copy_(part)

    def leave(self) -> None:
        """Takes the gradients away: the optimizer leaves weight and bias as they are."""
        for parameter in self.parameters:
            parameter.grad = None

    def arranged(self, parameter: Tensor) -> Tensor:
        """A view of weight or bias whose elements are in the order of the matrix."""
        return parameter

    def parts(self, matrix: Tensor) -> list[Tensor]:
        """Views of `matrix`, shaped as the arranged weight and bias."""
        ends = [matrix[..., : matrix.shape[-1] - self.bias], matrix[..., -1]]
        chosen = ends[2 - len(self.parameters) :] if self.bias else ends[:1]
        return [part.view(self.arranged(p).shape) for part, p in zip(chosen, self.parameters)]
