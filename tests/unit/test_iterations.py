"""Old eigenvectors that are renewed by orthogonal iterations instead of a decomposition."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from mpikfac import Eigen, LayerShape, MemOpt, Refresh, Strategy, make_plan
from mpikfac.numerics import add_triangle, eigenbases, unfold_triangle
from mpikfac.preconditioners import EKFAC, Inverse, renewed_together
from support import inside, problem
from support.strategies import changed

ONCE = Eigen(iterations=1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def orthonormal(order):
    return torch.linalg.qr(torch.randn(order, order, dtype=torch.float64)).Q


def with_spectrum(values, basis=None):
    """Return a matrix with eigenvalues `values`."""
    values = torch.as_tensor(values, dtype=torch.float64)
    basis = orthonormal(len(values)) if basis is None else basis
    return basis * values @ basis.T


def renew(factor, vectors, iterations=1):
    """Return values, vectors and misfit."""
    blocks, misfit = Eigen(iterations=iterations).renew(factor, {"vectors": vectors}, None)
    return blocks["values"], blocks["vectors"], misfit


# -- of a factor -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_an_iteration_turns_vectors_by_the_ratio_of_eigenvalues(order):
    """Oracle: diag(3, 1) by hand: the tangent of the leading vector's angle falls to a third."""
    angle = torch.tensor(0.3, dtype=torch.float64)
    sine, cosine = angle.sin(), angle.cos()
    older = torch.stack([torch.stack([cosine, -sine]), torch.stack([sine, cosine])])[:, order]
    factor = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    _, vectors, _ = renew(factor, older)
    tangents = vectors[1, 0] / vectors[0, 0], -vectors[0, 1] / vectors[1, 1]
    assert [t.item() for t in tangents] == pytest.approx([angle.tan().item() / 3] * 2)


@pytest.mark.parametrize(
    "values", [[5, 3, 2, 1], [2, 2, 2, 1, 1], [4, 3, 0, 0, 0], [1], [0, 0, 0], [1e-9, 1, 1e9]]
)
@pytest.mark.parametrize("iterations", [1, 2])
def test_a_factors_own_vectors_stay_its_vectors(values, iterations):
    """Oracle: dense eigh; also where eigenvalues are equal or zero."""
    factor = with_spectrum(values)
    expected, older = torch.linalg.eigh(factor)
    values, vectors, misfit = renew(factor, older, iterations)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(len(factor)).double())
    rounding = 1e-12 * factor.norm().item()
    torch.testing.assert_close(vectors * values @ vectors.T, factor, rtol=0, atol=rounding)
    torch.testing.assert_close(values.sort().values, expected.clamp(min=0), rtol=0, atol=rounding)
    assert misfit <= 1e-12


def test_refreshes_of_a_standing_factor_lead_to_its_eigenvectors():
    """Oracle: dense eigh, from vectors that know nothing of the factor."""
    factor = with_spectrum(0.5 ** torch.arange(12.0))
    expected = torch.linalg.eigh(factor)
    vectors, misfits = torch.eye(12).double(), []
    for _ in range(40):
        values, vectors, misfit = renew(factor, vectors)
        misfits.append(misfit.item())
    torch.testing.assert_close(values.flip(0), expected.eigenvalues)
    torch.testing.assert_close(
        (vectors.flip(1).T @ expected.eigenvectors).abs(), torch.eye(12).double()
    )
    assert misfits[0] > 0.1 and misfits[-1] < 1e-10


def test_two_iterations_are_one_after_the_other():
    """Oracle: two single iterations, to the last bit."""
    factor, vectors = with_spectrum(torch.rand(20)), orthonormal(20)
    _, first, _ = renew(factor, vectors)
    for ours, theirs in zip(renew(factor, vectors, 2), renew(factor, first)):
        assert torch.equal(ours, theirs)


def test_leading_vectors_stay_and_see_what_grows_outside():
    """Oracle: dense eigh; a vector that has no part of the grown one cannot turn towards it."""
    basis, values = orthonormal(60), torch.cat([torch.linspace(2, 1, 6), torch.zeros(54)]).double()
    leading = basis[:, :6].contiguous()
    found, vectors, misfit = renew(with_spectrum(values, basis), leading)
    torch.testing.assert_close(vectors * found[1:] @ vectors.T, with_spectrum(values, basis))
    assert vectors.shape == (60, 6) and misfit < 1e-12
    values[-1] = 3
    misfit = renew(with_spectrum(values, basis), leading)[2]
    assert misfit == pytest.approx(2 / values.norm().item())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_fits_nothing(bad):
    """Oracle: no comparison with NaN holds."""
    factor = torch.eye(4)
    factor[1, 1] = bad
    assert not renew(factor, torch.eye(4))[2] <= 1e9


