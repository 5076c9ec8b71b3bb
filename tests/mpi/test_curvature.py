"""Curvature servers decompose for the training ranks: results of one process, planned bytes."""

from __future__ import annotations

import collections
import dataclasses
import time

import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac import CommOpt, Refresh, Trace, numerics
from mpikfac.comm import curvature_servers as intercomm
from mpikfac.lab import CurvatureServers
from mpikfac.plan import NAMED
from support import inside, problem
from support.strategies import changed, strategy_of

RANKS = mpikfac.world().size
PRECONDITIONERS = "eigen", "inverse", problem.UNSPLIT
STEPS = range(10)  # decompositions at 0, 3, 6 and 9
OWNERS = {"assignment.factor_reduction": "reduce_scatter", "assignment.shard_optimizer": True}
# Choices of strategies, by the number of training ranks.
CHOICES = {
    "all workers": lambda ranks: {"assignment": CommOpt()},
    "two owners of a layer": lambda ranks: {"assignment": CommOpt(colocate_factors=False)},
    "sharded-optimizer": lambda ranks: OWNERS,
    "own batch": lambda ranks: {"assignment.factor_reduction": "local"},
    "late to owners": lambda ranks: {**OWNERS, "transport.reduce_factors_at": "inverses"},
    "staggered": lambda ranks: {"assignment": CommOpt(), "refresh.stagger": 3},
    "in parts": lambda ranks: {"transport.virtual_ranks": ranks},
    "overlapped": lambda ranks: {
        "assignment": CommOpt(),
        "transport.fusion": 1,
        "transport.overlap": True,
    },
}

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(RANKS == 1, reason="one rank has none to spare for curvature"),
]
every_number = pytest.mark.parametrize("curvature_servers", range(1, RANKS))


def on_both(comm, curvature_servers, train, **serving):
    """Return the result of `train(training, curvature)`, and None on curvature servers."""
    team = mpikfac.split_comm(comm, curvature_servers)
    if team.comm is None:
        return mpikfac.lab.run_curvature_server(team, **serving)
    return train(team.comm, team.intercomm)


def trainer(comm, curvature=None, dtype=torch.float64, choices=CHOICES["all workers"], **settings):
    """Return K-FAC that decomposes two steps ahead, in the background or on curvature servers."""
    model = problem.network().to(dtype)
    servers = curvature.remote_size if curvature else 0
    refresh = CurvatureServers(servers=servers) if servers else Refresh()
    strategy = strategy_of({"refresh": refresh, "refresh.staleness": 2}, choices(comm.size))
    settings = problem.SETTINGS | settings
    return problem.kfac(
        model, problem.sgd(model), mpikfac.comm.SplitComm(comm, curvature), strategy, **settings
    )


def run(kfac, steps=STEPS):
    """Train on this rank's shards, a shard as a part if batches come in parts; return the state."""
    ranks, rank, dtype = kfac.plan.ranks, inside.grid(kfac).world.rank, kfac.votes.dtype
    for step in steps:
        images, labels = problem.shards(step, ranks)[rank]
        kfac.optimizer.zero_grad()
        F.cross_entropy(kfac.model(images.to(dtype)), labels).backward()
        if kfac.plan.of(inside.grid(kfac).world.rank).parts:
            kfac.accumulate()
        kfac.step()
    return problem.state(kfac.model)


def assert_same(comm, curvature_servers, steps=STEPS, **settings):
    """Oracle: the training ranks alone, with decompositions in the background; to the last bit."""

    def train(training, curvature):
        found = trainer(training, curvature, **settings)
        state = run(found, steps)
        found.close()
        expected = trainer(training, **settings)
        assert torch.equal(state, run(expected, steps))
        assert found.nonfinite.counts == expected.nonfinite.counts
        return training.allreduce(found.nonfinite.counts["decomposition"])

    return on_both(comm, curvature_servers, train)


@pytest.mark.parametrize("name", CHOICES)
@every_number
def test_curvature_servers_change_no_bit(comm, curvature_servers, name):
    """Oracle: see `assert_same`.

    Each number of ranks of both kinds takes another preconditioner.
    """
    preconditioner = PRECONDITIONERS[
        (list(CHOICES).index(name) + curvature_servers + RANKS) % len(PRECONDITIONERS)
    ]
    assert_same(comm, curvature_servers, choices=CHOICES[name], preconditioner=preconditioner)


@pytest.mark.parametrize("name", ["all workers", "two owners of a layer", "staggered"])
def test_of_low_rank(comm, name):
    """Oracle: see `assert_same`."""

    def rule(layer):
        return dataclasses.replace(layer, rank=3)

    assert_same(comm, 1, choices=CHOICES[name], rule=rule)


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse"])
def test_in_single_precision_the_damping_is_not_rounded(comm, preconditioner):
    """Oracle: see `assert_same`; 0.01 is no float32."""
    assert_same(comm, 1, preconditioner=preconditioner, dtype=torch.float32)


def test_in_messages_of_limited_size(comm, monkeypatch):
    """Oracle: see `assert_same`."""
    monkeypatch.setattr(intercomm, "MAX_COUNT", 1000)
    assert_same(comm, 1)


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_relative_damping(comm, preconditioner):
    """Oracle: see `assert_same`."""
    assert_same(comm, 1, preconditioner=preconditioner, relative_damping=True)


