"""Moments of a convolution's inputs and outputs, mostly without copying its patches.

The workhorse of second moments is the kernel that computes a convolution's weight gradient: it sums
products of one image's pixels with another's at every offset of a kernel. On a CPU it runs near the
rate of large matrix products, on channels-last images without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from mpikfac.kron import product
from mpikfac.moments import with_bias, with_count


@dataclass(frozen=True)
class Window:
    """Geometry of a two-dimensional convolution, for height and width.

    Attributes:
        padding: zeros before and after each dimension: ((top, bottom), (left, right)).
    """

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[tuple[int, int]]
    dilation: Sequence[int]

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Distance between the first and the last element of the kernel, by dimension."""
        return tuple((k - 1) * d for k, d in zip(self.kernel, self.dilation))


def output_sum(g: Tensor) -> Tensor:
    """`sum(g g^T)` `[channels, channels]` over pixels of `g` `[batch, channels, height, width]`."""
    channels, pixels = g.shape[1], g.shape[2] * g.shape[3]
    apart = not g.is_contiguous(memory_format=torch.channels_last)  # channels are far apart
    if _in_kernel(g) and pixels > 1 and (pixels <= 16 * channels or not apart):
        return _correlate(g, g, (1, 1)).view(channels, channels)
    if apart and channels <= pixels:
        rows = g.flatten(2)
        return torch.bmm(rows, rows.transpose(1, 2)).sum(0)
    columns = g.permute(0, 2, 3, 1).reshape(-1, channels)
    return columns.T @ columns


def input_sum(
    x: Tensor, window: Window, bias: bool, rounded_to: torch.dtype | None = None
) -> Tensor:
    """`sum(a a^T)` `[inputs, inputs]` over all patches of `x` `[batch, channels, height, width]`.

    Inputs are ordered as a convolution's weight is: channel, kernel row, kernel column.

    Args:
        rounded_to: what pixels, and sums of their products, are rounded to; sums accumulate in
            float32 all the same.
    """
    pixels = x if rounded_to is None else x.to(rounded_to)
    if tuple(window.kernel) == (1, 1) and not any(map(any, window.padding)):
        total = output_sum(pixels[:, :, :: window.stride[0], :: window.stride[1]])
    elif can_correlate(x, window) and worth_correlating(x, window):
        total = by_correlation(pixels, window)
    else:
        total = by_patches(pixels, window)
    total = total.to(x.dtype)
    return with_bias(total, input_vector(x, window, bias)) if bias else total


def input_vector(x: Tensor, window: Window, bias: bool) -> Tensor:
    """`sum(a)` `[inputs]` over all patches, ordered as in `input_sum`."""
    # Summing over the batch commutes with taking patches, which are a view of the sum.
    patches = _patches(x.sum(0, keepdim=True), window)
    total = patches.sum((0, 1, 2)).flatten()
    return with_count(total, len(x) * patches[..., 0, 0, 0].numel()) if bias else total


# -- two ways to the same sum ---------------------------------------------------------------------


def by_patches(x: Tensor, window: Window) -> Tensor:
    """`sum(a a^T)` from the copy of all patches (im2col)."""
    channels, (kh, kw) = x.shape[1], window.kernel
    patches = _patches(_channels_last(x), window)
    if patches[..., 0, 0, 0].numel() < channels * kh * kw:
        rows = patches.flatten(3).flatten(0, 2)
        return product(rows.T, rows)
    # Taken as pixels with more channels, offsets before channels, they are copied in long runs.
    pixels = patches.permute(0, 1, 2, 4, 5, 3).flatten(3).permute(0, 3, 1, 2)
    total = output_sum(pixels).view(kh, kw, channels, kh, kw, channels)
    return _matrix(total.transpose(2, 3).transpose(3, 4))


