"""Ranks that exchange weights in the place of gradients, with first-order steps and with K-FAC."""

from __future__ import annotations

import collections
import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import DataParallel, Strategy
from mpikfac.numerics import BY_COORDINATE, by_vector
from mpikfac.plan import NAMED, Robust
from support import problem

RATE, MOMENTUM, SIZE = 0.05, 0.9, 6
PER_NODE = 2 if mpikfac.world().size == 4 else 1


def quadratic(rank):
    """Return matrix and target of a rank's loss `|A w - b|^2 / 2`."""
    random = np.random.default_rng(rank)
    return random.normal(size=(8, SIZE)), random.normal(size=8)


def trained(comm, strategy, steps, nesterov=False):
    """Return the weights after each step of SGD on the ranks' losses."""
    model = nn.Linear(SIZE, 1, bias=False).double()
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, nesterov=nesterov)
    trainer = DataParallel(model.to(problem.DEVICE), optimizer, comm, strategy)
    matrix, target = (torch.tensor(part).to(problem.DEVICE) for part in quadratic(comm.rank))
    weights = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(matrix)[:, 0] - target).square().sum() / 2
        loss.backward()
        trainer.step(mean_loss=loss)
        weights.append(model.weight.detach().cpu().numpy()[0].copy())
    return weights


