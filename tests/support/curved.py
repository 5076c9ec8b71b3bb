"""A small network and its trainer, and layers of every kind, for tests of the curvature."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import mpikfac

F64 = torch.float64


def network():
    """Return a network with a convolution, groups, and layers with and without bias."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 3, bias=False),
        nn.Tanh(),
        nn.Linear(3, 3),
    ).double()


def trained(model, comm=None, strategy=None, steps=3, **settings):
    """Return a trainer after some steps on random images."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = {"factor_update_steps": 1, "budget": None} | settings
    kfac = mpikfac.KFAC(model, optimizer, comm, strategy, **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = torch.randn(8, 2, 3, 3, dtype=F64), torch.randint(3, (8,))
        nn.functional.cross_entropy(model(x), y).backward()
        kfac.step()
    return kfac


def vectors(model, *examples):
    """Return random vectors, by parameter name."""
    return {n: torch.randn(*examples, *p.shape, dtype=F64) for n, p in model.named_parameters()}


def losses(model, batch):
    """Return the cross entropy of each example."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels, reduction="none")


# -- kinds of layers -----------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention, with joint parameters or separate ones."""

    def __init__(self, **settings):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, **settings)

    def forward(self, x):
        keys = x[..., : self.inner.kdim]
        batch_first = self.inner.batch_first
        query, keys = (x, keys) if batch_first else (x.transpose(0, 1), keys.transpose(0, 1))
        y = self.inner(query, keys, keys, need_weights=False)[0]
        return y if batch_first else y.transpose(0, 1)


class Twice(nn.Module):
    """A linear layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(self.inner(x).tanh())


class Cell(nn.Module):
    """A recurrent cell over three steps."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(3, 2)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0]


# Modules by name, with the shape of an example.
KINDS = {
    "linear": (lambda: nn.Linear(3, 4), (3,)),
    "linear of tokens": (lambda: nn.Linear(3, 4, bias=False), (5, 3)),
    "called twice": (Twice, (3,)),
    "convolution": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 5, 4)),
    "groups": (lambda: nn.Conv2d(4, 6, 2, groups=2, bias=False), (4, 3, 3)),
    "reflected": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 4, 4)),
    "volume": (lambda: nn.Conv3d(2, 2, 2), (2, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, (2, 3), stride=(2, 1), groups=2), (4, 3, 3)),
    "embedding": (lambda: nn.Embedding(5, 3, padding_idx=1), ()),
    "embedding of tokens": (lambda: nn.Embedding(5, 3), (4,)),
    "layer norm": (lambda: nn.LayerNorm(4), (3, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 3)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (3, 2, 4)),
    "attention": (lambda: Attention(batch_first=True), (3, 4)),
    "attention by tokens": (lambda: Attention(), (3, 4)),
    "attention with keys": (lambda: Attention(kdim=3, vdim=3, batch_first=True), (3, 4)),
    "cell": (Cell, (3, 3)),
}
SHARED = ["linear of tokens", "convolution", "groups"]  # KFAC-reduce differs from KFAC-expand
CASES = [*((kind, "expand") for kind in KINDS), *((kind, "reduce") for kind in SHARED)]


def coverage_of(approximation):
    """Return a coverage of all kinds, with a `kfac_approx`."""
    return mpikfac.Coverage(
        covers={**mpikfac.layers.KINDS, **mpikfac.layers.NORMS},
        rule=lambda layer: replace(layer, kfac_approx=approximation),
    )


class Heads(nn.Module):
    """Two heads of a layer, of which `eval()` mode calls one."""

    def __init__(self):
        super().__init__()
        self.inner, self.used, self.other = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.inner(x).tanh()
        return self.used(hidden) + (self.other(hidden) if self.training else 0)
