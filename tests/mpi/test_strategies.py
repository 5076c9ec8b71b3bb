"""Every named strategy and every choice: the numbers of one process, and the plan's bytes."""

from __future__ import annotations

import collections
import copy
import threading

import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac import FirstOrderTrainer, Strategy
from mpikfac.plan import NAMED
from support import inside, problem

RANKS = mpikfac.world().size
SOLVERS = "eigen", "unsplit-inverse", "rank-one"
SETTINGS = problem.SETTINGS | {"inv_update_steps": 6}
STEPS = range(14)  # all kinds of step, with every share of a staggered refresh
OWNERS = {"workers": 1, "reduction": "owners", "update": "owner"}
CHOICES = {
    "squares": {"packing": "square"},
    "squares to owners": {"packing": "square", "reduction": "owners"},
    "a message per layer": {"fusion": 1},
    "messages of one and two layers": {"fusion": (1, 2)},
    "a message per layer to owners": {"fusion": 1, "reduction": "owners", "workers": RANKS},
    "directions layer by layer": {"fusion": 1, "workers": 1},
    "small factors everywhere": {"replicate_below": 20, "workers": RANKS},
    "all factors everywhere": {"replicate_below": 1000, "workers": RANKS},
    "deferred-allreduce": {"reduce_at": "bases"},
    "late to owners": {"reduce_at": "bases", "reduction": "owners"},
    "late in squares, layer by layer": {"reduce_at": "bases", "packing": "square", "fusion": 1},
    "late, later": {"reduce_at": "bases", "delay": 2},
    "overlapped": {"overlap": True},
    "overlapped layer by layer": {"overlap": True, "fusion": 1, "workers": RANKS},
    "overlapped to owners at once": {"overlap": True, "reduction": "owners"},
    "overlapped to owners": {"overlap": True, "fusion": (1, 2), **OWNERS},
    "overlapped, factors late": {"overlap": True, "fusion": 1, "reduce_at": "bases"},
    "by Alltoall": {"sums": "alltoall", **OWNERS},
    "by Alltoall and late": {"sums": "alltoall", "reduction": "owners", "reduce_at": "bases"},
    "through shards": {"shards": True, "workers": 1},
    "through shards to owners": {"shards": True, **OWNERS},
    "squares through shards to owners": {"shards": True, "packing": "square", **OWNERS},
    "staggered": {"stagger": 3, "workers": RANKS},
    "staggered by layer": {"stagger": 2, "fusion": 1, "workers": RANKS},
    "staggered and late": {"stagger": 3, "reduce_at": "bases", **OWNERS},
    "staggered and delayed": {"stagger": 3, "delay": 1, "workers": RANKS},
    "event-driven by owners": {"tolerance": 0.3, **OWNERS},
    "event-driven and late": {"tolerance": 0.3, "reduce_at": "bases"},
    "event-driven, small ones everywhere": {
        **{"tolerance": 0.3, "delay": 1, "stagger": 3},
        **{"replicate_below": 20, "workers": RANKS},
    },
}
TWO_LEVELS = {
    "in nodes": {"ranks_per_node": 2, "workers": RANKS},
    "in nodes, one worker": {"ranks_per_node": 2, "workers": 1},
    "in nodes to owners": {"ranks_per_node": 2, **OWNERS},
    "in nodes to owners by Alltoall": {"ranks_per_node": 2, "sums": "alltoall", **OWNERS},
    "in nodes through shards": {"ranks_per_node": 2, "shards": True, "workers": 1},
    "in nodes through shards to owners": {"ranks_per_node": 2, "shards": True, **OWNERS},
    "in nodes through shards, late": {
        **{"ranks_per_node": 2, "shards": True, "reduce_at": "bases"},
        **OWNERS,
    },
    "in nodes layer by layer": {"ranks_per_node": 2, "fusion": 1, "workers": RANKS},
    "in nodes layer by layer to owners": {"ranks_per_node": 2, "fusion": 1, **OWNERS},
    "in nodes, staggered and late": {
        **{"ranks_per_node": 2, "stagger": 3, "reduce_at": "bases"},
        **OWNERS,
    },
}
if RANKS == 4:  # as two nodes of two
    CHOICES |= TWO_LEVELS
