"""Compute gradients of single examples as products of the vectors that layers receive.

The gradient of an example in a layer is the sum of `g a^T` over positions and calls. One ordinary
backward pass yields the inputs and the output gradients of all layers, from which the vectors `a`
and `g`, such as the patches of a convolution, are computed one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpikfac.layers import Layer

Losses = Callable[[nn.Module, Any], Tensor]
"""A function of a model and a batch that returns one loss per example, `[examples]`."""


class RecordedCall(NamedTuple):
    """A call of a layer in a pass over a batch.

    Attributes:
        layer: the layer, for all of its groups or for one of them.
        x: the input, in the model's dtype.
        g: the gradients of the examples' own losses at the output.
    """

    layer: Layer
    x: Tensor
    g: Tensor

    def vectors(self) -> tuple[slice, Tensor, Tensor]:
        """Return groups of the layer, and their vectors in float64.

        The vectors `a` are `[groups, examples, positions, inputs]`, and `g` are `[groups, examples,
        positions, outputs]`.
        """
        layer, x = self.layer, self.layer.prepared(self.x, self.g)
        pairs = layer.pairs(x.double() if x.is_floating_point() else x, self.g.double())
        a, g = (pair if layer.shape.groups > 1 else pair[None] for pair in pairs)
        groups = slice(None) if layer.group is None else slice(layer.group, layer.group + 1)
        return groups, a, g


Records = Mapping[str, Sequence[RecordedCall]]
"""The calls in a pass over a batch, by layer."""


def record(model: nn.Module, layers: Sequence[Layer], losses: Losses, batch: Any) -> Records:
    """Return the calls in a pass over a batch; gradients in `.grad` do not change.

    Collective over: none.

    Raises:
        ValueError: a module is in training mode, in which examples can depend on each other or on
            random numbers; `losses` does not return one loss per example; or the inputs of a layer
            are not those of the examples.
    """
    if training := [name or "the model" for name, m in model.named_modules() if m.training]:
        raise ValueError(f"{training[0]} is in training mode; call model.eval() first")
    records: dict[str, list[RecordedCall]] = {layer.name: [] for layer in layers}
    hooks = [
        attached
        for layer in layers
        for member in layer.members
        for module in layer.modules
        for attached in layer.attach(module, partial(_on_call, member, records[layer.name]))
    ]
    try:
        with torch.enable_grad():
            values = losses(model, batch)
            if values.dim() != 1:
                raise ValueError(
                    f"losses must return one loss per example, [examples], not {[*values.shape]}"
                )
            parameters = [p for layer in layers for p in layer.parameters]
            torch.autograd.grad(values.sum(), parameters, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    for name, calls in records.items():
        for call in calls:
            if len(call.g) != len(values):
                raise ValueError(
                    f"layer {name!r} has {len(call.g)} examples, and the batch {len(values)}; "
                    f"use a model whose layers keep one row per example"
                )
    return records


def _on_call(layer: Layer, records: list[RecordedCall], _: nn.Module, *called: Any) -> None:
    call = layer.watch(*called)
    if call is not None and call[0].numel():  # a rank can have no examples
        x, listen = call
        single = x.dim() < layer.dimensions  # one example without a batch dimension
        listen(
            lambda g: records.append(
                RecordedCall(layer, *((x[None], g[None]) if single else (x, g)))
            )
        )


@torch.no_grad()
def gradients(layer: Layer, calls: Sequence[RecordedCall], examples: int) -> Tensor:
    """Return the examples' gradients in a layer, `[examples, groups, outputs, inputs]`."""
    shape = layer.shape.groups, layer.shape.outputs, layer.shape.inputs
    total = torch.zeros(examples, *shape, dtype=torch.float64, device=layer.parameters[0].device)
    for groups, a, g in (call.vectors() for call in calls):
        total[:, groups] += torch.einsum("kbso,kbsi->bkoi", g, a)
    return total


@torch.no_grad()
def products(matrices: Tensor, calls: Sequence[RecordedCall], examples: int) -> Tensor:
    """Return the products of matrices with the examples' gradients, `[vectors, examples]`.

    The gradients are computed only for examples with several positions, which saves work.

    Args:
        matrices: `[vectors, groups, outputs, inputs]`.
    """
    total = matrices.new_zeros(len(matrices), examples)
    for groups, a, g in (call.vectors() for call in calls):
        if a.shape[2] == 1:
            mapped = torch.einsum("vkoi,kbsi->vkbso", matrices[:, groups], a)
            total += torch.einsum("vkbso,kbso->vb", mapped, g)
        else:
            each = torch.einsum("kbso,kbsi->bkoi", g, a)
            total += matrices[:, groups].flatten(1) @ each.flatten(1).T
    return total
