"""Steps in sample space are the same on several ranks as on one, and send the planned bytes."""

from __future__ import annotations

import pytest
import torch

import mpikfac
from mpikfac.lab import SampleSpace, Term
from mpikfac.lab.sample_space.messages import Form, planned_messages
from support.residuals import flat, network, points, terms, unknown

pytestmark = pytest.mark.lab

EXACT = {"rtol": 1e-12, "atol": 1e-12}
WHOLE = {"interior": points(23), "border": points(11, 2), "pair": points(6, 3)}
STEPS = 5
MATRICES = [(6, 3), (6, 7), (1, 6), (1, 2)]
STREAMS = {"interior": (4, 8, 4, 1), "border": (1, 2, 1, 1), "pair": (2, 4, 2, 1)}
"""The streams of each term in each matrix: `middle` is called twice, and `pair` calls all twice."""


@pytest.fixture
def alone(comm):
    """Return a communicator of this rank alone."""
    own = comm.Split(comm.rank)
    yield own
    own.Free()


def shares(comm):
    """Return the points of each rank by term, in unequal numbers; each term has a rank without."""
    of_rank = [{} for _ in range(comm.size)]
    for number, (name, x) in enumerate(WHOLE.items()):
        parts = [(rank + number) % comm.size + (comm.size == 1) for rank in range(comm.size)]
        cuts = [len(x) * sum(parts[:rank]) // sum(parts) for rank in range(1, comm.size)]
        for own, part in zip(of_rank, x.tensor_split(cuts)):
            own[name] = part
    return of_rank


def space(comm, parts, **settings):
    """Return a model, its coefficient and `SampleSpace`, with weights of the rank's own seed."""
    model, nu = network(comm.rank), unknown()
    return model, nu, SampleSpace(model, terms(nu, parts), also=[nu], comm=comm, **settings)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_ranks_take_the_steps_of_one_rank(comm, alone, momentum):
    """Oracle: one rank with all points, from the same weights, after five steps."""
    model, nu, steps = space(comm, shares(comm)[comm.rank], momentum=momentum)
    lone, lone_nu, expected = space(alone, WHOLE, momentum=momentum)
    lone.load_state_dict(network(0).state_dict())
    for _ in range(STEPS):
        found, right = steps.step(), expected.step()
        assert (found.tries, found.length) == (right.tries, right.length)
        assert found.new_loss == pytest.approx(right.new_loss, rel=1e-10)
    torch.testing.assert_close(flat(model, nu), flat(lone, lone_nu), **EXACT)
    copies = comm.allgather(flat(model, nu).tolist())
    assert all(copy == copies[0] for copy in copies)
    steps.close()


def test_renewed_points_are_those_of_all_ranks(comm, alone):
    """Oracle: one rank with all points; another rank has all points of a term after the change."""
    parts, last = shares(comm)[comm.rank], comm.rank == comm.size - 1
    model, nu, steps = space(comm, parts)
    lone, lone_nu, expected = space(alone, WHOLE)
    lone.load_state_dict(network(0).state_dict())
    steps.step(), expected.step()
    others = points(13, 7)
    steps.renew(border=others if last else others[:0])
    expected.renew(border=others)
    steps.step(), expected.step()
    torch.testing.assert_close(flat(model, nu), flat(lone, lone_nu), **EXACT)
    steps.close()


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_messages_are_those_planned(comm, momentum):
    """Oracle: the plan's bytes by stage, for the streams that the functions' calls have."""
    of_rank = shares(comm)
    _, _, steps = space(comm, of_rank[comm.rank], momentum=momentum)
    steps.step()
    steps.trace.clear()
    report = steps.step()
    forms = [
        [
            Form(len(x) * (2 if name == "pair" else 1), STREAMS[name] if len(x) else (0,) * 4)
            for name, x in own.items()
        ]
        for own in of_rank
    ]
    losses = 1 + steps.trace.calls["losses"]
    settings = {"losses": losses, "momentum": bool(momentum), "acceleration": True}
    planned = planned_messages(forms, MATRICES, comm.rank, **settings)
    assert report.tries == 1
    by_stage = {}
    for message in planned:
        by_stage[message.stage] = by_stage.get(message.stage, 0) + message.bytes
    assert {stage: n for stage, n in steps.trace.sent.items() if n or stage in by_stage} == by_stage
    steps.close()


def test_each_pair_of_ranks_has_one_block_of_products(comm):
    """Oracle: the number of elements that rank 0 needs, by counting pairs."""
    counts = [3 + rank for rank in range(comm.size)]
    forms = [[Form(count, (1,))] for count in counts]
    sent = 0
    for rank in range(comm.size):
        messages = planned_messages(forms, [(1, 1)], rank, losses=2, acceleration=False)
        sent += sum(m.bytes for m in messages if m.stage == "reduce gram") // 8
    pairs = sum(a * b for i, a in enumerate(counts) for b in counts[: i + 1])
    assert sent == (pairs + sum(counts) if comm.size > 1 else 0)


def test_a_run_continues_on_other_ranks(comm, alone, tmp_path):
    """Oracle: a run of ten steps on one rank; five are taken by all ranks but the last."""
    few = comm.Split(int(comm.rank == comm.size - 1 and comm.size > 1))
    path = comm.bcast(str(tmp_path))
    lone, lone_nu, expected = space(alone, WHOLE, momentum=0.5)
    lone.load_state_dict(network(0).state_dict())
    for _ in range(10):
        expected.step()
    if comm.rank < comm.size - 1 or comm.size == 1:
        _, _, first = space(few, shares(few)[few.rank], momentum=0.5)
        for _ in range(5):
            first.step()
        mpikfac.save_checkpoint(few, path, first.state_dict(), first.steps)
        first.close()
    comm.Barrier()
    model, nu, steps = space(comm, shares(comm)[comm.rank], momentum=0.5, damping=7.0)
    steps.load_state_dict(mpikfac.find_checkpoint(comm, path))
    assert steps.steps == 5
    for _ in range(5):
        steps.step()
    torch.testing.assert_close(flat(model, nu), flat(lone, lone_nu), rtol=1e-10, atol=1e-10)
    steps.close()
    few.Free()


def test_an_error_of_one_rank_ends_all(comm):
    """Oracle: the same line on all ranks."""

    def loss(model, x):
        u = model(x)[:, 0]
        return u.mean() if comm.rank == comm.size - 1 else u

    steps = SampleSpace(network(), [Term(loss, points(4))], comm=comm)
    with pytest.raises(mpikfac.UserError, match="not one number, such as a loss"):
        steps.step()
    steps.close()


def test_an_error_at_a_trial_length_ends_all(comm):
    """Oracle: the same line on all ranks, and the weights before."""
    model = network()
    before = flat(model, unknown())

    def fails(model, x):
        if comm.rank == comm.size - 1 and not torch.equal(flat(model, unknown()), before):
            raise ValueError("no table for these weights")
        return model(x)[:, 0]

    steps = SampleSpace(model, [Term(fails, points(4))], comm=comm)
    with pytest.raises(mpikfac.UserError, match="trying a length: no table for these weights"):
        steps.step()
    assert torch.equal(flat(model, unknown()), before)
    steps.close()


def test_a_state_that_one_rank_lacks_is_loaded_by_none(comm):
    """Oracle: the weights before, on all ranks."""
    model, nu, steps = space(comm, WHOLE)
    state, before = steps.state_dict(), flat(model, nu)
    state = {name: torch.ones_like(v) if torch.is_tensor(v) else v for name, v in state.items()}
    if comm.rank == comm.size - 1:
        del state["sample/also/0"]
    with pytest.raises(
        mpikfac.UserError, match="item 'sample/also/0' is missing; it must be float64"
    ):
        steps.load_state_dict(state)
    assert torch.equal(flat(model, nu), before)
    steps.close()


@pytest.mark.parametrize("what", ["weights", "momentum", "terms"])
def test_arguments_that_differ_are_refused(comm, what):
    """Oracle: one line on all ranks with the argument and both values."""
    if comm.size == 1:
        return
    last = comm.rank == comm.size - 1
    model, nu = network(), unknown()
    weights = {"interior": 1.0, "border": 2.0 if last and what == "weights" else 3.0, "pair": 1.0}
    own = terms(nu, WHOLE, weights)
    momentum = 0.5 if last and what == "momentum" else 0.0
    with pytest.raises(mpikfac.RanksDifferError, match="ranks disagree on"):
        SampleSpace(
            model, own[::-1] if last and what == "terms" else own, momentum=momentum, comm=comm
        )
