"""Which elements of an image a convolution's kernel sees, position by position.

Images are `[batch, channels, *size]` of one, two or three dimensions. Moments do not ask in which
order positions come, so an image may be turned over, or taken apart, as long as its patches stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from types import EllipsisType

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """Geometry of a convolution, by dimension of its images.

    Attributes:
        padding: zeros before and after each dimension; of two: ((top, bottom), (left, right)).
    """

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[tuple[int, int]]
    dilation: Sequence[int]

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Distance between the first and the last element of the kernel, by dimension."""
        return tuple((k - 1) * d for k, d in zip(self.kernel, self.dilation))


def patches(x: Tensor, window: Window) -> Tensor:
    """A view of all patches, `[batch, *positions, channels, *kernel]`."""
    pixels = _pad(x, window).movedim(1, -1)
    for dim, (stride, reach) in enumerate(zip(window.stride, window.reach), start=1):
        pixels = pixels.unfold(dim, reach + 1, stride)
    return pixels[every(window.dilation)]


def planar(x: Tensor, window: Window) -> tuple[Tensor, Window]:
    """A two-dimensional image and window with the same patches, in the same order of elements.

    One dimension is two with a height of 1. Three are two with more examples and more channels:
    each position in depth is an example, and the slices seen from there are channels of it.
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
    """The image and window whose patches a transposed convolution multiplies by its weight.

    A transposed convolution is a convolution of its input's pixels, spread with zeros between them,
    by the weight turned over. Here the image is turned over instead: its patches have the order of
    the weight's elements, input channel first, and the last one belongs to the first position.

    Args:
        padding: of the transposed convolution: what its output is cut by on each side.
    """
    dims = range(2, x.dim())
    size = [(n - 1) * s + 1 + extra for n, s, extra in zip(x.shape[2:], stride, output_padding)]
    image = x.new_zeros(*x.shape[:2], *size)
    image[every(stride, output_padding)] = x.flip(*dims)
    around = [(k - 1) * d - p for k, d, p in zip(kernel, dilation, padding)]
    for dim, zeros in zip(dims, around):
        if zeros < 0:  # so much is cut off that pixels on the margin are never seen
            image = image.narrow(dim, -zeros, image.shape[dim] + 2 * zeros)
    margins = tuple((max(zeros, 0), max(zeros, 0)) for zeros in around)
    return image, Window(kernel, (1,) * len(dims), margins, dilation)


def every(
    steps: Sequence[int], starts: Iterable[int] = repeat(0)
) -> tuple[slice | EllipsisType, ...]:
    """The index of every `step`-th element, from `start`, in each of the last dimensions."""
    return (..., *(slice(start, None, step) for step, start in zip(steps, starts)))


def _pad(x: Tensor, window: Window) -> Tensor:
    zeros = [count for pair in reversed(window.padding) for count in pair]
    return F.pad(x, zeros) if any(zeros) else x
