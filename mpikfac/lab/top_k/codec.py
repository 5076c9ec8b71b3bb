"""Encode only the largest values, with their indices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from mpikfac.plan import Codec

if TYPE_CHECKING:
    from torch import Tensor

INDEX = 4  # bytes per index


@dataclass(frozen=True, kw_only=True)
class TopKCodec(Codec):
    """Send the largest values, followed by their indices; NaN counts as the largest value.

    Attributes:
        ratio: the fraction of values that are sent.
        momentum: the momentum with which unsent values accumulate.
        padding: the padding of an arena, as pairs of first and last (exclusive) elements; it does
            not count towards `ratio`.
    """

    name: ClassVar[str] = "top-k"

    ratio: float = 1.0
    momentum: float = 0.0
    padding: tuple[tuple[int, int], ...] = ()

    @property
    def delays(self) -> bool:
        """Whether unsent values accumulate with momentum."""
        return self.momentum > 0

    def within(self, start: int, stop: int) -> TopKCodec:
        """Return the codec for a span, with only the padding in it."""
        return replace(self, padding=tuple(gap for gap in self.padding if start <= gap[0] < stop))

    def count(self, elements: int) -> int:
        """Return the number of values that are sent for a span of `elements` elements."""
        return math.ceil(
            self.ratio * (elements - sum(stop - start for start, stop in self.padding))
        )

    def size(self, elements: int, itemsize: int) -> int:
        """Return the encoded size, in bytes, of `elements` values."""
        return self.count(elements) * (itemsize + INDEX)

    def encode(self, values: Tensor) -> Tensor:
        """Return the largest of `values` `[n]`, and their indices, as bytes `[size(n)]`."""
        import torch

        places = values.abs().topk(self.count(len(values)), sorted=False).indices
        return torch.cat([values[places].view(torch.uint8), places.int().view(torch.uint8)])

    def add_decoded(self, total: Tensor, encoded: Tensor, weight: int) -> None:
        """Add the decoded values, times `weight`, to `total` `[n]`, in place."""
        places = _indices(encoded, total.element_size())
        # A copy, because a part of a longer buffer may start at an unaligned address.
        values = encoded[: len(places) * total.element_size()].clone().view(total.dtype)
        total[places] += weight * values

    def accumulate(self, velocity: Tensor, values: Tensor) -> Tensor:
        """Update the velocity to `momentum * velocity + values`, and return it [DGC]."""
        return velocity.mul_(self.momentum).add_(values)

    def clear_sent(self, velocity: Tensor, encoded: Tensor) -> None:
        """Set `velocity` `[n]` to 0 where values were sent [DGC]."""
        velocity[_indices(encoded, velocity.element_size())] = 0


def _indices(encoded: Tensor, itemsize: int) -> Tensor:
    """Return the indices of the values that were sent."""
    import torch

    count = len(encoded) // (itemsize + INDEX)
    return encoded[count * itemsize :].clone().view(torch.int32).long()