STRATEGIES = {name: Strategy().changed(**choices) for name, choices in CHOICES.items()}
STRATEGIES |= {name: way.make(RANKS) for name, way in NAMED.items() if way.same}
del STRATEGIES["curvature-servers"]  # test_curvature.py
STRATEGIES["staggered by name"] = NAMED["staggered"].make(RANKS, stagger=6)
del STRATEGIES["staggered"]  # five turns do not divide the interval


def trainer(comm, strategy, solver, **settings):
    model = problem.network()
    choices = SETTINGS | {"solver": solver} | settings
    return problem.kfac(model, problem.sgd(model), comm, strategy, **choices)


def alone(strategy):
    """Return a single process's strategy with the same times."""
    tolerance = strategy.refresh.tolerance
    return Strategy().changed(
        delay=strategy.refresh.delay, stagger=strategy.refresh.stagger, tolerance=tolerance
    )


@problem.by_one_process
def trained(own, strategy, solver):
    """Return the states after each step of one process with the joined batches."""
    serial = trainer(own, strategy, solver)
    return [problem.run(serial, own, [step]) for step in STEPS]


def decompositions(comm, kfac):
    """Return how many factors all ranks have decomposed since the trace was cleared."""
    return comm.allreduce(kfac.trace.calls["decompositions"])


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_trains_as_one_process_does_and_sends_what_is_planned(comm, name):
    """Oracle: a single process with the joined batch and the same refreshes; the plan.

    Every number of ranks tests another solver.
    """
    strategy = STRATEGIES[name]
    solver = SOLVERS[(list(STRATEGIES).index(name) + RANKS) % len(SOLVERS)]
    if solver == "rank-one" and (
        strategy.transport.packing == "square" or strategy.refresh.tolerance
    ):
        with pytest.raises(ValueError, match="vectors are neither squares nor decomposed"):
            trainer(comm, strategy, solver)
        return
    kfac = trainer(comm, strategy, solver)
    sent = collections.Counter()
    for step, expected in zip(STEPS, trained(alone(strategy), solver)):
        found = problem.run(kfac, comm, [step])
        sent += problem.planned(kfac, step)
        if strategy.refresh.delay == 0 and not strategy.transport.overlap:
            assert +collections.Counter(kfac.trace.sent) == sent
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    inside.settle(kfac)
    if strategy.refresh.delay == 0:
        assert +collections.Counter(kfac.trace.sent) == sent


@pytest.mark.skipif(RANKS == 1, reason="one rank sends nothing")
def test_a_second_backward_pass_is_refused_where_the_first_ones_gradients_are_sent(comm):
    """Oracle: by hand; also a refusal of the caller's own averaging, which would come too late."""
    kfac = trainer(comm, Strategy().changed(overlap=True, fusion=1), "eigen")
    with pytest.raises(ValueError, match="gradients are not the caller's"):
        kfac.precondition()
    images, labels = problem.shards(0, comm.size)[comm.rank]
    F.cross_entropy(kfac.model(images), labels).backward()
    with pytest.raises(RuntimeError, match="one backward pass"):
        F.cross_entropy(kfac.model(images), labels).backward()
    kfac.step()


def test_a_detached_model_sends_nothing(comm):
    """Oracle: by hand: two backward passes belong to no step, and are not refused."""
    kfac = trainer(comm, Strategy().changed(overlap=True, fusion=1), "eigen")
    problem.run(kfac, comm, [0])
    kfac.detach()
    inside.settle(kfac)
    kfac.trace.clear()
    images, labels = problem.shards(0, comm.size)[comm.rank]
    for _ in range(2):
        F.cross_entropy(kfac.model(images), labels).backward()
    assert not kfac.trace.sent


