"""Decompositions that are used later than they are begun."""

from __future__ import annotations

import problem
import pytest
import torch

import mpikfac


def trainer(comm, delay=0, **settings):
    model, strategy = problem.network(), mpikfac.Strategy(delay=delay)
    return mpikfac.KFAC(model, problem.sgd(model), comm, strategy, **problem.SETTINGS | settings)


def standing(comm, **settings):
    """The bases after each of nine steps that leave the weights where they are."""
    kfac = trainer(comm, **settings)
    for group in kfac.optimizer.param_groups:
        group["lr"] = 0.0
    seen = []
    for step in range(9):
        problem.run(kfac, comm, [step])
        seen.append(kfac.bases.arena.flat.clone())
    return seen


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize(
    ("delay", "basis_every", "made_at"),
    [
        (2, 3, [0, 0, 0, 0, 0, 3, 3, 3, 6]),
        (1, 1, [0, 0, 1, 2, 3, 4, 5, 6, 7]),
        (5, 2, [0, 0, 0, 0, 2, 2, 4, 4, 6]),  # the next decomposition waits for the last one
    ],
)
def test_a_delayed_decomposition_is_used_on_its_day(comm, solver, delay, basis_every, made_at):
    """Oracle: decompositions at every step without a delay, of the same factors."""
    at_once = standing(comm, solver=solver, basis_every=1)
    delayed = standing(comm, solver=solver, basis_every=basis_every, delay=delay)
    for bases, made in zip(delayed, made_at):
        assert torch.equal(bases, at_once[made])


def test_a_run_stopped_before_a_decomposition_is_used_goes_on_to_the_last_bit(comm):
    """Oracle: the uninterrupted run; decompositions begun at step 3 are due at step 5."""
    first, second = trainer(comm, delay=2), trainer(comm, delay=2)
    problem.run(first, comm, range(4))
    assert first.bases.pending
    second.load_state_dict(first.state_dict())
    expected = problem.run(first, comm, range(4, 8))
    assert torch.equal(problem.run(second, comm, range(4, 8)), expected)


def test_bases_rounded_to_bfloat16_are_as_published(comm):
    """Oracle: the bases in the model's dtype; directions differ by rounding only."""
    exact, rounded = trainer(comm), trainer(comm, precondition_dtype=torch.bfloat16)
    for kfac in (exact, rounded):
        problem.run(kfac, comm, [0])
    assert torch.equal(rounded.bases.arena.flat, exact.bases.arena.flat)
    assert torch.equal(rounded.bases.rounded.flat, exact.bases.arena.flat.bfloat16())
    error = (rounded.directions.flat - exact.directions.flat).norm() / exact.directions.flat.norm()
    assert 1e-4 < error < 0.02
