"""Weights and buffers that must be equal on all ranks are compared, without further messages."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import KFAC, FirstOrderTrainer, MemOpt, RanksDifferError, Strategy
from support import inside, problem
from support.strategies import changed

RANKS = mpikfac.world().size
EVERY = 2
STRATEGIES = {
    "first-order": None,
    "everyone": {},
    "owner steps": {"assignment": MemOpt(shard_optimizer=True)},
    "overlapped": {"transport.overlap": True},
}


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Compare in every second step."""
    inside.compare_every(monkeypatch, EVERY)


class Counting(nn.Module):
    """A layer with a buffer that each rank writes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += self.rank
        return x


def made(comm, strategy: str, *further: nn.Module) -> KFAC | FirstOrderTrainer:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3), *further)
    model = model.double().to(problem.DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if STRATEGIES[strategy] is None:
        return FirstOrderTrainer(model, optimizer, comm)
    return KFAC(model, optimizer, comm, changed(Strategy(), STRATEGIES[strategy]), damping=0.01)


def step(trainer: KFAC | FirstOrderTrainer, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * trainer.steps + rank)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64, device="cpu")
    y = torch.randint(3, (8,), generator=generator, device="cpu")
    trainer.optimizer.zero_grad()
    F.cross_entropy(trainer.model(x.to(problem.DEVICE)), y.to(problem.DEVICE)).backward()
    trainer.step()


def restored(weight: torch.Tensor) -> None:
    weight.copy_(torch.ones_like(weight))


def flipped(weight: torch.Tensor) -> None:
    weight.view(torch.int64)[0, 0] ^= 1 << 40  # a lower one may be lost in rounding


@pytest.mark.skipif(RANKS == 1, reason="one rank agrees with itself")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("change", [restored, flipped])
def test_a_weight_that_one_rank_changes_is_named(comm, strategy, change):
    """Oracle: the same text on all ranks within a few comparisons, and equal weights in the end.

    A comparison misses a difference with a chance of 1 in 64.
    """
    trainer, caught = made(comm, strategy), None
    for _ in range(3):
        step(trainer, comm.rank)
    with torch.no_grad():
        if comm.rank == comm.size - 1:
            change(trainer.model[3].weight)
    for _ in range(3 * EVERY):
        try:
            step(trainer, comm.rank)
        except RanksDifferError as error:
            caught = str(error)
            break
    told = comm.allgather(caught)
    if strategy == "owner steps":  # owners' weights replace those of other ranks
        assert told == [None] * comm.size
    else:
        assert len(set(told)) == 1 and "mpikfac.comm.broadcast(" in told[0]
        assert told[0].startswith("parameter '3.weight' has other values on rank")
        mpikfac.comm.broadcast(comm, [*trainer.model.parameters(), *trainer.model.buffers()])
    for _ in range(2 * EVERY):
        step(trainer, comm.rank)
    weights = nn.utils.parameters_to_vector(trainer.model.parameters()).detach().cpu()
    assert all(torch.equal(weights, other) for other in comm.allgather(weights))


@pytest.mark.skipif(RANKS == 1, reason="one rank agrees with itself")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_buffer_that_ranks_write_is_named_once(comm, strategy, caplog):
    """Oracle: a line on rank 0; running statistics, which differ within a step, are not named."""
    trainer = made(comm, strategy, Counting(comm.rank))
    for _ in range(6 * EVERY):
        step(trainer, comm.rank)
    told = [r.getMessage() for r in caplog.records if "has other values" in r.getMessage()]
    assert len(told) == (comm.rank == 0)
    assert all(line.startswith("buffer '4.seen' has other values on rank 1") for line in told)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_comparison_sends_nothing_more(comm, strategy):
    """Oracle: bytes of steps with and without a comparison."""
    trainer, sent = made(comm, strategy), []
    for _ in range(2 * EVERY):
        before = sum(trainer.trace.sent.values())
        step(trainer, comm.rank)
        sent.append(sum(trainer.trace.sent.values()) - before)
    if STRATEGIES[strategy] is None:
        assert len(set(sent)) == 1
    assert sent[EVERY] <= sent[0]