def test_nothing_runs_beside_a_trainer_that_was_closed(comm):
    """Oracle: the threads before; the averages contain the last pending factors."""
    before = set(threading.enumerate())  # threads of trainers that were dropped may end meanwhile
    kfac = trainer(comm, Strategy().changed(overlap=True, fusion=1), "eigen")
    problem.run(kfac, comm, range(3))
    assert len(set(threading.enumerate()) - before) == (RANKS > 1)
    used = kfac.communicators
    kfac.close()
    assert before.issuperset(threading.enumerate())
    assert inside.settled(kfac)
    assert not any(used)  # MPI's null communicators


def test_no_step_follows_close(comm):
    """Oracle: the text of the error; a second call does nothing."""
    kfac = trainer(comm, None, "eigen")
    kfac.close()
    kfac.close()
    with pytest.raises(ValueError, match=r"no step may follow close\(\)"):
        problem.run(kfac, comm, [0])


@pytest.mark.parametrize("kind", ["K-FAC", "baseline"])
def test_a_run_goes_back_after_a_backward_pass_that_has_sent_sums(comm, kind):
    """Oracle: the run without the bad batch, of which one rank lacks the backward pass."""
    strategy = Strategy().changed(overlap=True, fusion=1)

    def make():
        if kind == "K-FAC":
            return trainer(comm, strategy, "eigen")
        model = problem.network()
        return FirstOrderTrainer(model, problem.sgd(model), comm, strategy)

    first, second = make(), make()
    for one in (first, second):
        problem.run(one, comm, range(4))
    state = problem.whole_state(second, comm)
    if comm.rank == 0:
        images, labels = problem.shards(9, comm.size)[0]
        F.cross_entropy(second.model(images), labels).backward()
        with pytest.raises(ValueError, match="a batch is sent as it is made"):
            second.discard()
    second.load_state_dict(state)
    ends = [problem.run(one, comm, range(4, 8)) for one in (first, second)]
    assert torch.equal(*ends)


@pytest.mark.parametrize("choices", [{"reduction": "owners"}, {"workers": RANKS}])
def test_a_run_goes_on_from_factors_that_were_on_their_way(comm, choices):
    """Oracle: the uninterrupted run; at step 2 the run sends factors, and no bases."""
    strategy = Strategy().changed(overlap=True, fusion=1, **choices)
    first, second = (trainer(comm, strategy, "eigen") for _ in range(2))
    problem.run(first, comm, range(3))
    assert inside.settled(first) == first.is_consistent == (RANKS == 1)
    state = problem.whole_state(first, comm)
    second.load_state_dict(state)
    expected = problem.run(first, comm, range(3, 9))
    assert torch.equal(problem.run(second, comm, range(3, 9)), expected)


@pytest.mark.parametrize("solver", ["eigen", "unsplit-inverse"])
def test_owners_decide_alike_what_is_decomposed_anew(comm, solver):
    """Oracle: a single process, which decomposes some factors again and keeps some, by number."""
    strategy = Strategy(workers=RANKS).changed(tolerance=0.3)
    kfac = trainer(comm, strategy, solver)
    serial = trainer(comm.Split(comm.rank), alone(strategy), solver)
    made = []
    for step in STEPS:
        problem.run(kfac, comm, [step])
        images, labels = problem.batch(step)
        serial.optimizer.zero_grad()
        F.cross_entropy(serial.model(images), labels).backward()
        serial.step()
        made.append(decompositions(comm, kfac))
        assert made[-1] == serial.trace.calls["decompositions"]
    assert made[0] == 6 < made[-1] < 3 * 6


