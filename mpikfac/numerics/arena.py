"""Store named tensors as views of a flat buffer, and copy many tensors in few calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from mpikfac.plan import Layout

Key = TypeVar("Key")
Copies: TypeAlias = Iterator[tuple[Tensor, Tensor]]
"""Pairs of the tensor to fill and its source."""


@torch.no_grad()
def copy_all(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first, in few calls.

    A GPU copies many tensors with one kernel if each tensor has the layout of its source.
    """
    stored: dict[bool, list[tuple[Tensor, Tensor]]] = {}
    for filled, source in copies:
        plain = filled.is_contiguous() and source.is_contiguous() and filled.dtype == source.dtype
        stored.setdefault(plain, []).append((filled, source))
    for pairs in stored.values():
        torch._foreach_copy_([filled for filled, _ in pairs], [source for _, source in pairs])


def alike(tensors: Mapping[Key, Tensor]) -> list[list[Key]]:
    """Return the keys, grouped by their tensors' shape and dtype; on the CPU, each key alone.

    The tensors of a group can be stacked to need fewer kernels: on a GPU, launching a small kernel
    takes as long as running it. On the CPU, stacking would add a copy and gain nothing.
    """
    groups: dict[object, list[Key]] = {}
    for name, tensor in tensors.items():
        key = name if tensor.is_cpu else (tensor.shape, tensor.dtype)
        groups.setdefault(key, []).append(name)
    return list(groups.values())


class Arena(dict[str, Tensor]):
    """Map names to tensors of one dtype, which are views of a flat buffer that MPI sends directly.

    Attributes:
        layout: the offset and shape of every block.
        flat: the buffer, `[layout.size]`, initially zero; its address never changes.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.flat = torch.zeros(layout.size, dtype=dtype, device=device)
        for name, shape in layout.shapes.items():
            start = layout.offsets[name]
            self[name] = self.flat[start : start + math.prod(shape)].view(shape)

    def span(self, name: str) -> slice:
        """Return the slice of the buffer that holds a block's elements."""
        start = self.layout.offsets[name]
        return slice(start, start + self[name].numel())

    def stack(self, names: Sequence[str]) -> Tensor | None:
        """Return blocks of equal shape and spacing as a view `[names, ...]`, otherwise None.

        Names must be in the order of the blocks.
        """
        first, starts = self[names[0]], [self.layout.offsets[name] for name in names]
        distance = starts[1] - starts[0] if len(names) > 1 else first.numel()
        even = starts == [starts[0] + place * distance for place in range(len(names))]
        if not even or distance < 0 or any(self[name].shape != first.shape for name in names):
            return None
        shape, strides = (len(names), *first.shape), (distance, *first.stride())
        return self.flat.as_strided(shape, strides, starts[0])

    def segment(self, index: int) -> Tensor:
        """Return a view of the segment `index` of the layout."""
        start, stop = self.layout.bounds[index : index + 2]
        return self.flat[start:stop]


def together(arena: Arena, names: Sequence[str]) -> Tensor:
    """Return one block of the arena, or several blocks of equal shape as a stack."""
    if len(names) == 1:
        return arena[names[0]]
    stack = arena.stack(names)
    assert stack is not None, "layouts place equal layers side by side"
    return stack


class Parts:
    """Store an arena's content for each part of a local batch, to be summed in order later."""

    def __init__(self, arena: Arena, count: int) -> None:
        self._flat = arena.flat
        self._stored = arena.flat.new_empty(count, len(arena.flat))
        self._taken = 0

    @property
    def nbytes(self) -> int:
        """The size of the stored parts in bytes."""
        return self._stored.nbytes

    def __len__(self) -> int:
        """Return the number of parts of the local batch."""
        return len(self._stored)

    @property
    def accumulated(self) -> Tensor:
        """The parts added so far, `[parts, size]`."""
        return self._stored[: self._taken]

    def add(self) -> None:
        """Store a copy of the arena's content as the next part.

        Raises:
            ValueError: all parts of the local batch have already been added.
        """
        if self._taken == len(self):
            raise ValueError(f"accumulate() was called more than {len(self)} times before step()")
        self._stored[self._taken].copy_(self._flat)
        self._taken += 1

    def take(self) -> Tensor:
        """Return all parts, `[count, size]`; later parts overwrite the returned tensor.

        Raises:
            ValueError: some parts are missing.
        """
        if self._taken < len(self):
            raise ValueError(f"step() needs {len(self)} parts, but has {self._taken}")
        self.clear()
        return self._stored

    def clear(self) -> None:
        """Discard all parts added so far."""
        self._taken = 0
