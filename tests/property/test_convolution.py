from __future__ import annotations

from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mpikfac import convolution

pairs = st.tuples


@st.composite
def convolutions(draw, channels, stride, kernel):
    """An input `[batch, channels, height, width]` and a window with at least one position."""
    shape = convolution.Window(
        kernel=draw(pairs(kernel, kernel)),
        stride=draw(pairs(stride, stride)),
        padding=draw(pairs(*[pairs(st.integers(0, 4), st.integers(0, 4))] * 2)),
        dilation=draw(pairs(st.integers(1, 3), st.integers(1, 3))),
    )
    smallest = [
        max(1, (k - 1) * d + 1 - sum(p))
        for k, d, p in zip(shape.kernel, shape.dilation, shape.padding)
    ]
    size = [draw(st.integers(least, least + 8)) for least in smallest]
    torch.manual_seed(draw(st.integers(0, 99)))
    return torch.randn(draw(st.integers(1, 3)), draw(channels), *size).double(), shape


def assert_sum_over_patches(x, shape, bias):
    (top, bottom), (left, right) = shape.padding
    padded = F.pad(x, (left, right, top, bottom))
    columns = F.unfold(padded, shape.kernel, shape.dilation, 0, shape.stride)
    a = columns.transpose(1, 2).reshape(-1, columns.shape[1])
    a = torch.cat([a, a.new_ones(len(a), 1)], 1) if bias else a
    found = convolution.input_sum(x, shape, bias)
    torch.testing.assert_close(found, a.T @ a, rtol=1e-10, atol=1e-10)
    vector = convolution.input_vector(x, shape, bias)
    torch.testing.assert_close(vector, a.sum(0), rtol=1e-10, atol=1e-10)


@given(
    convolutions(st.sampled_from([1, 3, 8]), st.just(1), st.integers(1, 4)),
    st.booleans(),
)
@settings(max_examples=150)
def test_unstrided_convolutions(case, bias):
    """Oracle: im2col by `torch.nn.functional.unfold`, whether the autocorrelation pays or not."""
    with mock.patch.object(convolution, "worth_correlating", return_value=True):
        assert_sum_over_patches(*case, bias)


@given(
    convolutions(st.sampled_from([1, 3, 8]), st.integers(1, 3), st.integers(1, 4)),
    st.booleans(),
)
@settings(max_examples=100)
def test_any_convolution(case, bias):
    """Oracle: im2col by `torch.nn.functional.unfold`."""
    assert_sum_over_patches(*case, bias)