def test_late_averages_go_on_from_a_checkpoint_to_the_last_bit(comm):
    """Oracle: the run that wrote the checkpoint and continued; factors as in one process."""
    strategy = Strategy(reduction="owners").changed(reduce_at="bases")
    first, second = (trainer(comm, strategy, "eigen") for _ in range(2))
    problem.run(first, comm, range(4))
    state = problem.whole_state(first, comm)
    second.load_state_dict(state)
    expected = problem.run(first, comm, range(4, 9))
    assert torch.equal(problem.run(second, comm, range(4, 9)), expected)
    serial = trainer(comm.Split(comm.rank), Strategy(), "eigen")
    for step in range(4):
        images, labels = problem.batch(step)
        serial.optimizer.zero_grad()
        F.cross_entropy(serial.model(images), labels).backward()
        serial.step()
    for name, average in inside.factors(serial).items():
        torch.testing.assert_close(state[f"kfac/factors/{name}"], average.cpu(), rtol=0, atol=1e-12)


def test_a_share_is_refreshed_at_its_turn(comm):
    """Oracle: by hand: at a time the bases of a single share change, share after share."""
    strategy = Strategy(workers=RANKS).changed(stagger=3)
    kfac = trainer(comm, strategy, "unsplit-inverse", factor_update_steps=1)
    changed = []
    for step in range(13):
        before = {name: block.clone() for name, block in inside.bases(kfac).items()}
        problem.run(kfac, comm, [step])
        now = inside.bases(kfac)
        layers = {n.partition(".")[0] for n in now if not torch.equal(now[n], before[n])}
        changed.append({kfac.plan.turns_of[layer] for layer in layers})
    assert changed[0] == {0, 1, 2} or RANKS > 1
    for step, shares in enumerate(changed[1:], start=1):
        assert shares <= ({step // 2 % 3} if step % 2 == 0 else set())
    assert set().union(*changed[1:]) == set(kfac.plan.turns_of.values())


def test_an_interval_that_a_refresh_cannot_be_spread_over_is_refused(comm):
    """Oracle: the right numbers."""
    with pytest.raises(ValueError, match="inv_update_steps=6 must be a multiple of stagger=4"):
        trainer(comm, Strategy().changed(stagger=4), "eigen")


def test_a_copy_of_a_strategy_by_name_is_that_strategy(comm):
    """Oracle: the choices by hand."""
    strategy, settings = mpikfac.get_strategy("kfac-opt", RANKS)
    assert strategy == Strategy(RANKS, colocate_factors=False).changed(packing="square", fusion=1)
    assert settings == {"solver": "eigen"}
    assert mpikfac.get_strategy("deferred-allreduce", RANKS)[0] == Strategy(RANKS).changed(
        reduce_at="bases"
    )


MEANS = [n for n, way in NAMED.items() if not {"exchanged", "combine"} & way.choices.keys()]


@pytest.mark.parametrize("name", MEANS)
def test_the_baseline_takes_the_strategies_of_kfac(comm, name):
    """Oracle: plain averages of gradients; choices about factors have no effect."""
    strategy, _ = mpikfac.get_strategy(
        name, comm.size, **({"workers": 1} if name == "hybrid" else {})
    )
    wires = strategy.transport.wires
    models = [problem.network() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    ends = [
        problem.run(FirstOrderTrainer(model, optimizer, comm, chosen), comm)
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
        ends.append(problem.run(FirstOrderTrainer(model, problem.sgd(model), comm, chosen), comm))
    torch.testing.assert_close(*ends)


@pytest.mark.skipif(RANKS == 1, reason="a single rank sends nothing early")
def test_half_a_backward_pass_leaves_no_trace(comm):
    """Oracle: a trainer whose program has run whole passes only, from the same state."""
    models = []
    for half in (False, True):
        kfac = trainer(comm, Strategy().changed(overlap=True, fusion=1), "eigen")
        state = copy.deepcopy(kfac.state_dict())
        if half:
            kfac.model[3].bias.sum().backward()  # of a layer's two gradients, one
            kfac.load_state_dict(state)
        problem.run(kfac, comm, range(2))
        models.append(problem.state(kfac.model))
    assert torch.equal(*models)
