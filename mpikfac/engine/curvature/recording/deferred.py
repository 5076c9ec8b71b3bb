"""Compute the moments of many layers together, with as many kernels as for one layer.

On a GPU, launching a small kernel takes as long as running it. The moments of calls are
therefore computed at the end of the backward pass; then inputs of the same shape, from layers of
the same form, are treated as the groups of one layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpikfac.engine.curvature.recording.moments import Moments
from mpikfac.engine.curvature.recording.sums import SideSums, Sum, changed_in_place
from mpikfac.layers import SIDE_BY_SIDE
from mpikfac.numerics import add_triangle, without_autocast

MOST_BYTES = 2**30
"""The maximum size, in bytes, of waiting calls and their patches; if they exceed it, they are added
to the sums immediately."""


@dataclass(frozen=True)
class Waiting:
    """Side A or G of a call, waiting to be added; its tensors are the program's own, not copies.

    Attributes:
        tensors: the tensors from which the moment is computed: inputs or gradients, or both for
            layers that are not in `SIDE_BY_SIDE`.
        weight: the weight of the moment in the sums.
        versions: the tensors' versions, by which torch counts in-place changes.
    """

    side: SideSums
    tensors: Sequence[Tensor]
    weight: float
    versions: Sequence[int]

    def check(self) -> None:
        """Check that the tensors have not changed since the call.

        Raises:
            RuntimeError: a tensor was changed in place.
        """
        if [_version(tensor) for tensor in self.tensors] != self.versions:
            what = "the input, or the gradient of the output,"
            raise changed_in_place(self.side.layer, what, "the end of the backward pass")

    def form(self) -> Hashable:
        """Return a key that is equal for calls whose moments are computed together."""
        side, (tensor, *_) = self.side, self.tensors
        if type(side.layer) not in SIDE_BY_SIDE:
            return id(side)
        blocks = ((each.block.start, each.total.shape) for each in side.sums)
        form = side.layer.form(side.side), side.vector, *blocks
        return *form, tensor.shape, tensor.dtype, self.weight


class DeferredMoments(Moments):
    """Moments that are added to the sums at the end of a backward pass.

    If reductions are overlapped, sums must be sent during the backward pass, so `Moments` is used.
    """

    def __init__(self, *bound: Any) -> None:
        """Bind the layers as `Moments` does."""
        super().__init__(*bound)
        self._stage, self._stage_of_all = nullcontext, self._stage
        self._waiting: list[Waiting] = []
        self._bytes = 0

    def abort_batch(self) -> None:
        """Drop the calls since the last `finish`."""
        super().abort_batch()
        self._waiting.clear()
        self._bytes = 0

    def finish(self) -> dict[str, bool]:
        """Add waiting moments, even of an interrupted backward pass; turn sums into factors."""
        self._add_waiting()
        return super().finish()

    def end_pass(self) -> None:
        """Add the moments of the pass, for many layers together."""
        self._add_waiting()

    def _take(self, sides: Iterable[SideSums], x: Tensor, g: Tensor, *weights: float) -> None:
        for side in sides:
            alone = type(side.layer) not in SIDE_BY_SIDE
            tensors = (x, g) if alone else (x if side.side == "A" else g,)
            versions = [_version(tensor) for tensor in tensors]
            self._waiting.append(Waiting(side, tensors, weights[side.quadratic], versions))
            vectors = side.layer.positions(g) * side.layer.shape.groups
            order = side.layer.shape.inputs if side.side == "A" else side.layer.shape.outputs
            self._bytes += sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            self._bytes += vectors * order * g.itemsize
        if self._bytes > MOST_BYTES:
            self._add_waiting()

    @without_autocast
    def _add_waiting(self) -> None:
        """Add the moments of the waiting calls."""
        if not self._waiting:
            return
        stacks: dict[Hashable, list[Waiting]] = {}
        calls: Counter[int] = Counter()
        while self._waiting:
            waiting = self._waiting.pop()
            waiting.check()
            calls[id(waiting.side)] += 1  # a stack adds to the same sum at most once
            stacks.setdefault((waiting.form(), calls[id(waiting.side)]), []).append(waiting)
        self._bytes = 0
        with self._stage_of_all(), torch.no_grad():
            while stacks:  # frees each stack before the next is used
                self._add_stack(stacks.popitem()[1])

    def _add_stack(self, stack: Sequence[Waiting]) -> None:
        """Add the moments of recorded calls with equal `form` to the sums of their layers."""
        side, tensors, weight = stack[0].side, stack[0].tensors, stack[0].weight
        if len(stack) == 1:
            super()._take([side], tensors[0], tensors[-1], weight, weight)
            return
        layer = side.layer.with_groups(len(stack))
        tensor = layer.side_by_side([waiting.tensors[0] for waiting in stack])
        of_sums = zip(*(waiting.side.sums for waiting in stack))
        for sums, moments in zip(of_sums, side.moments(layer, tensor, tensor)):
            _add_all(sums, moments.unflatten(0, (len(stack), -1)), weight)


def _add_all(sums: Sequence[Sum], moments: Tensor, weight: float) -> None:
    """Add `weight` times `moments[i]` to the i-th sum; `moments` is `[sums, ...]`."""
    totals, factor = [each.total for each in sums], sums[0].factor
    shape = len(sums), *totals[0].shape
    if factor.preconditioner.vector:
        added = moments.reshape(shape) * weight
    else:
        added = moments.new_zeros(shape)
        squares = moments.reshape(*shape[:-2], factor.order, factor.order)
        add_triangle(added, squares, weight)
    torch._foreach_add_(totals, list(added))


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
