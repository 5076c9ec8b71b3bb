"""Decompositions that are first used some steps after they begin."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mpikfac import MemOpt, Refresh, Strategy
from mpikfac.numerics import triangles
from support import inside, problem


def trainer(comm, delay=0, tolerance=0.0, **settings):
    model, strategy = (
        problem.network(),
        Strategy(MemOpt(), refresh=Refresh(staleness=delay, tolerance=tolerance)),
    )
    return problem.kfac(model, problem.sgd(model), comm, strategy, **problem.SETTINGS | settings)


def stopped(kfac):
    """Set the learning rates of `kfac` to 0 and return `kfac`: steps then keep the weights."""
    for group in kfac.optimizer.param_groups:
        group["lr"] = 0.0
    return kfac


def distance(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def standing(comm, **settings):
    """Return the bases after every step of nine steps that keep the weights."""
    kfac, seen = stopped(trainer(comm, **settings)), []
    for step in range(9):
        problem.run(kfac, comm, [step])
        seen.append(inside.bases(kfac).flat.clone())
    return seen


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse"])
@pytest.mark.parametrize(
    ("delay", "inv_update_steps", "made_at"),
    [
        (2, 3, [0, 0, 0, 0, 0, 3, 3, 3, 6]),
        (1, 1, [0, 0, 1, 2, 3, 4, 5, 6, 7]),
        (5, 2, [0, 0, 0, 0, 2, 2, 4, 4, 6]),  # the next decomposition waits for the last one
    ],
)
def test_a_delayed_decomposition_is_used_on_its_day(
    comm, preconditioner, delay, inv_update_steps, made_at
):
    """Oracle: decompositions at every step without a delay, of the same factors."""
    at_once = standing(comm, preconditioner=preconditioner, inv_update_steps=1)
    delayed = standing(
        comm, preconditioner=preconditioner, inv_update_steps=inv_update_steps, delay=delay
    )
    for bases, made in zip(delayed, made_at):
        assert torch.equal(bases, at_once[made])


@pytest.mark.parametrize("preconditioner", ["eigen", "ekfac", "inverse", "eva"])
@pytest.mark.parametrize("tolerance", [0.0, 0.3])
def test_a_run_stopped_before_a_decomposition_is_used_goes_on_to_the_last_bit(
    comm, preconditioner, tolerance
):
    """Oracle: the uninterrupted run; decompositions begun at step 3 are due at step 5."""
    choices = {
        "delay": 2,
        "preconditioner": preconditioner,
        "tolerance": tolerance * (preconditioner != "eva"),
    }
    first, second = trainer(comm, **choices), trainer(comm, **choices)
    problem.run(first, comm, range(4))
    state = first.state_dict()
    assert "kfac/due" in state
    second.load_state_dict(state)
    expected = problem.run(first, comm, range(4, 8))
    assert torch.equal(problem.run(second, comm, range(4, 8)), expected)


@pytest.mark.parametrize(("stop", "is_consistent"), [(3, False), (5, True)])
def test_a_state_is_not_intact_once_a_refresh_has_begun(comm, monkeypatch, stop, is_consistent):
    """Oracle: by hand: steps 3 and 5 take no statistics; step 3 begins a refresh, step 5 does not.

    At both steps the sum of gradients is the first sum over ranks, and the sum of gradients fails.
    """

    def fail(*_):
        raise OSError("a rank was lost")

    kfac = trainer(comm, delay=1)
    problem.run(kfac, comm, range(stop))
    assert kfac.is_consistent
    monkeypatch.setattr(*inside.PLACES["reduce gradients"], fail)
    with pytest.raises(OSError, match="a rank was lost"):
        problem.run(kfac, comm, [stop])
    assert kfac.is_consistent == is_consistent


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse"])
def test_bases_kept_in_bfloat16(comm, preconditioner):
    """Oracle: bases in the model's dtype, rounded; directions differ by rounding only."""
    exact, rounded = (
        trainer(comm, preconditioner=preconditioner, basis_dtype=d) for d in (None, torch.bfloat16)
    )
    for kfac in (exact, rounded):
        problem.run(kfac, comm, [0])
    assert torch.equal(inside.bases(rounded).flat, inside.bases(exact).flat.bfloat16())
    assert 1e-4 < distance(inside.directions(rounded).flat, inside.directions(exact).flat) < 0.02


@pytest.mark.parametrize(
    "settings", [{}, {"relative_damping": True, "damping": 0.3}, {"initial_factor": "identity"}]
)
@pytest.mark.parametrize("preconditioner", ["eigen", "inverse"])
def test_averages_kept_in_bfloat16(comm, preconditioner, settings):
    """Oracle: averages in the model's dtype, each number rounded once at every step."""
    settings = {"preconditioner": preconditioner, "factor_decay": 0.5, **settings}
    exact, rounded = (trainer(comm, factor_dtype=d, **settings) for d in (None, torch.bfloat16))
    for kfac in (exact, rounded):
        problem.run(stopped(kfac), comm, range(4))
    ours, theirs = (inside.factors(kfac).flat for kfac in (rounded, exact))
    assert ours.dtype == torch.bfloat16
    # At most half of the earlier error remains: the error stays below twice the rounding.
    assert 1e-4 < distance(ours, theirs) < 2 * 2**-9
    assert 1e-4 < distance(inside.directions(rounded).flat, inside.directions(exact).flat) < 0.05


