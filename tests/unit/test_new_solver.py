"""A new solver is a separate class: plan, state, rules and logs know the solver by its form."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

import mpikfac
from mpikfac import MemOpt, Refresh, Strategy
from mpikfac.solvers import SOLVERS
from support import diagonal, inside, oracles, problem
from support.diagonal import Diagonal

SETTINGS = problem.SETTINGS | {"solver": Diagonal()}


def trainer(comm, strategy=None, **settings):
    model = problem.network()
    return problem.kfac(model, problem.sgd(model), comm, strategy, **SETTINGS | settings)


def textbook(monkeypatch, steps=range(problem.STEPS)):
    """Return the state after training with dense solves."""
    monkeypatch.setitem(oracles.SOLVES, "diagonal", diagonal.dense_solve)
    model = problem.network()
    shards = [problem.shards(step, 1) for step in steps]
    oracles.train(model, problem.sgd(model), shards, **problem.SETTINGS | {"solver": "diagonal"})
    return problem.state(model)


@pytest.mark.parametrize("delay", [0, 2])
def test_training_is_the_textbooks(comm, monkeypatch, delay):
    """Oracle: dense solves with the diagonals; with a delay, the first bases stay in use."""
    steps = range(problem.STEPS - delay // 2)
    found = problem.run(
        trainer(comm, Strategy(MemOpt(), refresh=Refresh(staleness=delay))), comm, steps
    )
    torch.testing.assert_close(found, textbook(monkeypatch, steps), rtol=0, atol=1e-10)


def test_a_line_gives_the_solver_a_name(comm, monkeypatch):
    """Oracle: the object; and a rule that gives the solver to a single layer."""
    monkeypatch.setitem(SOLVERS, "diagonal", Diagonal())
    ends = [problem.run(trainer(comm, solver=one), comm) for one in ("diagonal", Diagonal())]
    assert torch.equal(*ends)
    kfac = trainer(
        comm,
        solver="eigen",
        rule=lambda layer: replace(layer, solver="diagonal" if layer.name == "3" else None),
    )
    problem.run(kfac, comm)
    assert kfac.state_dict()["kfac/solver"] == "eigen, 3: diagonal"
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


def test_the_solver_is_short():
    """Oracle: lines of the class."""
    assert len(inspect.getsource(Diagonal).splitlines()) < 20


def test_a_solver_says_what_it_lacks():
    """Oracle: an error message with the solver and the method."""
    solver = mpikfac.solvers.Solver()
    with pytest.raises(NotImplementedError, match="Solver does not set form"):
        solver.form  # noqa: B018
    bare = type("Bare", (mpikfac.solvers.Solver,), {"form": Diagonal.form})()
    with pytest.raises(NotImplementedError, match=r"'diagonal' does not define decompose\(\)"):
        bare.decompose(torch.eye(2), 0.0, None)
    with pytest.raises(NotImplementedError, match=r"'diagonal' does not define direction\(\)"):
        bare.direction(torch.eye(2), None)
