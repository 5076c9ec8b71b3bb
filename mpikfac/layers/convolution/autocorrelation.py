"""Compute second moments of a convolution's patches as autocorrelations, without copying patches.

This uses the weight-gradient kernel of a convolution, which sums products of the pixels of two
images at every offset. On a CPU, it is nearly as fast as large matrix products, and does not copy
channels-last images.

Images are two-dimensional. Channels form `groups` of c channels each, and are multiplied only
within a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from mpikfac.layers.convolution.window import Window
from mpikfac.numerics import squares


def pixel_sum(x: Tensor, groups: int = 1) -> Tensor:
    """Return `sum(x x^T)` `[groups, c, c]` over pixels of images `[batch, groups * c, *size]`."""
    x = x.unsqueeze(2).flatten(2, -2)  # this makes images two-dimensional
    channels, pixels = x.shape[1] // groups, x.shape[2] * x.shape[3]
    if groups > 1 and channels == 1:
        return x.square().sum((0, 2, 3)).view(groups, 1, 1)
    # Whether a pixel's channels are not adjacent in memory.
    apart = not x.is_contiguous(memory_format=torch.channels_last)
    if _in_kernel(x) and pixels > 1 and (pixels <= 16 * channels or not apart):
        return _correlate(x, x, (1, 1), groups).flatten(2)
    if groups > 1:
        rows = x.unflatten(1, (groups, channels)).permute(1, 2, 0, 3, 4).flatten(2)
        return squares(rows)
    if apart and channels <= pixels:
        rows = x.flatten(2)
        return squares(rows).sum(0, keepdim=True)
    columns = x.permute(0, 2, 3, 1).reshape(-1, channels)
    return squares(columns.T, torch.mm)[None]


def by_correlation(x: Tensor, window: Window, groups: int = 1) -> Tensor:
    """Return `sum(a a^T)` `[groups, inputs, inputs]` over the patches of a stride-1 convolution.

    The products of two patch elements at offsets o and o', summed over output positions, are the
    autocorrelation of `x` at o' - o. If the sum is over *all* positions at which a patch touches
    `x`, it depends only on o' - o. The terms of positions outside of the layer's output are then
    subtracted. Patches at these positions cover little of `x`: only a thin strip along each side if
    the layer is padded.
    """
    total = _sum_inside(channels_last(x), window, groups, (0, 1))
    return total.permute(4, 5, 0, 1, 6, 2, 3).flatten(4).flatten(1, 3)


def _sum_inside(x: Tensor, window: Window, groups: int, dims: tuple[int, ...]) -> Tensor:
    """Return `sum(a a^T)` `[kh, kw, kh, kw, groups, c, c]` over patches of `x`.

    In the dimensions `dims`, the sum is over the positions of the layer's output; in all others,
    over all positions at which a patch touches `x`.
    """
    if not dims:
        return _sum_everywhere(x, window, groups)
    dim, *remaining = dims
    total = _sum_inside(x, window, groups, tuple(remaining))
    for side in (0, 1):
        if window.padding[dim][side] < window.reach[dim]:
            strip, strip_window, taps = _strip(x, window, groups, dim, side)
            outside = _sum_inside(strip, strip_window, groups, tuple(remaining))
            block = total[taps, :, taps] if dim == 0 else total[:, taps, :, taps]
            block -= _taps_from_channels(outside, dim, block.shape)
    return total


def _strip(
    x: Tensor, window: Window, groups: int, dim: int, side: int
) -> tuple[Tensor, Window, slice]:
    """Return the strip of `x` seen by patches before or after the output positions along `dim`.

    In these patches, the `hidden` outermost kernel elements ("taps") along `dim` see only zeros
    outside of `x`. The remaining taps become channels of the strip, so that every pixel along `dim`
    stands for one position.

    Returns:
        The strip `[batch, groups * taps * c, ...]`, transposed if `dim` is 1; its window; and the
        taps that became channels.
    """
    pad, dilation = window.padding[dim][side], window.dilation[dim]
    thickness = window.reach[dim] - pad
    hidden = pad // dilation + 1
    seen = window.kernel[dim] - hidden
    strip = x.narrow(2 + dim, 0 if side == 0 else x.shape[2 + dim] - thickness, thickness)
    if seen > 1:
        overhang = [0, 0, 0, 0]
        overhang[2 * (1 - dim) + side] = (seen - 1) * dilation
        views = F.pad(strip, overhang).unfold(2 + dim, (seen - 1) * dilation + 1, 1)
        views = views[..., ::dilation].unflatten(1, (groups, -1))
        strip = views.permute(0, 1, 5, 2, 3, 4).flatten(1, 3)
    taps = slice(hidden, None) if side == 0 else slice(0, seen)
    kernel, padding = list(window.kernel), list(window.padding)
    kernel[dim], padding[dim] = 1, (0, 0)
    shape = Window(kernel, window.stride, padding, window.dilation)
    if dim == 1:  # transposed to run along rows, for which the weight-gradient kernel is faster
        strip = strip.transpose(2, 3)
        shape = Window(kernel[::-1], window.stride, padding[::-1], window.dilation[::-1])
    return channels_last(strip), shape, taps


def _taps_from_channels(total: Tensor, dim: int, shape: torch.Size) -> Tensor:
    """Return a strip's `sum(a a^T)`, with the taps of `dim` moved from channels to the kernel."""
    kernel, groups, channels = shape[:2], shape[4], shape[-1]
    taps, length = kernel[dim], kernel[1 - dim]
    total = total.view(length, length, groups, taps, channels, taps, channels)
    return total.permute(3, 0, 5, 1, 2, 4, 6) if dim == 0 else total.permute(0, 3, 1, 5, 2, 4, 6)


