"""Cover the two linear layers of `RNNCell`, `LSTMCell` and `GRUCell`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mpikfac.layers.inner.product import InnerLayer, Node
from mpikfac.layers.layer import Layer


class CellLayer(InnerLayer):
    """Cover a cell's linear layer for the input or the hidden state, with all gates together."""

    arguments = ("input", "hx")
    module: nn.RNNCellBase

    def input_of(self, arguments: Mapping[str, Any], product: Node) -> Tensor:
        """Return the input or the hidden state, `[batch, inputs]`; a missing state is zero."""
        states, x = arguments.get(self.source), arguments["input"]
        if states is None:
            states = x.new_zeros(*x.shape[:-1], self.module.hidden_size)
        state: Tensor = states if isinstance(states, Tensor) else states[0]  # of (hidden, cell)
        return state if state.dim() == 2 else state[None]


def cell_layers(name: str, module: nn.Module) -> list[Layer]:
    """Return a cell's linear layers that have trained weights."""
    assert isinstance(module, nn.RNNCellBase)
    layers: list[Layer] = []
    for part, source in (("ih", "input"), ("hh", "hx")):
        weight, bias = (getattr(module, f"{kind}_{part}") for kind in ("weight", "bias"))
        if weight.requires_grad:
            arguments = f"{name}.{part}".lstrip("."), module, (weight, bias)
            layers.append(CellLayer(*arguments, source, weight))
    return layers