def test_a_late_curvature_rank_is_waited_for(comm, monkeypatch):
    """Oracle: see `assert_same`; a decomposition takes longer than the steps until its use."""
    place = inside.PLACES["decompose for others"]
    make = getattr(*place)

    def slow(*args):
        time.sleep(0.1)
        return make(*args)

    monkeypatch.setattr(*place, slow)
    assert_same(comm, 1)


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse"])
def test_owners_note_what_curvature_servers_cannot_decompose(comm, preconditioner, monkeypatch):
    """Oracle: see `assert_same`; a factor fails at 0, 3 and 6, whose decompositions are used."""
    for name in ("eigenbasis", "damped_inverse"):
        make = getattr(numerics, name)

        def failing(factor, *damping, make=make):
            if factor.shape[-1] == 82:
                raise ArithmeticError("on purpose")
            return make(factor, *damping)

        monkeypatch.setattr(numerics, name, failing)
    assert assert_same(comm, 1, preconditioner=preconditioner) in (3, None)


@every_number
def test_what_is_sent_is_planned(comm, curvature_servers):
    """Oracle: the plan's messages of four refreshes; received bytes equal sent bytes."""

    def train(training, curvature):
        kfac = trainer(
            training,
            curvature,
            choices=lambda _: {"assignment": CommOpt(), "refresh.staleness": 1},
        )
        by_name = changed(
            NAMED["curvature-servers"].strategy,
            {"refresh.servers": curvature_servers},
        )
        assert kfac.plan.strategy == by_name
        run(kfac, range(12))
        kfac.close()
        planned = collections.Counter()
        received = 0
        for message in kfac.plan.messages(training.rank, False, True):
            if message.stage in ("send factors", "publish bases"):
                planned[message.stage] += 4 * message.bytes
            if message.stage == "receive bases":
                received = 4 * message.size
                assert message.root == training.rank % curvature_servers
        assert planned["send factors"] > 0
        assert {stage: kfac.trace.sent[stage] for stage in planned} == planned
        return received

    trace = Trace()
    received = on_both(comm, curvature_servers, train, trace=trace)
    sent = comm.allreduce(trace.sent["send bases"])
    assert sent == comm.allreduce(received or 0) > 0


@pytest.mark.parametrize("others", range(RANKS))
def test_a_run_goes_on_with_other_curvature_servers(comm, others):
    """Oracle: the uninterrupted run, except for rounding with other training ranks.

    Decompositions are pending at step 5. With as many training ranks the runs agree to the last
    bit.
    """

    def before(training, curvature):
        kfac = trainer(training, curvature, factor_update_steps=1, inv_update_steps=4)
        run(kfac, range(5))
        state = {}
        for share in training.allgather(kfac.state_dict()):
            state |= share
        assert "kfac/due" in state
        expected = run(kfac, range(5, 10))
        kfac.close()
        return state, expected

    state, expected = comm.bcast(on_both(comm, 1, before))

    def after(training, curvature):
        kfac = trainer(training, curvature, factor_update_steps=1, inv_update_steps=4)
        kfac.load_state_dict(state)
        found = run(kfac, range(5, 10))
        kfac.close()
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if others == 1 else 1e-10)

    on_both(comm, others, after)


@every_number
def test_a_run_may_end_before_its_last_bases_are_used(comm, curvature_servers):
    """Oracle: the time limit; curvature servers end when the last rank is done, not before."""

    def train(training, curvature):
        kfac = trainer(training, curvature)
        run(kfac, range(3))
        training.Barrier()
        time.sleep(0.2 * training.rank)  # later, ranks request the decomposition of step 3
        inside.decompositions(kfac).decompose(inside.whole_factors(kfac), 3, 0.01, None)
        kfac.close()

    on_both(comm, curvature_servers, train)


def test_curvature_servers_are_let_go_once(comm, monkeypatch):
    """Oracle: the number of messages; a second message would count for another training rank."""
    sent = []

    def leave(curvature):
        sent.append(curvature)
        intercomm.leave(curvature)

    monkeypatch.setattr(*inside.PLACES["let curvature servers go"], leave)

    def train(training, curvature):
        kfac = trainer(training, curvature)
        run(kfac, range(1))
        kfac.close()
        kfac.close()
        assert len(sent) == 1

    on_both(comm, 1, train)


def test_a_state_is_loaded_over_bases_on_their_way(comm):
    """Oracle: the run from the state on; decompositions pending from before are not used."""

    def train(training, curvature):
        kfac = trainer(training, curvature, preconditioner="eigen")
        run(kfac, range(3))
        state = {name: copied(value) for name, value in kfac.state_dict().items()}
        expected = run(kfac, range(3, 10))
        kfac.load_state_dict(state)
        assert torch.equal(run(kfac, range(3, 10)), expected)
        kfac.close()

    on_both(comm, 1, train)


def copied(value):
    return value.clone() if torch.is_tensor(value) else value


@pytest.mark.parametrize("curvature_servers", [-1, RANKS])
def test_some_rank_has_to_train(comm, curvature_servers):
    with pytest.raises(
        ValueError, match=rf"s={curvature_servers} must be less than .* \({RANKS}\)"
    ):
        mpikfac.split_comm(comm, curvature_servers)


def test_other_numbers_of_curvature_servers_are_refused(comm):
    alone = comm.Split(comm.rank)
    with pytest.raises(
        ValueError, match="refresh.servers=1, but comm has 0 curvature servers; pass the result of"
    ):
        trainer(alone, choices=lambda _: {"refresh": CurvatureServers()})
    with pytest.raises(ValueError, match="staleness=0 must be a whole number >= 1"):
        CurvatureServers(staleness=0)
