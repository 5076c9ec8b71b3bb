from __future__ import annotations

import oracles
import pytest
import torch

from mpikfac import convolution, decompose, kron
from mpikfac.layout import triangle_shape


def symmetric(order, rank=None):
    """A random positive semidefinite matrix."""
    rows = torch.randn(rank or 2 * order, order, dtype=torch.float64)
    product = rows.T @ rows / len(rows)
    return (product + product.T) / 2


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("order", range(1, 13))
def test_a_triangle_unfolds_to_the_same_bits(order):
    """Oracle: the matrix itself, and its elements at `torch.tril_indices`."""
    matrix = symmetric(order)
    packed = matrix.new_zeros(triangle_shape(order))
    kron.add_triangle(packed, matrix)
    assert torch.equal(kron.unfold_triangle(packed), matrix)
    rows, columns = torch.tril_indices(order, order)
    assert torch.equal(packed.view(-1).sort().values, matrix[rows, columns].sort().values)


@pytest.mark.parametrize("order", [4, 5])
def test_triangles_add_up_in_place(order):
    """Oracle: the sum of the matrices."""
    first, second = symmetric(order), symmetric(order)
    packed = first.new_zeros(triangle_shape(order))
    kron.add_triangle(packed, first)
    kron.add_triangle(packed, second)
    assert torch.equal(kron.unfold_triangle(packed), first + second)


@pytest.mark.parametrize("damping", [1e-3, 1.0])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 5), (6, 4)])
@pytest.mark.parametrize("rank", [None, 2])
def test_preconditioning_is_the_dense_solve(outputs, inputs, damping, rank):
    """Oracle: `(G (x) A + damping I)^-1` written out; also where factors are singular."""
    a, g = symmetric(inputs, rank), symmetric(outputs, rank)
    gradient = torch.randn(outputs, inputs, dtype=torch.float64)
    (a_values, a_vectors), (g_values, g_vectors) = map(decompose.eigenbasis, (a, g))
    denominators = torch.empty_like(gradient)
    kron.damped_denominators(a_values, g_values, damping, denominators)
    out = kron.precondition(gradient, a_vectors, g_vectors, denominators)
    expected = oracles.kronecker_solve(gradient, a, g, damping)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(300, 512, 256), (64, 1024, 512), (2, 3, 4)])
@pytest.mark.parametrize("turned", [False, True])
def test_products_in_float32(shape, turned):
    """Oracle: the product in float64, whichever library makes it."""
    m, k, n = shape
    a, b = torch.randn(m, k), torch.randn(n, k).T if turned else torch.randn(k, n)
    found = kron.product(a, b)
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)


def test_preconditioning_in_bfloat16():
    """Oracle: float64; the error of four rounded products stays below 2 %."""
    a, g = symmetric(96), symmetric(64)
    gradient = torch.randn(64, 96, dtype=torch.float64)
    (a_values, a_vectors), (g_values, g_vectors) = map(decompose.eigenbasis, (a, g))
    denominators = torch.empty_like(gradient)
    kron.damped_denominators(a_values, g_values, 0.01, denominators)
    exact = kron.precondition(gradient, a_vectors, g_vectors, denominators)
    rounded = [part.bfloat16() for part in (a_vectors, g_vectors)]
    found = kron.precondition(gradient.float(), *rounded, denominators.float())
    assert 1e-4 < (found.double() - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("damping", [1e-3, 1.0])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 5), (6, 4)])
def test_damped_inverses_are_factored_tikhonov(outputs, inputs, damping):
    """Oracle: the two damped systems solved densely [Martens & Grosse 2015, sec. 6.3]."""
    a, g = symmetric(inputs), 100 * symmetric(outputs)
    gradient = torch.randn(outputs, inputs, dtype=torch.float64)
    a_inverse = decompose.damped_inverse(a, decompose.tikhonov_share(a, g, damping))
    g_inverse = decompose.damped_inverse(g, decompose.tikhonov_share(g, a, damping))
    out = kron.precondition_by_inverse(gradient, a_inverse, g_inverse)
    expected = oracles.tikhonov_solve(gradient, a, g, damping)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_a_damped_inverse_leaves_the_factor_as_it_is():
    """Oracle: the factor before; damping added in place would pile up in the running average."""
    factor = symmetric(4)
    before = factor.clone()
    decompose.damped_inverse(factor, 0.1)
    assert torch.equal(factor, before)


@pytest.mark.parametrize(("a", "g"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_a_factor_of_zeros_shares_the_damping_evenly(a, g):
    """Oracle: sqrt(damping) for both; a zero-initialised layer behind makes such a factor."""
    share = decompose.tikhonov_share(a * torch.eye(3), g * torch.eye(2), 0.04)
    assert share.item() == pytest.approx(0.2)


def test_eigenvalues_are_not_negative():
    """Oracle: rounding makes some eigenvalues of a singular factor negative; a basis has none."""
    factor = symmetric(20, rank=3).float()
    assert torch.linalg.eigvalsh(factor).min() < 0
    values, vectors = decompose.eigenbasis(factor)
    assert values.min() == 0
    torch.testing.assert_close(vectors @ values.diag() @ vectors.T, factor)


@pytest.mark.parametrize(
    ("divergence", "scale"), [(0.4, 0.05), (-0.4, 0.05), (0.001, 1.0), (1e-9, 1.0), (0.0, 1.0)]
)
def test_the_kl_clip_is_its_formula(divergence, scale):
    """Oracle: min(1, sqrt(kl_clip / |divergence|)) at kl_clip 0.001 [SC20, eq. 18]."""
    found = kron.kl_scale(torch.tensor(divergence, dtype=torch.float64), 0.001)
    assert found.item() == pytest.approx(scale)


@pytest.mark.parametrize("dead", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_factors_with_dead_inputs_are_decomposed(dead, seed):
    """Oracle: the factor itself, from its basis, to float32 rounding."""
    torch.manual_seed(seed)
    x = torch.randn(64, 32, 1, 1).relu() * (torch.rand(32, 1, 1) >= dead)
    window = convolution.Window(
        (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)
    )  # 8 of 9 taps see zeros only
    factor = convolution.input_sum(x, window, bias=False) / len(x)
    values, vectors = decompose.eigenbasis(factor)
    torch.testing.assert_close(vectors * values @ vectors.T, factor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_decomposed(bad):
    """Oracle: an error; LAPACK would return NaN without one."""
    factor = torch.eye(3)
    factor[1, 1] = bad
    with pytest.raises(ArithmeticError, match="not finite"):
        decompose.eigenbasis(factor)
    with pytest.raises(ArithmeticError, match="not finite"):
        decompose.damped_inverse(factor, 0.1)