@pytest.mark.parametrize(
    "preconditioner", [ONCE, Eigen(), Inverse()], ids=["iterated", "kept", "inverse"]
)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("count", [1, 3])
def test_factors_are_renewed_together(preconditioner, groups, count):
    """Oracle: each matrix alone; the misfit of several groups is the largest."""
    order = 6
    layers = [LayerShape(str(n), order, order, groups=groups) for n in range(count)]
    plan = make_plan(layers, 1, Strategy(MemOpt()), preconditioner=preconditioner)
    factors = [plan.factors[f"{n}.A"] for n in range(count)]
    matrices = torch.stack([with_spectrum(torch.rand(order)) for _ in range(count * groups)])
    older = torch.stack([orthonormal(order) for _ in range(count * groups)])
    added = torch.rand(count * groups).double() if preconditioner.form.damped else None
    packed = torch.zeros(count, *factors[0].packed).double()
    add_triangle(packed, matrices.view(count, *([groups] if groups > 1 else []), order, order))
    kinds = {b.kind: b.shape for b in factors[0].blocks}
    blocks = {"vectors": older, "inverse": older, "values": torch.rand(count * groups, order)}
    held = [
        {kind: blocks[kind].view(count, *shape)[place] for kind, shape in kinds.items()}
        for place in range(count)
    ]
    shaped = None if added is None else added.view(count, *factors[0].damping)
    found, misfits = renewed_together(factors, preconditioner, packed, held, shaped)
    for place, factor in enumerate(factors):
        parts = range(place * groups, (place + 1) * groups)
        alone = [
            preconditioner.renew(
                matrices[part],
                {kind: blocks[kind][part] for kind in kinds},
                None if added is None else added[part],
            )
            for part in parts
        ]
        torch.testing.assert_close(misfits[place], torch.stack([m for _, m in alone]).max())
        for name, kind, shape in factor.blocks:
            if kind in alone[0][0]:
                expected = torch.stack([of_part[kind] for of_part, _ in alone])
                torch.testing.assert_close(found[name], expected.view(shape))
            else:
                assert name not in found


# -- in a run --------------------------------------------------------------------------------------


def trainer(comm, preconditioner=ONCE, tolerance=1e9, model=None, strategy=None, **settings):
    model = problem.network() if model is None else model
    strategy = changed(strategy or Strategy(MemOpt()), {"refresh.tolerance": tolerance})
    choices = problem.SETTINGS | {"preconditioner": preconditioner} | settings
    return problem.kfac(model, problem.sgd_all(model), comm, strategy, **choices)


def bases(kfac):
    return {name: block.clone() for name, block in inside.bases(kfac).items()}


def standing(kfac):
    """Set the learning rates to 0 and return `kfac`: steps then keep the weights."""
    for group in kfac.optimizer.param_groups:
        group["lr"] = 0.0
    return kfac


def test_a_refresh_iterates_from_the_vectors_in_use(comm):
    """Oracle: the preconditioner, of the factor and the vectors before the refresh."""
    kfac = trainer(comm)
    problem.run(kfac, comm, range(3))
    before = bases(kfac)
    problem.run(kfac, comm, [3])
    for name, packed in inside.factors(kfac).items():
        values, vectors, misfit = renew(unfold_triangle(packed), before[f"{name}.vectors"])
        assert misfit > 1e-3
        torch.testing.assert_close(inside.bases(kfac)[f"{name}.values"], values)
        torch.testing.assert_close(inside.bases(kfac)[f"{name}.vectors"], vectors)


def test_vectors_with_a_large_misfit_are_decomposed(comm):
    """Oracle: the run that decomposes all factors, to the last bit; nothing meets the tolerance."""
    ours = trainer(comm, tolerance=1e-300, inv_update_steps=1)
    theirs = problem.kfac(
        theirs_model := problem.network(),
        problem.sgd_all(theirs_model),
        comm,
        **problem.SETTINGS | {"inv_update_steps": 1},
    )
    assert torch.equal(problem.run(ours, comm, range(3)), problem.run(theirs, comm, range(3)))


def test_a_tolerance_divides_factors(comm):
    """Oracle: eigh for the factors with a larger misfit, iterations for the others."""
    kfac = trainer(comm, inv_update_steps=4, factor_update_steps=1)
    problem.run(kfac, comm, range(4))
    before, trial = bases(kfac), copy.deepcopy(kfac.state_dict())
    problem.run(kfac, comm, [4])
    renewed = {
        name: renew(unfold_triangle(packed), before[f"{name}.vectors"])
        for name, packed in inside.factors(kfac).items()
    }
    misfits = sorted(misfit.item() for *_, misfit in renewed.values())
    tolerance = (misfits[2] + misfits[3]) / 2
    other = trainer(comm, tolerance=tolerance, inv_update_steps=4, factor_update_steps=1)
    other.load_state_dict(trial)
    problem.run(other, comm, [4])
    for name, packed in inside.factors(other).items():
        _, vectors, misfit = renewed[name]
        if misfit > tolerance:
            vectors = eigenbases.eigenbasis(unfold_triangle(packed))[1]
        torch.testing.assert_close(inside.bases(other)[f"{name}.vectors"], vectors)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("preconditioner", [ONCE, EKFAC(iterations=2)], ids=["eigen", "ekfac"])
