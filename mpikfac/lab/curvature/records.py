"""Compute per-example gradients as products of the vectors that layers receive.

An example's gradient in a layer is the sum of `g a^T` over positions and calls. An ordinary
backward pass yields the inputs and output gradients of all layers. From these, the vectors `a` and
`g`, such as the patches of a convolution, are computed one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpikfac.lab.curvature.eigenbasis import Eigenbasis
from mpikfac.layers import Layer

ELEMENTS = 2**24
"""The maximum number of elements of a layer's per-example gradients in memory (128 MiB)."""
Losses = Callable[[nn.Module, Any], Tensor]
"""A function of a model and a batch that returns one loss per example, `[examples]`."""
Outputs = Callable[[nn.Module, Any], Tensor]
"""A function of a model and a batch that returns the outputs, `[examples, outputs]`."""
Columns = Callable[[Tensor], Iterator[Tensor]]
"""A function of outputs that yields gradients with respect to them, of the same shape."""


class RecordedCall(NamedTuple):
    """One call to a layer during a pass over a batch.

    Attributes:
        layer: the layer, for all of its groups or for one of them.
        x: the input, in the model's dtype.
        g: the gradients of the per-example losses with respect to the output.
    """

    layer: Layer
    x: Tensor
    g: Tensor

    def prepared(self) -> tuple[Tensor, Tensor]:
        """Return the input, as prepared by `Layer.prepared`, and the gradients, in float64.

        Integer inputs keep their dtype.
        """
        x = self.layer.prepared(self.x, self.g)
        return x.double() if x.is_floating_point() else x, self.g.double()

    @property
    def groups(self) -> slice:
        """The layer's groups to which the call belongs."""
        group = self.layer.group
        return slice(None) if group is None else slice(group, group + 1)

    @property
    def positions(self) -> int:
        """The number of positions in all examples, regardless of the layer's `kfac_approx`."""
        if "A" in self.layer.quadratic:  # a normalisation layer's vectors are sums over positions
            return len(self.g)
        return self.g.numel() // (self.layer.shape.groups * self.layer.shape.outputs)

    @property
    def elements(self) -> int:
        """The number of elements in the vectors `a` and `g` of a call of all the layer's groups."""
        shape = self.layer.shape
        return self.positions * shape.groups * (shape.outputs + shape.inputs)

    def vectors(self) -> tuple[slice, Tensor, Tensor]:
        """Return the groups of the call, and their vectors `a` and `g` in float64.

        The shape of `a` is `[groups, examples, positions, inputs]`, and that of `g` is `[groups,
        examples, positions, outputs]`.
        """
        layer = self.layer
        a, g = (
            pair if layer.shape.groups > 1 else pair[None] for pair in layer.pairs(*self.prepared())
        )
        return self.groups, a, g

    def gradients(self) -> Tensor:
        """Return the per-example gradients, `[examples, groups, outputs, inputs]`."""
        _, a, g = self.vectors()
        return torch.einsum("kbso,kbsi->bkoi", g, a)


Records = Mapping[str, Sequence[RecordedCall]]
"""The calls in a pass over a batch, by layer."""


def record(model: nn.Module, layers: Sequence[Layer], losses: Losses, batch: Any) -> Records:
    """Run a pass over a batch, and return the calls of layers; `.grad` does not change.

    Collective over: none.

    Raises:
        ValueError: a module is in training mode, where an example's loss can depend on other
            examples or on random numbers; `losses` does not return one loss per example; or a
            layer's inputs do not have one row per example.
    """
    _check_mode(model)
    with torch.enable_grad():
        values, records = _forward(model, layers, losses, batch)
        if values.dim() != 1:
            raise ValueError(
                f"losses must return one loss per example, [examples], not {[*values.shape]}"
            )
        torch.autograd.grad(values.sum(), _parameters(layers), allow_unused=True)
    _check_examples(records, len(values))
    return records


def record_columns(
    model: nn.Module, layers: Sequence[Layer], outputs: Outputs, batch: Any, columns: Columns
) -> Iterator[tuple[int, Records]]:
    """Yield, for each gradient of the outputs in `columns`, the number of examples and the calls.

    Each result must be used before the next is requested, because the lists of calls are reused.
    The calls' inputs are always the same.

    Collective over: none.

    Args:
        outputs: returns the outputs of a batch, `[examples, outputs]`.
        columns: yields gradients of the outputs, `[examples, outputs]`.

    Raises:
        ValueError: see `record`.
    """
    _check_mode(model)
    with torch.enable_grad():
        found, records = _forward(model, layers, outputs, batch)
    if found.dim() != 2:
        raise ValueError(
            f"outputs must return one row per example, [examples, outputs], not {[*found.shape]}"
        )
    for column in columns(found.detach()):
        for calls in records.values():
            calls.clear()
        parameters = _parameters(layers)
        torch.autograd.grad(found, parameters, column, retain_graph=True, allow_unused=True)
        _check_examples(records, len(found))
        yield len(found), records


