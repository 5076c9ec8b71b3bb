"""Every named strategy and every choice match one process and the plan's bytes."""

from __future__ import annotations

import collections
import copy
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac import CommOpt, FirstOrderTrainer, MemOpt, Refresh, Strategy, Synchronous, Transport
from mpikfac.plan import NAMED
from support import inside, problem
from support.strategies import strategy_of

RANKS = mpikfac.world().size
PRECONDITIONERS = "eigen", problem.UNSPLIT, "eva"
SETTINGS = problem.SETTINGS | {"inv_update_steps": 6}
STEPS = range(14)  # all kinds of step, with every share of a staggered refresh
OWNERS = {"assignment": MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)}
CHOICES = {
    "squares": {"transport.packing": "square"},
    "squares to owners": {
        "assignment.factor_reduction": "reduce_scatter",
        "transport.packing": "square",
    },
    "a message per layer": {"transport.fusion": 1},
    "messages of one and two layers": {"transport.fusion": (1, 2)},
    "a message per layer to owners": {
        "assignment": CommOpt(factor_reduction="reduce_scatter"),
        "transport.fusion": 1,
    },
    "directions layer by layer": {"assignment": MemOpt(), "transport.fusion": 1},
    "small factors everywhere": {"assignment": CommOpt(replicate_below=20)},
    "all factors everywhere": {"assignment": CommOpt(replicate_below=1000)},
    "deferred-allreduce": {"transport.reduce_factors_at": "inverses"},
    "late to owners": {
        "assignment.factor_reduction": "reduce_scatter",
        "transport.reduce_factors_at": "inverses",
    },
    "late in squares, layer by layer": {
        "transport.reduce_factors_at": "inverses",
        "transport.packing": "square",
        "transport.fusion": 1,
    },
    "late, later": {"refresh.staleness": 2, "transport.reduce_factors_at": "inverses"},
    "overlapped": {"transport.overlap": True},
    "overlapped layer by layer": {
        "assignment": CommOpt(),
        "transport.fusion": 1,
        "transport.overlap": True,
    },
    "overlapped to owners at once": {
        "assignment.factor_reduction": "reduce_scatter",
        "transport.overlap": True,
    },
    "overlapped to owners": {**OWNERS, "transport.fusion": (1, 2), "transport.overlap": True},
    "overlapped, factors late": {
        "transport.reduce_factors_at": "inverses",
        "transport.fusion": 1,
        "transport.overlap": True,
    },
    "by Alltoall": {**OWNERS, "transport.owner_sums": "alltoall"},
    "by Alltoall and late": {
        "assignment.factor_reduction": "reduce_scatter",
        "transport.reduce_factors_at": "inverses",
        "transport.owner_sums": "alltoall",
    },
    "through shards": {"assignment": MemOpt(), "transport.balanced_shards": True},
    "through shards to owners": {**OWNERS, "transport.balanced_shards": True},
    "squares through shards to owners": {
        **OWNERS,
        "transport.packing": "square",
        "transport.balanced_shards": True,
    },
    "staggered": {"assignment": CommOpt(), "refresh.stagger": 3},
    "staggered by layer": {"assignment": CommOpt(), "refresh.stagger": 2, "transport.fusion": 1},
    "staggered and late": {
        **OWNERS,
        "refresh.stagger": 3,
        "transport.reduce_factors_at": "inverses",
    },
    "staggered and delayed": {
        "assignment": CommOpt(),
        "refresh.staleness": 1,
        "refresh.stagger": 3,
    },
    "event-driven by owners": {**OWNERS, "refresh.tolerance": 0.3},
    "event-driven and late": {"refresh.tolerance": 0.3, "transport.reduce_factors_at": "inverses"},
    "event-driven, small ones everywhere": {
        "assignment": CommOpt(replicate_below=20),
        "refresh.staleness": 1,
        "refresh.stagger": 3,
        "refresh.tolerance": 0.3,
    },
}
TWO_LEVELS = {
    "in nodes": {"assignment": CommOpt(), "transport.ranks_per_node": 2},
    "in nodes, one worker": {"assignment": MemOpt(), "transport.ranks_per_node": 2},
    "in nodes to owners": {**OWNERS, "transport.ranks_per_node": 2},
    "in nodes to owners by Alltoall": {
        **OWNERS,
        "transport.owner_sums": "alltoall",
        "transport.ranks_per_node": 2,
    },
    "in nodes through shards": {
        "assignment": MemOpt(),
        "transport.balanced_shards": True,
        "transport.ranks_per_node": 2,
    },
    "in nodes through shards to owners": {
        **OWNERS,
        "transport.balanced_shards": True,
        "transport.ranks_per_node": 2,
    },
    "in nodes through shards, late": {
        **OWNERS,
        "transport.reduce_factors_at": "inverses",
        "transport.balanced_shards": True,
        "transport.ranks_per_node": 2,
    },
    "in nodes layer by layer": {
        "assignment": CommOpt(),
        "transport.fusion": 1,
        "transport.ranks_per_node": 2,
    },
    "in nodes layer by layer to owners": {
        **OWNERS,
        "transport.fusion": 1,
        "transport.ranks_per_node": 2,
    },
    "in nodes, staggered and late": {
        **OWNERS,
        "refresh.stagger": 3,
        "transport.reduce_factors_at": "inverses",
        "transport.ranks_per_node": 2,
    },
}
if RANKS == 4:  # as two nodes of two
    CHOICES |= TWO_LEVELS
