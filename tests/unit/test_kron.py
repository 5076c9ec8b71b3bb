from __future__ import annotations

import pytest
import torch

from mpikfac.numerics import eigenbases, inverses, precondition_by_vectors, products, triangles
from mpikfac.plan.layout import triangle_shape
from mpikfac.preconditioners import Held, Inverse
from support import inside, oracles


def symmetric(order, rank=None):
    """Return a random positive semidefinite matrix."""
    rows = torch.randn(rank or 2 * order, order, dtype=torch.float64)
    product = rows.T @ rows / len(rows)
    return (product + product.T) / 2


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("order", range(1, 13))
def test_a_triangle_unfolds_to_the_same_bits(order):
    """Oracle: the matrix, the elements at `torch.tril_indices`, and the eigenvalues."""
    matrix = symmetric(order)
    packed = matrix.new_zeros(triangle_shape(order))
    triangles.add_triangle(packed, matrix)
    assert torch.equal(triangles.unfold_triangle(packed), matrix)
    torch.testing.assert_close(
        triangles.triangle_trace(packed), torch.linalg.eigvalsh(matrix).sum()
    )
    rows, columns = torch.tril_indices(order, order)
    assert torch.equal(packed.view(-1).sort().values, matrix[rows, columns].sort().values)


@pytest.mark.parametrize("order", [4, 5])
def test_triangles_add_up_in_place(order):
    """Oracle: the sum of the matrices."""
    first, second = symmetric(order), symmetric(order)
    packed = first.new_zeros(triangle_shape(order))
    triangles.add_triangle(packed, first)
    triangles.add_triangle(packed, second)
    assert torch.equal(triangles.unfold_triangle(packed), first + second)


@pytest.mark.parametrize("damping", [1e-3, 1.0])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 5), (6, 4)])
@pytest.mark.parametrize("rank", [None, 2])
def test_preconditioning_is_the_dense_solve(outputs, inputs, damping, rank):
    """Oracle: `(G (x) A + damping I)^-1` written out; also for singular factors."""
    a, g = symmetric(inputs, rank), symmetric(outputs, rank)
    gradient = torch.randn(outputs, inputs, dtype=torch.float64)
    (a_values, a_vectors), (g_values, g_vectors) = map(eigenbases.eigenbasis, (a, g))
    denominators = torch.empty_like(gradient)
    eigenbases.damped_denominators([a_values], [g_values], damping, denominators)
    out = eigenbases.precondition(gradient, [a_vectors], [g_vectors], denominators)
    expected = oracles.kronecker_solve(gradient, a, g, damping)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(300, 512, 256), (64, 1024, 512), (2, 3, 4)])
@pytest.mark.parametrize("turned", [False, True])
def test_products_in_float32(shape, turned):
    """Oracle: the product in float64, for any library behind the product."""
    m, k, n = shape
    a, b = torch.randn(m, k), torch.randn(n, k).T if turned else torch.randn(k, n)
    found = products.product(a, b)
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)


def test_preconditioning_in_bfloat16():
    """Oracle: float64; the error of four rounded products stays below 2 %."""
    a, g = symmetric(96), symmetric(64)
    gradient = torch.randn(64, 96, dtype=torch.float64)
    (a_values, a_vectors), (g_values, g_vectors) = map(eigenbases.eigenbasis, (a, g))
    denominators = torch.empty_like(gradient)
    eigenbases.damped_denominators([a_values], [g_values], 0.01, denominators)
    exact = eigenbases.precondition(gradient, [a_vectors], [g_vectors], denominators)
    rounded = [[part.bfloat16()] for part in (a_vectors, g_vectors)]
    found = eigenbases.precondition(gradient.float(), *rounded, denominators.float())
    assert 1e-4 < (found.double() - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("damping", [1e-3, 1.0])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 5), (6, 4)])
def test_damped_inverses_are_factored_tikhonov(outputs, inputs, damping):
    """Oracle: the two damped systems solved densely [Martens & Grosse 2015, sec. 6.3]."""
    a, g = symmetric(inputs), 100 * symmetric(outputs)
    gradient = torch.randn(outputs, inputs, dtype=torch.float64)
    ratio = a.diagonal().mean() / g.diagonal().mean()
    a_inverse = inverses.damped_inverse(a, inverses.tikhonov_share(ratio, damping))
    g_inverse = inverses.damped_inverse(g, inverses.tikhonov_share(1 / ratio, damping))
    out = by_inverses(gradient, [a_inverse], [g_inverse])
    expected = oracles.tikhonov_solve(gradient, a, g, damping)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("damping", [1e-3, 1.0])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 5), (6, 4)])
def test_preconditioning_by_vectors_is_the_dense_solve(outputs, inputs, damping):
    """Oracle: the Kronecker product of both squares, damped, inverted densely."""
    a, g = (torch.randn(n, dtype=torch.float64) for n in (inputs, outputs))
    gradient = torch.randn(outputs, inputs, dtype=torch.float64)
    found = precondition_by_vectors(gradient, [a], [g], damping)
    expected = oracles.eva_solve(gradient, a, g, damping)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def by_inverses(gradient, a, g):
    return Inverse().direction(gradient, Held({"inverse": a}, {"inverse": g}))


