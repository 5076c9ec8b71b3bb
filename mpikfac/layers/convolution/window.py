"""Find the elements of an image that a convolution's kernel sees, position by position.

Images have the shape `[batch, channels, *size]`, where `size` has 1, 2 or 3 dimensions. Moments do
not depend on the order of positions, so an image can be flipped or split as long as the patches
stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from types import EllipsisType

import torch.nn.functional as F
from torch import Tensor

Index = tuple[slice | EllipsisType, ...]


@dataclass(frozen=True)
class Window:
    """The geometry of a convolution; each attribute has one element per dimension of the images.

    Attributes:
        padding: zeros before and after each dimension; in 2-D: ((top, bottom), (left, right)).
    """

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[tuple[int, int]]
    dilation: Sequence[int]

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """The distance between the kernel's first and last element, by dimension."""
        return tuple((k - 1) * d for k, d in zip(self.kernel, self.dilation))

    @cached_property
    def zeros(self) -> list[int]:
        """The padding in the order that `F.pad` expects: the last dimension first."""
        return [count for pair in reversed(self.padding) for count in pair]

    @cached_property
    def taps(self) -> Index:
        """The index of the kernel's elements within its reach."""
        return every(self.dilation)


def patches(x: Tensor, window: Window) -> Tensor:
    """Return a view of all patches, `[batch, *positions, channels, *kernel]`."""
    padded = F.pad(x, window.zeros) if any(window.zeros) else x
    pixels = padded.movedim(1, -1)
    for dim, (stride, reach) in enumerate(zip(window.stride, window.reach), start=1):
        pixels = pixels.unfold(dim, reach + 1, stride)
    return pixels[window.taps]


def planar(x: Tensor, window: Window) -> tuple[Tensor, Window]:
    """Return a 2-D image and window with the same patches, in the same order of elements.

    A 1-D image becomes a 2-D image with a height of 1. A 3-D image becomes 2-D images with more
    channels: every position in depth is an example, and the slices seen from it are its channels.
    """
    if len(window.kernel) == 2:
        return x, window
    k, s, p, d = window.kernel, window.stride, window.padding, window.dilation
    if len(k) == 1:
        return x.unsqueeze(2), Window((1, *k), (1, *s), ((0, 0), *p), (1, *d))
    depth = Window((k[0], 1, 1), (s[0], 1, 1), (p[0], (0, 0), (0, 0)), (d[0], 1, 1))
    image = patches(x, depth).flatten(4).flatten(0, 1).movedim(-1, 1)
    return image, Window(k[1:], s[1:], p[1:], d[1:])


def spread(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Tensor, Window]:
    """Return an image and window with the patches that a transposed convolution multiplies.

    A transposed convolution spreads the pixels of its input, with zeros in between, and convolves
    the result with the flipped weight. `spread` flips the image instead: patches then have the
    order of the weight's elements, input channel first, and the last patch belongs to the first
    position.

    Args:
        padding: the padding of the transposed convolution, which is cut off each side of the
            output.
    """
    dims = range(2, x.dim())
    size = [(n - 1) * s + 1 + extra for n, s, extra in zip(x.shape[2:], stride, output_padding)]
    image = x.new_zeros(*x.shape[:2], *size)
    image[every(stride, output_padding)] = x.flip(*dims)
    around = [(k - 1) * d - p for k, d, p in zip(kernel, dilation, padding)]
    for dim, zeros in zip(dims, around):
        if zeros < 0:  # so much is cut off that no patch contains the border pixels
            image = image.narrow(dim, -zeros, image.shape[dim] + 2 * zeros)
    margins = tuple((max(zeros, 0), max(zeros, 0)) for zeros in around)
    return image, Window(kernel, (1,) * len(dims), margins, dilation)


def every(steps: Sequence[int], starts: Iterable[int] = repeat(0)) -> Index:
    """Return the index of every `step`-th element, from `start`, in each of the last dimensions."""
    return (..., *(slice(start, None, step) for step, start in zip(steps, starts)))
