from __future__ import annotations

import oracles
import pytest
import torch
from torch import nn

from mpikfac import moments


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def assert_moment(total, vectors):
    """`total` is the sum of outer products of `vectors`."""
    torch.testing.assert_close(total, vectors.T @ vectors, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 5), (2, 3, 4, 5), (5,)])
def test_a_linear_input_is_its_last_dimension(shape, bias):
    """Oracle: the sum over outer products, with a 1 appended for the bias."""
    x = torch.randn(shape).double()
    vectors = oracles.input_vectors(nn.Linear(5, 2, bias), x)
    assert_moment(moments.linear_input_sum(x, bias), vectors)
    assert_moment(moments.linear_output_sum(x), x.reshape(-1, 5))


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