STRATEGIES = {name: strategy_of(choices) for name, choices in CHOICES.items()}
STRATEGIES |= {name: way.strategy for name, way in NAMED.items() if way.same}
del STRATEGIES["curvature-servers"]  # test_curvature.py
STRATEGIES["staggered by name"] = replace(NAMED["staggered"].strategy, refresh=Refresh(stagger=6))
del STRATEGIES["staggered"]  # five turns do not divide the interval


def trainer(comm, strategy, preconditioner, **settings):
    model = problem.network()
    choices = SETTINGS | {"preconditioner": preconditioner} | settings
    return problem.kfac(model, problem.sgd(model), comm, strategy, **choices)


def alone(strategy):
    """Return a single process's strategy with the same times."""
    return Strategy(MemOpt(), refresh=strategy.refresh)


@problem.by_one_process
def trained(own, strategy, preconditioner):
    """Return the states after each step of one process with the joined batches."""
    serial = trainer(own, strategy, preconditioner)
    return [problem.run(serial, own, [step]) for step in STEPS]


def decompositions(comm, kfac):
    """Return how many factors all ranks have decomposed since the trace was cleared."""
    return comm.allreduce(kfac.trace.calls["decompositions"])


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_trains_as_one_process_does_and_sends_what_is_planned(comm, name):
    """Oracle: a single process with the joined batch and the same refreshes; the plan.

    Every number of ranks tests another preconditioner.
    """
    strategy = STRATEGIES[name]
    preconditioner = PRECONDITIONERS[(list(STRATEGIES).index(name) + RANKS) % len(PRECONDITIONERS)]
    if preconditioner == "eva" and (
        strategy.transport.packing == "square" or strategy.refresh.tolerance
    ):
        with pytest.raises(ValueError, match="vectors are not matrices, and nothing is decomposed"):
            trainer(comm, strategy, preconditioner)
        return
    kfac = trainer(comm, strategy, preconditioner)
    sent = collections.Counter()
    for step, expected in zip(STEPS, trained(alone(strategy), preconditioner)):
        found = problem.run(kfac, comm, [step])
        sent += problem.planned(kfac, step)
        if strategy.refresh.staleness == 0 and not strategy.transport.overlap:
            assert +collections.Counter(kfac.trace.sent) == sent
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    inside.settle(kfac)
    if strategy.refresh.staleness == 0:
        assert +collections.Counter(kfac.trace.sent) == sent


@pytest.mark.skipif(RANKS == 1, reason="one rank sends nothing")
def test_a_second_backward_pass_is_refused_where_the_first_ones_gradients_are_sent(comm):
    """Oracle: by hand; also a refusal of the caller's own averaging, which would come too late."""
    kfac = trainer(comm, Strategy(MemOpt(), transport=Transport(fusion=1, overlap=True)), "eigen")
    with pytest.raises(ValueError, match="the caller cannot average gradients or take the step"):
        kfac.precondition()
    images, labels = problem.shards(0, comm.size)[comm.rank]
    F.cross_entropy(kfac.model(images), labels).backward()
    with pytest.raises(RuntimeError, match="one backward pass"):
        F.cross_entropy(kfac.model(images), labels).backward()
    kfac.step()


def test_a_detached_model_sends_nothing(comm):
    """Oracle: by hand: two backward passes belong to no step, and are not refused."""
    kfac = trainer(comm, Strategy(MemOpt(), transport=Transport(fusion=1, overlap=True)), "eigen")
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
    kfac = trainer(comm, Strategy(MemOpt(), transport=Transport(fusion=1, overlap=True)), "eigen")
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
    with pytest.raises(ValueError, match=r"do not call step\(\) after close\(\)"):
        problem.run(kfac, comm, [0])


