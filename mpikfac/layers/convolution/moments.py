"""Compute moments of a convolution's inputs and outputs, over positions and examples.

Images have 1, 2 or 3 dimensions. With `groups`, channels are multiplied only within a group: every
group has its own weight and moments, and results have the shape `[groups, ...]`. Inputs are ordered
as in a convolution's weight: first by channel, then by kernel element.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mpikfac.layers.convolution.autocorrelation import (
    by_correlation,
    can_correlate,
    channels_last,
    pixel_sum,
    worth_correlating,
)
from mpikfac.layers.convolution.window import Window, every, patches, planar
from mpikfac.numerics import squares, with_bias


def output_sum(g: Tensor, groups: int = 1) -> Tensor:
    """Return `sum(g g^T)` `[channels, channels]` over pixels of `g` `[batch, channels, *size]`.

    With groups, the result is `[groups, channels / groups, channels / groups]`.
    """
    total = pixel_sum(g, groups)
    return total if groups > 1 else total[0]


def output_vector(g: Tensor, groups: int = 1) -> Tensor:
    """Return `sum(g)` `[channels]` over pixels; with groups, `[groups, channels / groups]`."""
    return _by_group(g.sum((0, *range(2, g.dim()))), groups)


def input_sum(
    x: Tensor,
    window: Window,
    bias: bool,
    rounded_to: torch.dtype | None = None,
    groups: int = 1,
) -> Tensor:
    """Return `sum(a a^T)` `[inputs, inputs]` over all patches of `x` `[batch, channels, *size]`.

    With groups, the result is `[groups, inputs, inputs]`, with the inputs of one group.

    Args:
        rounded_to: the dtype to which pixels, and the sums of their products, are rounded; the
            sums are still accumulated in float32.
    """
    pixels = x if rounded_to is None else _rounded(x, rounded_to)
    total = _patch_sum(pixels, window, groups).to(torch.promote_types(x.dtype, torch.float32))
    total = total if groups > 1 else total[0]
    return with_bias(total, input_vector(x, window, bias, groups)) if bias else total


def _rounded(x: Tensor, to: torch.dtype) -> Tensor:
    """Return `x` rounded to the dtype `to`, in a dtype whose products accumulate in float32.

    A processor without bfloat16 instructions accumulates products of bfloat16 in bfloat16.
    """
    rounded = x.to(to)
    slow = x.is_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return rounded.to(x.dtype) if slow else rounded


def input_vector(x: Tensor, window: Window, bias: bool, groups: int = 1) -> Tensor:
    """Return `sum(a)` `[inputs]` over all patches; with groups, `[groups, inputs]`."""
    # Summing over the batch commutes with taking patches, which are then a view of the sum.
    views = patches(_batch_sum(x), window)
    positions = views.shape[1 : x.dim() - 1].numel()
    total = _by_group(views.sum(tuple(range(x.dim() - 1))).flatten(), groups)
    return F.pad(total, (0, 1), value=len(x) * positions) if bias else total


def input_means(x: Tensor, window: Window, bias: bool, groups: int = 1) -> Tensor:
    """Return each example's mean of `a` over positions, `[batch, inputs]`.

    With groups, the result is `[batch, groups, inputs]`.
    """
    means = patches(x, window).mean(tuple(range(1, x.dim() - 1))).flatten(1)
    means = _by_group(means, groups)
    return F.pad(means, (0, 1), value=1.0) if bias else means


def _patch_sum(x: Tensor, window: Window, groups: int) -> Tensor:
    """Return `sum(a a^T)` `[groups, inputs, inputs]` over all patches, without the bias."""
    if not any(window.reach) and not any(map(any, window.padding)):
        return pixel_sum(x[every(window.stride)], groups)
    image, plane = planar(x, window)
    if can_correlate(image, plane) and worth_correlating(image, plane):
        return by_correlation(image, plane, groups)
    return by_patches(image, plane, groups)


def by_patches(x: Tensor, window: Window, groups: int = 1) -> Tensor:
    """Return `sum(a a^T)` `[groups, inputs, inputs]` from a copy of all 2-D patches (im2col)."""
    if groups > 1:
        views = patches(x.contiguous(), window).unflatten(3, (groups, -1))
        rows = views.permute(3, 4, 5, 6, 0, 1, 2).flatten(1, 3).flatten(2)
        return squares(rows)
    channels, (kh, kw) = x.shape[1], window.kernel
    views = patches(channels_last(x), window)
    if views[..., 0, 0, 0].numel() < channels * kh * kw:
        rows = views.flatten(3).flatten(0, 2)
        return squares(rows.T)[None]
    # Patches with offsets before channels can be copied in contiguous runs.
    pixels = views.permute(0, 1, 2, 4, 5, 3).flatten(3).permute(0, 3, 1, 2)
    total = pixel_sum(pixels).view(kh, kw, channels, kh, kw, channels)
    return total.permute(2, 0, 1, 5, 3, 4).reshape(1, channels * kh * kw, -1)


def _batch_sum(x: Tensor) -> Tensor:
    """Return the sum of all images, `[1, channels, *size]`."""
    pixels, dtype = x.movedim(1, -1), torch.promote_types(x.dtype, torch.float32)
    if pixels.is_contiguous():  # torch's sum is 30 times slower if strides are not descending
        return pixels.sum(0, keepdim=True, dtype=dtype).movedim(-1, 1).contiguous()
    return x.sum(0, keepdim=True, dtype=dtype)


def _by_group(vectors: Tensor, groups: int) -> Tensor:
    """Return vectors `[..., n]` as `[..., groups, n / groups]` if `groups` > 1."""
    return vectors.unflatten(-1, (groups, -1)) if groups > 1 else vectors
