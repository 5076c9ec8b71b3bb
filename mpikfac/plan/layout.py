"""The locations of named blocks in a flat buffer."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

Shape = tuple[int, ...]
ALIGNMENT = 16  # elements: views start on cache lines, so results do not depend on offsets


@dataclass(frozen=True)
class Layout:
    """The locations of named blocks in a flat buffer, segment by segment.

    Attributes:
        shapes: the shape of each block.
        offsets: the first element of each block.
        bounds: segment k consists of the elements from `bounds[k]` up to `bounds[k + 1]`.
    """

    shapes: dict[str, Shape]
    offsets: dict[str, int]
    bounds: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements, including padding."""
        return self.bounds[-1]

    def place(self, name: str) -> tuple[int, int]:
        """Return the start and stop of a block's elements."""
        start = self.offsets[name]
        return start, start + math.prod(self.shapes[name])

    def counts(self) -> tuple[int, ...]:
        """Return the number of elements of every segment."""
        return tuple(stop - start for start, stop in zip(self.bounds, self.bounds[1:]))

    def padding(self) -> tuple[tuple[int, int], ...]:
        """Return the start and stop of the padding after every block."""
        behind = [*list(self.offsets.values())[1:], self.size]
        ends = (self.place(name)[1] for name in self.offsets)
        return tuple((end, start) for end, start in zip(ends, behind) if end < start)

    def segments(self) -> list[tuple[int, int]]:
        """Return the start and stop of every segment's elements."""
        return list(zip(self.bounds, self.bounds[1:]))

    def spans(self, kind: Callable[[str], Hashable]) -> list[Span]:
        """Split the whole buffer wherever the segment or the `kind` of blocks changes."""
        spans: list[Span] = []
        ends = [*list(self.offsets.values())[1:], self.size]
        for (name, start), end in zip(self.offsets.items(), ends):
            segment = bisect.bisect_right(self.bounds, start) - 1
            if end == start:  # a block without elements
                continue
            key = kind(name)
            if spans and (spans[-1].kind, spans[-1].segment) == (key, segment):
                spans[-1] = spans[-1]._replace(stop=end)
            else:
                spans.append(Span(start, end, segment, key))
        return spans


class Span(NamedTuple):
    """Neighbouring blocks of one kind: elements from `start` up to `stop` of a segment."""

    start: int
    stop: int
    segment: int
    kind: Hashable


def lay_out(segments: Iterable[Iterable[tuple[str, Shape]]]) -> Layout:
    """Return a `Layout` that aligns the blocks and stores them segment by segment."""
    shapes: dict[str, Shape] = {}
    offsets: dict[str, int] = {}
    bounds = [0]
    for segment in segments:
        end = bounds[-1]
        for name, shape in segment:
            shapes[name], offsets[name] = shape, end
            end += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        bounds.append(end)
    return Layout(shapes, offsets, tuple(bounds))


def triangle_shape(order: int) -> Shape:
    """Return the shape of a symmetric matrix's lower triangle, folded into a full rectangle."""
    return (order + 1, order // 2) if order % 2 == 0 else (order, (order + 1) // 2)