def test_a_resumed_run_goes_on_to_the_last_bit(comm, preconditioner, delay):
    """Oracle: the uninterrupted run; with a delay, iterations begun at step 3 are due at step 5."""
    choices = {
        "preconditioner": preconditioner,
        "strategy": Strategy(MemOpt(), refresh=Refresh(staleness=delay)),
    }
    first, second = trainer(comm, **choices), trainer(comm, **choices)
    problem.run(first, comm, range(4))
    state = first.state_dict()
    assert ("kfac/due" in state) == bool(delay)
    second.load_state_dict(state)
    expected = problem.run(first, comm, range(4, 9))
    assert torch.equal(problem.run(second, comm, range(4, 9)), expected)


def test_a_run_of_decompositions_goes_on_by_iterations(comm):
    """Oracle: the preconditioner, of the vectors that the state of the other run holds."""
    first, second = trainer(comm, "eigen"), trainer(comm)
    problem.run(first, comm, range(3))
    second.load_state_dict(first.state_dict())
    before = bases(first)
    problem.run(second, comm, [3])
    for name, packed in inside.factors(second).items():
        _, vectors, _ = renew(unfold_triangle(packed), before[f"{name}.vectors"])
        torch.testing.assert_close(inside.bases(second)[f"{name}.vectors"], vectors)


def test_a_broken_factor_keeps_its_vectors(comm):
    """Oracle: the vectors before; all other factors get new vectors."""
    kfac = standing(trainer(comm, factor_update_steps=100))
    problem.run(kfac, comm, range(3))
    before = bases(kfac)
    for average in inside.factors(kfac).values():
        average[0] *= 1.5
    inside.factors(kfac)["0.A"][0] = torch.nan
    problem.run(kfac, comm, [3])
    for name, block in inside.bases(kfac).items():
        assert torch.equal(block, before[name]) == name.startswith("0.A"), name
    assert kfac.nonfinite.counts["decomposition"] == 1


def test_scales_begin_anew_in_iterated_vectors(comm):
    """Oracle: EKFAC with a refresh at each step with factors gives directions of eigenbases."""
    runs = [
        trainer(comm, preconditioner, inv_update_steps=2)
        for preconditioner in (EKFAC(iterations=1), ONCE)
    ]
    assert torch.equal(*(problem.run(kfac, comm, range(6)) for kfac in runs))


def test_vectors_kept_in_bfloat16_stay_orthonormal(comm):
    """Oracle: directions of exact vectors; roundings of twenty refreshes must not add up."""
    choices = {"factor_update_steps": 100, "inv_update_steps": 1}
    exact = standing(trainer(comm, Eigen(), **choices))
    rounded = standing(trainer(comm, Eigen(dtype=torch.bfloat16, iterations=1), **choices))
    for kfac in (exact, rounded):
        problem.run(kfac, comm, range(20))
    ours, theirs = (inside.directions(kfac).flat for kfac in (rounded, exact))
    assert 1e-4 < ((ours - theirs).norm() / theirs.norm()).item() < 0.02


def test_few_vectors_are_iterated_in_a_run(comm):
    """Oracle: the leading eigenvectors of the standing factor, by dense eigh."""

    def rule(layer):
        return dataclasses.replace(layer, rank=2)

    kfac = standing(trainer(comm, rule=rule, factor_update_steps=100, inv_update_steps=1))
    problem.run(kfac, comm, range(30))
    for name, packed in inside.factors(kfac).items():
        vectors = inside.bases(kfac)[f"{name}.vectors"]
        exact = torch.linalg.eigh(unfold_triangle(packed)).eigenvectors[:, -vectors.shape[-1] :]
        torch.testing.assert_close(vectors @ vectors.T, exact @ exact.T, rtol=0, atol=1e-5)


def test_refusals(comm):
    """Oracle: by hand: without a tolerance no misfit is small enough."""
    for preconditioner in (ONCE, EKFAC(iterations=1)):
        needs = r"preconditioner\.iterations=1 needs refresh.tolerance > 0, not 0\.0"
        with pytest.raises(ValueError, match=needs):
            trainer(comm, preconditioner, tolerance=0.0)
    with pytest.raises(ValueError, match="iterations=-1"):
        Eigen(iterations=-1)
