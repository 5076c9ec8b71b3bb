from __future__ import annotations

import pytest
import torch

from mpikfac import LayerShape, MemOpt, Strategy, make_plan, numerics
from mpikfac.numerics import add_triangle, eigenbases, inverses
from mpikfac.preconditioners import PRECONDITIONERS, decomposed, decomposed_together

LEAF = inverses.LEAF


def spectrum(values):
    """Return a float32 matrix with the given eigenvalues, in a random basis."""
    basis = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64)).Q
    product = basis * values @ basis.T
    return ((product + product.T) / 2).float()


def error(inverse, matrix):
    """Return the relative error of `inverse`, in float64."""
    exact = torch.linalg.inv(matrix.double())
    return ((inverse - exact).norm() / exact.norm()).item()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_eigenvalues_are_not_negative():
    """Oracle: rounding makes some eigenvalues of a singular factor negative; a basis has none."""
    factor = spectrum(torch.tensor([3.0, 2.0, 1.0] + [0.0] * 17))
    assert torch.linalg.eigvalsh(factor).min() < 0
    values, vectors = eigenbases.eigenbasis(factor)
    assert values.min() == 0
    torch.testing.assert_close(vectors * values @ vectors.T, factor)


@pytest.mark.parametrize("dead", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_factors_with_dead_inputs_are_decomposed(dead, seed):
    """Oracle: the factor, from the factor's basis; float32 alone converges for few of the seeds."""
    torch.manual_seed(seed)
    inputs = torch.randn(64, 32).relu() * (torch.rand(32) >= dead)
    factor = torch.zeros(288, 288)
    factor[4::9, 4::9] = inputs.T @ inputs / 64  # of a 3x3 kernel on 1x1 maps
    values, vectors = eigenbases.eigenbasis(factor.double())
    torch.testing.assert_close(vectors * values @ vectors.T, factor.double())


@pytest.mark.parametrize("order", [1, 50, LEAF, LEAF + 1, 2 * LEAF, 2 * LEAF + 1, 4 * LEAF + 3])
@pytest.mark.parametrize("rank", [1.0, 0.3])
def test_a_damped_inverse_is_the_dense_inverse(order, rank):
    """Oracle: the inverse in float64; orders at and around the sizes at which blocks are split."""
    rows = torch.randn(max(1, int(rank * order)), order)
    factor = rows.T @ rows / len(rows)
    found = inverses.damped_inverse(factor, 0.1)
    assert error(found, factor + 0.1 * torch.eye(order)) < 5e-5


@pytest.mark.parametrize("order", [LEAF, LEAF + 1, 2 * LEAF + 1, 4 * LEAF + 3])
def test_blocks_give_the_inverse_and_are_taken(order):
    """Oracle: the inverse in float64; Cholesky's inverse would hide a wrong inverse by blocks."""
    factor = spectrum(torch.rand(order))
    damped = factor + 0.1 * torch.eye(order)
    alone = inverses._inverse_by_blocks(damped)
    assert error(alone, damped) < 1e-5
    assert torch.equal(inverses.damped_inverse(factor, 0.1), alone)


def test_a_damped_inverse_leaves_the_factor_as_it_is():
    """Oracle: the factor before; damping added in place would pile up in the running average."""
    factor = spectrum(torch.rand(LEAF + 1))
    before = factor.clone()
    inverses.damped_inverse(factor, 0.1)
    assert torch.equal(factor, before)


@pytest.mark.parametrize("damping", [1e-4, 1e-5])
def test_where_blocks_are_not_accurate_enough_cholesky_is_taken(damping):
    """Oracle: LAPACK's inverse, bit by bit; blocks alone are off by more than the tolerance."""
    factor = spectrum(torch.cat([torch.rand(3) + 30, torch.zeros(5 * LEAF)]))
    damped = factor + damping * torch.eye(len(factor))
    alone = inverses._inverse_by_blocks(damped)
    assert not error(alone, damped) < inverses.TOLERANCE  # may be NaN
    expected = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    assert torch.equal(inverses.damped_inverse(factor, damping), expected)


@pytest.mark.parametrize("off", [1e-2, 1e-4])
def test_the_error_of_an_inverse_is_seen(off):
    """Oracle: an inverse whose every direction is off by a known factor."""
    matrix = spectrum(torch.rand(300) + 0.1)
    wrong = torch.linalg.inv(matrix.double()).float() * (1 + off)
    assert inverses.error_of_inverse(matrix, wrong) == pytest.approx(off, rel=0.1)


def test_a_turned_basis_is_off_by_what_it_leaves_off_the_diagonal():
    """Oracle: diag(3, 1) seen in a basis turned by an angle, by hand."""
    angle = torch.tensor(0.1, dtype=torch.float64)
    sine, cosine = angle.sin(), angle.cos()
    turned = torch.stack([torch.stack([cosine, -sine]), torch.stack([sine, cosine])])
    factor = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    values, misfit = eigenbases.values_in_basis(factor, turned)
    expected = torch.stack([3 * cosine**2 + sine**2, 3 * sine**2 + cosine**2])
    torch.testing.assert_close(values, expected)
    off_diagonal = (3 - 1) * sine * cosine
    assert misfit == pytest.approx((2 * off_diagonal**2 / (3**2 + 1**2)).sqrt().item())


@pytest.mark.parametrize("order", [5, LEAF + 1])
def test_a_factors_own_basis_fits(order):
    """Oracle: the decomposition, and zero except for rounding."""
    factor = spectrum(torch.rand(order))
    expected, vectors = eigenbases.eigenbasis(factor)
    values, misfit = eigenbases.values_in_basis(factor, vectors)
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-6)
    assert misfit < 1e-5


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse"])
@pytest.mark.parametrize("order", [3, LEAF + 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_decomposed(order, bad, preconditioner):
    """Oracle: NaN; LAPACK finds an inverse if the diagonal has infinity."""
    layer = LayerShape("0", order, order)
    factor = make_plan([layer], 1, Strategy(MemOpt()), preconditioner=preconditioner).factors["0.A"]
    packed = torch.zeros(factor.packed)
    matrix = torch.eye(order)
    matrix[1, 1] = bad
    add_triangle(packed, matrix)
    added = torch.tensor(0.1) if preconditioner == "inverse" else None
    made = decomposed(factor, PRECONDITIONERS[preconditioner], packed, added)
    assert all(block.isnan().all() for block in made.values())


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse"])
@pytest.mark.parametrize("order", [3, 4])
def test_factors_of_one_order_are_decomposed_together(order, preconditioner):
    """Oracle: each factor alone."""
    layers = [LayerShape(name, order, order) for name in "01"]
    plan = make_plan(layers, 1, Strategy(MemOpt()), preconditioner=preconditioner)
    factors = [plan.factors[f"{name}.A"] for name in "01"]
    packed = torch.zeros(2, *factors[0].packed)
    add_triangle(packed, torch.stack([spectrum(torch.rand(order)) for _ in factors]))
    added = torch.tensor([0.1, 0.2]) if preconditioner == "inverse" else None
    found = decomposed_together(factors, PRECONDITIONERS[preconditioner], packed, added)
    for place, factor in enumerate(factors):
        more = None if added is None else added[place]
        for name, block in decomposed(
            factor, PRECONDITIONERS[preconditioner], packed[place], more
        ).items():
            torch.testing.assert_close(found[name], block, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", [3, LEAF + 1, 3 * LEAF])
def test_what_is_not_positive_definite_is_not_inverted(order):
    """Oracle: NaN; an indefinite matrix may well have an inverse, also by blocks."""
    assert inverses.damped_inverse(-torch.eye(order), 0.1).isnan().all()


@pytest.mark.parametrize(("a", "g"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_a_factor_of_zeros_shares_the_damping_evenly(a, g):
    """Oracle: sqrt(damping) for both; a zero-initialised layer behind makes a factor of zeros."""
    share = inverses.tikhonov_share(torch.tensor(a) / torch.tensor(g), 0.04)
    assert share.item() == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("preconditioner", "tried"),
    [("eigen", [torch.float32, torch.float64]), ("inverse", [torch.float32] + 2 * [torch.float64])],
)
@pytest.mark.parametrize("own", [torch.float32, torch.float64])
def test_what_fails_is_not_tried_again_as_it_was(monkeypatch, preconditioner, tried, own):
    """Oracle: by hand: another dtype, and more damping for preconditioners with damping."""
    seen = []

    def failing(factor, *damping):
        seen.append((factor.dtype, *map(float, damping)))
        raise ArithmeticError("on purpose")

    for name in ("eigenbasis", "damped_inverse"):
        monkeypatch.setattr(numerics, name, failing)
    factor = make_plan(
        [LayerShape("0", 2, 2)], 1, Strategy(MemOpt()), preconditioner=preconditioner
    ).factors["0.A"]
    added = None if preconditioner == "eigen" else torch.tensor(0.1, dtype=own)
    made = decomposed(
        factor, PRECONDITIONERS[preconditioner], torch.ones(factor.packed, dtype=own), added
    )
    assert all(block.isnan().all() for block in made.values())
    assert len(set(seen)) == len(seen)
    assert [dtype for dtype, *_ in seen] == tried[own == torch.float64 :]
