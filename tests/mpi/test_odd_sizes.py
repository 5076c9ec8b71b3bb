"""Every named strategy where nothing divides: uneven batches, ranks beyond layers, nodes, restarts.

`bash jobs/test.sh --sizes` runs this file at 5, 7, 12 and 16 ranks.
"""

from __future__ import annotations

import collections
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import BFloat16, HybridOpt, Int8, MemOpt, Refresh, Strategy
from mpikfac.numerics import by_vector
from mpikfac.plan import NAMED, divisors
from support import inside, oracles, problem
from support.strategies import changed

RANKS = mpikfac.world().size
FEW = 5
STEPS = range(8)  # factors at 0, 2, 4 and 6; decompositions at 0 and 5, or by turns from 5 on
SETTINGS = problem.SETTINGS | {"inv_update_steps": 5}
ALL = {"subsample": 1}  # uneven shards weigh by their examples only if all examples count
PRECONDITIONERS = "eigen", "inverse", problem.UNSPLIT

if RANKS < FEW:
    pytest.skip("other files test 1 to 4 ranks", allow_module_level=True)


def three_layers():
    """Return the tests' network: with 5 ranks and more, some ranks own no layer."""
    return problem.network()


def one_layer():
    """Return a network of one layer: one rank owns all."""
    torch.manual_seed(1)
    with torch.device("cpu"):
        model = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(8, 5))
    return model.to(problem.DEVICE, torch.float64)


NETWORKS = {"three layers": three_layers, "one layer": one_layer}


def in_one_level(strategy):
    """Return whether a strategy has no messages in two levels."""
    vectors = not strategy.sync.aggregation.sums
    return vectors or strategy.transport.overlap or getattr(strategy.sync, "fragments", 1) > 1


def ways(names):
    """Return strategies and settings by name: in one level, and in nodes of 2 and of 4 ranks.

    "hybrid" has each number of workers.
    """
    found = {}
    for name, per_node in itertools.product(names, (None, 2, 4)):
        strategy, settings = mpikfac.get_strategy(name)
        if per_node and (RANKS % per_node or in_one_level(strategy)):
            continue
        level = {"transport.ranks_per_node": per_node} if per_node else {}
        for workers in divisors(RANKS) if name == "hybrid" else [None]:
            of = {"assignment": HybridOpt(grad_workers=workers)} if workers else {}
            title = [name, *([f"{workers} workers"] if workers else [])]
            title += [f"in nodes of {per_node}"] if per_node else []
            found[" ".join(title)] = changed(strategy, of, level), settings
    return found


SAME = [name for name, way in NAMED.items() if way.same or name == "eva"]
SAME.remove("curvature-servers")
ROBUST = [name for name, way in NAMED.items() if not way.strategy.sync.aggregation.sums]
WIRES = [name for name, way in NAMED.items() if way.strategy.compression.gradients]
COPIES = [name for name, way in NAMED.items() if way.strategy.sync.local_steps]
ELSEWHERE = ["downpour"]
"""test_asynchronous.py"""


def test_no_named_strategy_is_left_out():
    """Oracle: the catalogue."""
    listed = [*SAME, *ROBUST, *WIRES, *COPIES, *ELSEWHERE, "dp-kfac", "curvature-servers"]
    assert sorted(listed) == sorted(NAMED)


def trainer(comm, network, strategy, optimizer=problem.sgd_all, **settings):
    model = NETWORKS[network]()
    return problem.kfac(model, optimizer(model), comm, strategy, **SETTINGS | ALL | settings)


def uneven(step, ranks):
    """Return the batch of a step, dealt out by chance to all ranks but one."""
    images, labels = problem.batch(step)
    if ranks == 1:
        return [(images, labels)]
    holder = np.random.default_rng([step, ranks]).integers(0, ranks - 1, len(images))
    holder = torch.from_numpy(holder + (holder >= step % ranks)).to(images.device)
    return [(images[holder == rank], labels[holder == rank]) for rank in range(ranks)]


def learn(kfac, comm, steps):
    """Train on uneven shards, and return the model's state; overlapped sums need equal shards."""
    if kfac.plan.strategy.transport.overlap:
        return problem.run(kfac, comm, steps)
    for step in steps:
        images, labels = uneven(step, comm.size)[comm.rank]
        kfac.optimizer.zero_grad()
        total = F.cross_entropy(kfac.model(images), labels, reduction="sum")
        (total / max(1, len(images))).backward()
        kfac.step(examples=len(images))
    return problem.state(kfac.model)


def test_shards_are_uneven():
    """Oracle: the numbers of examples."""
    for step in STEPS:
        counts = [len(images) for images, _ in uneven(step, RANKS)]
        assert sum(counts) == problem.EXAMPLES
        assert counts[step % RANKS] == 0 and max(counts) > 1


