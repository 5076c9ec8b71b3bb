"""Only one rank prints a warning that concerns the loss, not a rank."""

from __future__ import annotations

import torch
from torch import nn

import mpikfac
from mpikfac import MemOpt, Strategy, Transport


def test_one_rank_tells_of_a_loss_with_derivatives(comm, caplog):
    """Oracle: the log of rank 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    strategy = Strategy(MemOpt(), transport=Transport(overlap=comm.size > 1))
    optimizer = mpikfac.KFACOptimizer(model, comm=comm, strategy=strategy)
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.rand(8, 2, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().mean().backward()
        optimizer.step()
    assert caplog.text.count("derivatives of the network with respect to") == (comm.rank == 0)
