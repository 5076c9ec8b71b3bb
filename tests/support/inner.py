"""Attention and recurrent cells: torch's modules, and equivalents made of linear layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

WIDTH, CLASSES = 4, 5


class LinearAttention(nn.Module):
    """Compute what a batch-first `MultiheadAttention` computes, with linear layers."""

    def __init__(self, of: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads, apart = of.num_heads, of.in_proj_weight is None
        own = of.q_proj_weight, of.k_proj_weight, of.v_proj_weight
        weights = own if apart else of.in_proj_weight.chunk(3)
        none = (None,) * 3
        biases = none if of.in_proj_bias is None else of.in_proj_bias.chunk(3)
        self.first = nn.ModuleList(map(linear, weights, none if apart else biases))
        self.shifts = nn.ModuleList(map(shift, biases) if apart and biases[0] is not None else ())
        self.out = linear(of.out_proj.weight, of.out_proj.bias)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: bool) -> tuple[Tensor]:
        vectors = [layer(x) for layer, x in zip(self.first, (query, key, value))]
        if self.shifts:
            vectors = [layer(x) for layer, x in zip(self.shifts, vectors)]
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in vectors)
        shares = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return (self.out((shares @ v).transpose(1, 2).flatten(2)),)


class LinearCell(nn.Module):
    """Compute what a recurrent cell computes, with two linear layers."""

    def __init__(self, of: nn.RNNCellBase) -> None:
        super().__init__()
        self.kind, self.size = type(of), of.hidden_size
        self.ih = linear(of.weight_ih, of.bias_ih if of.bias else None)
        self.hh = linear(of.weight_hh, of.bias_hh if of.bias else None)

    def forward(self, x: Tensor, state: Tensor | tuple[Tensor, Tensor] | None = None):
        zeros = x.new_zeros(len(x), self.size)
        h, c = state if isinstance(state, tuple) else (zeros if state is None else state, zeros)
        given, kept = self.ih(x), self.hh(h)
        if self.kind is nn.RNNCell:
            return torch.tanh(given + kept)
        if self.kind is nn.LSTMCell:
            i, f, g, o = (given + kept).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            return o.sigmoid() * c.tanh(), c
        (r, z, n), (of_r, of_z, of_n) = given.chunk(3, 1), kept.chunk(3, 1)
        z = (z + of_z).sigmoid()
        return (1 - z) * torch.tanh(n + (r + of_r).sigmoid() * of_n) + z * h


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with copies of `weight` and `bias`."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None).to(weight)
    made.weight.data = weight.detach().clone()
    if bias is not None:
        made.bias.data = bias.detach().clone()
    return made


def shift(bias: Tensor) -> nn.Linear:
    """Return a linear layer that adds a bias; its weight is a frozen identity matrix."""
    made = linear(torch.eye(len(bias)).to(bias), bias)
    made.weight.requires_grad_(False)
    return made


class Attends(nn.Module):
    """Let the tokens of an image attend to themselves, to others, or to two sets of others."""

    def __init__(self, attention: nn.Module, to: str, sequence_first: bool = False) -> None:
        super().__init__()
        self.attention, self.to, self.sequence_first = attention, to, sequence_first
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x, other = images[:, :, :3, :4].flatten(1, 2), images[:, :, 3:8, 4:].flatten(1, 2)
        key, value = {
            "itself": (x, x),
            "others": (other, other),
            "apart": (other, other * other),
            "sizes": (other[..., :3], other[..., 1:3]),
        }[self.to]
        given = {id(one): one for one in (x, key, value)}  # keep equal arguments the same object
        if self.sequence_first:
            given = {name: one.transpose(0, 1) for name, one in given.items()}
        y = self.attention(*(given[id(one)] for one in (x, key, value)), need_weights=False)[0]
        return self.head(torch.tanh(y).mean(0 if self.sequence_first else 1))


class Repeats(nn.Module):
    """Run a cell over the rows of an image."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        state = None
        for row in images[:, 0, :3].unbind(1):
            state = self.cell(row) if state is None else self.cell(row, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


CELLS = {"rnn": nn.RNNCell, "lstm": nn.LSTMCell, "gru": nn.GRUCell}
TO = ("itself", "others", "apart", "sizes")


def pair(kind: str, bias: bool = True, sequence_first: bool = False) -> tuple[nn.Module, nn.Module]:
    """Return a network with torch's module, and an equal one of linear layers, in float64."""
    torch.manual_seed(1)
    if kind in CELLS:
        cell = CELLS[kind](8, WIDTH, bias=bias)
        networks = Repeats(cell), Repeats(LinearCell(cell))
    else:
        sizes = {"kdim": 3, "vdim": 2} if kind == "sizes" else {}
        attention = nn.MultiheadAttention(
            WIDTH, 2, bias=bias, batch_first=not sequence_first, **sizes
        )
        for parameter in attention.parameters():  # torch initialises biases to 0
            nn.init.normal_(parameter, std=0.7)
        networks = (
            Attends(attention, kind, sequence_first),
            Attends(LinearAttention(attention), kind),
        )
    networks[1].head.load_state_dict(networks[0].head.state_dict())
    return networks[0].double(), networks[1].double()


def weights(network: nn.Module) -> Tensor:
    """Return all trained parameters of one of a pair's networks as a vector, in the same order."""
    inner = network.attention if isinstance(network, Attends) else network.cell
    groups = [network.head.weight, network.head.bias]
    if isinstance(inner, nn.MultiheadAttention):
        own = inner.q_proj_weight, inner.k_proj_weight, inner.v_proj_weight
        groups += [inner.in_proj_weight] if own[0] is None else own
        groups += [inner.in_proj_bias, inner.out_proj.weight, inner.out_proj.bias]
    elif isinstance(inner, LinearAttention):
        groups += [layer.weight for layer in inner.first]
        groups += [layer.bias for layer in (list(inner.shifts) or inner.first)]
        groups += [inner.out.weight, inner.out.bias]
    elif isinstance(inner, LinearCell):
        groups += [inner.ih.weight, inner.hh.weight, inner.ih.bias, inner.hh.bias]
    else:
        groups += list(inner.parameters())
    return torch.cat([one.detach().flatten() for one in groups if one is not None])
