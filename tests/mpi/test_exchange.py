"""Ranks that exchange weights instead of gradients: each rule compared with numpy."""

from __future__ import annotations

import collections
import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac import CommOpt, FirstOrderTrainer, MemOpt, Strategy, Transport
from mpikfac.lab import DASO, DiLoCo, LocalSGD, Parle
from mpikfac.lab.local_sgd.messages import PlannedCopies
from support import inside, problem
from support.copies import (
    DILOCO,
    ELASTIC,
    LEADER,
    MOMENTUM,
    PER_NODE,
    RATE,
    SIZE,
    STREAM,
    kfac_of,
    quadratic,
    trained,
    trainer_of,
)


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


RULES = {
    "local SGD": LocalSGD(sync_every=3),
    "post-local SGD": LocalSGD(sync_every=2, warmup_steps=3),
    "DiLoCo": replace(DILOCO, sync_every=3),
    "DiLoCo after averaged gradients": replace(DILOCO, warmup_steps=3),
    "a longer outer step": DiLoCo(sync_every=2, outer_lr=1.3, outer_momentum=0.0),
}


def rule_of(sync):
    """Return what `expected` needs of the rule of an exchange."""
    rule = {"every": sync.sync_every, "begin": sync.warmup_steps}
    if isinstance(sync, DiLoCo):
        rule |= {"outer_lr": sync.outer_lr, "outer_momentum": sync.outer_momentum}
    return rule


