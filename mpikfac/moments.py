"""Second moments of layer inputs and output gradients, and their normalisation.

With B examples in the batch, S positions that a weight is shared over (outputs of a convolution,
tokens), `a` a layer's inputs `[batch, shared, inputs]` (1 appended where there is a bias) and `g`
the gradient of the *mean* loss at its outputs `[batch, shared, outputs]`:

    expand         A = sum(a a^T) / (B S)      G = B sum(g g^T)

so that `A (x) G` is the layer's Fisher block if positions are independent, exactly so for linear
layers [Grosse & Martens 2016; Eschenhagen et al. 2023]. Two other scalings exist for comparison;
they change what a damping value means:

    sc20           A = sum(a a^T) / (B S^2)    G = B S sum(g g^T)       product as expand
    kfac-pytorch   A = sum(a a^T) / (B S^3)    G = sum(g g^T) / (B S^3) product B^2 S^5 smaller

For linear layers both of the latter count positions as examples (S = 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

Normalization = Literal["expand", "sc20", "kfac-pytorch"]
NORMALIZATIONS: tuple[Normalization, ...] = ("expand", "sc20", "kfac-pytorch")


def factor_scales(normalization: Normalization, batch: int, shared: float) -> tuple[float, float]:
    """What to multiply `sum(a a^T)` and `sum(g g^T)` by to get A and G."""
    if normalization == "expand":
        return 1 / (batch * shared), float(batch)
    if normalization == "sc20":
        return 1 / (batch * shared**2), batch * shared
    return 1 / (batch * shared**3), 1 / (batch * shared**3)


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


def linear_input_sum(x: Tensor, bias: bool) -> Tensor:
    """`sum(a a^T)` `[inputs, inputs]` of a linear layer's input `[..., features]`."""
    rows = x.reshape(-1, x.shape[-1])
    return with_bias(rows.T @ rows, rows.sum(0), len(rows)) if bias else rows.T @ rows


def linear_output_sum(g: Tensor) -> Tensor:
    """`sum(g g^T)` `[outputs, outputs]` of gradients `[..., outputs]`."""
    rows = g.reshape(-1, g.shape[-1])
    return rows.T @ rows


def conv_output_sum(g: Tensor) -> Tensor:
    """`sum(g g^T)` `[channels, channels]` of gradients `[batch, channels, height, width]`."""
    rows = g.flatten(2)
    return torch.bmm(rows, rows.transpose(1, 2)).sum(0)


def conv_input_sum(x: Tensor, window: Window, bias: bool) -> Tensor:
    """`sum(a a^T)` `[inputs, inputs]` over all patches of `x` `[batch, channels, height, width]`.

    Inputs are ordered as a convolution's weight is: channel, kernel row, kernel column.
    """
    if tuple(window.kernel) == (1, 1) and not any(map(any, window.padding)):
        total = conv_output_sum(x[:, :, :: window.stride[0], :: window.stride[1]])
    elif _can_correlate(x, window) and _worth_correlating(x, window):
        total = _correlated(x, window)
    else:
        patches = _patches(x, window)
        total = patches @ patches.T
    if not bias:
        return total
    # Summing over the batch commutes with taking patches.
    patches = _patches(x.sum(0, keepdim=True), window)
    return with_bias(total, patches.sum(1), len(x) * patches.shape[1])


def with_bias(total: Tensor, sums: Tensor, count: int) -> Tensor:
    """`sum(a a^T)` after a 1 is appended to each of the `count` vectors `a`.

    Args:
        total: `sum(a a^T)` without it, `[n, n]`.
        sums: `sum(a)`, `[n]`.
    """
    n = len(total)
    grown = total.new_empty(n + 1, n + 1)
    grown[:n, :n] = total
    grown[:n, n] = grown[n, :n] = sums
    grown[n, n] = count
    return grown


def _pad(x: Tensor, window: Window) -> Tensor:
    (top, bottom), (left, right) = window.padding
    return F.pad(x, (left, right, top, bottom)) if top or bottom or left or right else x


def _patches(x: Tensor, window: Window) -> Tensor:
    """All patches as columns, `[channels * kernel, batch * positions]`: the im2col copy."""
    (rows, columns), (sh, sw), (dh, dw) = window.reach, window.stride, window.dilation
    x = _pad(x, window).transpose(0, 1)
    views = x.unfold(2, rows + 1, sh).unfold(3, columns + 1, sw)[..., ::dh, ::dw]
    return views.permute(0, 4, 5, 1, 2, 3).flatten(3).flatten(0, 2)


def _can_correlate(x: Tensor, window: Window) -> bool:
    """Whether the autocorrelation applies: stride 1, padding and `x` as the kernel's reach asks."""
    return tuple(window.stride) == (1, 1) and all(
        max(window.padding[dim]) <= window.reach[dim] < x.shape[2 + dim] for dim in (0, 1)
    )


