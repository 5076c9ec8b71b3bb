"""Compiled models on several ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support.compiled import ORDINARY, Problem, fresh, weights
from support.strategies import strategy_of


def network():
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(216, 5))


@pytest.mark.parametrize(
    "changes", [{}, {"transport.overlap": True}, {"assignment.shard_optimizer": True}], ids=str
)
def test_compiled_models_train_as_others(comm, changes):
    """Oracle: the weights without compilation; the runs of the graph by hand."""
    torch.manual_seed(comm.rank)
    problem = Problem(network, torch.rand(4, 3, 8, 8), torch.arange(4) + comm.rank % 2)
    strategy, counter, trained = strategy_of(changes), fresh(), []
    for compiled in (False, True):
        model = problem.made()
        call = torch.compile(model, backend=counter) if compiled else model
        optimizer = problem.kfac(model, comm=comm, strategy=strategy)
        problem.descend(optimizer, call)
        optimizer.trainer.close()
        trained.append(weights(model))
    assert torch.equal(*trained)
    assert (counter.graphs, counter.runs) == (1, ORDINARY)
    assert torch._dynamo.eval_frame._stance.stance == "default"