def alone(strategy):
    """Return a single process's strategy with the same times."""
    times = strategy.refresh
    return Strategy(
        MemOpt(),
        refresh=Refresh(
            staleness=times.staleness, stagger=times.stagger, tolerance=times.tolerance
        ),
    )


@problem.by_one_process
def trained(own, network, strategy, **settings):
    """Return the states after each step of one process with the joined batches."""
    serial = trainer(own, network, strategy, **settings)
    return [problem.run(serial, own, [step]) for step in STEPS]


@pytest.fixture
def through_shards(request, monkeypatch):
    """Let unequal parts pass through shards in every other case, as parts of large models do."""
    names = list(request.node.callspec.params.values())
    listed = [*NETWORKS, *SAME_WAYS, *OWN, *COPIED]
    if (sum(map(listed.index, names)) + RANKS) % 2:
        monkeypatch.setattr("mpikfac.plan.messages.shards.LEAST", 1)


def alike(comm, found):
    return all(torch.equal(found, other) for other in comm.allgather(found))


SAME_WAYS = ways(SAME)


@pytest.mark.usefixtures("through_shards")
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", SAME_WAYS)
def test_the_numbers_of_one_process(comm, name, network):
    """Oracle: a single process with the joined batch and the same refreshes; the plan's bytes."""
    strategy, settings = SAME_WAYS[name]
    turn = list(SAME_WAYS).index(name) + RANKS
    settings = {"preconditioner": PRECONDITIONERS[turn % len(PRECONDITIONERS)]} | settings
    kfac = trainer(comm, network, strategy, **settings)
    sent = collections.Counter()
    for step, expected in zip(STEPS, trained(network, alone(strategy), **settings)):
        found = learn(kfac, comm, [step])
        sent += problem.planned(kfac, step)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        assert alike(comm, found)
    inside.settle(kfac)
    if strategy.refresh.staleness == 0:
        assert +collections.Counter(kfac.trace.sent) == sent
    kfac.close()


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("serving", sorted({1, RANKS // 2}))
def test_curvature_servers(comm, serving, network):
    """Oracle: a single process with the joined batch, and decompositions one step later."""
    team = mpikfac.split_comm(comm, serving)
    strategy = changed(NAMED["curvature-servers"].strategy, {"refresh.servers": serving})
    expected = trained(network, alone(strategy), preconditioner="eigen")
    if team.comm is None:
        mpikfac.lab.run_curvature_server(team)
        return
    kfac = trainer(team, network, strategy, preconditioner="eigen")
    for step in STEPS:
        found = learn(kfac, team.comm, [step])
        torch.testing.assert_close(found, expected[step], rtol=0, atol=1e-10)
        assert alike(team.comm, found)
    kfac.close()


@pytest.mark.usefixtures("through_shards")
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", OWN := ways(["dp-kfac"]))
def test_owners_with_factors_of_their_own_batch(comm, name, network):
    """Oracle: K-FAC by im2col and dense solves, each factor from the owner's shard."""
    kfac = trainer(comm, network, OWN[name][0])
    model = NETWORKS[network]()
    batches = [problem.shards(step, comm.size) for step in STEPS]
    oracles.train(model, problem.sgd_all(model), batches, sources=kfac.plan.owners, **SETTINGS)
    found = problem.run(kfac, comm, STEPS)
    torch.testing.assert_close(found, problem.state(model), rtol=0, atol=1e-10)
    assert alike(comm, found)
    kfac.close()


class Combined:
    """Combine gradients of shards on one process, as a robust rule does."""

    def __init__(self, rule, model, twin):
        self.rule, self.model, self.twin = rule, model, twin
        size = sum(parameter.numel() for parameter in model.parameters())
        zeros = torch.zeros(size, dtype=torch.float64, device="cpu")
        self.combiner = by_vector(rule, RANKS, zeros) if rule.products(RANKS) else None

    def __call__(self, shards):
        """Set the gradients of the model."""
        rows = torch.stack([self.gradient(*shard) for shard in shards])
        if self.combiner is None:
            found = self.rule.combine(rows)
        else:
            near = self.combiner.rows(rows)
            found = self.combiner.combine(near @ near.mT, rows)
        parameters = list(self.model.parameters())
        for p, part in zip(parameters, found.split([p.numel() for p in parameters])):
            p.grad = part.view_as(p).to(p)

    def gradient(self, images, labels):
        """Return the gradient of a shard's mean loss, of a twin: K-FAC sees no pass."""
        self.twin.load_state_dict(self.model.state_dict())
        loss = F.cross_entropy(self.twin(images), labels)
        found = torch.autograd.grad(loss, self.twin.parameters())
        return torch.cat([gradient.flatten() for gradient in found]).cpu()


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", RULES := ways(ROBUST))
def test_robust_rules(comm, name, network):
    """Oracle: one process, in which the rule combines the gradients of all shards; the plan."""
    strategy, _ = RULES[name]
    kfac, serial = trainer(comm, network, strategy), trainer(comm.Split(comm.rank), network, None)
    combine = Combined(strategy.sync.aggregation, serial.model, NETWORKS[network]())
    for step in STEPS:
        kfac.trace.clear()
        found = problem.run(kfac, comm, [step])
        assert +collections.Counter(kfac.trace.sent) == problem.planned(kfac, step)
        images, labels = problem.batch(step)
        F.cross_entropy(serial.model(images), labels).backward()
        combine(problem.shards(step, comm.size))
        serial.step()
        torch.testing.assert_close(found, problem.state(serial.model), rtol=0, atol=1e-9)
        assert alike(comm, found)
    kfac.close()


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", ENCODED := ways(WIRES))
def test_encoded_messages(comm, name, network):
    """Oracle: the models of all ranks; the plan's bytes; one process, to the wire's rounding."""
    strategy, _ = ENCODED[name]
    kfac = trainer(comm, network, strategy, problem.plain_sgd)
    for step in STEPS:
        kfac.trace.clear()
        found = problem.run(kfac, comm, [step])
        assert +collections.Counter(kfac.trace.sent) == problem.planned(kfac, step)
        assert found.isfinite().all() and alike(comm, found)
    exact = trained(network, Strategy(MemOpt()), optimizer=problem.plain_sgd)[-1]
    moved = (exact - problem.state(NETWORKS[network]())).norm()
    if isinstance(strategy.compression.gradients, BFloat16 | Int8):
        assert 0 < (found - exact).norm() < 0.1 * moved
    kfac.close()


SOON = {
    **{name: {"sync.sync_every": 3} for name in ("local-sgd", "diloco", "lsgd", "parle")},
    "post-local-sgd": {"sync.sync_every": 3, "sync.warmup_steps": 1},
    "streaming-diloco": {"sync.sync_every": 5, "sync.delay": 2},
    "daso": {},
}
"""Choices with which `STEPS` have several exchanges."""


@pytest.mark.usefixtures("through_shards")
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", COPIED := ways(COPIES))
def test_copies_of_the_model(comm, name, network):
    """Oracle: the models of all ranks after an exchange; the plan's bytes of factors and bases."""
    way = max((one for one in COPIES if name.startswith(one)), key=len)
    strategy = changed(COPIED[name][0], SOON[way])
    kfac = trainer(comm, network, strategy)
    for step in STEPS:
        kfac.trace.clear()
        found = problem.run(kfac, comm, [step])
        planned = problem.planned(kfac, step)
        of_factors = {"reduce statistics", "publish bases", "publish directions"}
        assert {n: kfac.trace.sent[n] for n in planned if n in of_factors} == {
            n: size for n, size in planned.items() if n in of_factors
        }
    assert not alike(comm, found)
    kfac.average_replicas()
    found = problem.state(kfac.model)
    assert found.isfinite().all() and alike(comm, found)
    kfac.close()


RESUMED = ["hybrid", "sharded-optimizer", "balanced-shards", "deferred-sharded", "staggered"]


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("direction", ["fewer", "more"])
def test_a_run_goes_on_with_another_number_of_ranks(comm, tmp_path, name, direction):
    """Oracle: a single process that was not interrupted; a checkpoint in between.

    The smaller team has 5 of the ranks, or 3 of 5; "hybrid" has half or all of them as workers.
    """
    few = FEW if RANKS > FEW else 3
    team = comm.Split(comm.rank >= few)
    sides = [comm, team] if direction == "fewer" else [team, comm]
    root, stop = comm.bcast(tmp_path), 3

    def made(on):
        strategy, possible = NAMED[name].strategy, divisors(on.size)
        if name == "hybrid":
            strategy = Strategy(HybridOpt(grad_workers=possible[len(possible) // 2]))
        return trainer(on, "three layers", strategy)

    if comm.rank < few or sides[0] is comm:
        first = made(sides[0])
        learn(first, sides[0], STEPS[:stop])
        mpikfac.save_checkpoint(sides[0], root, first.state_dict(), stop)
        first.close()
    comm.Barrier()
    if comm.rank < few or sides[1] is comm:
        second = made(sides[1])
        second.load_state_dict(mpikfac.load_checkpoint(sides[1], root / f"step-{stop:09d}"))
        found = learn(second, sides[1], STEPS[stop:])
        second.close()
    expected = trained("three layers", alone(NAMED[name].strategy))[-1]
    if comm.rank < few or sides[1] is comm:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
