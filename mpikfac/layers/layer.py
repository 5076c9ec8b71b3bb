"""Describe modules that multiply their inputs by a weight; `Layer` describes a linear layer.

A covered layer's weight and bias form a matrix `[outputs, inputs]` with the bias as the last
column; with groups, there is one matrix per group, `[groups, outputs, inputs]`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mpikfac.numerics import (
    Copies,
    factor_scales,
    listen,
    squares,
    sum_of,
    vector_scales,
    with_bias,
)
from mpikfac.plan import LayerShape, Normalization

Call = tuple[Tensor, Callable[[Callable[[Tensor], None]], object]]
"""An input, and a function that registers a hook on the gradient of the input's product with the
weight."""


class Attached(Protocol):
    """Something attached to a module, such as a hook."""

    def remove(self) -> None:
        """Restore the module."""


def skipping(names: Sequence[str]) -> str:
    """Return the `KFAC` argument with which the named modules are trained first-order."""
    return f"coverage=mpikfac.Coverage(skip={list(names)!r})"


class NotCovered(ValueError):
    """Report that a module cannot be covered; the message gives the reason, but not the name.

    Raised by the constructor of a layer. `cover` collects the reasons of all modules of a model.
    """


class Layer:
    """Describe a module whose gradient K-FAC preconditions; the base class describes `Linear`.

    For your own modules, derive a class, override what differs (often only `inputs` and
    `outputs`), and pass it as `Coverage(covers={YourModule: YourLayer})`.

    Attributes:
        name: the module's name in the model, or the name of a layer inside the module.
        path: the module's name in the model.
        modules: the modules that share the parameters; the first one is named `path`.
        parameters: the weight and the bias, if trained.
        bias: whether the matrix's last column is the bias.
        bias_alone: whether the bias is the matrix's only column.
        shape: the layer's factors and the form of its gradient.
        spatial: whether positions are pixels; this affects how factors are normalised, except with
            `normalization="expand"`.
        dimensions: the minimum number of dimensions of a batch; an input with fewer is one example.
        quadratic: the sides whose statistics are sums of squares of gradients; the statistics of
            other sides use only inputs.
        rounded_to: the dtype to which inputs of convolutions are rounded before they are
            multiplied; None to leave them unchanged.
        of_batch: whether the first dimension of inputs is the batch; otherwise, it is the layer's
            own examples.
        of_part: whether the layer's own examples are only a part of the batch, and the loss is a
            mean over the whole batch.
        group: the group to which the layer's statistics belong; None if they belong to all groups.
    """

    spatial = False
    dimensions = 2
    quadratic = "G"
    rounded_to: torch.dtype | None = None
    of_batch = True
    of_part = False
    group: int | None = None
    _last = -2  # the last dimension before the vectors

    def __init__(
        self, name: str, module: nn.Module, given: Sequence[Tensor | None] | None = None
    ) -> None:
        """Use the weight and bias in `given`; if `given` is None, the module's `weight` and `bias`.

        Raises:
            NotCovered: the weight or bias is not a parameter of the module but computed in every
                pass, or neither is trained.
        """
        self.name = self.path = name
        self.modules = [module]
        self.module: nn.Module = module
        tensors = given or [getattr(module, "weight", None), getattr(module, "bias", None)]
        _check_registered(module, tensors)
        trained = [p for p in tensors if p is not None and p.requires_grad]
        if not trained:
            raise NotCovered("weight and bias are not trained")
        self.parameters: list[Tensor] = trained
        self.bias = trained[-1] is tensors[1]
        self.bias_alone = self.bias and len(trained) == 1
        self._places = [place_of(module, parameter) for parameter in trained]
        self.shape = self.whole_shape()

    def __repr__(self) -> str:
        """Return a summary: the name, the kind of module and the factors."""
        factors = ", ".join(f"{side} {self._form(side)}" for side in self.shape.sides)
        return f"{type(self).__name__}({self.name!r}, {type(self.module).__name__}, {factors})"

    def _form(self, side: str) -> str:
        """Describe the form of A or G: one matrix, several matrices, or a diagonal."""
        factors = self.shape.side(side)
        order, count = max(factor.order for factor in factors), sum(f.count for f in factors)
        if side in self.shape.diagonal:
            return f"diagonal of {count}"
        return f"{order}x{order}" if count == 1 else f"{count} of {order}x{order}"

    def whole_shape(self) -> LayerShape:
        """Return the shape with whole factors A and G, or only G if only the bias is trained."""
        first = self.arranged(_without_values(self.parameters[0]))
        outputs = len(first)
        if self.bias_alone:
            return LayerShape(self.name, 1, outputs, sides="G")
        fan_in = first[0].numel()
        return LayerShape(self.name, fan_in + self.bias, outputs)

    # -- statistics ------------------------------------------------------------------------------

    @property
    def members(self) -> list[Layer]:
        """The layers to record: the layer itself, or one layer per group, with `group` set."""
        return [self]

    def attach(self, module: nn.Module, hook: Callable[..., None]) -> list[RemovableHandle]:
        """Call `hook` after each forward call of `module`; return the handles that remove the hook.

        The hook runs before the program's own hooks, because these can replace the module's output.
        """
        return [module.register_forward_hook(hook, with_kwargs=True, prepend=True)]

    def watch(self, positional: Sequence[Any], named: dict[str, Any], output: Any) -> Call | None:
        """Return a call's input, and a function that registers a hook on the output's gradient.

        Return None if no backward pass follows.

        Raises:
            TypeError: the output is not a tensor.
        """
        if not isinstance(output, Tensor):
            raise TypeError(
                f"layer {self.name!r} returned a {type(output).__name__}, which is not a tensor; "
                f"call it with a plain tensor, or train it first-order with {skipping([self.path])}"
            )
        # The hook is on the graph, not on the module: an in-place activation after a layer
        # breaks module backward hooks, and calls without a backward pass need not be recorded.
        if not output.requires_grad:
            return None
        x = positional[0] if positional else named["input"]
        if x.layout != torch.strided or x.is_nested:
            x = self._dense(x)
        if x.is_floating_point():  # under autocast, autograd saves a copy, so x may be overwritten
            x = x.detach().to(output.dtype)
        # A layer that is split over ranks has its own `watch`, because its examples and channels
        # can be those of other ranks.
        watch = getattr(self.module.forward, "watch", None)
        return (x, partial(listen, output)) if watch is None else watch(x, output)

    def _dense(self, x: Tensor) -> Tensor:
        """Return a sparse input as a dense tensor.

        Raises:
            TypeError: the input is a nested tensor, or in oneDNN's layout.
        """
        if x.is_nested or x.is_mkldnn:
            kind = "a nested tensor" if x.is_nested else "in the layout of oneDNN"
            raise TypeError(
                f"layer {self.name!r}: the input is {kind}, which is not covered; pass a dense or "
                f"sparse tensor, or train the layer first-order with {skipping([self.path])}"
            )
        return x.detach().to_dense()

    def inputs(self, x: Tensor) -> Tensor:
        """Return the vectors `a` `[batch, shared, inputs]`, without the bias's 1."""
        return x.reshape(len(x), -1, *x.shape[self._last + 1 :])

    def outputs(self, g: Tensor) -> Tensor:
        """Return the vectors `g` `[batch, shared, outputs]`: gradients with respect to outputs."""
        return g.reshape(len(g), -1, *g.shape[self._last + 1 :])

    def prepared(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the tensor from which input statistics are computed, for a call's whole batch."""
        return x

    def second_moment(self, side: str, x: Tensor, g: Tensor) -> Tensor:
        """Return a call's `sum(a a^T)` (side A) or `sum(g g^T)`, in the form given by `shape`."""
        diagonal = side in self.shape.diagonal
        if self.shape.kfac_approx == "reduce":
            rows = self.input_means(x) if side == "A" else self.output_totals(g)
            if diagonal:
                return sum_of(rows.square()).view(-1, 1, 1)
            return squares(rows.movedim(0, -1))
        if diagonal:
            return self.sum_of_squares(side, x, g).view(-1, 1, 1)
        return self.input_sum(x) if side == "A" else self.output_sum(g)

    def second_moments(
        self, side: str, x: Tensor, g: Tensor, blocks: Sequence[slice]
    ) -> list[Tensor]:
        """Return the given blocks along the diagonal of `second_moment`."""
        kind = type(self)
        own = kind.input_sum if side == "A" else kind.output_sum
        of_rows = own in (Layer.input_sum, Layer.output_sum) and self.shape.kfac_approx == "expand"
        if len(blocks) == 1 or kind.second_moment is not Layer.second_moment or not of_rows:
            moment = self.second_moment(side, x, g)
            return [moment[..., block, block] for block in blocks]
        rows = self.with_ones(self.inputs(x)) if side == "A" else self.outputs(g)
        columns = rows.flatten(0, self._last).movedim(0, -1)
        return [squares(columns[..., block, :]) for block in blocks]

    def first_moment(self, side: str, x: Tensor, g: Tensor) -> Tensor:
        """Return `sum(a)` (side A) or `sum(g)` (side G) of a call.

        With kfac_approx="reduce", `a` is replaced by its mean over the positions of an example.
        """
        if side == "A" and self.shape.kfac_approx == "reduce":
            return self.input_means(x).sum(0)
        return self.input_vector(x) if side == "A" else self.output_vector(g)

    def sum_of_squares(self, side: str, x: Tensor, g: Tensor) -> Tensor:
        """Return the elementwise sum of squares of all `a` `[inputs]`, or all `g` `[outputs]`."""
        if side == "A":
            return sum_of(self.inputs(x).square().flatten(0, self._last), self.bias)
        return sum_of(self.outputs(g).square().flatten(0, self._last))

    def input_sum(self, x: Tensor) -> Tensor:
        """Return `sum(a a^T)` `[inputs, inputs]` for a forward call's input."""
        rows = self.inputs(x).flatten(0, self._last)
        total = squares(rows.movedim(0, -1))
        return with_bias(total, sum_of(rows, bias=True)) if self.bias else total

    def output_sum(self, g: Tensor) -> Tensor:
        """Return `sum(g g^T)` `[outputs, outputs]` for the gradient of the call's output."""
        return squares(self.outputs(g).flatten(0, self._last).movedim(0, -1))

    def input_vector(self, x: Tensor) -> Tensor:
        """Return `sum(a)` `[inputs]` for a forward call's input."""
        return sum_of(self.inputs(x).flatten(0, self._last), self.bias)

    def output_vector(self, g: Tensor) -> Tensor:
        """Return `sum(g)` `[outputs]` for the gradient of the call's output."""
        return sum_of(self.outputs(g).flatten(0, self._last))

    def input_means(self, x: Tensor) -> Tensor:
        """Return every example's mean of `a` over positions, `[batch, inputs]`."""
        return self.with_ones(self.inputs(x).mean(1))

    def output_totals(self, g: Tensor) -> Tensor:
        """Return every example's sum of `g` over positions, `[batch, outputs]`."""
        return self.outputs(g).sum(1)

    def form(self, side: str) -> Hashable:
        """Return a key; layers with the same key compute a side's moments in the same way."""
        return (
            type(self),
            side,
            self.shape.groups,
            self.shape.kfac_approx,
            side in self.shape.diagonal,
        )

    def with_groups(self, count: int) -> Layer:
        """Return a layer whose groups are `count` such layers, to compute moments of one side."""
        layer = copy.copy(self)
        layer.shape, layer._last = replace(self.shape, groups=count * self.shape.groups), -3
        return layer

    def side_by_side(self, tensors: Sequence[Tensor]) -> Tensor:
        """Join several layers' inputs, or gradients, for the layer that `with_groups` returns."""
        return torch.stack(tuple(tensors), -2)

    def pairs(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors `a`, with the bias's 1, and `g`, for every position.

        Shapes are `[batch, shared, inputs]` and `[batch, shared, outputs]`; with several groups,
        `[groups, batch, ...]`. The sum of `g a^T` over positions is an example's gradient.
        """
        rows = self.outputs(g)
        if self.bias_alone:
            return rows.new_ones(*rows.shape[:-1], 1), rows
        return self.with_ones(self.inputs(x)), rows

    def projections(
        self, x: Tensor, g: Tensor, of_inputs: Tensor, of_outputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the products of `a`, without the bias's 1, and of `g` with vectors.

        Multiplying both results and summing over positions gives, for each pair of vectors,
        `u^T W v` summed over groups, where `W` `[groups, outputs, inputs]` is the weight's
        gradient.

        Args:
            of_inputs: the vectors `v` of each group, `[groups, inputs, vectors]`.
            of_outputs: the vectors `u` of each group, `[groups, outputs, vectors]`.

        Returns:
            Both products, `[positions, vectors]`.
        """
        rows = self.inputs(x), self.outputs(g)
        a, b = (side.flatten(0, self._last).to(of_inputs.dtype) for side in rows)
        return a @ of_inputs[0], b @ of_outputs[0]

    def with_ones(self, vectors: Tensor) -> Tensor:
        """Return vectors `a` `[..., inputs]`, with a 1 appended if the layer has a bias."""
        return F.pad(vectors, (0, 1), value=1.0) if self.bias else vectors

    def positions(self, g: Tensor) -> int:
        """Return the number of vectors `a` (and `g`) in a call: batch times shared positions."""
        if self.shape.kfac_approx == "reduce":
            return len(g)
        return g.numel() // (self.shape.groups * self.shape.outputs)

    def scales(
        self, normalization: Normalization, batch: int, positions: int, vectors: bool
    ) -> dict[str, float]:
        """Return each side's multiplier, which turns sums into A or G or, with `vectors`, means."""
        scales = vector_scales if vectors else factor_scales
        examples = batch if self.spatial or normalization == "expand" else positions
        return dict(zip("AG", scales(normalization, examples, positions / examples)))

    # -- gradients and values --------------------------------------------------------------------

    def gradients_to(self, parts: Sequence[Tensor]) -> Copies:
        """Return the copies that write gradients to `parts`; set parts without a gradient to 0.

        Each copy is a pair of target and source; the caller performs the copies of many layers at
        once.
        """
        for part, parameter in zip(parts, self.parameters):
            if parameter.grad is None:
                part.zero_()
            else:
                yield part, self.arranged(parameter.grad)

    def gradients_from(self, parts: Sequence[Tensor]) -> Copies:
        """Return the copies that write the `parts` of a matrix to the parameters' gradients."""
        for part, parameter in zip(parts, self.parameters):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            yield self.arranged(parameter.grad), part

    def values_to(self, parts: Sequence[Tensor]) -> Copies:
        """Return the copies that write weight and bias to the `parts` of a matrix."""
        for value, part in self.values_from(parts):
            yield part, value

    def values_from(self, parts: Sequence[Tensor]) -> Copies:
        """Return the copies that write the `parts` of a matrix to weight and bias."""
        for part, parameter in zip(parts, self.parameters):
            yield self.arranged(parameter.detach()), part

    def abort_batch(self) -> None:
        """Drop the gradients, so that the optimizer skips weight and bias."""
        for parameter in self.parameters:
            parameter.grad = None

    def arranged(self, parameter: Tensor) -> Tensor:
        """Return a view of weight or bias with the elements in the order of the matrix."""
        return parameter

    def parts(self, matrix: Tensor) -> list[Tensor]:
        """Return views of `matrix` `[outputs, inputs]`, shaped like the arranged parameters."""
        ends = [matrix[..., : matrix.shape[-1] - self.bias], matrix[..., -1]]
        chosen = ends[2 - len(self.parameters) :] if self.bias else ends[:1]
        return [part.view(shape) for part, shape in zip(chosen, self._arranged_shapes)]

    @cached_property
    def _arranged_shapes(self) -> list[torch.Size]:
        return [self.arranged(_without_values(p)).shape for p in self.parameters]

    @property
    def in_use(self) -> list[Tensor]:
        """The module's current parameters, which `fully_shard` makes whole during a pass."""
        return [getattr(module, name) for module, name in self._places]


def place_of(module: nn.Module, parameter: Tensor) -> tuple[nn.Module, str]:
    """Return the submodule of `module` that holds `parameter`, and the parameter's name there."""
    return next(
        (part, name)
        for part in module.modules()
        for named in (part.named_parameters, part.named_buffers)
        for name, own in named(recurse=False)
        if own is parameter
    )


def _without_values(parameter: Tensor) -> Tensor:
    """Return a meta tensor with a parameter's full shape, even if the rank holds only a shard."""
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


def _check_registered(module: nn.Module, tensors: Sequence[Tensor | None]) -> None:
    """Check that the weight and bias are stored in the module.

    Raises:
        NotCovered: the weight or bias is computed in every pass.
    """
    registered = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    if any(tensor is not None and id(tensor) not in registered for tensor in tensors):
        raise NotCovered(
            "the weight is computed in every pass, as by weight_norm, spectral_norm or prune, "
            "which is not covered"
        )
