from __future__ import annotations

import oracles
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpikfac import moments


def window(module):
    return moments.Window(
        module.kernel_size, module.stride, [(p, p) for p in module.padding], module.dilation
    )


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


def test_a_convolutions_outputs_are_its_pixels():
    """Oracle: the sum over outer products of channel vectors."""
    g = torch.randn(3, 4, 5, 2).double()
    assert_moment(moments.conv_output_sum(g), g.permute(0, 2, 3, 1).reshape(-1, 4))


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
    assert_moment(moments.conv_input_sum(x, window(module), bias), oracles.input_vectors(module, x))


def test_patches_need_not_be_contiguous():
    """Oracle: the same values in the usual memory format."""
    x = torch.randn(3, 9, 6, 6).double()
    shape = window(nn.Conv2d(9, 2, 3, padding=1))
    expected = moments.conv_input_sum(x, shape, True)
    found = moments.conv_input_sum(x.to(memory_format=torch.channels_last), shape, True)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


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


def test_the_autocorrelation_is_used_where_it_pays(monkeypatch):
    """Oracle: the case it was made for never copies all patches; the result is im2col's still."""
    copied = []
    patches = moments._patches
    monkeypatch.setattr(
        moments, "_patches", lambda x, shape: copied.append(patches(x, shape)) or copied[-1]
    )
    x = torch.randn(32, 16, 8, 8).double()
    total = moments.conv_input_sum(x, window(nn.Conv2d(16, 2, 3, padding=1)), False)
    everything = F.unfold(x, 3, padding=1)
    assert sum(p.numel() for p in copied) < everything.numel()
    assert_moment(total, everything.transpose(1, 2).reshape(-1, 144))


def test_precision_settings_are_left_alone():
    """Oracle: the setting itself; torch's older and newer settings must not be mixed."""
    settings = torch.backends.cudnn.conv
    before = settings.fp32_precision
    settings.fp32_precision = "ieee"
    try:
        x = torch.randn(32, 16, 8, 8)
        moments.conv_input_sum(x, window(nn.Conv2d(16, 2, 3, padding=1)), False)
        assert settings.fp32_precision == "ieee"
    finally:
        settings.fp32_precision = before
