"""Record the products that attention modules and recurrent cells compute without submodules.

Attention modules call `F.linear`. Cells are rewritten in terms of `F.linear`, following their
formulas in torch's documentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpikfac
from mpikfac.numerics import copy_all

MODULES = (nn.MultiheadAttention, nn.RNNCellBase)


class Use(NamedTuple):
    """A product of an input and a weight that a module computes internally.

    Attributes:
        x: the input, `[batch, positions, inputs]`.
        y: the tensor that contains the output of the product.
        columns: the columns of `y` that are the output.
    """

    x: Tensor
    y: Tensor
    columns: slice


def is_inside(layer: mpikfac.Layer) -> bool:
    """Return whether a layer is a product that a module computes internally."""
    return isinstance(layer.module, MODULES)


def weights_of(layer: mpikfac.Layer) -> list[Tensor]:
    """Return a layer's weight matrices: one, or one per group."""
    if layer.shape.groups == 1:
        return [layer.parameters[0]]
    module = layer.module
    assert isinstance(module, nn.MultiheadAttention)
    if module.in_proj_weight is not None:
        return list(module.in_proj_weight.chunk(3))
    return [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]


def as_modules(layer: mpikfac.Layer) -> list[mpikfac.Layer]:
    """Split a product inside a module into a `Linear` layer per group; return others unchanged."""
    if not is_inside(layer):
        return [layer]
    matrix = torch.empty(layer.shape.gradient).to(layer.parameters[0])
    copy_all(layer.values_to(layer.parts(matrix)))
    layers = []
    for values, weight in zip(matrix.view(-1, *matrix.shape[-2:]), weights_of(layer)):
        linear = nn.Linear(weight.shape[1], len(weight), layer.bias).to(weight)
        if layer.bias:
            linear.bias.data = values[:, -1].clone()
        if layer.bias_alone:
            linear.weight.requires_grad_(False)
        else:
            linear.weight.data = values[:, : weight.shape[1]].clone()
        layers.append(mpikfac.Layer(layer.name, linear))
    return layers


@contextmanager
def watched(layers: Sequence[mpikfac.Layer]) -> Iterator[dict[str, list[list[Use]]]]:
    """Record the products that `layers` compute in this context, by layer name and group."""
    plain, examples = F.linear, dict[int, int]()
    seen: dict[str, list[list[Use]]] = {
        layer.name: [[] for _ in weights_of(layer)] for layer in layers
    }
    places = [
        (layer, group, view) for layer in layers for group, view in enumerate(weights_of(layer))
    ]

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = plain(input, weight, bias)
        products = [
            (layer, group, slice(start, start + len(view)))
            for layer, group, view in places
            if (start := _row(view, weight)) is not None and y.requires_grad
        ]
        if not products:
            return y
        y.retain_grad()
        for layer, group, columns in products:
            batch = examples.get(id(layer.module), len(input) if input.dim() > 1 else 1)
            rows = input.detach().clone().reshape(-1, batch, input.shape[-1])
            seen[layer.name][group].append(Use(rows.transpose(0, 1), y, columns))
        return y.clone()

    def note(module: nn.Module, inputs: Any, named: Any) -> None:
        query = inputs[0] if inputs else named["query"]
        batch = query.shape[0 if module.batch_first else 1] if query.dim() == 3 else 1
        examples[id(module)] = batch

    with ExitStack() as stack:
        for module in {layer.module for layer in layers}:
            if isinstance(module, nn.RNNCellBase):
                module.forward = partial(written_out, module)
                stack.callback(delattr, module, "forward")
            else:
                stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        stack.callback(setattr, F, "linear", plain)
        F.linear = linear
        yield seen


def _row(view: Tensor, weight: Tensor) -> int | None:
    """Return the row of `weight` at which a view begins; None if it is not a view of `weight`."""
    if view.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
        return None
    row = (view.storage_offset() - weight.storage_offset()) // weight.stride(0)
    return row if 0 <= row < len(weight) else None


def written_out(cell: nn.RNNCellBase, input: Tensor, hx: Any = None) -> Any:
    """Return the output of a cell, computed with `F.linear`."""
    zeros = input.new_zeros(*input.shape[:-1], cell.hidden_size)
    h, c = hx if isinstance(hx, tuple) else (zeros if hx is None else hx, zeros)
    from_input = F.linear(input, cell.weight_ih, cell.bias_ih)
    from_state = F.linear(h, cell.weight_hh, cell.bias_hh)
    sums = from_input + from_state
    if isinstance(cell, nn.RNNCell):
        return torch.tanh(sums) if cell.nonlinearity == "tanh" else F.relu(sums)
    if isinstance(cell, nn.LSTMCell):
        i, f, g, o = sums.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    (r, z, n), (own_r, own_z, own_n) = from_input.chunk(3, -1), from_state.chunk(3, -1)
    r, z = (r + own_r).sigmoid(), (z + own_z).sigmoid()
    return (1 - z) * torch.tanh(n + r * own_n) + z * h
