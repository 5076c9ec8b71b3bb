"""Weights and buffers that must be equal on all ranks are compared without additional messages."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
import mpikfac.lab
from mpikfac import KFAC, FirstOrderTrainer, MemOpt, RanksDifferError, Strategy
from mpikfac.plan import NAMED
from support import inside, problem
from support.strategies import changed

RANKS = mpikfac.world().size
EVERY = 2
STRATEGIES = {
    "first-order": None,
    "everyone": {},
    "owner steps": {"assignment": MemOpt(shard_optimizer=True)},
    "owner steps, overlapped": {
        "assignment": MemOpt(shard_optimizer=True),
        "transport.overlap": True,
    },
    "overlapped": {"transport.overlap": True},
}
OWNED = {name for name in STRATEGIES if name.startswith("owner steps")}


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


def network(*further: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3), *further)
    return model.double().to(problem.DEVICE)


def made(comm, strategy: str, *further: nn.Module) -> KFAC | FirstOrderTrainer:
    model = network(*further)
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


def replaced(weight: nn.Parameter) -> None:
    weight.data = torch.ones_like(weight)


def behind_autograd(weight: torch.Tensor) -> None:
    weight.data.mul_(1.5)


def steps_until_named(trainer: KFAC | FirstOrderTrainer, rank: int, steps: int) -> str | None:
    """Take steps until a difference of ranks is named; return the line, or None."""
    for _ in range(steps):
        try:
            step(trainer, rank)
        except RanksDifferError as error:
            return str(error)
    return None


@pytest.mark.skipif(RANKS == 1, reason="one rank agrees with itself")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("change", [restored, flipped, replaced, behind_autograd])
def test_a_weight_that_one_rank_changes_is_named(comm, strategy, change):
    """Oracle: the same text on all ranks within a few comparisons, and equal weights in the end.

    A comparison misses a difference with a chance of 1 in 64.
    """
    owned, trainer = strategy in OWNED, made(comm, strategy)
    if change is behind_autograd and owned and problem.DEVICE.type != "cpu":
        pytest.skip("owners' weights replace it, and the host does not wait for a GPU to see it")
    assert steps_until_named(trainer, comm.rank, 3) is None
    with torch.no_grad():
        if comm.rank == comm.size - 1:
            change(trainer.model[3].weight)
    told = comm.allgather(steps_until_named(trainer, comm.rank, 3 if owned else 3 * EVERY))
    assert len(set(told)) == 1
    if owned:  # their weights replace those of other ranks, and no comparison would see it
        assert told[0].startswith("parameter '3.weight' was written between two steps with")
    else:
        assert told[0].startswith("parameter '3.weight' has different values on rank")
        assert "mpikfac.comm.broadcast(" in told[0]
        mpikfac.comm.broadcast(comm, [*trainer.model.parameters(), *trainer.model.buffers()])
    assert steps_until_named(trainer, comm.rank, 2 * EVERY) is None
    weights = nn.utils.parameters_to_vector(trainer.model.parameters()).detach().cpu()
    assert all(torch.equal(weights, other) for other in comm.allgather(weights))


def borrowed(model: nn.Module) -> None:
    """Evaluate with other weights, as with averages of them, and put the weights back."""
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: torch.ones_like(value) for name, value in kept.items()})
    model.load_state_dict(kept)


def clamped(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.clamp_(-0.05, 0.05)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("change", "everywhere"), [(borrowed, False), (clamped, True)])
def test_equal_weights_are_no_difference(comm, strategy, change, everywhere):
    """Oracle: no line if all ranks clamp weights, or one evaluates with others and restores."""
    trainer = made(comm, strategy)
    for _ in range(3 * EVERY):
        step(trainer, comm.rank)
        with torch.no_grad():
            if everywhere or not comm.rank:
                change(trainer.model)


@pytest.mark.skipif(RANKS == 1, reason="one rank agrees with itself")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_buffer_that_ranks_write_is_named_once(comm, strategy, caplog):
    """Oracle: a line on rank 0; running statistics, which differ within a step, are not named."""
    trainer = made(comm, strategy, Counting(comm.rank))
    for _ in range(6 * EVERY):
        step(trainer, comm.rank)
    told = [r.getMessage() for r in caplog.records if "has different values" in r.getMessage()]
    assert len(told) == (comm.rank == 0)
    assert all(line.startswith("buffer '4.seen' has different values on rank 1") for line in told)


ALIKE = [
    name
    for name, named in NAMED.items()
    if not named.strategy.sync.local_steps and name not in ("downpour", "curvature-servers")
]
"""Strategies whose ranks have equal weights between steps; test_asynchronous.py has the others."""


@pytest.mark.skipif(RANKS == 1, reason="one rank agrees with itself")
@pytest.mark.parametrize("fault", ["restored", "flipped", "buffer"])
@pytest.mark.parametrize("name", ALIKE)
def test_every_named_strategy_tells_a_difference(comm, name, fault, caplog):
    """Oracle: the same text on all ranks with the weight's name, or one line about the buffer."""
    strategy, settings = mpikfac.get_strategy(name)
    model = network(Counting(comm.rank if fault == "buffer" else 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        trainer = KFAC(model, optimizer, comm, strategy, damping=0.01, **settings)
    except ValueError as refusal:
        pytest.skip(f"{RANKS} ranks: {refusal}")
    named = steps_until_named(trainer, comm.rank, 3)
    assert named is None
    if fault != "buffer" and comm.rank == comm.size - 1:
        with torch.no_grad():
            {"restored": restored, "flipped": flipped}[fault](model[3].weight)
    named = steps_until_named(trainer, comm.rank, 6 * EVERY)
    if fault == "buffer":
        told = [r.getMessage() for r in caplog.records if "has different values" in r.getMessage()]
        assert named is None and len(told) == (comm.rank == 0)
    else:
        assert len(set(comm.allgather(named))) == 1
        assert str(named).startswith("parameter '3.weight' ")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_comparison_sends_nothing_more(comm, strategy, monkeypatch):
    """Oracle: the bytes of a run that never compares; with overlap, a message may wait a step."""

    def sent() -> int:
        trainer = made(comm, strategy)
        for _ in range(3 * EVERY):
            step(trainer, comm.rank)
        trainer.close()
        return sum(trainer.trace.sent.values())

    compared = sent()
    inside.compare_every(monkeypatch, 1000)
    assert compared == sent()