@pytest.mark.parametrize("kind", ["K-FAC", "baseline"])
def test_a_run_goes_back_after_a_backward_pass_that_has_sent_sums(comm, kind):
    """Oracle: the run without the bad batch, of which one rank lacks the backward pass."""
    strategy = Strategy(MemOpt(), transport=Transport(fusion=1, overlap=True))

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
        with pytest.raises(ValueError, match="the backward pass has already sent gradients"):
            second.clear_statistics()
    second.load_state_dict(state)
    ends = [problem.run(one, comm, range(4, 8)) for one in (first, second)]
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    "choices", [{"assignment.factor_reduction": "reduce_scatter"}, {"assignment": CommOpt()}]
)
def test_a_run_goes_on_from_factors_that_were_on_their_way(comm, choices):
    """Oracle: the uninterrupted run; at step 2 the run sends factors, and no bases."""
    strategy = strategy_of(choices, {"transport.fusion": 1, "transport.overlap": True})
    first, second = (trainer(comm, strategy, "eigen") for _ in range(2))
    problem.run(first, comm, range(3))
    assert inside.settled(first) == first.is_consistent == (RANKS == 1)
    state = problem.whole_state(first, comm)
    second.load_state_dict(state)
    expected = problem.run(first, comm, range(3, 9))
    assert torch.equal(problem.run(second, comm, range(3, 9)), expected)


@pytest.mark.parametrize("preconditioner", ["eigen", problem.UNSPLIT])
def test_owners_decide_alike_what_is_decomposed_anew(comm, preconditioner):
    """Oracle: a single process, which decomposes some factors again and keeps some, by number."""
    strategy = Strategy(CommOpt(), refresh=Refresh(tolerance=0.3))
    kfac = trainer(comm, strategy, preconditioner)
    serial = trainer(comm.Split(comm.rank), alone(strategy), preconditioner)
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
    strategy = Strategy(
        MemOpt(factor_reduction="reduce_scatter"), transport=Transport(reduce_factors_at="inverses")
    )
    first, second = (trainer(comm, strategy, "eigen") for _ in range(2))
    problem.run(first, comm, range(4))
    state = problem.whole_state(first, comm)
    second.load_state_dict(state)
    expected = problem.run(first, comm, range(4, 9))
    assert torch.equal(problem.run(second, comm, range(4, 9)), expected)
    serial = trainer(comm.Split(comm.rank), Strategy(MemOpt()), "eigen")
    for step in range(4):
        images, labels = problem.batch(step)
        serial.optimizer.zero_grad()
        F.cross_entropy(serial.model(images), labels).backward()
        serial.step()
    for name, average in inside.factors(serial).items():
        torch.testing.assert_close(state[f"kfac/factors/{name}"], average.cpu(), rtol=0, atol=1e-12)


def test_a_share_is_refreshed_at_its_turn(comm):
    """Oracle: by hand: at a time the bases of a single share change, share after share."""
    strategy = Strategy(CommOpt(), refresh=Refresh(stagger=3))
    kfac = trainer(comm, strategy, problem.UNSPLIT, factor_update_steps=1)
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
        trainer(comm, Strategy(MemOpt(), refresh=Refresh(stagger=4)), "eigen")


def test_a_copy_of_a_strategy_by_name_is_that_strategy(comm):
    """Oracle: the choices by hand."""
    strategy, settings = mpikfac.get_strategy("kfac-opt")
    assert strategy == Strategy(
        CommOpt(colocate_factors=False), transport=Transport(packing="square", fusion=1)
    )
    assert settings == {"preconditioner": "eigen"}
    assert mpikfac.get_strategy("deferred-allreduce")[0] == Strategy(
        CommOpt(), transport=Transport(reduce_factors_at="inverses")
    )


MEANS = [n for n, way in NAMED.items() if way.strategy.sync == Synchronous()]


@pytest.mark.parametrize("name", MEANS)
def test_the_baseline_takes_the_strategies_of_kfac(comm, name):
    """Oracle: plain averages of gradients; choices about factors have no effect."""
    strategy, _ = mpikfac.get_strategy(name)
    models = [problem.network() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    ends = [
        problem.run(FirstOrderTrainer(model, optimizer, comm, chosen), comm)
        for model, optimizer, chosen in zip(models, optimizers, (strategy, None))
    ]
    if strategy.compression.gradients is None:
        torch.testing.assert_close(*ends)
    assert all(end.isfinite().all() for end in ends)


def test_the_owners_of_factors_do_not_matter_to_the_baseline(comm):
    """Oracle: K-FAC takes the strategy; the baseline has the numbers of plain averages."""
    strategy = Strategy(
        MemOpt(factor_reduction="reduce_scatter"), transport=Transport(owner_sums="alltoall")
    )
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
        kfac = trainer(
            comm, Strategy(MemOpt(), transport=Transport(fusion=1, overlap=True)), "eigen"
        )
        state = copy.deepcopy(kfac.state_dict())
        if half:
            kfac.model[3].bias.sum().backward()  # of a layer's two gradients, one
            kfac.load_state_dict(state)
        problem.run(kfac, comm, range(2))
        models.append(problem.state(kfac.model))
    assert torch.equal(*models)