def _worth_correlating(x: Tensor, window: Window) -> bool:
    """Whether the autocorrelation takes well under the work of patches.

    Work is in products per example and pair of channels; the rule is fitted to times on CPU cores.
    """
    (kh, kw), (reach_h, reach_w), (height, width) = window.kernel, window.reach, x.shape[2:]
    if x.shape[1] < 8:
        return False
    frame_h, frame_w = 2 * reach_h - sum(window.padding[0]), 2 * reach_w - sum(window.padding[1])
    out_h, out_w = height + reach_h - frame_h, width + reach_w - frame_w
    seen_h, seen_w = frame_h / 2 / window.dilation[0], frame_w / 2 / window.dilation[1]
    shifts = kh * (2 * kw - 1) * (height + reach_h) * width
    around = (seen_h * kw) ** 2 * frame_h * (width + reach_w)
    beside = (kh * seen_w) ** 2 * frame_w * out_h
    spreading = 100 * (kh * kw) ** 2 / len(x)  # writes the matrix once, whatever the batch
    patches = (kh * kw) ** 2 * out_h * out_w
    return 1.7 * (shifts + around + beside + spreading) < patches


def _correlated(x: Tensor, window: Window) -> Tensor:
    """`sum(a a^T)` of a stride-1 convolution without patches, exactly.

    Two patch elements at offsets o and o' multiply to the autocorrelation of `x` at o' - o, summed
    over output positions. Summed over *all* positions at which a patch touches `x`, it depends on
    o' - o only: one pass of the convolution's weight-gradient kernel, with `x` in both roles, gives
    it for half of the differences, the other half follows by symmetry. The positions outside of the
    layer's output form a frame, thin if the layer is padded; their patches, which see little of `x`
    and are mostly zero, are subtracted.
    """
    kh, kw = window.kernel
    total = _toeplitz(_autocorrelation(x, window), kh, kw)
    _subtract_frame(total, x, window)
    return total.reshape(len(total) * kh * kw, -1)


def _autocorrelation(x: Tensor, window: Window) -> Tensor:
    """`sum_u x[c, u] x[d, u + delta]` as `[c, d, kh, 2 kw - 1]` for row differences >= 0."""
    channels, (kh, kw) = x.shape[1], window.kernel
    below = F.pad(x, (0, 0, 0, window.reach[0]))
    shape = (channels, channels, kh, 2 * kw - 1)
    return conv2d_weight(below, shape, x, padding=(0, window.reach[1]), dilation=window.dilation)


def _toeplitz(correlation: Tensor, kh: int, kw: int) -> Tensor:
    """Autocorrelations by difference spread to `[c, kh, kw, d, kh, kw]` by pairs of offsets."""
    channels = len(correlation)
    total = correlation.new_empty(channels, kh, kw, channels, kh, kw)
    turned = correlation.transpose(0, 1)
    for i in range(kh):
        for j in range(kw):
            ahead = slice(kw - 1 - j, 2 * kw - 1 - j)
            total[:, i, j, :, i:, :] = correlation[:, :, : kh - i, ahead]
            total[:, i:, :, :, i, j] = turned[:, :, : kh - i, ahead].permute(0, 2, 3, 1)
    return total


def _subtract_frame(total: Tensor, x: Tensor, window: Window) -> None:
    """Subtracts from `total` the patches at positions around the layer's output positions."""
    every_column = (window.reach[1], window.reach[1])
    for dim, side in ((0, 0), (0, 1), (1, 0), (1, 1)):
        pad, dilation = window.padding[dim][side], window.dilation[dim]
        thickness = window.reach[dim] - pad
        if thickness == 0:
            continue
        # So far out, the kernel's far taps still see x; the `hidden` ones see only zeros.
        hidden = pad // dilation + 1
        seen = window.kernel[dim] - hidden
        taps = slice(hidden, None) if side == 0 else slice(0, seen)
        overhang = (seen - 1) * dilation
        outside = (overhang, 0) if side == 0 else (0, overhang)
        start = 0 if side == 0 else x.shape[2 + dim] - thickness
        strip = x.narrow(2 + dim, start, thickness)
        # Strips above and below span the frame's whole width, corners included.
        padding = [window.padding[0], every_column]
        kernel, at = list(window.kernel), [slice(None), slice(None)]
        padding[dim], kernel[dim], at[dim] = outside, seen, taps
        patches = _patches(strip, Window(kernel, (1, 1), padding, window.dilation))
        block = total[:, at[0], at[1], :, at[0], at[1]]
        block -= (patches @ patches.T).view(block.shape)
