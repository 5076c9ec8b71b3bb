"""Measure the sizes of each layer's calls, on which the cost of its statistics depends."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpikfac.layers.layer import Layer
from mpikfac.plan import CallSize


def call_sizes(
    model: nn.Module, layers: Iterable[Layer], inputs: Tensor
) -> dict[str, list[CallSize]]:
    """Return the sizes of all calls of each layer in a forward and a backward pass.

    If a layer has several groups, the sizes are those of its first group. On torch's meta device,
    the passes compute no values. The passes change the model's gradients and running statistics.

    Args:
        model: a model in training mode that returns a single tensor.
    """
    sizes: dict[str, list[CallSize]] = {}
    attached = []
    for layer in layers:
        member, calls = layer.members[0], sizes.setdefault(layer.name, [])
        for module in member.modules:
            attached += member.attach(module, partial(_on_forward, calls, member))
    try:
        with torch.enable_grad():
            model(inputs).sum().backward()
    finally:
        for each in attached:
            each.remove()
    return sizes


def _on_forward(calls: list[CallSize], layer: Layer, _: nn.Module, *called: Any) -> None:
    call = layer.watch(*called)
    if call is not None:
        x, listen = call
        listen(partial(_on_gradient, calls, layer, x.detach()))


def _on_gradient(calls: list[CallSize], layer: Layer, x: Tensor, g: Tensor) -> None:
    if x.dim() < layer.dimensions:  # one example without a batch dimension
        x, g = x[None], g[None]
    if len(x):
        calls.append(CallSize(len(x), layer.positions(g), x.is_floating_point()))
