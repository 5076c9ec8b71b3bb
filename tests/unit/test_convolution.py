from __future__ import annotations

import oracles
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpikfac import convolution


def window(module):
    return convolution.Window(
        module.kernel_size, module.stride, [(p, p) for p in module.padding], module.dilation
    )


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def assert_moment(total, vectors):
    """`total` is the sum of outer products of `vectors`."""
    torch.testing.assert_close(total, vectors.T @ vectors, rtol=1e-10, atol=1e-10)


def test_a_convolutions_outputs_are_its_pixels():
    """Oracle: the sum over outer products of channel vectors."""
    g = torch.randn(3, 4, 5, 2).double()
    assert_moment(convolution.output_sum(g), g.permute(0, 2, 3, 1).reshape(-1, 4))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("channels", [3, 9])  # patches, and autocorrelation
@pytest.mark.parametrize(
    "geometry",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3},
        {"kernel_size": 3, "padding": 4},
        {"kernel_size": 3, "padding": 1, "stride": 2},
        {"kernel_size": 1},
        {"kernel_size": 1, "stride": 2},
        {"kernel_size": 1, "padding": 1},
        {"kernel_size": (3, 1), "padding": (1, 0)},
        {"kernel_size": (2, 4), "padding": (0, 3), "dilation": (3, 1)},
        {"kernel_size": 7, "padding": 3},
        {"kernel_size": 7},
    ],
    ids=str,
)
def test_a_convolutions_inputs_are_its_patches(geometry, channels, bias):
    """Oracle: im2col by `torch.nn.functional.unfold`."""
    module = nn.Conv2d(channels, 2, bias=bias, **geometry)
    x = torch.randn(3, channels, 8, 7).double()
    assert_moment(convolution.input_sum(x, window(module), bias), oracles.input_vectors(module, x))


def test_patches_need_not_be_contiguous():
    """Oracle: the same values in the usual memory format."""
    x = torch.randn(3, 9, 6, 6).double()
    shape = window(nn.Conv2d(9, 2, 3, padding=1))
    expected = convolution.input_sum(x, shape, True)
    found = convolution.input_sum(x.to(memory_format=torch.channels_last), shape, True)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [3, 40])
@pytest.mark.parametrize("way", [convolution.by_patches, convolution.by_correlation])
@pytest.mark.parametrize(("kernel", "padding", "dilation"), [(3, 1, 1), (2, 0, 3), (5, 2, 1)])
def test_every_way_in_float32(way, channels, memory_format, kernel, padding, dilation):
    """Oracle: im2col in float64; float32 takes other kernels than float64 does."""
    module = nn.Conv2d(channels, 2, kernel, padding=padding, dilation=dilation, bias=False)
    x = torch.randn(5, channels, 9, 8).to(memory_format=memory_format)
    vectors = oracles.input_vectors(module, x.double())
    found = way(x, window(module)).double()
    assert (found - vectors.T @ vectors).norm() < 1e-6 * (vectors.T @ vectors).norm()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(4, 16, 20, 20), (4, 64, 3, 3), (6, 8, 1, 1)])
def test_outputs_in_float32(shape, memory_format):
    """Oracle: the sum over outer products in float64."""
    g = torch.randn(shape).to(memory_format=memory_format)
    vectors = g.double().permute(0, 2, 3, 1).reshape(-1, shape[1])
    found = convolution.output_sum(g).double()
    assert (found - vectors.T @ vectors).norm() < 1e-6 * (vectors.T @ vectors).norm()


@pytest.mark.parametrize("geometry", [{"padding": 1}, {"padding": 1, "stride": 2}], ids=str)
def test_inputs_rounded_to_bfloat16(geometry):
    """Oracle: im2col in float64; errors stay within bfloat16's rounding, 2^-8."""
    module = nn.Conv2d(16, 2, 3, bias=True, **geometry)
    x = torch.randn(32, 16, 8, 8).relu()
    vectors = oracles.input_vectors(module, x.double())
    expected = vectors.T @ vectors
    found = convolution.input_sum(x, window(module), True, torch.bfloat16)
    assert found.dtype == torch.float32
    assert 1e-6 < (found - expected).norm() / expected.norm() < 2**-8
    assert found[-1, -1] == expected[-1, -1]  # counts are not rounded


def test_the_autocorrelation_is_used_where_it_pays(monkeypatch):
    """Oracle: im2col, which the case it was made for never calls."""
    monkeypatch.setattr(convolution, "by_patches", None)
    x = torch.randn(32, 16, 8, 8).double()
    total = convolution.input_sum(x, window(nn.Conv2d(16, 2, 3, padding=1)), False)
    assert_moment(total, F.unfold(x, 3, padding=1).transpose(1, 2).reshape(-1, 144))


def test_precision_settings_are_left_alone():
    """Oracle: the setting itself; torch's older and newer settings must not be mixed."""
    settings = torch.backends.cudnn.conv
    before = settings.fp32_precision
    settings.fp32_precision = "ieee"
    try:
        x = torch.randn(32, 16, 8, 8)
        convolution.input_sum(x, window(nn.Conv2d(16, 2, 3, padding=1)), False)
        assert settings.fp32_precision == "ieee"
    finally:
        settings.fp32_precision = before
