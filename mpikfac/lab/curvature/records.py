"""Gradients of single examples as products of the vectors that layers see.

The gradient of an example in a layer is the sum of `g a^T` over positions and calls. The vectors
`a` and `g` of a batch need far less memory than the gradients, and one ordinary backward pass
yields them.
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


class CallVectors(NamedTuple):
    """The vectors of a call of a layer, for all groups or one, in float64.

    Attributes:
        groups: the groups of the layer to which the vectors belong.
        a: `[groups, examples, positions, inputs]`.
        g: the gradients of the examples' own losses, `[groups, examples, positions, outputs]`.
    """

    groups: slice
    a: Tensor
    g: Tensor


Records = Mapping[str, Sequence[CallVectors]]
"""The records of a batch by layer, one for each call."""


def record(model: nn.Module, layers: Sequence[Layer], losses: Losses, batch: Any) -> Records:
    """Return the vectors of a batch; gradients in `.grad` do not change.

    Collective over: none.

    Raises:
        ValueError: a module is in training mode, in which examples can depend on each other or on
            random numbers; `losses` does not return one loss per example; or the inputs of a layer
            are not those of the examples.
    """
    if training := [name or "the model" for name, m in model.named_modules() if m.training]:
        raise ValueError(f"{training[0]} is in training mode; call model.eval() first")
    records: dict[str, list[CallVectors]] = {layer.name: [] for layer in layers}
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
            if call.g.shape[1] != len(values):
                raise ValueError(
                    f"layer {name!r} has {call.g.shape[1]} examples, and the batch {len(values)}"
                )
    return records


def _on_call(layer: Layer, records: list[CallVectors], _: nn.Module, *called: Any) -> None:
    call = layer.watch(*called)
    if call is not None and call[0].numel():  # a rank can have no examples
        x, listen = call
        listen(lambda g: records.append(_record(layer, x, g)))


@torch.no_grad()
def _record(layer: Layer, x: Tensor, g: Tensor) -> CallVectors:
    if x.dim() < layer.dimensions:  # one example without a batch dimension
        x, g = x[None], g[None]
    x = layer.prepared(x, g)  # in the model's dtype, which its running statistics have
    pairs = layer.pairs(x.double() if x.is_floating_point() else x, g.double())
    a, g = (pair if layer.shape.groups > 1 else pair[None] for pair in pairs)
    groups = slice(None) if layer.group is None else slice(layer.group, layer.group + 1)
    return CallVectors(groups, a, g)


def gradients(layer: Layer, calls: Sequence[CallVectors], examples: int) -> Tensor:
    """Return the examples' gradients in a layer, `[examples, groups, outputs, inputs]`."""
    shape = layer.shape.groups, layer.shape.outputs, layer.shape.inputs
    total = torch.zeros(examples, *shape, dtype=torch.float64, device=layer.parameters[0].device)
    for groups, a, g in calls:
        total[:, groups] += torch.einsum("kbso,kbsi->bkoi", g, a)
    return total


def products(matrices: Tensor, calls: Sequence[CallVectors], examples: int) -> Tensor:
    """Return the products of matrices with the examples' gradients, `[vectors, examples]`.

    The gradients are not computed.

    Args:
        matrices: `[vectors, groups, outputs, inputs]`.
    """
    total = matrices.new_zeros(len(matrices), examples)
    for groups, a, g in calls:
        mapped = torch.einsum("vkoi,kbsi->vkbso", matrices[:, groups], a)
        total += torch.einsum("vkbso,kbso->vb", mapped, g)
    return total
