"""Robust rules instead of averaged gradients: results, messages and memory."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import FirstOrderTrainer, MemOpt, Strategy, Synchronous
from mpikfac.lab import CenteredClipping, GeometricMedian, Krum, Median, Safeguard, TrimmedMean
from mpikfac.numerics import by_vector
from mpikfac.plan import stages
from mpikfac_apps.lab.reproduce.rules import MOMENTUM, RATE, SIZE, quadratic
from support import inside, problem
from support.copies import kfac_of, trained, trainer_of

pytestmark = pytest.mark.lab

ROBUST = [
    Median(),
    GeometricMedian(),
    CenteredClipping(radius=2.0),
    Safeguard(long_window=4, short_window=2, threshold=1.1, floor=0.0),
    Safeguard(long_window=4, short_window=2, floor=0.3, mean_of="before"),
    Safeguard(long_window=4, short_window=2, floor=0.1, reset_interval=3),
    TrimmedMean(),
    Krum(num_byzantine=0),
]
if mpikfac.world().size < 3:
    ROBUST = [rule for rule in ROBUST if not isinstance(rule, TrimmedMean | Krum)]


def on_one_process(rule, ranks, size=SIZE):
    """Return a function from the vectors of all ranks to what the rule makes of the vectors."""
    if not rule.products(ranks):
        return lambda rows: rule.combine(torch.from_numpy(rows)).numpy()
    combiner = by_vector(rule, ranks, torch.zeros(size, dtype=torch.float64, device="cpu"))

    def combined(vectors):
        parts = torch.from_numpy(vectors)
        rows = combiner.rows(parts)
        return combiner.combine(rows @ rows.mT, parts).numpy()

    return combined


@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: rule.name)
def test_gradients_are_combined_by_the_rule(comm, rule):
    """Oracle: the rule, which tests/unit/test_robust.py checks, of all gradients on one process."""
    ranks = comm.size
    strategy = Strategy(MemOpt(), sync=Synchronous(aggregation=rule))
    w, v, combined = np.ones(SIZE), np.zeros(SIZE), on_one_process(rule, ranks)
    for found in trained(comm, strategy, 6):
        losses = [quadratic(rank) for rank in range(ranks)]
        g = np.array([a.T @ (a @ w - b) for a, b in losses])
        v = MOMENTUM * v + (combined(g) if ranks > 1 else g[0])
        w = w - RATE * v
        np.testing.assert_allclose(found, w, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: rule.name)
def test_messages_of_a_rule_are_the_plans(comm, rule):
    """Oracle: the plan, message by message."""
    model = problem.network()
    trainer = FirstOrderTrainer(
        model,
        problem.sgd_all(model),
        comm,
        Strategy(MemOpt(), sync=Synchronous(aggregation=rule)),
        mpikfac.Trace(events=True),
    )
    problem.run(trainer, comm, [0])
    planned = stages.reduce_gradients(trainer.plan.of(comm.rank))
    events = [(e.name, e.over, e.bytes) for e in trainer.trace.events if e.over]
    assert events == [(m.stage, m.over, m.bytes) for m in planned]


@pytest.mark.skipif(mpikfac.world().size < 3, reason="two ranks cannot tell which of them is wrong")
@pytest.mark.parametrize("wrong", [-100.0, np.nan])
def test_a_wrong_rank_does_not_lead_training_astray(comm, wrong):
    """Oracle: K-FAC whose ranks all have the right gradient of one batch."""

    def ended(strategy, wrong):
        kfac = kfac_of(comm, strategy, kl_clip=None)
        for step in range(4):
            images, labels = problem.shards(step, 1)[0]
            kfac.optimizer.zero_grad()
            F.cross_entropy(kfac.model(images), labels).backward()
            if comm.rank == 1:
                for parameter in kfac.model.parameters():
                    parameter.grad *= wrong
            kfac.step()
        return problem.state(kfac.model)

    robust = Strategy(sync=Synchronous(aggregation=Median()))
    ends = ended(robust, wrong), ended(Strategy(), 1.0)
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: rule.name)
def test_running_statistics_do_not_cut_vectors_in_two(comm, rule):
    """Oracle: the rule, of all gradients of a network with batch normalisation on one process."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model.to(problem.DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = FirstOrderTrainer(
        model, optimizer, comm, Strategy(MemOpt(), sync=Synchronous(aggregation=rule))
    )
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    generator = torch.Generator().manual_seed(comm.rank)
    inputs = torch.randn(6, 3, generator=generator, device="cpu").double()
    model(inputs.to(problem.DEVICE)).square().sum().backward()
    own = torch.cat([p.grad.flatten() for p in model.parameters()]).cpu().numpy()
    vectors = np.array(comm.allgather(own))
    combined = on_one_process(rule, *vectors.shape)(vectors) if comm.size > 1 else own
    trainer.step()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    np.testing.assert_allclose((before - after).cpu(), combined, rtol=1e-8, atol=1e-10)


REMEMBERING = [
    CenteredClipping(radius=0.1),
    Safeguard(
        long_window=5,
        short_window=2,
        threshold=1.1,
        floor=0.3,
        reset_interval=5,
        noise_std=0.01,
    ),
]


@pytest.mark.parametrize("kind", ["first-order", "K-FAC"])
@pytest.mark.parametrize("rule", REMEMBERING, ids=lambda rule: rule.name)
def test_a_rule_remembers_earlier_steps_after_a_checkpoint(comm, rule, kind):
    """Oracle: the run that was not interrupted; a run without the memory ends elsewhere."""
    sync = Synchronous(aggregation=rule)
    first, second, third = (trainer_of(comm, kind, sync) for _ in range(3))
    problem.run(first, comm, range(3))
    state = copy.deepcopy(problem.whole_state(first, comm))
    second.load_state_dict(state)
    third.load_state_dict({n: v for n, v in state.items() if not n.startswith("exchange/rule")})
    ends = [problem.run(trainer, comm, range(3, 7)) for trainer in (first, second, third)]
    assert torch.equal(*ends[:2])
    if comm.size > 2:
        assert not torch.equal(ends[0], ends[2])


def test_a_rule_keeps_its_memory_for_the_same_number_of_ranks_only(comm):
    """Oracle: the names; a state of five ranks fits no test's number of ranks."""
    model = problem.network()
    strategy = Strategy(MemOpt(), sync=Synchronous(aggregation=Safeguard()))
    trainer = FirstOrderTrainer(model, problem.sgd(model), comm, strategy)
    problem.run(trainer, comm, [0])
    state = copy.deepcopy(problem.whole_state(trainer, comm))
    assert not trainer.missing(state)
    other = {name.replace(f" of {comm.size}/", " of 5/"): v for name, v in state.items()}
    trainer.load_state_dict(other)
    assert not any(kept.any() for kept in inside.replicas(trainer).state_dict().values())


def test_a_memory_with_a_gap_begins_anew(comm):
    """Oracle: zeros; a spread of 0 after many steps would leave no floor, and drop right ranks."""
    model = problem.network()
    trainer = FirstOrderTrainer(
        model, problem.sgd(model), comm, Strategy(sync=Synchronous(aggregation=Safeguard()))
    )
    problem.run(trainer, comm, [0])
    state = copy.deepcopy(problem.whole_state(trainer, comm))
    trainer.load_state_dict({n: v for n, v in state.items() if not n.endswith("/spread")})
    kept = {n: v for n, v in trainer.state_dict().items() if n.startswith("exchange/rule")}
    assert bool(kept) == (comm.size > 1)
    assert not any(value.any() for value in kept.values())