def within(nodes, numbers):
    """Return the means of neighbouring ranks, so many nodes, for each rank."""
    means = numbers.reshape(nodes, -1, SIZE).mean(1, keepdims=True)
    return np.broadcast_to(means, (nodes, len(numbers) // nodes, SIZE)).reshape(numbers.shape)


def expected(ranks, steps, every, begin=0, outer_lr=1.0, outer_momentum=0.0, nodes=None):
    """Return the weights of all ranks after each step: the rules in numpy, rank by rank.

    The rules of local SGD [Lin et al. 2020] and DiLoCo [Douillard et al. 2023].
    """
    losses = [quadratic(rank) for rank in range(ranks)]
    w, v = np.ones((ranks, SIZE)), np.zeros((ranks, SIZE))
    before, outer, found = w[0].copy(), np.zeros(SIZE), []
    for step in range(steps):
        g = np.array([a.T @ (a @ own - b) for own, (a, b) in zip(w, losses)])
        g = within(nodes or ranks, g)
        if step < begin or every == 1:
            g = within(1, g)
        v = MOMENTUM * v + g
        w = w - RATE * v
        if step < begin:
            before = w[0].copy()
        elif every > 1 and (step + 1 - begin) % every == 0:
            change = before - w.mean(0)
            outer = outer_momentum * outer + change
            before = before - outer_lr * (change + outer_momentum * outer)
            w[:] = before
        found.append(w.copy())
    return found


DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}
RULES = {
    "local SGD": {"exchange_every": 3},
    "post-local SGD": {"exchange_every": 2, "exchange_from": 3},
    "DiLoCo": {"exchange_every": 3, **DILOCO},
    "DiLoCo after averaged gradients": {"exchange_every": 2, "exchange_from": 3, **DILOCO},
    "a longer outer step": {"exchange_every": 2, "outer_lr": 1.3},
}


@pytest.mark.parametrize("name", RULES)
def test_each_step_follows_the_rule(comm, name):
    """Oracle: the rule in numpy."""
    given = dict(RULES[name])
    strategy = Strategy.mem_opt(exchanged="weights", **given)
    every, begin = given.pop("exchange_every"), given.pop("exchange_from", 0)
    right = expected(comm.size, 9, every, begin, **given)
    for found, of_ranks in zip(trained(comm, strategy, 9), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-12, atol=1e-13)


LEADER = {"merge": "leader", "exchange_every": 3, "leader_step": 0.2, "leader_pull": 0.3}


@pytest.mark.parametrize("per_node", mpikfac.plan.divisors(mpikfac.world().size))
@pytest.mark.parametrize("name", RULES)
def test_nodes_step_copies_by_their_mean_gradient(comm, name, per_node):
    """Oracle: the rule in numpy, of as many copies as nodes."""
    given = dict(RULES[name])
    choices = {"copies_of": "node", "ranks_per_node": per_node, **given}
    every, begin = given.pop("exchange_every"), given.pop("exchange_from", 0)
    strategy = Strategy.mem_opt(exchanged="weights", **choices)
    right = expected(comm.size, 9, every, begin, **given, nodes=comm.size // per_node)
    for found, of_ranks in zip(trained(comm, strategy, 9), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-11, atol=1e-12)


def late_means(ranks, steps, nodes, every=4, late=2):
    """Return the weights of all ranks after each step: DASO in numpy [Coquelin et al. 2022]."""
    losses = [quadratic(rank) for rank in range(ranks)]
    w, v = np.ones((ranks, SIZE)), np.zeros((ranks, SIZE))
    sent, found = {}, []
    for step in range(steps):
        g = np.array([a.T @ (a @ own - b) for own, (a, b) in zip(w, losses)])
        v = MOMENTUM * v + within(nodes, g)
        w = w - RATE * v
        if (step + 1) % every == 0:
            sent[step + late] = nodes * w.mean(0)
        if step in sent:
            w = (2 * late * w + sent[step]) / (2 * late + nodes)
        found.append(w.copy())
    return found


@pytest.mark.parametrize("per_node", mpikfac.plan.divisors(mpikfac.world().size))
def test_one_rank_of_each_node_sends_by_turns(comm, per_node):
    """Oracle: the rule in numpy; the bytes of the rank whose turn comes first."""
    choices = {"exchange_every": 4, "lateness": 2, "local_share": None}
    strategy = Strategy.mem_opt(
        exchanged="weights", copies_of="node", ranks_per_node=per_node, **choices
    )
    nodes = comm.size // per_node
    right = late_means(comm.size, 15, nodes)
    for found, of_ranks in zip(trained(comm, strategy, 15), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-11, atol=1e-12)
    model = problem.network()
    trainer = DataParallel(model, problem.sgd_all(model), comm, strategy)
    planned = sum(m.bytes for m in trainer.plan.of(0).exchange_weights())
    problem.run(trainer, comm, range(6))
    mine = comm.rank % per_node == 0
    assert trainer.trace.sent.get("exchange weights", 0) == planned * mine


def test_the_best_node_leads(comm):
    """Oracle: the copies of the last node, whose mean loss is least."""
    model = problem.network()
    choices = {**LEADER, "copies_of": "node", "ranks_per_node": PER_NODE, "leader_step": 1.0}
    strategy = Strategy.mem_opt(exchanged="weights", **choices)
    trainer = DataParallel(model, problem.sgd_all(model), comm, strategy)
    for step in range(3):
        images, labels = problem.shards(step, comm.size)[comm.rank]
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        if step == 2:
            trainer.replicas.rule.merge = lambda: None
        trainer.step(mean_loss=float(comm.size - comm.rank // PER_NODE))
    before = comm.allgather(problem.state(model))
    assert all(torch.equal(before[r], before[r // PER_NODE * PER_NODE]) for r in range(comm.size))
    type(trainer.replicas.rule).merge(trainer.replicas.rule)
    torch.testing.assert_close(problem.state(model), before[-1])


def led(ranks, steps, per_node=1, every=3, begin=0, leader_step=0.2, leader_pull=0.3, copies=None):
    """Return the weights of all ranks after each step: LSGD in numpy [Teng et al. 2019].

    With `copies`, neighbouring ranks step a copy together; the sum of their losses decides.
    """
    losses = [quadratic(rank) for rank in range(ranks)]
    nodes = [range(ranks)] + [range(n, n + per_node) for n in range(0, ranks, per_node)]
    nodes = nodes if 1 < per_node < ranks else nodes[:1]
    w, v = np.ones((ranks, SIZE)), np.zeros((ranks, SIZE))
    leaders, heard, found = [w[0].copy() for _ in nodes], np.zeros(ranks), []
    for step in range(steps):
        of_ranks = np.array([((a @ own - b) ** 2).sum() / 2 for own, (a, b) in zip(w, losses)])
        heard += of_ranks.reshape(copies or ranks, -1).sum(1).repeat(ranks // (copies or ranks))
        g = np.array([a.T @ (a @ own - b) for own, (a, b) in zip(w, losses)])
        g = within(1 if step < begin else copies or ranks, g)
        v = MOMENTUM * v + g
        w = w - RATE * v
        due = step >= begin and (step + 1 - begin) % every == 0
        if step < begin:
            leaders, heard = [w[0].copy() for _ in nodes], np.zeros(ranks)
            found.append(w.copy())
            continue
        if due:
            leaders = [w[min(node, key=heard.__getitem__)].copy() for node in nodes]
            heard = np.zeros(ranks)
        share, old = leader_step if due else leader_pull / every, w.copy()
        for node, leader in zip(nodes, leaders):
            w[node] += share * (leader - old[node])
        found.append(w.copy())
    return found


@pytest.mark.parametrize("begin", [0, 2])
@pytest.mark.parametrize("per_node", sorted({1, PER_NODE}))
def test_each_step_follows_the_leaders(comm, per_node, begin):
    """Oracle: the rule in numpy, in one level and with leaders of nodes."""
    strategy = Strategy.mem_opt(
        exchanged="weights", exchange_from=begin, ranks_per_node=per_node, **LEADER
    )
    right = led(comm.size, 10, per_node, begin=begin)
    for found, of_ranks in zip(trained(comm, strategy, 10), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-12, atol=1e-13)


def test_the_copy_of_the_leader_is_the_state_of_the_run(comm):
    """Oracle: the copy of the rank with the least loss; the bytes and the memory of the plan."""
    model = problem.network()
    strategy = Strategy.mem_opt(exchanged="weights", **LEADER)
    trainer = DataParallel(model, problem.sgd_all(model), comm, strategy)
    with pytest.raises(ValueError, match="needs step"):
        trainer.step()
    for step in range(3):
        images, labels = problem.shards(step, comm.size)[comm.rank]
        F.cross_entropy(model(images), labels).backward()
        trainer.trace.clear()
        trainer.step(mean_loss=1.0 + (comm.rank + 1) % comm.size)
        assert trainer.combined == (step == 2)
    plans = map(trainer.plan.of, range(comm.size))
    planned = sum(message.bytes for plan in plans for message in plan.exchange_weights())
    assert comm.allreduce(sum(trainer.trace.sent.values())) == planned
    assert nbytes(trainer.replicas.rule) == trainer.plan.memory(comm.rank)["copies"]
    with pytest.raises(ValueError, match="call combine"):
        trainer.state_dict()
    copies = comm.allgather(problem.state(model))
    trainer.combine()
    assert torch.equal(problem.state(model), copies[-1])


ELASTIC = {
    **{"merge": "elastic", "exchange_every": 4, "anchor_pull": 0.05, "mean_pull": 0.2},
    **{"pull_growth": 0.1, "average_decay": 0.6, "outer_lr": 0.9},
}


def elastic(
    ranks, steps, begin=0, outer_lr=0.9, rho=0.2, gamma=0.05, growth=0.1, decay=0.6, copies=None
):
    """Return the weights of all ranks after each step: Parle in numpy [Chaudhari et al. 2018].

    With `copies`, neighbouring ranks step a copy together.
    """
    losses = [quadratic(rank) for rank in range(ranks)]
    y, v, found = np.ones((ranks, SIZE)), np.zeros((ranks, SIZE)), []
    x, z = y.copy(), y.copy()
    for step in range(steps):
        g = np.array([a.T @ (a @ own - b) for own, (a, b) in zip(y, losses)])
        g = within(1, g) if step < begin else within(copies or ranks, g) + gamma * (y - x)
        v = MOMENTUM * v + g
        y = y - RATE * (g + MOMENTUM * v)
        z = decay * z + (1 - decay) * y
        if step < begin:
            x, z = y.copy(), y.copy()
        elif (step + 1 - begin) % 4 == 0:
            x = x - outer_lr * ((x - z) + rho * (x - z.mean(0)))
            gamma, rho = gamma * (1 + growth), rho * (1 + growth)
            y, z = x.copy(), x.copy()
        found.append(y.copy())
    return found


@pytest.mark.parametrize("begin", [0, 2])
def test_each_step_is_elastic(comm, begin):
    """Oracle: the rule in numpy, with Nesterov's momentum inside."""
    strategy = Strategy.mem_opt(exchanged="weights", exchange_from=begin, **ELASTIC)
    right = elastic(comm.size, 14, begin)
    for found, of_ranks in zip(trained(comm, strategy, 14, nesterov=True), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-12, atol=1e-13)


OF_NODES = {
    "LSGD": (LEADER, led, {}),
    "Parle": (ELASTIC, elastic, {"nesterov": True}),
}


@pytest.mark.parametrize("begin", [0, 2])
@pytest.mark.parametrize("per_node", mpikfac.plan.divisors(mpikfac.world().size))
@pytest.mark.parametrize("name", OF_NODES)
def test_copies_of_nodes_that_stay_apart_follow_the_rule(comm, name, per_node, begin):
    """Oracle: the rule in numpy, of as many copies as nodes."""
    choices, rule, settings = OF_NODES[name]
    of_nodes = {"copies_of": "node", "ranks_per_node": per_node, "exchange_from": begin}
    strategy = Strategy.mem_opt(exchanged="weights", **choices, **of_nodes)
    right = rule(comm.size, 14, begin=begin, copies=comm.size // per_node)
    for found, of_ranks in zip(trained(comm, strategy, 14, **settings), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", OF_NODES)
def test_nodes_of_a_rank_are_ranks(comm, name):
    """Oracle: the rule between ranks, bit for bit."""
    choices, _, settings = OF_NODES[name]
    plain = Strategy.mem_opt(exchanged="weights", **choices)
    of_nodes = plain.changed(copies_of="node", ranks_per_node=1)
    pairs = zip(trained(comm, of_nodes, 9, **settings), trained(comm, plain, 9, **settings))
    assert all(np.array_equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("name", OF_NODES)
def test_messages_between_nodes_are_the_plans(comm, name):
    """Oracle: the plan's bytes, by stage and level; and one copy of the model for each node.

    A leader gives MPI one copy between nodes, and each node one copy inside the node.
    """
    model, choices = problem.network(), OF_NODES[name][0]
    of_nodes = {"copies_of": "node", "ranks_per_node": PER_NODE}
    strategy = Strategy.mem_opt(exchanged="weights", **choices, **of_nodes)
    trainer = DataParallel(
        model, problem.sgd_all(model), comm, strategy, mpikfac.Trace(events=True)
    )
    every = choices["exchange_every"]
    problem.run(trainer, comm, range(every))
    plans = [trainer.plan.of(rank) for rank in range(comm.size)]
    planned = collections.Counter()
    for plan in plans:
        for message in plan.reduce_in_node() * every + plan.exchange_weights():
            planned[message.stage, message.over] += message.bytes
    sent = collections.Counter()
    for events in comm.allgather(trainer.trace.events):
        for event in events:
            if event.over:
                sent[event.name, event.over.rstrip(" 0123456789")] += event.bytes
    assert +sent == +planned
    if comm.size == 4:
        between = planned["exchange weights", "world between nodes"]
        means = (plans[0].layouts.copies.size - plans[0].trained) * 8 * 2
        vectors = {"LSGD": 1, "Parle": 2}[name]
        assert between == vectors * plans[0].trained * 8 + means


@pytest.mark.parametrize("name", OF_NODES)
def test_local_kfac_of_nodes_is_local_kfac_of_larger_batches(comm, name):
    """Oracle: as many workers as nodes, each a rank alone with the batch of the node."""
    choices, nodes = OF_NODES[name][0] | {"exchange_every": 2}, comm.size // PER_NODE
    steps, settings = range(6), {"factor_every": 1, "basis_every": 2, "kl_clip": None}
    of_nodes = {"copies_of": "node", "ranks_per_node": PER_NODE}
    strategy = Strategy.comm_opt(comm.size, exchanged="weights", **choices, **of_nodes)
    found = problem.run(kfac_of(comm, strategy, **settings), comm, steps)
    workers = comm.Split(comm.rank % PER_NODE)
    alone = Strategy.comm_opt(nodes, exchanged="weights", **choices)
    expected = problem.run(kfac_of(workers, alone, **settings), workers, steps)
    torch.testing.assert_close(found, expected)


@pytest.mark.skipif(mpikfac.world().size != 4, reason="two nodes of two ranks")
@pytest.mark.parametrize("kind", ["first-order", "K-FAC"])
def test_the_ranks_of_a_node_go_on_with_one_momentum(comm, kind):
    """Oracle: the copy of rank 0 or 2, of a run in which each rank had a momentum of its own."""
    choices = {"exchanged": "weights", "exchange_every": 3, "merge": "elastic"}

    def make(**more):
        if kind == "K-FAC":
            return kfac_of(comm, Strategy.comm_opt(comm.size, **choices, **more))
        model = problem.network()
        return DataParallel(model, problem.sgd(model), comm, Strategy.mem_opt(**choices, **more))

    first, second = make(), make(copies_of="node", ranks_per_node=2)
    problem.run(first, comm, range(4))
    first.combine()
    second.load_state_dict(copy.deepcopy(problem.whole_state(first, comm)))
    states = comm.allgather(problem.run(second, comm, [4]))
    assert torch.equal(states[0], states[1]) and torch.equal(states[2], states[3])
    assert not torch.equal(states[0], states[2])


STREAM = {"fragments": 2, "lateness": 3, "local_share": 0.3, "exchange_every": 4, **DILOCO}


def streamed(ranks, steps, every=4, late=3, share=0.3, outer_lr=0.7, outer_momentum=0.9, begin=0):
    """Return the weights of all ranks after each step: Streaming DiLoCo in numpy.

    The weights are the first part of two, and votes the second [Douillard et al. 2025].
    """
    losses = [quadratic(rank) for rank in range(ranks)]
    w, v = np.ones((ranks, SIZE)), np.zeros((ranks, SIZE))
    before, outer, sent, found = w[0].copy(), np.zeros(SIZE), {}, []
    for step in range(steps):
        g = np.array([a.T @ (a @ own - b) for own, (a, b) in zip(w, losses)])
        if step < begin:
            g[:] = g.mean(0)
        v = MOMENTUM * v + g
        w = w - RATE * v
        if step < begin:
            before = w[0].copy()
        elif (step + 1 - begin) % every == every // 2:
            sent[step + late] = before - w.mean(0)
        if step in sent:
            outer = outer_momentum * outer + sent[step]
            before = before - outer_lr * (sent[step] + outer_momentum * outer)
            w = share * w + (1 - share) * before
        found.append(w.copy())
    return found


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("late", [0, 1, 3])
def test_each_step_of_a_stream_follows_the_rule(comm, late, begin):
    """Oracle: the rule in numpy."""
    choices = STREAM | {"lateness": late, "exchange_from": begin}
    strategy = Strategy.mem_opt(exchanged="weights", **choices)
    right = streamed(comm.size, 15, late=late, begin=begin)
    for found, of_ranks in zip(trained(comm, strategy, 15), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-12, atol=1e-13)


def test_a_stream_in_one_part_without_delay_is_the_exchange(comm):
    """Oracle: DiLoCo; a small own share keeps the rule of streams in use."""
    choices = {"exchanged": "weights", "exchange_every": 3, **DILOCO}
    plain, stream = (Strategy.mem_opt(**choices, **x) for x in ({}, {"local_share": 1e-300}))
    for one, other in zip(trained(comm, plain, 7), trained(comm, stream, 7)):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_all_parts_of_a_model_travel_in_turn(comm):
    """Oracle: the plan's bytes, part by part; in the end all ranks hold the same model."""
    model = problem.network()
    choices = {"fragments": 3, "exchange_every": 6, "lateness": 1}
    trainer = DataParallel(
        model, problem.sgd_all(model), comm, Strategy.mem_opt(exchanged="weights", **choices)
    )
    planned = sum(m.bytes for m in trainer.plan.of(comm.rank).exchange_weights())
    problem.run(trainer, comm, range(7))
    sent = trainer.trace.sent.get("exchange weights", 0)
    assert sum(trainer.trace.sent.values()) == planned == sent
    trainer.combine()
    states = comm.allgather(problem.state(model))
    assert all(torch.equal(states[0], other) for other in states)


def test_a_rank_without_a_finite_loss_stops_all_ranks(comm):
    """Oracle: the message on all ranks."""
    model = problem.network()
    strategy = Strategy.mem_opt(exchanged="weights", **LEADER | {"exchange_every": 2})
    trainer = DataParallel(model, problem.sgd_all(model), comm, strategy)
    trainer.step(mean_loss=1.0)
    with pytest.raises(mpikfac.UserError, match="are not finite"):
        trainer.step(mean_loss=np.nan if comm.rank == 0 else 1.0)


def test_an_exchange_at_every_step_is_the_average_of_gradients(comm):
    """Oracle: synchronous SGD, bit for bit; on a single rank any number of steps."""
    every = 4 if comm.size == 1 else 1
    strategy = Strategy.mem_opt(exchanged="weights", exchange_every=every)
    pairs = zip(trained(comm, strategy, 5), trained(comm, None, 5))
    assert all(np.array_equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("every", [2, 3])
def test_messages_are_the_plans(comm, every):
    """Oracle: the plan: bytes of an exchange, and none between two exchanges."""
    model = problem.network()
    strategy = Strategy.mem_opt(exchanged="weights", exchange_every=every)
    trainer = DataParallel(model, problem.sgd_all(model), comm, strategy)
    planned = sum(m.bytes for m in trainer.plan.of(comm.rank).exchange_weights())
    for step in range(2 * every):
        trainer.trace.clear()
        problem.run(trainer, comm, [step])
        due = (step + 1) % every == 0
        assert trainer.combined == due
        assert sum(trainer.trace.sent.values()) == planned * due
        assert (planned > 0) == (comm.size > 1)


@pytest.mark.parametrize(
    ("outer", "kept"),
    [({}, 1), ({"outer_lr": 0.5}, 2), (DILOCO, 3), ({"merge": "elastic"}, 3)],
)
def test_memory_of_copies_is_the_plans(comm, outer, kept):
    """Oracle: the plan; the copy, the weights of the last exchange, the momentum."""
    model = problem.network()
    strategy = Strategy.mem_opt(exchanged="weights", exchange_every=2, **outer)
    trainer = DataParallel(model, problem.sgd_all(model), comm, strategy)
    found, plan = nbytes(trainer.replicas.rule), trainer.plan
    assert found == plan.memory(comm.rank)["copies"] == kept * plan.memory(comm.rank)["gradients"]


def nbytes(rule):
    """Return the bytes of a rule's arenas, also of arenas in lists."""
    found = [one for v in vars(rule).values() for one in (v if isinstance(v, list) else [v])]
    return sum(one.flat.nbytes for one in found if isinstance(one, mpikfac.numerics.Arena))


def kfac_of(comm, strategy, **settings):
    model = problem.network()
    chosen = {**problem.SETTINGS, "length": "own", **settings}
    return problem.kfac(model, problem.sgd(model), comm, strategy, **chosen)


def trainer_of(comm, kind, choices):
    """Return K-FAC or the baseline, with choices of the strategy."""
    if kind == "K-FAC":
        return kfac_of(comm, Strategy.comm_opt(comm.size, **choices))
    model = problem.network()
    return DataParallel(model, problem.sgd(model), comm, Strategy.mem_opt(**choices))


def test_local_kfac_preconditions_the_ranks_own_gradient(comm):
    """Oracle: a copy of the model on the rank, whose step is preconditioned by dense solves.

    Factors are averaged over ranks at each step; gradients are not.
    """
    ranks = comm.size
    strategy = Strategy.comm_opt(ranks, exchanged="weights", exchange_every=2)
    settings = {"factor_every": 1, "basis_every": 1, "kl_clip": None}
    kfac, alone = kfac_of(comm, strategy, **settings), problem.network()
    optimizer = problem.sgd(alone)
    for step in range(4):
        for model in (kfac.model, alone):
            model.zero_grad()
            images, labels = problem.shards(step, ranks)[comm.rank]
            F.cross_entropy(model(images), labels).backward()
        kfac.step()
        for layer in kfac.layers:
            module = alone.get_submodule(layer.name)
            precondition(module, *factors_of(kfac, layer), damping=problem.SETTINGS["damping"])
        optimizer.step()
        if step % 2:
            average(comm, alone)
        torch.testing.assert_close(problem.state(kfac.model), problem.state(alone))


def factors_of(kfac, layer):
    """Return both averages of a layer as matrices."""
    whole = kfac.factors.whole()
    return [mpikfac.numerics.unfold_triangle(whole[f"{layer.name}.{side}"]) for side in "AG"]


def precondition(module, a, g, damping):
    """Set a module's gradient to the solution of `(G (x) A + damping I) x = gradient`."""
    bias = [module.bias.grad[:, None]] if module.bias is not None else []
    weight = module.weight.grad
    matrix = torch.cat([weight.flatten(1), *bias], 1)
    curvature = torch.kron(g, a) + damping * torch.eye(matrix.numel()).to(a)
    solved = torch.linalg.solve(curvature, matrix.flatten()).view(matrix.shape)
    count = weight[0].numel()
    weight.copy_(solved[:, :count].reshape(weight.shape))
    if bias:
        module.bias.grad.copy_(solved[:, -1])


def average(comm, model):
    """Average the parameters over ranks."""
    for parameter in model.parameters():
        every = comm.allgather(parameter.detach().cpu())
        parameter.data.copy_(torch.stack(every).mean(0))


WAYS = {
    "DiLoCo": DILOCO,
    "LSGD": {"merge": "leader"},
    "Parle": ELASTIC | {"exchange_every": 2},
    "stream": STREAM,
    "nodes": {"copies_of": "node", "ranks_per_node": PER_NODE, **DILOCO},
    "LSGD of nodes": {"copies_of": "node", "ranks_per_node": PER_NODE, "merge": "leader"},
    "Parle of nodes": ELASTIC
    | {"copies_of": "node", "ranks_per_node": PER_NODE, "exchange_every": 2},
    "DASO": {
        **{"copies_of": "node", "ranks_per_node": PER_NODE},
        **{"exchange_every": 3, "lateness": 2, "local_share": None},
    },
}


@pytest.mark.parametrize("kind", ["first-order", "K-FAC"])
@pytest.mark.parametrize("way", WAYS)
def test_a_loaded_state_goes_on_as_the_run(comm, kind, way):
    """Oracle: the run that was not interrupted; each rank has a momentum of its own."""
    choices = {"exchanged": "weights", "exchange_every": 2} | WAYS[way]
    first = trainer_of(comm, kind, choices)
    problem.run(first, comm, range(5))
    first.combine()
    state = copy.deepcopy(problem.whole_state(first, comm))
    second = trainer_of(comm, kind, choices)
    second.load_state_dict(state)
    ends = [problem.run(trainer, comm, range(5, 10)) for trainer in (first, second)]
    assert torch.equal(*ends)


@pytest.mark.parametrize("kind", ["K-FAC", "baseline"])
@pytest.mark.parametrize("later", [{}, {"exchanged": "weights", "exchange_from": 100}])
def test_ranks_that_average_gradients_take_a_single_copy(comm, kind, later):
    """Oracle: all ranks stay alike, though every rank's copy had a momentum of its own."""
    first = trainer_of(comm, kind, {"exchanged": "weights", "exchange_every": 2})
    problem.run(first, comm, range(4))
    second = trainer_of(comm, kind, later)
    second.load_state_dict(copy.deepcopy(problem.whole_state(first, comm)))
    ends = comm.allgather(problem.run(second, comm, range(4, 6)))
    assert all(torch.equal(end, ends[0]) for end in ends)


@pytest.mark.parametrize("kind", ["K-FAC", "baseline"])
def test_a_trainer_loads_its_own_state(comm, kind):
    """Oracle: the state before; momenta of exchanges are views of what the load forgets."""
    choices = {"exchanged": "weights", "exchange_every": 2, "outer_lr": 0.7, "outer_momentum": 0.9}
    trainer = trainer_of(comm, kind, choices)
    problem.run(trainer, comm, range(4))
    before = copy.deepcopy(trainer.state_dict())
    assert any(value.any() for name, value in before.items() if name.startswith("exchange/mom"))
    trainer.load_state_dict(trainer.state_dict())
    for name, value in trainer.state_dict().items():
        same = torch.equal(value, before[name]) if torch.is_tensor(value) else value == before[name]
        assert same, name


@pytest.mark.skipif(mpikfac.world().size == 1, reason="one rank cannot differ from itself")
def test_ranks_that_drift_apart_stop_together_at_the_exchange(comm):
    """Oracle: the message on all ranks."""
    model = problem.network()
    strategy = Strategy.mem_opt(exchanged="weights", exchange_every=3)
    trainer = DataParallel(model, problem.sgd(model), comm, strategy)
    trainer.optimizer.param_groups[0]["lr"] += 0.1 * comm.rank
    problem.run(trainer, comm, [0, 1])
    with pytest.raises(mpikfac.UserError, match="ranks disagree on"):
        problem.run(trainer, comm, [2])


MEANS = [n for n, way in NAMED.items() if not {"exchanged", "combine"} & way.choices.keys()]


@pytest.mark.parametrize("name", MEANS)
def test_the_baseline_takes_the_strategies_of_kfac(comm, name):
    """Oracle: plain averages of gradients; choices about factors have no effect."""
    strategy, _ = mpikfac.named(name, comm.size, **({"workers": 1} if name == "hybrid" else {}))
    wires = strategy.transport.wires
    models = [problem.network() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    ends = [
        problem.run(DataParallel(model, optimizer, comm, chosen), comm)
        for model, optimizer, chosen in zip(models, optimizers, (strategy, None))
    ]
    if wires.gradient_wire is None:
        torch.testing.assert_close(*ends)
    assert all(end.isfinite().all() for end in ends)


def test_the_owners_of_factors_do_not_matter_to_the_baseline(comm):
    """Oracle: K-FAC takes the strategy; the baseline has the numbers of plain averages."""
    strategy = Strategy(reduction="owners").changed(sums="alltoall")
    ends = []
    for chosen in (strategy, None):
        model = problem.network()
        ends.append(problem.run(DataParallel(model, problem.sgd(model), comm, chosen), comm))
    torch.testing.assert_close(*ends)


REMEMBERING = {
    "centred-clip": {"clip_radius": 0.1},
    "safeguard": {"long_window": 5, "short_window": 2, "safe_noise": 0.01, "safe_factor": 1.1},
}


@pytest.mark.parametrize("kind", ["first-order", "K-FAC"])
@pytest.mark.parametrize("rule", REMEMBERING)
def test_a_rule_remembers_earlier_steps_after_a_checkpoint(comm, rule, kind):
    """Oracle: the run that was not interrupted; a run without the memory ends elsewhere."""
    choices = {"combine": rule, **REMEMBERING[rule]}

    def make():
        if kind == "K-FAC":
            return kfac_of(comm, Strategy.comm_opt(comm.size, **choices))
        model = problem.network()
        return DataParallel(model, problem.sgd(model), comm, Strategy.mem_opt(**choices))

    first, second, third = make(), make(), make()
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
    strategy = Strategy.mem_opt(combine="safeguard")
    trainer = DataParallel(model, problem.sgd(model), comm, strategy)
    problem.run(trainer, comm, [0])
    state = copy.deepcopy(problem.whole_state(trainer, comm))
    assert not trainer.missing(state)
    other = {name.replace(f" of {comm.size}/", " of 5/"): v for name, v in state.items()}
    trainer.load_state_dict(other)
    assert not any(kept.any() for kept in trainer.replicas.state_dict().values())


def test_gradients_of_the_caller_and_copies_of_the_ranks_exclude_each_other(comm):
    strategy = Strategy.comm_opt(comm.size, exchanged="weights", exchange_every=2)
    kfac = kfac_of(comm, strategy)
    with pytest.raises(ValueError, match="call step"):
        kfac.precondition()


def test_copies_are_no_state_of_the_run(comm):
    strategy = Strategy.mem_opt(exchanged="weights", exchange_every=4)
    model = problem.network()
    trainer = DataParallel(model, problem.sgd(model), comm, strategy)
    problem.run(trainer, comm, [0])
    with pytest.raises(ValueError, match="call combine"):
        trainer.state_dict()
    trainer.combine()
    states = comm.allgather(problem.state(model).cpu())
    assert trainer.state_dict() and all(torch.equal(states[0], other) for other in states)


# -- robust rules ---------------------------------------------------------------------------------

ROBUST = [
    Robust("median"),
    Robust("geometric-median"),
    Robust("centred-clip", clip_radius=2.0),
    Robust("safeguard", long_window=4, short_window=2, safe_factor=1.1),
    Robust("trimmed-mean", liars=1),
    Robust("krum", liars=0),
]
ROBUST = [rule for rule in ROBUST if rule.combine != "krum" or mpikfac.world().size >= 3]
ROBUST = [rule for rule in ROBUST if rule.liars == 0 or mpikfac.world().size >= 3]


def on_one_process(rule, ranks, size=SIZE):
    """Return a function from the vectors of all ranks to what the rule makes of the vectors."""
    if rule.combine in BY_COORDINATE:
        return lambda rows: BY_COORDINATE[rule.combine](torch.from_numpy(rows), rule).numpy()
    combiner = by_vector(rule, ranks, torch.zeros(size, dtype=torch.float64, device="cpu"))

    def combined(vectors):
        parts = torch.from_numpy(vectors)
        rows = combiner.rows(parts)
        return combiner.combine(rows @ rows.mT, parts).numpy()

    return combined


@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: rule.combine)
def test_gradients_are_combined_by_the_rule(comm, rule):
    """Oracle: the rule, which tests/unit/test_robust.py checks, of all gradients on one process."""
    ranks = comm.size
    strategy = Strategy.mem_opt(**dataclasses.asdict(rule))
    w, v, combined = np.ones(SIZE), np.zeros(SIZE), on_one_process(rule, ranks)
    for found in trained(comm, strategy, 6):
        losses = [quadratic(rank) for rank in range(ranks)]
        g = np.array([a.T @ (a @ w - b) for a, b in losses])
        v = MOMENTUM * v + (combined(g) if ranks > 1 else g[0])
        w = w - RATE * v
        np.testing.assert_allclose(found, w, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: rule.combine)
def test_messages_of_a_rule_are_the_plans(comm, rule):
    """Oracle: the plan, message by message."""
    model = problem.network()
    trainer = DataParallel(
        model,
        problem.sgd_all(model),
        comm,
        Strategy.mem_opt(**dataclasses.asdict(rule)),
        mpikfac.Trace(events=True),
    )
    problem.run(trainer, comm, [0])
    planned = trainer.plan.of(comm.rank).reduce_gradients()
    events = [(e.name, e.over, e.bytes) for e in trainer.trace.events if e.over]
    assert events == [(m.stage, m.over, m.bytes) for m in planned]


@pytest.mark.skipif(mpikfac.world().size < 3, reason="two ranks cannot tell which of them is wrong")
@pytest.mark.parametrize("wrong", [-100.0, np.nan])
def test_a_wrong_rank_does_not_lead_training_astray(comm, wrong):
    """Oracle: K-FAC whose ranks all have the right gradient of one batch."""
    rule = {"combine": "median"}

    def trained(strategy, wrong):
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

    ranks = comm.size
    ends = trained(Strategy.comm_opt(ranks, **rule), wrong), trained(Strategy.comm_opt(ranks), 1.0)
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: rule.combine)
def test_running_statistics_do_not_cut_vectors_in_two(comm, rule):
    """Oracle: the rule, of all gradients of a network with batch normalisation on one process."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model.to(problem.DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = DataParallel(model, optimizer, comm, Strategy.mem_opt(**dataclasses.asdict(rule)))
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