def by_correlation(x: Tensor, window: Window) -> Tensor:
    """`sum(a a^T)` of a stride-1 convolution from autocorrelations of `x`.

    Two patch elements at offsets o and o' multiply to the autocorrelation of `x` at o' - o, summed
    over output positions. Summed over *all* positions at which a patch touches `x`, it depends on
    o' - o only. The positions around the layer's output are subtracted: their patches see little
    of `x`, a thin strip along each side if the layer is padded.
    """
    return _matrix(_sum_inside(_channels_last(x), window, (0, 1)))


def _sum_inside(x: Tensor, window: Window, dims: tuple[int, ...]) -> Tensor:
    """`sum(a a^T)` `[kh, kw, kh, kw, c, c]` over the output positions in `dims`.

    In the other dimension all positions count at which a patch touches `x`.
    """
    if not dims:
        return _sum_everywhere(x, window)
    dim, *others = dims
    total = _sum_inside(x, window, tuple(others))
    for side in (0, 1):
        if window.padding[dim][side] < window.reach[dim]:
            strip, strip_window, taps = _strip(x, window, dim, side)
            outside = _sum_inside(strip, strip_window, tuple(others))
            block = total[taps, :, taps] if dim == 0 else total[:, taps, :, taps]
            block -= _taps_from_channels(outside, dim, block.shape)
    return total


def _strip(x: Tensor, window: Window, dim: int, side: int) -> tuple[Tensor, Window, slice]:
    """The image that patches before or after the output positions of a dimension see.

    So far out, the `hidden` taps nearest the output see zeros of the padding only; the others
    become channels of the image, of which each pixel is one position in `dim`.

    Returns:
        The image `[batch, taps * channels, ...]`, turned if `dim` is 1, its window, and the taps.
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
        strip = views[..., ::dilation].permute(0, 4, 1, 2, 3).flatten(1, 2)
    taps = slice(hidden, None) if side == 0 else slice(0, seen)
    kernel, padding = list(window.kernel), list(window.padding)
    kernel[dim], padding[dim] = 1, (0, 0)
    shape = Window(kernel, window.stride, padding, window.dilation)
    if dim == 1:  # turned to lie along rows, as the weight-gradient kernel likes it
        strip = strip.transpose(2, 3)
        shape = Window(kernel[::-1], window.stride, padding[::-1], window.dilation[::-1])
    return _channels_last(strip), shape, taps


def _taps_from_channels(total: Tensor, dim: int, shape: torch.Size) -> Tensor:
    """The sum over a strip with its taps in `dim` as such again, not as channels."""
    kernel, channels = shape[:2], shape[-1]
    taps, length = kernel[dim], kernel[1 - dim]
    total = total.view(length, length, taps, channels, taps, channels)
    return total.permute(2, 0, 4, 1, 3, 5) if dim == 0 else total.permute(0, 2, 1, 4, 3, 5)


def _sum_everywhere(x: Tensor, window: Window) -> Tensor:
    """`sum(a a^T)` `[kh, kw, kh, kw, c, c]` over all positions at which a patch touches `x`.

    For pairs of offsets it is the autocorrelation at their difference: a block Toeplitz matrix.
    """
    channels, (kh, kw) = x.shape[1], window.kernel
    if kh == kw == 1:
        return output_sum(x).view(1, 1, 1, 1, channels, channels)
    half = _autocorrelation(x, window)
    whole = torch.cat([half.transpose(0, 1)[:, :, 1:].flip(2, 3), half], 2)
    by_difference = whole.permute(2, 3, 0, 1).flatten(0, 1)
    pairs = by_difference.index_select(0, _differences(kh, kw, x.device))
    return pairs.view(kh, kw, kh, kw, channels, channels)


@cache
def _differences(kh: int, kw: int, device: torch.device) -> Tensor:
    """For all pairs of offsets `[kh * kw * kh * kw]`: the number of their difference."""
    rows, columns = torch.arange(kh, device=device), torch.arange(kw, device=device)
    down = (rows - rows[:, None])[:, None, :, None] + kh - 1
    right = (columns - columns[:, None])[None, :, None, :] + kw - 1
    return (down * (2 * kw - 1) + right).flatten()


def _autocorrelation(x: Tensor, window: Window) -> Tensor:
    """`sum_u x[c, u] x[d, u + delta]` as `[c, d, kh, 2 kw - 1]` for row differences >= 0.

    One call of the weight-gradient kernel with `x` in both roles; negative row differences follow
    by symmetry.
    """
    (kh, kw), (below, beside) = window.kernel, window.reach
    lower = torch.cat([x, torch.zeros_like(x[:, :, :below])], 2) if below else x
    return _correlate(lower, x, (kh, 2 * kw - 1), padding=(0, beside), dilation=window.dilation)


def _correlate(x: Tensor, y: Tensor, kernel: tuple[int, int], **geometry: Sequence[int]) -> Tensor:
    """`sum_u y[c, u] x[d, u + delta]` `[c, d, *kernel]`: a convolution's weight gradient."""
    total = conv2d_weight(x, (y.shape[1], x.shape[1], *kernel), y, **geometry)
    return total.float() if total.dtype == torch.bfloat16 else total


