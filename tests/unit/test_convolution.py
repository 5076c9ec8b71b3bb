from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mpikfac.layers.convolution import autocorrelation, moments
from mpikfac.layers.convolution.window import Window, spread
from support import oracles


def window(module):
    return Window(
        module.kernel_size, module.stride, [(p, p) for p in module.padding], module.dilation
    )


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def assert_moment(total, vectors):
    """Check that `total` is the sum of outer products of `vectors`."""
    torch.testing.assert_close(total, vectors.T @ vectors, rtol=1e-10, atol=1e-10)


def test_a_convolutions_outputs_are_its_pixels():
    """Oracle: the sum over outer products of channel vectors."""
    g = torch.randn(3, 4, 5, 2).double()
    assert_moment(moments.output_sum(g), g.permute(0, 2, 3, 1).reshape(-1, 4))


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
    assert_moment(moments.input_sum(x, window(module), bias), oracles.input_vectors(module, x))


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def every_second(x):
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    return wide[..., ::2]


def turned(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", [channels_last, every_second, turned])
@pytest.mark.parametrize("groups", [1, 3, 9])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_images_need_not_be_contiguous(dims, groups, layout, dtype):
    """Oracle: the same values in the usual memory format."""
    x = torch.randn(3, 9, *(6, 7, 8)[:dims], dtype=dtype)
    laid_out = layout(x)
    assert not laid_out.is_contiguous()
    close = torch.finfo(dtype).eps ** 0.6
    for kernel, stride, padding in [(3, 1, (1, 1)), (3, 2, (0, 1)), (1, 1, (0, 0)), (1, 2, (0, 0))]:
        shape = Window((kernel,) * dims, (stride,) * dims, (padding,) * dims, (1,) * dims)
        for moment in (moments.input_sum, moments.input_vector, moments.input_means):
            found, expected = (moment(i, shape, True, groups=groups) for i in (laid_out, x))
            torch.testing.assert_close(found, expected, rtol=close, atol=close)
    for moment in (moments.output_sum, moments.output_vector):
        found, expected = moment(laid_out, groups), moment(x, groups)
        torch.testing.assert_close(found, expected, rtol=close, atol=close)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("channels", "groups"), [(3, 1), (40, 1), (3, 3), (40, 40), (40, 5)])
@pytest.mark.parametrize("way", [moments.by_patches, autocorrelation.by_correlation])
@pytest.mark.parametrize(("kernel", "padding", "dilation"), [(3, 1, 1), (2, 0, 3), (5, 2, 1)])
def test_every_way_in_float32(way, channels, groups, memory_format, kernel, padding, dilation):
    """Oracle: im2col in float64; float32 takes other kernels than float64."""
    module = nn.Conv2d(channels, 2, kernel, padding=padding, dilation=dilation, bias=False)
    x = torch.randn(5, channels, 9, 8).to(memory_format=memory_format)
    vectors = oracles.input_vectors(module, x.double()).unflatten(1, (groups, -1))
    expected = torch.einsum("vgi,vgj->gij", vectors, vectors)
    found = way(x, window(module), groups)
    assert found.shape == expected.shape
    assert (found.double() - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("shape", [(4, 16, 20, 20), (4, 64, 3, 3), (6, 8, 1, 1)])
def test_outputs_in_float32(shape, groups, memory_format):
    """Oracle: the sum over outer products in float64."""
    g = torch.randn(shape).to(memory_format=memory_format)
    vectors = g.double().permute(0, 2, 3, 1).reshape(-1, groups, shape[1] // groups)
    expected = torch.einsum("vgi,vgj->gij", vectors, vectors)
    found = moments.output_sum(g, groups).double()
    assert (found - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("size", [(7,), (4, 3), (3, 2, 4)])
def test_outputs_of_every_dimension(size, groups):
    """Oracle: sums over vectors and outer products of every group's channels."""
    g = torch.randn(3, 6, *size).double()
    vectors = g.flatten(2).transpose(1, 2).reshape(-1, groups, 6 // groups)
    total, vector = torch.einsum("vgi,vgj->gij", vectors, vectors), vectors.sum(0)
    if groups == 1:
        total, vector = total[0], vector[0]
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(moments.output_sum(g, groups), total, **close)
    torch.testing.assert_close(moments.output_vector(g, groups), vector, **close)


def test_what_a_transposed_convolution_cuts_off_is_not_in_the_image():
    """Oracle: by hand: [3, 0, 2, 0].

    Pixels 1 2 3, two apart and one zero longer, are 1 0 2 0 3 0. Turned over, and an element less
    on either side, the image is 3 0 2 0.
    """
    image, shape = spread(torch.tensor([[[1.0, 2, 3]]]), (1,), (2,), (1,), (1,), (1,))
    assert image.tolist() == [[[3, 0, 2, 0]]]
    assert shape == Window((1,), (1,), ((0, 0),), (1,))


@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("geometry", [{"padding": 1}, {"padding": 1, "stride": 2}], ids=str)
def test_inputs_rounded_to_bfloat16(geometry, groups):
    """Oracle: im2col in float64; errors stay within bfloat16's rounding, 2^-8."""
    module = nn.Conv2d(16, 2, 3, bias=False, **geometry)
    x = torch.randn(32, 16, 8, 8).relu()
    vectors = oracles.input_vectors(module, x.double()).unflatten(1, (groups, -1))
    vectors = F.pad(vectors, (0, 1), value=1)
    expected = torch.einsum("vgi,vgj->gij", vectors, vectors).squeeze(0)
    found = moments.input_sum(x, window(module), True, torch.bfloat16, groups)
    assert found.dtype == torch.float32
    assert 1e-6 < (found - expected).norm() / expected.norm() < 2**-8
    assert torch.equal(found[..., -1, -1].double(), expected[..., -1, -1])  # counts are exact


def test_the_autocorrelation_is_used_where_it_pays(monkeypatch):
    """Oracle: im2col, which the autocorrelation's own case never calls."""
    monkeypatch.setattr(moments, "by_patches", None)
    x = torch.randn(32, 16, 8, 8).double()
    total = moments.input_sum(x, window(nn.Conv2d(16, 2, 3, padding=1)), False)
    assert_moment(total, F.unfold(x, 3, padding=1).transpose(1, 2).reshape(-1, 144))


def test_precision_settings_are_left_alone():
    """Oracle: the setting; torch's older and newer settings must not be mixed."""
    settings = torch.backends.cudnn.conv
    before = settings.fp32_precision
    settings.fp32_precision = "ieee"
    try:
        x = torch.randn(32, 16, 8, 8)
        moments.input_sum(x, window(nn.Conv2d(16, 2, 3, padding=1)), False)
        assert settings.fp32_precision == "ieee"
    finally:
        settings.fp32_precision = before


def test_the_sums_of_a_padded_convolution_take_shifts_instead_of_patches():
    """Oracle: by hand: products of the shifts, of the strips beside the output, and of the corners.

    Every pixel has 3 rows of 5 differences of offsets, and a pixel of the four strips has 5
    differences. Four corners have one product.
    """
    batch, channels, size = 8, 4, 32
    with torch.device("meta"):  # the products of the CPU's own kernel are not counted
        x = torch.empty(batch, channels, size, size)
    geometry = window(nn.Conv2d(channels, 1, 3, padding=1))
    with FlopCounterMode(display=False) as counter:
        moments.input_sum(x, geometry, bias=False)
    per_pixel = 2 * batch * channels**2
    expected = per_pixel * (15 * size**2 + 4 * 5 * size + 4)
    assert counter.get_total_flops() == expected
