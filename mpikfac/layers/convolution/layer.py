"""Describe convolutions as matrices: inputs are patches, and positions are output pixels."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpikfac.layers.convolution.moments import (
    input_means,
    input_sum,
    input_vector,
    output_sum,
    output_vector,
)
from mpikfac.layers.convolution.window import Window, patches, spread
from mpikfac.layers.layer import Layer
from mpikfac.plan import LayerShape


class ConvLayer(Layer):
    """Cover a convolution, possibly transposed or grouped, in 1, 2 or 3 dimensions.

    A transposed convolution is a convolution of its input, with zeros inserted between the pixels,
    so its positions are output pixels as well.
    """

    spatial = True
    module: nn.modules.conv._ConvNd

    def __init__(self, name: str, module: nn.modules.conv._ConvNd) -> None:
        self.dimensions = 2 + len(module.kernel_size)
        self.transposed = module.transposed
        self._around = () if module.padding_mode == "zeros" else _padding(module)
        if self.transposed:
            # The image is large enough that a pixel remains after the padding is cut off.
            image = torch.empty(1, 1, *(1 + 2 * int(p) for p in module.padding), device="cpu")
            _, self._window = self._spread(module, image, module.output_padding)
        else:
            zeros = ((0, 0),) * len(module.kernel_size) if self._around else _padding(module)
            self._window = Window(module.kernel_size, module.stride, zeros, module.dilation)
        super().__init__(name, module)

    def whole_shape(self) -> LayerShape:
        """Return the layer's shape, in which the factors' orders are those of a single group."""
        module, groups = self.module, self.module.groups
        outputs = module.out_channels // groups
        if self.bias_alone:
            return LayerShape(self.name, 1, module.out_channels, sides="G")
        fan_in = module.in_channels // groups * math.prod(module.weight.shape[2:])
        return LayerShape(self.name, fan_in + self.bias, outputs, groups)

    def prepared(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the image from which patches are taken, before it is padded with zeros."""
        if self.transposed:
            return self._spread(self.module, x, self._output_padding(x, g))[0]
        ends = [end for both in reversed(self._around) for end in both]
        return F.pad(x, ends, mode=self.module.padding_mode) if ends else x

    def sum_of_squares(self, side: str, x: Tensor, g: Tensor) -> Tensor:
        """Return the elementwise sum of squares of all `a` `[inputs]`, or all `g` `[outputs]`."""
        return self.first_moment(side, x.square(), g.square())

    def input_sum(self, x: Tensor) -> Tensor:
        """Return `sum(a a^T)` over all patches, in the order of the weight's elements."""
        options = (self.bias, self.rounded_to, self.shape.groups)
        return input_sum(x, self._window, *options)

    def output_sum(self, g: Tensor) -> Tensor:
        """Return `sum(g g^T)` over all output pixels."""
        return output_sum(g, self.shape.groups)

    def input_vector(self, x: Tensor) -> Tensor:
        """Return `sum(a)` over all patches, in the order of the weight's elements."""
        return input_vector(x, self._window, self.bias, self.shape.groups)

    def output_vector(self, g: Tensor) -> Tensor:
        """Return `sum(g)` over all output pixels."""
        return output_vector(g, self.shape.groups)

    def input_means(self, x: Tensor) -> Tensor:
        """Return every example's mean patch."""
        return input_means(x, self._window, self.bias, self.shape.groups)

    def output_totals(self, g: Tensor) -> Tensor:
        """Return every example's sum of `g` over output pixels."""
        totals = g.flatten(2).sum(2)
        groups = self.shape.groups
        return totals if groups == 1 else totals.view(len(g), groups, -1)

    def form(self, side: str) -> Hashable:
        """Return a key; layers with the same key compute a side's moments in the same way."""
        window = (self._window, self.rounded_to) if side == "A" else ()
        return super().form(side), window

    def side_by_side(self, tensors: Sequence[Tensor]) -> Tensor:
        """Join several layers' images, or their gradients, along the channels."""
        return torch.cat(tuple(tensors), 1)

    def pairs(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return all patches, and the gradient of the output pixel computed from each of them."""
        groups, pixels = self.shape.groups, g.flatten(2)
        if self.transposed:  # the image from which patches are taken is flipped
            pixels = pixels.flip(2)
        if self.bias_alone:
            return pixels.new_ones(len(g), pixels.shape[2], 1), pixels.mT
        # Copying is fast with positions last, because a channel's pixels are then contiguous.
        n = x.dim() - 2
        views = patches(x.contiguous(), self._window)
        views = views.permute(0, *range(n + 1, 2 * n + 2), *range(1, n + 1))
        a = views.flatten(1, n + 1).flatten(2)
        if groups > 1:
            a, pixels = (b.unflatten(1, (groups, -1)).movedim(1, 0) for b in (a, pixels))
        a = F.pad(a, (0, 0, 0, 1), value=1.0) if self.bias else a
        return a.mT, pixels.mT

    def projections(
        self, x: Tensor, g: Tensor, of_inputs: Tensor, of_outputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return patches times `of_inputs`, and gradients times `of_outputs`.

        The first product is computed as a convolution with few channels. Both results have the
        dtype of `g`, but at least float32.
        """
        groups, dtype = self.shape.groups, torch.promote_types(g.dtype, torch.float32)
        vectors, module = of_inputs.shape[-1], self.module
        kernels = of_inputs.to(dtype).mT.unflatten(2, (-1, *module.kernel_size))
        if self.transposed:
            kernels = kernels.transpose(1, 2)
        products = self._convolved(x.to(dtype), kernels.flatten(0, 1), g)
        pixels = g.to(dtype).flatten(2).unflatten(1, (groups, -1))
        each = products.flatten(2).unflatten(1, (groups, vectors)), of_outputs.to(dtype).mT @ pixels
        a, b = (side.movedim(2, -1).flatten(0, -2) for side in each)
        return a, b

    def _convolved(self, x: Tensor, kernels: Tensor, g: Tensor) -> Tensor:
        """Convolve `x` as in the forward pass, but with `kernels` for the weight and no bias.

        The size of `g`, the gradient of the call's output, determines the output padding.
        """
        module, dims = self.module, len(self.module.kernel_size)
        stride, dilation, groups = module.stride, module.dilation, module.groups
        if self.transposed:
            paddings = [int(cut) for cut in module.padding], self._output_padding(x, g)
            transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
            return transposed(x, kernels, None, stride, *paddings, groups, dilation)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
        zeros = 0 if self._around else module.padding
        return convolve(self.prepared(x, g), kernels, None, stride, zeros, dilation, groups)

    def arranged(self, parameter: Tensor) -> Tensor:
        """Return the weight or bias, with outputs first even for a transposed convolution."""
        if not self.transposed or parameter.dim() == 1:
            return parameter
        by_group: Tensor = parameter.unflatten(0, (self.shape.groups, -1))
        return by_group.transpose(1, 2)

    def _output_padding(self, x: Tensor, g: Tensor) -> list[int]:
        """Derive a call's `output_padding` from tensor sizes; a call can set its `output_size`."""
        cuts = [int(cut) for cut in self.module.padding]
        each = zip(x.shape[2:], self.module.stride, cuts, self._window.reach)
        least = [(n - 1) * stride - 2 * cut + reach + 1 for n, stride, cut, reach in each]
        return [size - without for size, without in zip(g.shape[2:], least)]

    @staticmethod
    def _spread(
        module: nn.modules.conv._ConvNd, x: Tensor, output_padding: Sequence[int]
    ) -> tuple[Tensor, Window]:
        cut = [int(p) for p in module.padding]
        return spread(x, module.kernel_size, module.stride, cut, output_padding, module.dilation)


def _padding(module: nn.modules.conv._ConvNd) -> tuple[tuple[int, int], ...]:
    """Return the padding before and after each dimension; "same" puts an odd element at the end."""
    if module.padding == "valid":
        return ((0, 0),) * len(module.kernel_size)
    if isinstance(module.padding, str):
        reach = [(k - 1) * d for k, d in zip(module.kernel_size, module.dilation)]
        return tuple((r // 2, r - r // 2) for r in reach)
    return tuple((p, p) for p in module.padding)
