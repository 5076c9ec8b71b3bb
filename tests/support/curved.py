"""A small network and its trainer, for tests of the curvature."""

from __future__ import annotations

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
