"""A flat tensor and its named views."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mpikfac.plan import Layout


class Arena(dict[str, Tensor]):
    """All tensors of one kind, by name: views of one flat buffer that MPI sends without a copy.

    Attributes:
        layout: where each block lies.
        flat: the buffer, zero at first, `[layout.size]`; its address never changes.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.flat = torch.zeros(layout.size, dtype=dtype, device=device)
        for name, shape in layout.shapes.items():
            start = layout.offsets[name]
            self[name] = self.flat[start : start + math.prod(shape)].view(shape)

    def span(self, name: str) -> slice:
        """Where a block's elements lie in the buffer."""
        start = self.layout.offsets[name]
        return slice(start, start + self[name].numel())

    def segment(self, index: int) -> Tensor:
        """Segment `index` of the layout, a view."""
        start, stop = self.layout.bounds[index : index + 2]
        return self.flat[start:stop]


class Parts:
    """What an arena held for each of several parts of a batch."""

    def __init__(self, arena: Arena, count: int) -> None:
        self._flat = arena.flat
        self._kept = arena.flat.new_empty(count, len(arena.flat)) if count else None
        self._count = count
        self._taken = 0

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return self._kept.nbytes if self._kept is not None else 0

    def __len__(self) -> int:
        """Parts of this rank; 0 if a share is not dealt out."""
        return self._count

    @property
    def collected(self) -> Tensor:
        """Those that were added, `[count, size]`; where a share is not dealt out, the arena's."""
        return self._flat if self._kept is None else self._kept[: self._taken]

    def add(self) -> None:
        """Keeps what the arena holds.

        Raises:
            ValueError: there are more parts than this rank's.
        """
        if self._kept is None or self._taken == self._count:
            raise ValueError(f"collect() was called more than {self._count} times before step()")
        self._kept[self._taken].copy_(self._flat)
        self._taken += 1

    def take(self) -> Tensor:
        """All parts, `[count, size]`, which the next ones overwrite.

        Raises:
            ValueError: some are missing.
        """
        if self._kept is None or self._taken < self._count:
            raise ValueError(f"step() needs {self._count} parts; collect() took {self._taken}")
        self.clear()
        return self._kept

    def clear(self) -> None:
        """Forgets those that were added; from here on parts are collected anew."""
        self._taken = 0
