"""The synchronisation that the page on exchanges defines trains as the page says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mpikfac import BFloat16, Compression, FirstOrderTrainer, Strategy, Trace

PAGE = Path(__file__).parents[2] / "docs" / "extensions" / "exchange.md"
SHAPE, ALPHA, STEPS = (4, 3), 0.3, 7


def on_page():
    """Return what the page's file defines."""
    programs = re.findall(r"```python\n(# my_sync.py.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"__name__": __name__}
    exec(programs[0], names)
    return names


def test_replicas_move_a_part_of_the_way_to_their_mean(comm):
    """Oracle: numpy, for the weights of all ranks; the plan's bytes."""
    strategy = Strategy(sync=on_page()["PartialSGD"](alpha=ALPHA, sync_every=3))
    torch.manual_seed(0)
    model = nn.Linear(*SHAPE, bias=False).double()
    optimizer, trace = torch.optim.SGD(model.parameters(), lr=1.0), Trace()
    trainer = FirstOrderTrainer(model, optimizer, comm, strategy=strategy, trace=trace)
    weights = np.stack([model.weight.detach().numpy()] * comm.size)
    random = np.random.default_rng(0)
    for step in range(STEPS):
        gradients = random.normal(size=weights.shape)
        model.weight.grad = torch.from_numpy(gradients[comm.rank].copy())
        trace.clear()
        trainer.step()
        weights -= gradients
        if step % 3 == 2:
            weights += ALPHA * (weights.mean(0) - weights)
            planned = messages_of(trainer, comm.rank)
            assert sum(trace.sent.values()) == sum(m.bytes for m in planned)
        own = model.weight.detach().numpy()
        np.testing.assert_allclose(own, weights[comm.rank], rtol=0, atol=1e-12)
    trainer.average_replicas()
    np.testing.assert_allclose(model.weight.detach().numpy(), weights.mean(0), rtol=0, atol=1e-12)


def messages_of(trainer, rank):
    """Return a rank's messages of an exchange."""
    rank = trainer.plan.of(rank)
    return rank.strategy.sync.messages(rank)


def test_compressed_weights_are_refused():
    """Oracle: the needs on the page."""
    strategy = Strategy(sync=on_page()["PartialSGD"]())
    with pytest.raises(ValueError, match="partial-sgd.*compression.gradients"):
        replace(strategy, compression=Compression(gradients=BFloat16()))