def _sum_everywhere(x: Tensor, window: Window, groups: int) -> Tensor:
    """Return `sum(a a^T)` `[kh, kw, kh, kw, groups, c, c]` over all positions that touch `x`.

    A position touches `x` if its patch does. The sum for a pair of kernel offsets is the
    autocorrelation at their difference, so the result is a block Toeplitz matrix.
    """
    kh, kw = window.kernel
    if kh == kw == 1:
        return pixel_sum(x, groups)[None, None, None, None]
    half = _autocorrelation(x, window, groups)
    full = half  # with a single row, `half` already contains all differences
    if kh > 1:
        full = torch.cat([half.transpose(1, 2)[:, :, :, 1:].flip(3, 4), half], 3)
    by_difference = full.permute(3, 4, 0, 1, 2).flatten(0, 1)
    pairs = by_difference.index_select(0, _differences(kh, kw, x.device))
    return pairs.view(kh, kw, kh, kw, *pairs.shape[1:])


@cache
def _differences(kh: int, kw: int, device: torch.device) -> Tensor:
    """Return, for each pair of kernel offsets, the index of their difference, `[(kh * kw)**2]`.

    Differences are numbered row by row, beginning with `(1 - kh, 1 - kw)`.
    """
    rows, columns = torch.arange(kh, device=device), torch.arange(kw, device=device)
    down = (rows - rows[:, None])[:, None, :, None] + kh - 1
    right = (columns - columns[:, None])[None, :, None, :] + kw - 1
    return (down * (2 * kw - 1) + right).flatten()


def _autocorrelation(x: Tensor, window: Window, groups: int) -> Tensor:
    """Return `sum_u x[c, u] x[d, u + delta]` `[groups, c, d, kh, 2 kw - 1]`, row differences >= 0.

    This is one call of the weight-gradient kernel, with `x` as both the input and the output's
    gradient; values at negative row differences follow by symmetry.
    """
    (kh, kw), (below, right) = window.kernel, window.reach
    lower = torch.cat([x, torch.zeros_like(x[:, :, :below])], 2) if below else x
    kernel = kh, 2 * kw - 1
    return _correlate(lower, x, kernel, groups, padding=(0, right), dilation=window.dilation)


def _correlate(
    x: Tensor, y: Tensor, kernel: tuple[int, int], groups: int, **geometry: Sequence[int]
) -> Tensor:
    """Return the weight gradient `sum_u y[c, u] x[d, u + delta]` `[groups, c, d, *kernel]`."""
    channels = x.shape[1] // groups
    total = conv2d_weight(x, (y.shape[1], channels, *kernel), y, groups=groups, **geometry)
    by_group: Tensor = total.unflatten(0, (groups, channels))
    return by_group.float() if by_group.dtype == torch.bfloat16 else by_group


# -- choice of the faster method -----------------------------------------------------------------


def can_correlate(x: Tensor, window: Window) -> bool:
    """Return whether `by_correlation` applies: stride 1, and padding <= window's reach < size."""
    return tuple(window.stride) == (1, 1) and all(
        max(window.padding[dim]) <= window.reach[dim] < x.shape[2 + dim] for dim in (0, 1)
    )


def worth_correlating(x: Tensor, window: Window) -> bool:
    """Return whether `by_correlation` takes much less work than copying all patches.

    Work is measured in multiplications per example and pair of channels; the rule was fitted to
    times measured on CPU cores. On a GPU, which runs small kernels faster than the host launches
    them, patches are always used, because they need the fewest kernels.
    """
    if x.is_cuda or x.is_xpu:
        return False
    (kh, kw), (reach_h, reach_w), (height, width) = window.kernel, window.reach, x.shape[2:]
    frame_h, frame_w = 2 * reach_h - sum(window.padding[0]), 2 * reach_w - sum(window.padding[1])
    seen_h, seen_w = frame_h / 2 / window.dilation[0], frame_w / 2 / window.dilation[1]
    shifts = kh * (2 * kw - 1) * (height + reach_h) * width
    above_below = seen_h**2 * (2 * kw - 1) * frame_h * width
    left_right = seen_w**2 * kh * frame_w * height
    spreading = 200 * (kh * kw) ** 2 / len(x)  # the matrix is written only once per batch
    patches = (kh * kw) ** 2 * (height + reach_h - frame_h) * (width + reach_w - frame_w)
    return x.shape[1] > 2 and shifts + above_below + left_right + spreading < 0.55 * patches


def _in_kernel(x: Tensor) -> bool:
    """Return whether the weight-gradient kernel is oneDNN's, which beats matrix products."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


def channels_last(x: Tensor) -> Tensor:
    """Return `x` in the memory format that the weight-gradient kernel accepts without a copy."""
    return x.contiguous(memory_format=torch.channels_last) if _in_kernel(x) else x