def _matrix(total: Tensor) -> Tensor:
    """`[kh, kw, kh, kw, c, c]` as a matrix in the order of a weight's elements."""
    kh, kw, *_, channels = total.shape
    return total.permute(4, 0, 1, 5, 2, 3).reshape(channels * kh * kw, -1)


# -- what to use when ----------------------------------------------------------------------------


def can_correlate(x: Tensor, window: Window) -> bool:
    """Whether `by_correlation` applies: stride 1, padding and `x` as the kernel's reach asks."""
    return tuple(window.stride) == (1, 1) and all(
        max(window.padding[dim]) <= window.reach[dim] < x.shape[2 + dim] for dim in (0, 1)
    )


def worth_correlating(x: Tensor, window: Window) -> bool:
    """Whether `by_correlation` takes well under the work of `by_patches`.

    Work is in products per example and pair of channels; the rule is fitted to times on CPU cores.
    """
    (kh, kw), (reach_h, reach_w), (height, width) = window.kernel, window.reach, x.shape[2:]
    frame_h, frame_w = 2 * reach_h - sum(window.padding[0]), 2 * reach_w - sum(window.padding[1])
    seen_h, seen_w = frame_h / 2 / window.dilation[0], frame_w / 2 / window.dilation[1]
    shifts = kh * (2 * kw - 1) * (height + reach_h) * width
    around = seen_h**2 * (2 * kw - 1) * frame_h * width
    beside = seen_w**2 * kh * frame_w * height
    spreading = 200 * (kh * kw) ** 2 / len(x)  # writes the matrix once, whatever the batch
    patches = (kh * kw) ** 2 * (height + reach_h - frame_h) * (width + reach_w - frame_w)
    return x.shape[1] > 2 and shifts + around + beside + spreading < 0.55 * patches


def _in_kernel(x: Tensor) -> bool:
    """Whether the weight-gradient kernel outruns matrix products: oneDNN's does."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


def _channels_last(x: Tensor) -> Tensor:
    """`x`, in the order of elements that the weight-gradient kernel takes without a copy."""
    return x.contiguous(memory_format=torch.channels_last) if _in_kernel(x) else x


def _pad(x: Tensor, window: Window) -> Tensor:
    (top, bottom), (left, right) = window.padding
    return F.pad(x, (left, right, top, bottom)) if top or bottom or left or right else x


def _patches(x: Tensor, window: Window) -> Tensor:
    """A view of all patches, `[batch, height, width, channels, kh, kw]`."""
    pixels = _pad(x, window).permute(0, 2, 3, 1)
    for dim, (stride, reach) in enumerate(zip(window.stride, window.reach), start=1):
        pixels = pixels.unfold(dim, reach + 1, stride)
    return pixels[..., :: window.dilation[0], :: window.dilation[1]]
