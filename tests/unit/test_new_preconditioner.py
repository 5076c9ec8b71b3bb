"""A new preconditioner is one class, whose form the plan, state, rules and logs use."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

import mpikfac
from mpikfac import MemOpt, Refresh, Strategy
from mpikfac.numerics import from_left, from_right
from mpikfac.preconditioners import PRECONDITIONERS
from support import diagonal, inside, oracles, problem
from support.diagonal import Diagonal

SETTINGS = problem.SETTINGS | {"preconditioner": Diagonal()}


def trainer(comm, strategy=None, **settings):
    model = problem.network()
    return problem.kfac(model, problem.sgd(model), comm, strategy, **SETTINGS | settings)


def textbook(monkeypatch, steps=range(problem.STEPS)):
    """Return the state after training with dense solves."""
    monkeypatch.setitem(oracles.SOLVES, "diagonal", diagonal.dense_solve)
    model = problem.network()
    shards = [problem.shards(step, 1) for step in steps]
    oracles.train(
        model, problem.sgd(model), shards, **problem.SETTINGS | {"preconditioner": "diagonal"}
    )
    return problem.state(model)


@pytest.mark.parametrize("delay", [0, 2])
def test_training_is_the_textbooks(comm, monkeypatch, delay):
    """Oracle: dense solves with the diagonals; with a delay, the first bases stay in use."""
    steps = range(problem.STEPS - delay // 2)
    found = problem.run(
        trainer(comm, Strategy(MemOpt(), refresh=Refresh(staleness=delay))), comm, steps
    )
    torch.testing.assert_close(found, textbook(monkeypatch, steps), rtol=0, atol=1e-10)


def test_a_line_gives_the_preconditioner_a_name(comm, monkeypatch):
    """Oracle: the object; and a rule that gives the preconditioner to a single layer."""
    monkeypatch.setitem(PRECONDITIONERS, "diagonal", Diagonal())
    ends = [
        problem.run(trainer(comm, preconditioner=one), comm) for one in ("diagonal", Diagonal())
    ]
    assert torch.equal(*ends)
    kfac = trainer(
        comm,
        preconditioner="eigen",
        rule=lambda layer: replace(layer, preconditioner="diagonal" if layer.name == "3" else None),
    )
    problem.run(kfac, comm)
    assert kfac.state_dict()["kfac/preconditioner"] == "eigen, 3: diagonal"
    assert set(inside.bases(kfac)) >= {"3.A.diagonal", "3.G.diagonal", "0.A.vectors"}


def test_its_bytes_are_planned_and_its_state_is_resumed(comm):
    """Oracle: elements by hand, each block rounded up to 16; the uninterrupted run."""
    first, second = trainer(comm), trainer(comm)
    shapes = {name: tuple(block.shape) for name, block in inside.bases(first).items()}
    assert shapes == {f"{n}.diagonal": (f.order,) for n, f in first.plan.factors.items()}
    padded = sum(-(-factor.order // 16) * 16 for factor in first.plan.factors.values())
    assert first.plan.memory(0)["bases"] == 8 * padded
    problem.run(first, comm, range(2))
    state = first.state_dict()
    assert first.missing(state) == set()
    second.load_state_dict(state)
    assert torch.equal(*(problem.run(kfac, comm, range(2, 6)) for kfac in (first, second)))


def test_the_preconditioner_is_short():
    """Oracle: lines of the class."""
    assert len(inspect.getsource(Diagonal).splitlines()) < 20


def test_a_preconditioner_says_what_it_lacks():
    """Oracle: an error message with the preconditioner and the method."""
    preconditioner = mpikfac.preconditioners.Preconditioner()
    with pytest.raises(NotImplementedError, match="Preconditioner does not set form"):
        preconditioner.form  # noqa: B018
    bare = type("Bare", (mpikfac.preconditioners.Preconditioner,), {"form": Diagonal.form})()
    with pytest.raises(NotImplementedError, match=r"'diagonal' does not define decompose\(\)"):
        bare.decompose(torch.eye(2), 0.0, None)
    with pytest.raises(NotImplementedError, match=r"'diagonal' does not define direction\(\)"):
        bare.direction(torch.eye(2), None)


@pytest.mark.parametrize("groups", [(), (3,)])
@pytest.mark.parametrize("orders", [(5,), (2, 3)])
def test_a_decomposition_can_consist_of_blocks_of_a_diagonal(groups, orders):
    """Oracle: products with the dense diagonal matrix."""
    side = [torch.rand(*groups, order, dtype=torch.float64) for order in orders]
    dense, matrix = torch.cat(side, -1).diag_embed(), torch.rand(*groups, 5, 5).double()
    torch.testing.assert_close(from_left(side, matrix), dense @ matrix)
    torch.testing.assert_close(from_right(matrix, side), matrix @ dense)
