from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mpikfac.numerics import eigenbases, triangles
from mpikfac.plan.layout import triangle_shape
from support import oracles


def symmetric(order, rank):
    rows = torch.randn(rank, order).double()
    product = rows.T @ rows / rank
    return (product + product.T) / 2


@given(st.integers(1, 70), st.integers(0, 9), st.sampled_from([torch.float32, torch.float64]))
def test_triangles_add_up_exactly(order, seed, dtype):
    """Oracle: the sum of two matrices, to the last bit."""
    torch.manual_seed(seed)
    first, second = symmetric(order, 3).to(dtype), symmetric(order, 3).to(dtype)
    packed = first.new_zeros(triangle_shape(order))
    triangles.add_triangle(packed, first)
    triangles.add_triangle(packed, second)
    assert torch.equal(triangles.unfold_triangle(packed), first + second)


sizes = st.integers(1, 8)


@given(sizes, sizes, sizes, st.floats(1e-3, 10), st.integers(0, 9))
def test_preconditioning_solves_the_damped_system(outputs, inputs, rank, damping, seed):
    """Oracle: the dense solve with `G (x) A + damping I`."""
    torch.manual_seed(seed)
    a, g = symmetric(inputs, rank), symmetric(outputs, rank)
    gradient = torch.randn(outputs, inputs).double()
    (a_values, a_vectors), (g_values, g_vectors) = map(eigenbases.eigenbasis, (a, g))
    denominators = torch.empty_like(gradient)
    eigenbases.damped_denominators([a_values], [g_values], damping, denominators)
    out = eigenbases.precondition(gradient, [a_vectors], [g_vectors], denominators)
    expected = oracles.kronecker_solve(gradient, a, g, damping)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
