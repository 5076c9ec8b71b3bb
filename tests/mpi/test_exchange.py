"""Ranks that exchange weights in the place of gradients: each rule of an exchange in numpy."""

from __future__ import annotations

import collections
import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac import FirstOrderTrainer, Strategy
from mpikfac.plan import PlannedCopies
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
    "local SGD": {"sync_every": 3},
    "post-local SGD": {"sync_every": 2, "exchange_from": 3},
    "DiLoCo": {"sync_every": 3, **DILOCO},
    "DiLoCo after averaged gradients": {"sync_every": 2, "exchange_from": 3, **DILOCO},
    "a longer outer step": {"sync_every": 2, "outer_lr": 1.3},
}


@pytest.mark.parametrize("name", RULES)
def test_each_step_follows_the_rule(comm, name):
    """Oracle: the rule in numpy."""
    given = dict(RULES[name])
    strategy = Strategy.mem_opt(exchanged="weights", **given)
    every, begin = given.pop("sync_every"), given.pop("exchange_from", 0)
    right = expected(comm.size, 9, every, begin, **given)
    for found, of_ranks in zip(trained(comm, strategy, 9), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("per_node", mpikfac.plan.divisors(mpikfac.world().size))
@pytest.mark.parametrize("name", RULES)
def test_nodes_step_copies_by_their_mean_gradient(comm, name, per_node):
    """Oracle: the rule in numpy, of as many copies as nodes."""
    given = dict(RULES[name])
    choices = {"copies_of": "node", "ranks_per_node": per_node, **given}
    every, begin = given.pop("sync_every"), given.pop("exchange_from", 0)
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
    choices = {"sync_every": 4, "lateness": 2, "local_share": None}
    strategy = Strategy.mem_opt(
        exchanged="weights", copies_of="node", ranks_per_node=per_node, **choices
    )
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
    choices = {**LEADER, "copies_of": "node", "ranks_per_node": PER_NODE, "leader_step": 1.0}
    strategy = Strategy.mem_opt(exchanged="weights", **choices)
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
            share = LEADER["leader_step"] if now else LEADER["leader_pull"] / period
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


@pytest.mark.skipif(mpikfac.world().size != 4, reason="two nodes of two ranks")
@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("node_every", [1, 2, 6])
def test_the_leader_of_a_node_changes_more_often(comm, node_every, begin):
    """Oracle: the rule in numpy, with two periods; the plan's bytes, by stage."""
    choices = LEADER | {"sync_every": 6, "exchange_from": begin, "node_every": node_every}
    strategy = Strategy.mem_opt(exchanged="weights", ranks_per_node=PER_NODE, **choices)
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
    strategy = Strategy.mem_opt(exchanged="weights", **LEADER)
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
    with pytest.raises(ValueError, match="call combine"):
        trainer.state_dict()
    copies = comm.allgather(problem.state(model))
    trainer.average_replicas()
    torch.testing.assert_close(problem.state(model), torch.stack(copies).mean(0))


def elastic(ranks, steps, begin=0, copies=None, **choices):
    """Return the weights of all ranks after each step: Parle in numpy [Chaudhari et al. 2018].

    Both pulls grow with the exchanges so far, the present one included, and never above 1 and 10
    in the authors' program. With `copies`, neighbouring ranks step a copy together.
    """
    rule = ELASTIC | choices
    losses = [quadratic(rank) for rank in range(ranks)]
    y, v, found = np.ones((ranks, SIZE)), np.zeros((ranks, SIZE)), []
    x, z, outer = y.copy(), y.copy(), np.zeros((ranks, SIZE))

    def pull(name, exchanges):
        grown = rule[f"{name}_pull"] * (1 + rule["pull_growth"]) ** exchanges
        return min(grown, rule[f"{name}_most"])

    for step in range(steps):
        exchanges = max(0, step - begin) // 4
        g = np.array([a.T @ (a @ own - b) for own, (a, b) in zip(y, losses)])
        if step < begin:
            g = within(1, g)
        else:
            g = within(copies or ranks, g) + pull("anchor", exchanges) * (y - x)
        v = MOMENTUM * v + g
        y = y - RATE * (g + MOMENTUM * v)
        z = rule["average_decay"] * z + (1 - rule["average_decay"]) * y
        if step < begin:
            x, z = y.copy(), y.copy()
        elif (step + 1 - begin) % 4 == 0:
            d = (x - z) + pull("mean", exchanges + 1) * (x - z.mean(0))
            outer = rule["outer_momentum"] * outer + d
            x = x - rule["outer_lr"] * (d + rule["outer_momentum"] * outer)
            y, z = x.copy(), x.copy()
        found.append(y.copy())
    return found


PAPER = {
    **{"anchor_pull": 0.01, "mean_pull": 0.1, "pull_growth": 0.5, "average_decay": 0.75},
    **{"anchor_most": 1.0, "mean_most": 10.0, "outer_lr": 0.1, "outer_momentum": 0.9},
}
"""The authors' numbers, with a growth that reaches both limits within 60 steps."""


@pytest.mark.parametrize("begin", [0, 2])
@pytest.mark.parametrize("choices", [{}, PAPER, {"outer_momentum": 0.0}])
def test_each_step_is_elastic(comm, choices, begin):
    """Oracle: the rule in numpy, with Nesterov's momentum inside, and outside in two cases."""
    rule = ELASTIC | choices
    strategy = Strategy.mem_opt(exchanged="weights", exchange_from=begin, **rule)
    right = elastic(comm.size, 60, begin, **choices)
    for found, of_ranks in zip(trained(comm, strategy, 60, nesterov=True), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-11, atol=1e-12)


def test_pulls_that_grow_for_long_stay_finite(comm):
    """Oracle: pulls that begin at their limits; the growth is beyond all numbers of float64."""
    limits = {"anchor_pull": ELASTIC["anchor_most"], "mean_pull": ELASTIC["mean_most"]}
    choices = ELASTIC | limits | {"sync_every": 2}
    growing = Strategy.mem_opt(exchanged="weights", **choices | {"pull_growth": 1e300})
    pairs = (trained(comm, s, 9) for s in (growing, growing.changed(pull_growth=0.0)))
    assert all(np.array_equal(one, other) for one, other in zip(*pairs))


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
    trainer = FirstOrderTrainer(
        model, problem.sgd_all(model), comm, strategy, mpikfac.Trace(events=True)
    )
    every = choices["sync_every"]
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
    choices, nodes = OF_NODES[name][0] | {"sync_every": 2}, comm.size // PER_NODE
    steps, settings = range(6), {"factor_update_steps": 1, "inv_update_steps": 2, "kl_clip": None}
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
    choices = {"exchanged": "weights", "sync_every": 3, "merge": "elastic"}

    def make(**more):
        if kind == "K-FAC":
            return kfac_of(comm, Strategy.comm_opt(comm.size, **choices, **more))
        model = problem.network()
        return FirstOrderTrainer(
            model, problem.sgd(model), comm, Strategy.mem_opt(**choices, **more)
        )

    first, second = make(), make(copies_of="node", ranks_per_node=2)
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
    choices = STREAM | {"lateness": late, "exchange_from": begin}
    strategy = Strategy.mem_opt(exchanged="weights", **choices)
    right = streamed(comm.size, 15, late=late, begin=begin)
    for found, of_ranks in zip(trained(comm, strategy, 15), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-12, atol=1e-13)


def test_a_stream_in_one_part_without_delay_is_the_exchange(comm):
    """Oracle: DiLoCo; a small own share keeps the rule of streams in use."""
    choices = {"exchanged": "weights", "sync_every": 3, **DILOCO}
    plain, stream = (Strategy.mem_opt(**choices, **x) for x in ({}, {"local_share": 1e-300}))
    for one, other in zip(trained(comm, plain, 7), trained(comm, stream, 7)):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_all_parts_of_a_model_travel_in_turn(comm):
    """Oracle: the plan's bytes, part by part; in the end all ranks hold the same model."""
    model = problem.network()
    choices = {"fragments": 3, "sync_every": 6, "lateness": 1}
    trainer = FirstOrderTrainer(
        model, problem.sgd_all(model), comm, Strategy.mem_opt(exchanged="weights", **choices)
    )
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
    strategy = Strategy.mem_opt(exchanged="weights", **LEADER | {"sync_every": 2})
    trainer = FirstOrderTrainer(model, problem.sgd_all(model), comm, strategy)
    problem.take_step(trainer, 1.0)
    with pytest.raises(mpikfac.UserError, match="are not finite"):
        problem.take_step(trainer, np.nan if comm.rank == 0 else 1.0)


def test_an_exchange_at_every_step_is_the_average_of_gradients(comm):
    """Oracle: synchronous SGD, bit for bit; on a single rank any number of steps."""
    every = 4 if comm.size == 1 else 1
    strategy = Strategy.mem_opt(exchanged="weights", sync_every=every)
    pairs = zip(trained(comm, strategy, 5), trained(comm, None, 5))
    assert all(np.array_equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("every", [2, 3])
def test_messages_are_the_plans(comm, every):
    """Oracle: the plan: bytes of an exchange, and none between two exchanges."""
    model = problem.network()
    strategy = Strategy.mem_opt(exchanged="weights", sync_every=every)
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
    ("outer", "kept"),
    [
        *(({}, 1), ({"outer_lr": 0.5}, 2), (DILOCO, 3)),
        *(({"merge": "elastic"}, 3), ({"merge": "elastic", "outer_momentum": 0.9}, 4)),
    ],
)
def test_memory_of_copies_is_the_plans(comm, outer, kept):
    """Oracle: the plan; the copy, the weights of the last exchange, the momentum."""
    model = problem.network()
    strategy = Strategy.mem_opt(exchanged="weights", sync_every=2, **outer)
    trainer = FirstOrderTrainer(model, problem.sgd_all(model), comm, strategy)
    found, plan = inside.memory(trainer)["copies"], trainer.plan
    assert found == plan.memory(comm.rank)["copies"] == kept * plan.memory(comm.rank)["gradients"]


@pytest.mark.parametrize("choices", [STREAM, LEADER | {"sync_every": 4}], ids=["stream", "leader"])
def test_a_loaded_state_leaves_nothing_of_the_steps_before(comm, choices):
    """Oracle: a trainer that has taken no steps before it loads the state of another one."""
    strategy = Strategy.mem_opt(exchanged="weights", **choices)
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
