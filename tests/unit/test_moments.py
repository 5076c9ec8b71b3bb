from __future__ import annotations

import pytest
import torch
from torch import nn

from mpikfac.layers import Layer
from mpikfac.numerics import moments
from mpikfac.plan import NORMALIZATIONS
from support import oracles


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def assert_moment(total, vectors):
    """Check that `total` is the sum of outer products of `vectors`."""
    torch.testing.assert_close(total, vectors.T @ vectors, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 5), (2, 3, 4, 5)])
def test_a_linear_input_is_its_last_dimension(shape, bias):
    """Oracle: the sum over outer products, with a 1 appended for the bias."""
    x = torch.randn(shape).double()
    module = nn.Linear(5, 5, bias)
    layer, vectors = Layer("linear", module), oracles.input_vectors(module, x)
    assert_moment(layer.input_sum(x), vectors)
    assert_moment(layer.output_sum(x), x.reshape(-1, 5))
    torch.testing.assert_close(layer.input_vector(x), vectors.sum(0))
    torch.testing.assert_close(layer.output_vector(x), x.reshape(-1, 5).sum(0))


@pytest.mark.parametrize(
    ("name", "a", "g"),
    [
        ("expand", 1 / (8 * 9), 8),
        ("sc20", 1 / (8 * 9**2), 8 * 9),
        ("kfac-pytorch", 1 / (8 * 9**3), 1 / (8 * 9**3)),
    ],
)
def test_normalizations(name, a, g):
    """Oracle: the formulas for a batch of 8 and 9 positions."""
    assert moments.factor_scales(name, 8, 9) == pytest.approx((a, g))


@pytest.mark.parametrize("name", NORMALIZATIONS)
@pytest.mark.parametrize(("batch", "shared"), [(8, 1), (8, 9)])
def test_of_equal_vectors_a_factor_is_the_square_of_its_vector(name, batch, shared):
    """Oracle: the factor, from the sum of outer products."""
    same = torch.randn(5).double().expand(batch * shared, 5)
    for of_matrix, of_vector in zip(
        moments.factor_scales(name, batch, shared), moments.vector_scales(name, batch, shared)
    ):
        vector = of_vector * same.sum(0)
        torch.testing.assert_close(torch.outer(vector, vector), of_matrix * same.T @ same)