def _check_mode(model: nn.Module) -> None:
    if training := [name or "the model" for name, m in model.named_modules() if m.training]:
        raise ValueError(f"{training[0]} is in training mode; call model.eval() first")


def _parameters(layers: Sequence[Layer]) -> list[Tensor]:
    return [parameter for layer in layers for parameter in layer.parameters]


def _forward(
    model: nn.Module, layers: Sequence[Layer], function: Losses, batch: Any
) -> tuple[Tensor, dict[str, list[RecordedCall]]]:
    """Return the function's value, and lists to which its backward passes append layers' calls."""
    records: dict[str, list[RecordedCall]] = {layer.name: [] for layer in layers}
    hooks = [
        attached
        for layer in layers
        for member in layer.members
        for module in layer.modules
        for attached in layer.attach(module, partial(_on_call, member, records[layer.name]))
    ]
    try:
        return function(model, batch), records
    finally:
        for hook in hooks:
            hook.remove()


def _check_examples(records: Records, examples: int) -> None:
    """Check that the first dimension of each layer's input is the batch dimension."""
    for name, calls in records.items():
        for call in calls:
            if len(call.g) != examples:
                raise ValueError(
                    f"layer {name!r} has {len(call.g)} examples, but the batch has {examples}; "
                    f"use a model whose layers keep one row per example"
                )


def _on_call(layer: Layer, records: list[RecordedCall], _: nn.Module, *called: Any) -> None:
    call = layer.watch(*called)
    if call is not None and call[0].numel():  # a rank may have zero examples
        x, listen = call
        single = x.dim() < layer.dimensions  # one example without a batch dimension
        listen(
            lambda g: records.append(
                RecordedCall(layer, *((x[None], g[None]) if single else (x, g)))
            )
        )


@torch.no_grad()
def gradients(layer: Layer, calls: Sequence[RecordedCall], examples: int) -> Tensor:
    """Return a layer's per-example gradients, `[examples, groups, outputs, inputs]`."""
    shape = layer.shape.groups, layer.shape.outputs, layer.shape.inputs
    total = torch.zeros(examples, *shape, dtype=torch.float64, device=layer.parameters[0].device)
    for part, some in parts(layer, calls, examples):
        for call in some:
            total[part, call.groups] += call.gradients()
    return total


@torch.no_grad()
def products(matrices: Tensor, calls: Sequence[RecordedCall], examples: int) -> Tensor:
    """Return the inner products of matrices with per-example gradients, `[vectors, examples]`.

    The gradients themselves are computed only if examples have several positions; for a single
    position, it is cheaper to multiply the matrices by the vectors `a` and `g`.

    Args:
        matrices: `[vectors, groups, outputs, inputs]`.
    """
    total = matrices.new_zeros(len(matrices), examples)
    for call in calls:
        if call.positions == examples:
            groups, a, g = call.vectors()
            mapped = torch.einsum("vkoi,kbsi->vkbso", matrices[:, groups], a)
            total += torch.einsum("vkbso,kbso->vb", mapped, g)
            continue
        rows = matrices[:, call.groups].flatten(1)
        for part, (some,) in parts(call.layer, [call], examples):
            total[:, part] += rows @ some.gradients().flatten(1).T
    return total


