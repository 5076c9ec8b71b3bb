"""LARS and LAMB, whose steps need norms of whole layers, with layers stepped by their owners."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import mpikfac
from mpikfac import MemOpt, Strategy
from support import problem

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_optimizer") is None,
    reason="pytorch_optimizer is not installed; run pip install pytorch_optimizer",
)
RANKS = mpikfac.world().size
SETTINGS = {"LARS": {"lr": 10.0}, "Lamb": {"lr": 0.01}}


def trained(comm, name, shards):
    """Return the trainer after some steps, and the model's state."""
    import pytorch_optimizer

    model = problem.network()
    made = getattr(pytorch_optimizer, name)
    optimizer = made(model.parameters(), weight_decay=0.01, **SETTINGS[name])
    trainer = mpikfac.FirstOrderTrainer(
        model, optimizer, comm, Strategy(MemOpt(shard_optimizer=shards))
    )
    return trainer, problem.run(trainer, comm)


@problem.by_one_process
def alone(own, name):
    return trained(own, name, False)[1]


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_owners_take_the_norms_of_their_layers(comm, name, shards):
    """Oracle: one process; with owners, a rank keeps the state of the tensors that it steps."""
    trainer, found = trained(comm, name, shards)
    torch.testing.assert_close(found, alone(name), rtol=1e-9, atol=1e-12)
    state = trainer.optimizer.state
    parameters = list(trainer.model.parameters())
    mine = [number for number, parameter in enumerate(parameters) if state.get(parameter)]
    if not shards:
        assert mine == list(range(len(parameters)))
    else:
        everywhere = sorted(number for numbers in comm.allgather(mine) for number in numbers)
        assert everywhere == list(range(len(parameters)))
