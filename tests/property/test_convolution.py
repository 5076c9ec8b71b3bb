from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from mpikfac.layers.convolution import moments, window
from support import oracles

pytestmark = pytest.mark.slow

SIZES = {1: 8, 2: 5, 3: 2}  # most elements beyond a single position, by dimensions
KERNELS = {1: 5, 2: 4, 3: 3}


@st.composite
def convolutions(draw, stride):
    """Draw a module without padding, an input with at least a position, and the input's padding."""
    n = draw(st.integers(1, 3))
    kernel, dilation, strides = (
        draw(st.tuples(*[numbers] * n))
        for numbers in (st.integers(1, KERNELS[n]), st.integers(1, 3), stride)
    )
    zeros = st.tuples(st.integers(0, 4), st.integers(0, 4))
    padding = draw(st.tuples(*[zeros] * n))
    smallest = [max(1, (k - 1) * d + 1 - sum(p)) for k, d, p in zip(kernel, dilation, padding)]
    size = [draw(st.integers(least, least + SIZES[n])) for least in smallest]
    module, x = draw(modules(f"Conv{n}d", size, kernel, strides, dilation=dilation))
    return module, x, padding


@st.composite
def transposed(draw):
    """Draw a transposed convolution and an input that gives an output."""
    n = draw(st.integers(1, 3))
    kernel, stride, dilation, padding, size = (
        draw(st.tuples(*[st.integers(least, most)] * n))
        for least, most in ((1, KERNELS[n]), (1, 3), (1, 3), (0, 5), (1, 5 - n))
    )
    extra = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation)]
    sizes = zip(size, kernel, stride, dilation, padding, extra)
    assume(all((i - 1) * s + (k - 1) * d + 1 + e > 2 * p for i, k, s, d, p, e in sizes))
    options = {"padding": padding, "output_padding": extra, "dilation": dilation}
    return draw(modules(f"ConvTranspose{n}d", size, kernel, stride, **options))


@st.composite
def modules(draw, name, size, *geometry, **options):
    """Draw a module with a single output per group, and an input `[batch, channels, *size]`."""
    groups, channels = draw(st.sampled_from([(1, 1), (1, 3), (1, 8), (2, 2), (2, 6), (3, 3)]))
    batch, bias = draw(st.integers(1, 3)), draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 99)))
    module = getattr(nn, name)(channels, groups, *geometry, groups=groups, bias=bias, **options)
    return module.double(), torch.randn(batch, channels, *size).double()


def assert_moments(a, x, shape, bias, groups):
    """Check moments of `x`, seen through `shape`, against moments of `a`.

    `a` has the shape `[batch, positions, groups, inputs]`.
    """
    total, vector, means = torch.einsum("bpgi,bpgj->gij", a, a), a.sum((0, 1)), a.mean(1)
    if groups == 1:
        total, vector, means = total[0], vector[0], means[:, 0]
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    close(moments.input_sum(x, shape, bias, groups=groups), total)
    close(moments.input_vector(x, shape, bias, groups), vector)
    close(moments.input_means(x, shape, bias, groups), means)


def assert_convolution(module, x, padding):
    shape = window.Window(module.kernel_size, module.stride, padding, module.dilation)
    padded = F.pad(x, [zeros for pair in reversed(padding) for zeros in pair])
    a = oracles.weight_vectors(module, padded)
    assert_moments(a, x, shape, module.bias is not None, module.groups)


@given(convolutions(st.just(1)))
@settings(max_examples=300)
def test_unstrided_convolutions(case):
    """Oracle: autograd's derivative of the module's output, also where correlating does not pay."""
    with mock.patch.object(moments, "worth_correlating", return_value=True):
        assert_convolution(*case)


@given(convolutions(st.integers(1, 3)))
@settings(max_examples=300)
def test_any_convolution(case):
    """Oracle: autograd's derivative of the module's output by weight and bias."""
    assert_convolution(*case)


@given(transposed(), st.booleans())
@settings(max_examples=300)
def test_transposed_convolutions(case, correlates):
    """Oracle: autograd's derivative of the module's output by weight and bias."""
    module, x = case
    image, shape = window.spread(
        *(x, module.kernel_size, module.stride, module.padding),
        *(module.output_padding, module.dilation),
    )
    a = oracles.weight_vectors(module, x)
    with mock.patch.object(moments, "worth_correlating", return_value=correlates):
        assert_moments(a, image, shape, module.bias is not None, module.groups)
    patches = window.patches(image, shape).flatten(1, x.dim() - 2).flatten(2).flip(1)
    seen = a[..., : patches.shape[-1] // module.groups].flatten(2)
    torch.testing.assert_close(patches, seen, rtol=0, atol=0)