def dense(kfac, name):
    """Return a factor's running average as a square matrix."""
    return triangles.unfold_triangle(inside.factors(kfac)[name])


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse", problem.UNSPLIT])
def test_a_tolerance_that_nothing_meets_changes_no_bit(comm, preconditioner):
    """Oracle: the run without a tolerance, which decomposes everything at every refresh."""
    settings = {"preconditioner": preconditioner, "inv_update_steps": 1, "factor_update_steps": 1}
    always, never = trainer(comm, **settings), trainer(comm, tolerance=1e-300, **settings)
    assert torch.equal(problem.run(never, comm), problem.run(always, comm))
    for kfac in (always, never):
        assert kfac.trace.calls["decompositions"] == problem.STEPS * len(kfac.plan.owners)


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse", problem.UNSPLIT])
def test_with_a_huge_tolerance_all_is_decomposed_once(comm, preconditioner):
    """Oracle: the first step's eigenvectors or inverses; in these, present factors' values."""
    kfac = trainer(
        comm,
        tolerance=1e9,
        preconditioner=preconditioner,
        inv_update_steps=1,
        factor_update_steps=1,
    )
    problem.run(kfac, comm, [0])
    first = {name: block.clone() for name, block in inside.bases(kfac).items()}
    problem.run(kfac, comm, range(1, 4))
    assert kfac.trace.calls["decompositions"] == len(kfac.plan.owners)
    for name, block in inside.bases(kfac).items():
        if name.endswith(".values"):
            factor = name.removesuffix(".values")
            vectors = first[f"{factor}.vectors"]
            expected = (vectors.T @ dense(kfac, factor) @ vectors).diagonal().clamp(min=0)
            torch.testing.assert_close(block, expected)
            assert not torch.equal(block, first[name])
        else:
            assert torch.equal(block, first[name])


def full_rank(comm, **settings):
    """Return a trainer whose factors have no eigenvalue near 0, so that damping is negligible."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4, bias=False)).double()
    strategy = Strategy(MemOpt(), refresh=Refresh(tolerance=0.1))
    choices = {"damping": 1e-12, "factor_update_steps": 100, "inv_update_steps": 1, "kl_clip": None}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return problem.kfac(model, optimizer, comm, strategy, **choices | settings)


def refreshed(kfac):
    """Take a step; return the factors that the step decomposes."""
    before = {name: block.clone() for name, block in inside.bases(kfac).items()}
    kfac.trace.clear()
    kfac.optimizer.zero_grad()
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(40, n, generator=generator).double() for n in (6, 4))
    F.mse_loss(kfac.model(x), y).backward()
    kfac.step()
    kinds = (".inverse", ".vectors")
    changed = [n for n, block in inside.bases(kfac).items() if not torch.equal(block, before[n])]
    names = {name.rpartition(".")[0] for name in changed if name.endswith(kinds)}
    assert kfac.trace.calls["decompositions"] == len(names)
    return names


def test_an_inverse_is_made_anew_when_its_factor_has_grown_by_the_tolerance(comm):
    """Oracle: by hand: M's inverse is off by c - 1 for c M; small steps add up."""
    kfac = full_rank(comm, preconditioner=problem.UNSPLIT)
    averages = inside.factors(kfac)
    assert refreshed(kfac) == {"0.A", "0.G"}
    assert refreshed(kfac) == set()
    averages["0.A"] *= 1.06
    averages["0.G"] *= 1.11
    assert refreshed(kfac) == {"0.G"}
    averages["0.A"] *= 1.03
    assert refreshed(kfac) == set()
    averages["0.A"] *= 1.03
    assert refreshed(kfac) == {"0.A"}


def test_a_new_damping_counts_as_a_change_of_the_factor(comm):
    """Oracle: by hand: a damping far above the factor; eigenvectors do not hold the damping."""
    settings = {"damping": lambda step: 1e-12 if step < 2 else 1e6}
    inverse, eigen = (
        full_rank(comm, preconditioner=s, **settings) for s in (problem.UNSPLIT, "eigen")
    )
    for kfac, expected in ((inverse, {"0.A", "0.G"}), (eigen, set())):
        assert len(refreshed(kfac)) == 2
        assert refreshed(kfac) == set()
        assert refreshed(kfac) == expected


@pytest.mark.parametrize(("angle", "fits"), [(0.02, True), (0.2, False)])
def test_eigenvectors_are_made_anew_when_the_factor_has_turned(comm, angle, fits):
    """Oracle: a turn's elements off the diagonal, by the dense product, against the tolerance."""
    kfac = full_rank(comm, preconditioner="eigen")
    refreshed(kfac)
    vectors, values = (inside.bases(kfac)[f"0.A.{part}"] for part in ("vectors", "values"))
    values = torch.arange(1.0, 7).double()
    skew = torch.zeros(6, 6).double()
    skew[0, 5], skew[5, 0] = angle, -angle
    turned = vectors @ torch.linalg.matrix_exp(skew)
    factor = turned * values @ turned.T
    inside.factors(kfac)["0.A"].zero_()
    triangles.add_triangle(inside.factors(kfac)["0.A"], factor)
    seen = vectors.T @ factor @ vectors
    off = (seen - seen.diagonal().diag()).norm() / seen.norm()
    assert (off <= 0.1) == fits
    assert refreshed(kfac) == (set() if fits else {"0.A"})