def parts(
    layer: Layer, calls: Sequence[RecordedCall], examples: int
) -> Iterator[tuple[slice, list[RecordedCall]]]:
    """Yield slices of the examples, and the calls restricted to them.

    The gradients or vectors of a slice have at most `ELEMENTS` elements, unless a single example
    has more. Without calls, there are no slices.
    """
    if not calls:
        return
    shape = layer.shape
    vectors = max(call.elements for call in calls) // max(1, examples)
    each = max(shape.groups * shape.outputs * shape.inputs, vectors)
    count = max(1, ELEMENTS // each)
    for first in range(0, examples, count):
        part = slice(first, first + count)
        yield part, [RecordedCall(call.layer, call.x[part], call.g[part]) for call in calls]


@torch.no_grad()
def rotated_inputs(basis: Eigenbasis, calls: Sequence[RecordedCall]) -> list[Tensor | None]:
    """Return `Q_A^T a` of each call, `[groups, examples, positions, inputs]`.

    The results can be used for all columns of `record_columns`. A result is None if it would have
    more than `ELEMENTS` elements; if there are more positions than inputs, so that rotating the
    gradients instead is cheap; or if the vectors `a` depend on the gradients of the call's outputs.
    """
    found: list[Tensor | None] = []
    for call in calls:
        if not rotated_elements(call, len(call.g)):
            found.append(None)
        else:
            groups, a, _ = call.vectors()
            rows = basis.of_groups(groups).rotate_inputs(a.flatten(1, 2))
            found.append(rows.view_as(a))
    return found


def rotated_elements(call: RecordedCall, examples: int) -> int:
    """Return the number of elements of a call's result in `rotated_inputs`; 0 if it is None."""
    shape, positions = call.layer.shape, call.positions // max(1, len(call.g))
    elements = examples * positions * shape.groups * shape.inputs
    many = elements > ELEMENTS or positions > shape.inputs or "A" in call.layer.quadratic
    return 0 if many else elements


@torch.no_grad()
def sum_of_squares(
    basis: Eigenbasis,
    layer: Layer,
    calls: Sequence[RecordedCall],
    examples: int,
    inputs: Sequence[Tensor | None],
) -> Tensor:
    """Return the sum of the examples' squared gradients in a basis, `[groups, outputs, inputs]`.

    Args:
        inputs: as returned by `rotated_inputs`.
    """
    if (pair := _rotated_pair(basis, calls, inputs)) is not None:
        g, a = (side.square() for side in pair)
        return g.mT @ a
    total = torch.zeros_like(basis.values)
    for part, some in parts(layer, calls, examples):
        total += _rotated(basis, some, _part_of(inputs, part)).square().sum(0)
    return total


@torch.no_grad()
def weighted_squares(
    basis: Eigenbasis,
    layer: Layer,
    calls: Sequence[RecordedCall],
    examples: int,
    inputs: Sequence[Tensor | None],
    weights: Tensor,
) -> Tensor:
    """Return weighted sums of each example's squared gradient in a basis, `[weights, examples]`.

    Args:
        inputs: as returned by `rotated_inputs`.
        weights: the weights of each sum, `[weights, groups, outputs, inputs]`.
    """
    if (pair := _rotated_pair(basis, calls, inputs)) is not None:
        g, a = (side.square() for side in pair)
        return ((g @ weights) * a).sum((1, 3))
    found = weights.new_zeros(len(weights), examples)
    for part, some in parts(layer, calls, examples):
        rows = _rotated(basis, some, _part_of(inputs, part)).square_()
        found[:, part] = weights.flatten(1) @ rows.flatten(1).T
        del rows  # before the next part allocates as much memory
    return found


def _rotated(
    basis: Eigenbasis, calls: Sequence[RecordedCall], inputs: Sequence[Tensor | None]
) -> Tensor:
    """Return the per-example gradients in a basis, `[examples, groups, outputs, inputs]`.

    Where `inputs` contains a call's rotated inputs, its vectors `g` are rotated instead of its
    gradients.
    """
    total = basis.values.new_zeros(max(len(call.g) for call in calls), *basis.values.shape)
    for call, known in zip(calls, inputs, strict=True):
        own = basis.of_groups(call.groups)
        if known is None:
            total[:, call.groups] += own.rotate(call.gradients())
        else:
            _, _, g = call.vectors()
            rows = own.rotate_outputs(g.flatten(1, 2)).view_as(g)
            total[:, call.groups] += torch.einsum("kbso,kbsi->bkoi", rows, known)
    return total


def _part_of(inputs: Sequence[Tensor | None], part: slice) -> list[Tensor | None]:
    """Return the rotated inputs of the examples in `part`."""
    return [None if vectors is None else vectors[:, part] for vectors in inputs]


def single_products(calls: Sequence[RecordedCall]) -> bool:
    """Return whether an example's gradient in a layer is a single product `g a^T`."""
    if len(calls) != 1 or calls[0].layer.group is not None:
        return False
    return calls[0].positions == len(calls[0].g)


def _rotated_pair(
    basis: Eigenbasis, calls: Sequence[RecordedCall], inputs: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor] | None:
    """Return `Q_G^T g` and `Q_A^T a`, `[groups, examples, n]`, or None if not `single_products`."""
    if not single_products(calls):
        return None
    _, a, g = calls[0].vectors()
    rows = basis.rotate_inputs(a[:, :, 0]) if inputs[0] is None else inputs[0][:, :, 0]
    return basis.rotate_outputs(g[:, :, 0]), rows