@pytest.mark.parametrize("name", RULES)
def test_each_step_follows_the_rule(comm, name):
    """Oracle: the rule in numpy."""
    strategy = Strategy(MemOpt(), sync=RULES[name])
    right = expected(comm.size, 9, **rule_of(RULES[name]))
    for found, of_ranks in zip(trained(comm, strategy, 9), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("per_node", mpikfac.plan.divisors(mpikfac.world().size))
@pytest.mark.parametrize("name", RULES)
def test_nodes_step_copies_by_their_mean_gradient(comm, name, per_node):
    """Oracle: the rule in numpy, of as many copies as nodes."""
    of_nodes = replace(RULES[name], replicas="node")
    strategy = Strategy(MemOpt(), sync=of_nodes, transport=Transport(ranks_per_node=per_node))
    right = expected(comm.size, 9, **rule_of(of_nodes), nodes=comm.size // per_node)
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
    transport = Transport(ranks_per_node=per_node)
    strategy = Strategy(MemOpt(), sync=DASO(sync_every=4, delay=2), transport=transport)
    nodes = comm.size // per_node
    right = late_means(comm.size, 15, nodes)
    for found, of_ranks in zip(trained(comm, strategy, 15), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-11, atol=1e-12)
    model = problem.network()
    trainer = FirstOrderTrainer(model, problem.sgd_all(model), comm, strategy)
    planned = sum(m.bytes for m in PlannedCopies(trainer.plan.of(0)).exchange_weights())
    problem.run(trainer, comm, range(6))
    mine = comm.rank % per_node == 0
    assert trainer.trace.sent.get("exchange weights", 0) == planned * mine


def test_the_best_node_leads(comm):
    """Oracle: the copies of the last node, whose mean loss is least."""
    model = problem.network()
    sync = replace(LEADER, replicas="node", leader_step=1.0)
    strategy = Strategy(MemOpt(), sync=sync, transport=Transport(ranks_per_node=PER_NODE))
    trainer = FirstOrderTrainer(model, problem.sgd_all(model), comm, strategy)
    rule = inside.replicas(trainer).rule
    for step in range(3):
        images, labels = problem.shards(step, comm.size)[comm.rank]
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        if step == 2:
            rule.end_step = lambda _step: False
        problem.take_step(trainer, float(comm.size - comm.rank // PER_NODE))
    before = comm.allgather(problem.state(model))
    assert all(torch.equal(before[r], before[r // PER_NODE * PER_NODE]) for r in range(comm.size))
    type(rule).end_step(rule, 2)
    torch.testing.assert_close(problem.state(model), before[-1])


def led(ranks, steps, per_node=1, every=3, begin=0, copies=None, node_every=None):
    """Return the weights of all ranks after each step: LSGD in numpy [Teng et al. 2019].

    With `copies`, neighbouring ranks step a copy together; the sum of their losses decides. The
    losses are those since a leader last changed.
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
        if step < begin:
            leaders, heard = [w[0].copy() for _ in nodes], np.zeros(ranks)
            found.append(w.copy())
            continue
        periods = [every] + [node_every or every] * (len(nodes) - 1)
        due = [(step + 1 - begin) % period == 0 for period in periods]
        for place, node in enumerate(nodes):
            if due[place]:
                leaders[place] = w[min(node, key=heard.__getitem__)].copy()
        heard, old = np.zeros(ranks) if any(due) else heard, w.copy()
        for node, leader, now, period in zip(nodes, leaders, due, periods):
            share = LEADER.leader_step if now else LEADER.leader_pull / period
            w[node] += share * (leader - old[node])
        found.append(w.copy())
    return found


@pytest.mark.parametrize("begin", [0, 2])
@pytest.mark.parametrize("per_node", sorted({1, PER_NODE}))
def test_each_step_follows_the_leaders(comm, per_node, begin):
    """Oracle: the rule in numpy, in one level and with leaders of nodes."""
    sync = replace(LEADER, warmup_steps=begin)
    strategy = Strategy(MemOpt(), sync=sync, transport=Transport(ranks_per_node=per_node))
    right = led(comm.size, 10, per_node, begin=begin)
    for found, of_ranks in zip(trained(comm, strategy, 10), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-12, atol=1e-13)


@pytest.mark.skipif(mpikfac.world().size != 4, reason="two nodes of two ranks")
@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("node_every", [1, 2, 6])
def test_the_leader_of_a_node_changes_more_often(comm, node_every, begin):
    """Oracle: the rule in numpy, with two periods; the plan's bytes, by stage."""
    sync = replace(LEADER, sync_every=6, warmup_steps=begin, local_sync_every=node_every)
    strategy = Strategy(MemOpt(), sync=sync, transport=Transport(ranks_per_node=PER_NODE))
    right = led(4, 20, PER_NODE, 6, begin, node_every=node_every)
    for found, of_ranks in zip(trained(comm, strategy, 20), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-12, atol=1e-13)
    model = problem.network()
    trainer = FirstOrderTrainer(model, problem.sgd_all(model), comm, strategy)
    problem.run(trainer, comm, range(begin + 6))
    planned = collections.Counter()
    for rank in range(4):
        for message in PlannedCopies(trainer.plan.of(rank)).exchange_weights():
            times = 6 // node_every if message.stage == "exchange weights in node" else 1
            planned[message.stage] += message.bytes * times
    sent = sum((collections.Counter(s) for s in comm.allgather(dict(trainer.trace.sent))), planned)
    assert all(sent[stage] == 2 * planned[stage] > 0 for stage in planned)


def test_the_mean_of_the_copies_is_the_state_of_the_run(comm):
    """Oracle: the mean over ranks; the bytes and the memory of the plan."""
    model = problem.network()
    strategy = Strategy(MemOpt(), sync=LEADER)
    trainer = FirstOrderTrainer(model, problem.sgd_all(model), comm, strategy)
    with pytest.raises(ValueError, match="needs exchange.report_loss"):
        trainer.step()
    for step in range(3):
        images, labels = problem.shards(step, comm.size)[comm.rank]
        F.cross_entropy(model(images), labels).backward()
        trainer.trace.clear()
        problem.take_step(trainer, 1.0 + (comm.rank + 1) % comm.size)
        assert trainer.combined == (step == 2)
    plans = map(trainer.plan.of, range(comm.size))
    exchanges = (PlannedCopies(plan).exchange_weights() for plan in plans)
    planned = sum(message.bytes for messages in exchanges for message in messages)
    assert comm.allreduce(sum(trainer.trace.sent.values())) == planned
    assert inside.memory(trainer)["copies"] == trainer.plan.memory(comm.rank)["copies"]
    with pytest.raises(ValueError, match="call average_replicas"):
        trainer.state_dict()
    copies = comm.allgather(problem.state(model))
    trainer.average_replicas()
    torch.testing.assert_close(problem.state(model), torch.stack(copies).mean(0))


def elastic(ranks, steps, begin=0, copies=None, rule=ELASTIC):
    """Return the weights of all ranks after each step: Parle in numpy [Chaudhari et al. 2018].

    Both pulls grow with the exchanges so far, the present one included, and never above 1 and 10
    in the authors' program. With `copies`, neighbouring ranks step a copy together.
    """
    losses = [quadratic(rank) for rank in range(ranks)]
    y, v, found = np.ones((ranks, SIZE)), np.zeros((ranks, SIZE)), []
    x, z, outer = y.copy(), y.copy(), np.zeros((ranks, SIZE))

    def grown(pull, most, exchanges):
        return min(pull * (1 + rule.growth) ** exchanges, most)

    for step in range(steps):
        exchanges = max(0, step - begin) // 4
        g = np.array([a.T @ (a @ own - b) for own, (a, b) in zip(y, losses)])
        if step < begin:
            g = within(1, g)
        else:
            gamma = grown(rule.gamma, rule.max_gamma, exchanges)
            g = within(copies or ranks, g) + gamma * (y - x)
        v = MOMENTUM * v + g
        y = y - RATE * (g + MOMENTUM * v)
        z = rule.alpha * z + (1 - rule.alpha) * y
        if step < begin:
            x, z = y.copy(), y.copy()
        elif (step + 1 - begin) % 4 == 0:
            rho = grown(rule.rho, rule.max_rho, exchanges + 1)
            d = (x - z) + rho * (x - z.mean(0))
            outer = rule.outer_momentum * outer + d
            x = x - rule.outer_lr * (d + rule.outer_momentum * outer)
            y, z = x.copy(), x.copy()
        found.append(y.copy())
    return found


PAPER = Parle(sync_every=4, growth=0.5, outer_lr=0.1, outer_momentum=0.9)
"""The authors' numbers, with a growth that reaches both limits within 60 steps."""


@pytest.mark.parametrize("begin", [0, 2])
@pytest.mark.parametrize("rule", [ELASTIC, PAPER, replace(ELASTIC, outer_momentum=0.0)])
def test_each_step_is_elastic(comm, rule, begin):
    """Oracle: the rule in numpy, with Nesterov's momentum inside, and outside in two cases."""
    strategy = Strategy(MemOpt(), sync=replace(rule, warmup_steps=begin))
    right = elastic(comm.size, 60, begin, rule=rule)
    for found, of_ranks in zip(trained(comm, strategy, 60, nesterov=True), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-11, atol=1e-12)


def test_pulls_that_grow_for_long_stay_finite(comm):
    """Oracle: pulls that begin at their limits; the growth is beyond all numbers of float64."""
    limits = {"gamma": ELASTIC.max_gamma, "rho": ELASTIC.max_rho}
    growths = (replace(ELASTIC, sync_every=2, growth=g, **limits) for g in (1e300, 0.0))
    pairs = (trained(comm, Strategy(MemOpt(), sync=sync), 9) for sync in growths)
    assert all(np.array_equal(one, other) for one, other in zip(*pairs))


OF_NODES = {
    "LSGD": (LEADER, led, {}),
    "Parle": (ELASTIC, elastic, {"nesterov": True}),
}


def between_nodes(sync, per_node):
    """Return the strategy in which the ranks of a node step a copy together."""
    sync = replace(sync, replicas="node")
    return Strategy(MemOpt(), sync=sync, transport=Transport(ranks_per_node=per_node))


@pytest.mark.parametrize("begin", [0, 2])
@pytest.mark.parametrize("per_node", mpikfac.plan.divisors(mpikfac.world().size))
@pytest.mark.parametrize("name", OF_NODES)
def test_copies_of_nodes_that_stay_apart_follow_the_rule(comm, name, per_node, begin):
    """Oracle: the rule in numpy, of as many copies as nodes."""
    sync, rule, settings = OF_NODES[name]
    strategy = between_nodes(replace(sync, warmup_steps=begin), per_node)
    right = rule(comm.size, 14, begin=begin, copies=comm.size // per_node)
    for found, of_ranks in zip(trained(comm, strategy, 14, **settings), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", OF_NODES)
def test_nodes_of_a_rank_are_ranks(comm, name):
    """Oracle: the rule between ranks, bit for bit."""
    sync, _, settings = OF_NODES[name]
    plain, of_nodes = Strategy(MemOpt(), sync=sync), between_nodes(sync, 1)
    pairs = zip(trained(comm, of_nodes, 9, **settings), trained(comm, plain, 9, **settings))
    assert all(np.array_equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("name", OF_NODES)
def test_messages_between_nodes_are_the_plans(comm, name):
    """Oracle: the plan's bytes, by stage and level; and one copy of the model for each node.

    A leader gives MPI one copy between nodes, and each node one copy inside the node.
    """
    model, sync = problem.network(), OF_NODES[name][0]
    strategy = between_nodes(sync, PER_NODE)
    trainer = FirstOrderTrainer(
        model, problem.sgd_all(model), comm, strategy, mpikfac.Trace(events=True)
    )
    every = sync.sync_every
    problem.run(trainer, comm, range(every))
    plans = [trainer.plan.of(rank) for rank in range(comm.size)]
    planned = collections.Counter()
    for copies in map(PlannedCopies, plans):
        for message in copies.reduce_in_node() * every + copies.exchange_weights():
            planned[message.stage, message.over] += message.bytes
    sent = collections.Counter()
    for events in comm.allgather(trainer.trace.events):
        for event in events:
            if event.over:
                sent[event.name, event.over.rstrip(" 0123456789")] += event.bytes
    assert +sent == +planned
    if comm.size == 4:
        between = planned["exchange weights", "world between nodes"]
        means = (copies.layout.size - copies.trained) * 8 * 2
        vectors = {"LSGD": 1, "Parle": 2}[name]
        assert between == vectors * copies.trained * 8 + means


@pytest.mark.parametrize("name", OF_NODES)
def test_local_kfac_of_nodes_is_local_kfac_of_larger_batches(comm, name):
    """Oracle: as many workers as nodes, each a rank alone with the batch of the node."""
    sync = replace(OF_NODES[name][0], sync_every=2)
    steps, settings = range(6), {"factor_update_steps": 1, "inv_update_steps": 2, "kl_clip": None}
    strategy = replace(between_nodes(sync, PER_NODE), assignment=CommOpt())
    found = problem.run(kfac_of(comm, strategy, **settings), comm, steps)
    workers = comm.Split(comm.rank % PER_NODE)
    alone = Strategy(CommOpt(), sync=sync)
    expected = problem.run(kfac_of(workers, alone, **settings), workers, steps)
    torch.testing.assert_close(found, expected)


@pytest.mark.skipif(mpikfac.world().size != 4, reason="two nodes of two ranks")
@pytest.mark.parametrize("kind", ["first-order", "K-FAC"])
def test_the_ranks_of_a_node_go_on_with_one_momentum(comm, kind):
    """Oracle: the copy of rank 0 or 2, of a run in which each rank had a momentum of its own."""
    sync, transport = Parle(sync_every=3), Transport(ranks_per_node=2)
    first = trainer_of(comm, kind, sync)
    second = trainer_of(comm, kind, replace(sync, replicas="node"), transport=transport)
    problem.run(first, comm, range(4))
    first.average_replicas()
    second.load_state_dict(copy.deepcopy(problem.whole_state(first, comm)))
    states = comm.allgather(problem.run(second, comm, [4]))
    assert torch.equal(states[0], states[1]) and torch.equal(states[2], states[3])
    assert not torch.equal(states[0], states[2])


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
    strategy = Strategy(MemOpt(), sync=replace(STREAM, delay=late, warmup_steps=begin))
    right = streamed(comm.size, 15, late=late, begin=begin)
    for found, of_ranks in zip(trained(comm, strategy, 15), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-12, atol=1e-13)


def test_a_stream_in_one_part_without_delay_is_the_exchange(comm):
    """Oracle: DiLoCo; a small own share keeps the rule of streams in use."""
    plain, stream = (
        Strategy(MemOpt(), sync=replace(DILOCO, sync_every=3, mixing=share))
        for share in (0.0, 1e-300)
    )
    for one, other in zip(trained(comm, plain, 7), trained(comm, stream, 7)):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_all_parts_of_a_model_travel_in_turn(comm):
    """Oracle: the plan's bytes, part by part; in the end all ranks hold the same model."""
    model = problem.network()
    sync = DiLoCo(sync_every=6, fragments=3, delay=1, outer_lr=1.0, outer_momentum=0.0)
    strategy = Strategy(MemOpt(), sync=sync)
    trainer = FirstOrderTrainer(model, problem.sgd_all(model), comm, strategy)
    planned = sum(m.bytes for m in PlannedCopies(trainer.plan.of(comm.rank)).exchange_weights())
    problem.run(trainer, comm, range(7))
    sent = trainer.trace.sent.get("exchange weights", 0)
    assert sum(trainer.trace.sent.values()) == planned == sent
    trainer.average_replicas()
    states = comm.allgather(problem.state(model))
    assert all(torch.equal(states[0], other) for other in states)


def test_a_rank_without_a_finite_loss_stops_all_ranks(comm):
    """Oracle: the message on all ranks."""
    model = problem.network()
    strategy = Strategy(MemOpt(), sync=replace(LEADER, sync_every=2))
    trainer = FirstOrderTrainer(model, problem.sgd_all(model), comm, strategy)
    problem.take_step(trainer, 1.0)
    with pytest.raises(mpikfac.UserError, match="are not finite"):
        problem.take_step(trainer, np.nan if comm.rank == 0 else 1.0)


@pytest.mark.skipif(mpikfac.world().size > 1, reason="several ranks have several copies")
def test_one_rank_has_nothing_to_exchange(comm):
    """Oracle: synchronous SGD, bit for bit."""
    pairs = zip(trained(comm, Strategy(sync=LocalSGD(sync_every=4)), 5), trained(comm, None, 5))
    assert all(np.array_equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("every", [2, 3])
def test_messages_are_the_plans(comm, every):
    """Oracle: the plan: bytes of an exchange, and none between two exchanges."""
    model = problem.network()
    strategy = Strategy(MemOpt(), sync=LocalSGD(sync_every=every))
    trainer = FirstOrderTrainer(model, problem.sgd_all(model), comm, strategy)
    planned = sum(m.bytes for m in PlannedCopies(trainer.plan.of(comm.rank)).exchange_weights())
    for step in range(2 * every):
        trainer.trace.clear()
        problem.run(trainer, comm, [step])
        due = (step + 1) % every == 0
        assert trainer.combined == due
        assert sum(trainer.trace.sent.values()) == planned * due
        assert (planned > 0) == (comm.size > 1)


@pytest.mark.parametrize(
    ("sync", "kept"),
    [
        (LocalSGD(sync_every=2), 1),
        (DiLoCo(sync_every=2, outer_lr=0.5, outer_momentum=0.0), 2),
        (DILOCO, 3),
        (Parle(sync_every=2), 3),
        (Parle(sync_every=2, outer_momentum=0.9), 4),
    ],
)
def test_memory_of_copies_is_the_plans(comm, sync, kept):
    """Oracle: the plan; the copy, the weights of the last exchange, the momentum."""
    model = problem.network()
    strategy = Strategy(MemOpt(), sync=sync)
    trainer = FirstOrderTrainer(model, problem.sgd_all(model), comm, strategy)
    found, plan = inside.memory(trainer)["copies"], trainer.plan
    assert found == plan.memory(comm.rank)["copies"] == kept * plan.memory(comm.rank)["gradients"]


@pytest.mark.parametrize("sync", [STREAM, replace(LEADER, sync_every=4)], ids=["stream", "leader"])
def test_a_loaded_state_leaves_nothing_of_the_steps_before(comm, sync):
    """Oracle: a trainer that has taken no steps before it loads the state of another one."""
    strategy = Strategy(MemOpt(), sync=sync)
    fresh, used = (
        FirstOrderTrainer(model, problem.sgd_all(model), comm, strategy)
        for model in (problem.network(), problem.network())
    )
    state = fresh.state_dict()
    problem.run(used, comm, range(3))  # means are under way, and losses have been heard
    used.load_state_dict(copy.deepcopy(state))
    fresh.load_state_dict(copy.deepcopy(state))
    for trainer in (fresh, used):
        problem.run(trainer, comm, range(4, 12))
        trainer.average_replicas()
    assert torch.equal(problem.state(fresh.model), problem.state(used.model))
