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
from mpikfac_apps.lab.reproduce import rules
from mpikfac_apps.lab.reproduce.rules import LEADER, STREAM
from support import inside, problem
from support.copies import DILOCO, ELASTIC, PER_NODE, kfac_of, trained, trainer_of

pytestmark = pytest.mark.lab

RULES = {
    "local SGD": LocalSGD(sync_every=3),
    "post-local SGD": LocalSGD(sync_every=2, warmup_steps=3),
    "DiLoCo": replace(DILOCO, sync_every=3),
    "DiLoCo after averaged gradients": replace(DILOCO, warmup_steps=3),
    "a longer outer step": DiLoCo(sync_every=2, outer_lr=1.3, outer_momentum=0.0),
}


def rule_of(sync):
    """Return what `rules.infrequent` needs of an exchange."""
    rule = {"every": sync.sync_every, "begin": sync.warmup_steps}
    if isinstance(sync, DiLoCo):
        rule |= {"outer_lr": sync.outer_lr, "outer_momentum": sync.outer_momentum}
    return rule


@pytest.mark.parametrize("name", RULES)
def test_each_step_follows_the_rule(comm, name):
    """Oracle: the rule in numpy."""
    strategy = Strategy(MemOpt(), sync=RULES[name])
    right = rules.infrequent(comm.size, 9, **rule_of(RULES[name]))
    for found, of_ranks in zip(trained(comm, strategy, 9), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("per_node", mpikfac.plan.divisors(mpikfac.world().size))
@pytest.mark.parametrize("name", RULES)
def test_nodes_step_copies_by_their_mean_gradient(comm, name, per_node):
    """Oracle: the rule in numpy, of as many copies as nodes."""
    of_nodes = replace(RULES[name], replicas="node")
    strategy = Strategy(MemOpt(), sync=of_nodes, transport=Transport(ranks_per_node=per_node))
    right = rules.infrequent(comm.size, 9, **rule_of(of_nodes), nodes=comm.size // per_node)
    for found, of_ranks in zip(trained(comm, strategy, 9), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("per_node", mpikfac.plan.divisors(mpikfac.world().size))
def test_one_rank_of_each_node_sends_by_turns(comm, per_node):
    """Oracle: the rule in numpy; the bytes of the rank whose turn comes first."""
    transport = Transport(ranks_per_node=per_node)
    strategy = Strategy(MemOpt(), sync=DASO(sync_every=4, delay=2), transport=transport)
    nodes = comm.size // per_node
    right = rules.daso(comm.size, 15, nodes)
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


@pytest.mark.parametrize("begin", [0, 2])
@pytest.mark.parametrize("per_node", sorted({1, PER_NODE}))
def test_each_step_follows_the_leaders(comm, per_node, begin):
    """Oracle: the rule in numpy, in one level and with leaders of nodes."""
    sync = replace(LEADER, warmup_steps=begin)
    strategy = Strategy(MemOpt(), sync=sync, transport=Transport(ranks_per_node=per_node))
    right = rules.lsgd(comm.size, 10, LEADER, per_node, begin=begin)
    for found, of_ranks in zip(trained(comm, strategy, 10), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-12, atol=1e-13)


@pytest.mark.skipif(mpikfac.world().size != 4, reason="two nodes of two ranks")
@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("node_every", [1, 2, 6])
def test_the_leader_of_a_node_changes_more_often(comm, node_every, begin):
    """Oracle: the rule in numpy, with two periods; the plan's bytes, by stage."""
    sync = replace(LEADER, sync_every=6, warmup_steps=begin, local_sync_every=node_every)
    strategy = Strategy(MemOpt(), sync=sync, transport=Transport(ranks_per_node=PER_NODE))
    right = rules.lsgd(4, 20, LEADER, PER_NODE, 6, begin, node_every=node_every)
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


@pytest.mark.parametrize("begin", [0, 2])
@pytest.mark.parametrize("rule", [ELASTIC, rules.PARLE, replace(ELASTIC, outer_momentum=0.0)])
def test_each_step_is_elastic(comm, rule, begin):
    """Oracle: the rule in numpy, with Nesterov's momentum inside, and outside in two cases."""
    strategy = Strategy(MemOpt(), sync=replace(rule, warmup_steps=begin))
    right = rules.parle(comm.size, 60, rule, begin)
    for found, of_ranks in zip(trained(comm, strategy, 60, nesterov=True), right):
        np.testing.assert_allclose(found, of_ranks[comm.rank], rtol=1e-11, atol=1e-12)


def test_pulls_that_grow_for_long_stay_finite(comm):
    """Oracle: pulls that begin at their limits; the growth is beyond all numbers of float64."""
    limits = {"gamma": ELASTIC.max_gamma, "rho": ELASTIC.max_rho}
    growths = (replace(ELASTIC, sync_every=2, growth=g, **limits) for g in (1e300, 0.0))
    pairs = (trained(comm, Strategy(MemOpt(), sync=sync), 9) for sync in growths)
    assert all(np.array_equal(one, other) for one, other in zip(*pairs))


OF_NODES = {
    "LSGD": (LEADER, rules.lsgd, {}),
    "Parle": (ELASTIC, rules.parle, {"nesterov": True}),
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
    right = rule(comm.size, 14, sync, begin=begin, copies=comm.size // per_node)
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


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("late", [0, 1, 3])
def test_each_step_of_a_stream_follows_the_rule(comm, late, begin):
    """Oracle: the rule in numpy."""
    strategy = Strategy(MemOpt(), sync=replace(STREAM, delay=late, warmup_steps=begin))
    right = rules.streaming_diloco(comm.size, 15, late=late, begin=begin)
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