def side(form, order):
    """Return a side's blocks in the given form, and the whole matrix of the blocks."""
    if form == "none":
        return [], torch.eye(order, dtype=torch.float64)
    if form == "diagonal":
        elements = torch.rand(order, dtype=torch.float64)
        return [elements], elements.diag()
    sizes = {"whole": [order], "blocks": [order // 2, order - order // 2]}[form]
    blocks = list(map(symmetric, sizes))
    return blocks, torch.block_diag(*blocks)


FORMS = ["whole", "blocks", "diagonal", "none"]


@pytest.mark.parametrize("a_form", FORMS)
@pytest.mark.parametrize("g_form", FORMS[:-1])
def test_products_with_each_form_of_a_side(a_form, g_form):
    """Oracle: products with the whole matrices."""
    (a, whole_a), (g, whole_g) = side(a_form, 5), side(g_form, 4)
    gradient = torch.randn(4, 5, dtype=torch.float64)
    found = by_inverses(gradient, a, g)
    torch.testing.assert_close(found, whole_g @ gradient @ whole_a)


@pytest.mark.parametrize("a_form", FORMS)
@pytest.mark.parametrize("g_form", FORMS[:-1])
def test_eigenbases_of_each_form_of_a_side(a_form, g_form):
    """Oracle: the dense solve with the whole matrices."""
    (a, whole_a), (g, whole_g) = side(a_form, 5), side(g_form, 4)
    gradient = torch.randn(4, 5, dtype=torch.float64)
    values, vectors = [], []
    for blocks in (a, g):
        bases = [eigenbases.eigenbasis(b if b.dim() == 2 else b.view(-1, 1, 1)) for b in blocks]
        values.append([found.view(-1) for found, _ in bases])
        vectors.append([v.view(b.shape) for (_, v), b in zip(bases, blocks)])
    denominators = torch.empty_like(gradient)
    eigenbases.damped_denominators(*values, 0.01, denominators)
    found = eigenbases.precondition(gradient, *vectors, denominators)
    torch.testing.assert_close(found, oracles.kronecker_solve(gradient, whole_a, whole_g, 0.01))


def test_groups_are_preconditioned_one_by_one():
    """Oracle: every group alone."""
    a, g = (torch.stack([symmetric(n) for _ in range(3)]) for n in (4, 2))
    gradient = torch.randn(3, 2, 4, dtype=torch.float64)
    found = by_inverses(gradient, [a], [g])
    one_by_one = [by_inverses(x, [y], [z]) for x, y, z in zip(gradient, a, g)]
    torch.testing.assert_close(found, torch.stack(one_by_one))
    packed = a.new_zeros(3, *triangle_shape(4))
    triangles.add_triangle(packed, a)
    assert torch.equal(triangles.unfold_triangle(packed), a)
    torch.testing.assert_close(triangles.triangle_trace(packed), a.diagonal(dim1=1, dim2=2).sum(1))
    damping = torch.tensor([0.1, 0.2, 0.3]).double()
    each_inverse = [inverses.damped_inverse(each, float(d)) for each, d in zip(a, damping)]
    torch.testing.assert_close(inverses.damped_inverse(a, damping), torch.stack(each_inverse))


@pytest.mark.parametrize("missing", ["A", "G"])
def test_a_vector_may_stand_for_one_side(missing):
    """Oracle: the dense solve with the identity for the missing side; groups one by one."""
    a, g = (torch.randn(3, n, dtype=torch.float64) for n in (5, 4))
    gradient = torch.randn(3, 4, 5, dtype=torch.float64)
    sides = ([] if missing == "A" else [a]), ([] if missing == "G" else [g])
    found = precondition_by_vectors(gradient, *sides, 0.1)
    for own_a, own_g, own, direction in zip(a, g, gradient, found):
        whole_a = torch.eye(5).double() if missing == "A" else torch.outer(own_a, own_a)
        whole_g = torch.eye(4).double() if missing == "G" else torch.outer(own_g, own_g)
        expected = oracles.kronecker_solve(own, whole_a, whole_g, 0.1)
        torch.testing.assert_close(direction, expected)


@pytest.mark.parametrize(
    ("divergence", "scale"), [(0.4, 0.05), (-0.4, 0.05), (0.001, 1.0), (1e-9, 1.0), (0.0, 1.0)]
)
def test_the_kl_clip_is_its_formula(divergence, scale):
    """Oracle: min(1, sqrt(kl_clip / |divergence|)) at kl_clip 0.001 [SC20, eq. 18]."""
    found = inside.clip_scale(torch.tensor([divergence], dtype=torch.float64), 0.001)
    assert found.item() == pytest.approx(scale)
