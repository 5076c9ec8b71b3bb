"""Reduce low-rank approximations of matrices.

PowerSGD [Vogels et al. 2019] reduces `P = M Q`, makes the columns of P orthonormal, reduces
`Q = M^T P`, and uses `P Q^T` as the sum of all ranks' M. This is one step of a power iteration,
which starts from the previous step's Q.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from mpikfac.plan import IN_TWO_SUMS, Codec, Shape

if TYPE_CHECKING:
    from torch import Tensor


class Matrix(NamedTuple):
    """The location and shape of a gradient in an arena, where it starts at index `start`."""

    start: int
    groups: int
    outputs: int
    inputs: int

    def sides(self, rank: int) -> tuple[int, int]:
        """Return the sizes of P `[groups, outputs, rank]` and Q `[groups, inputs, rank]`.

        The rank is limited to the smaller dimension of the matrix.
        """
        rank = min(rank, self.outputs, self.inputs)
        return self.groups * self.outputs * rank, self.groups * self.inputs * rank

    def view(self, flat: Tensor) -> Tensor:
        """Return a view `[groups, outputs, inputs]` of the gradient in an arena."""
        shape = self.groups, self.outputs, self.inputs
        return flat[self.start : self.start + math.prod(shape)].view(shape)


def matrix(start: int, shape: Shape, of_groups: bool) -> Matrix:
    """Return the `Matrix` of a block that starts at index `start` and has the given shape.

    The first dimension of a parameter indexes outputs. A vector is treated as a single row.

    Args:
        of_groups: whether a three-dimensional shape means groups, outputs and inputs.
    """
    groups = shape[0] if of_groups and len(shape) == 3 else 1
    if of_groups:
        outputs = shape[-2]
    elif len(shape) > 1:
        outputs = shape[0]
    else:
        outputs = 1
    return Matrix(start, groups, outputs, math.prod(shape) // max(1, groups * outputs))


@dataclass(frozen=True, kw_only=True)
class PowerSGDCodec(Codec):
    """Send products `P Q^T` instead of matrices.

    Attributes:
        rank: the number of columns of P and Q.
        matrices: the matrices in a message.
    """

    name: ClassVar[str] = "power-sgd"
    everywhere: ClassVar[str] = IN_TWO_SUMS

    rank: int = 0
    matrices: tuple[Matrix, ...] = ()

    @property
    def borders(self) -> tuple[int, ...]:
        """The index of each matrix's first element."""
        return tuple(matrix.start for matrix in self.matrices)

    @property
    def reductions(self) -> tuple[int, int]:
        """The total numbers of elements in all P and in all Q."""
        sides = [matrix.sides(self.rank) for matrix in self.matrices]
        return sum(left for left, _ in sides), sum(right for _, right in sides)

    def within(self, start: int, stop: int) -> PowerSGDCodec:
        """Return the codec for the matrices in a span."""
        inside = (matrix for matrix in self.matrices if start <= matrix.start < stop)
        return replace(self, matrices=tuple(inside))

    def size(self, elements: int, itemsize: int) -> int:
        """Return the size in bytes of all P and Q."""
        return sum(self.reductions) * itemsize

    def all_reduce(
        self,
        flat: Tensor,
        span: tuple[int, int],
        residuals: Tensor,
        last: Tensor,
        reduce: Callable[[Tensor], None],
    ) -> None:
        """Replace the matrices in a span by products of two all-reduced factors."""
        import torch

        part = slice(*span)
        residuals[part] += flat[part]
        matrices = [place.view(residuals) for place in self.matrices]
        left, right = (flat.new_empty(size) for size in self.reductions)
        lefts, rights, lasts = self._split(left, 0), self._split(right, 1), self._split(last, 1)
        for place, matrix, p, before in zip(self.matrices, matrices, lefts, lasts):
            torch.matmul(matrix, _renewed(before, place.start), out=p)
        reduce(left)
        for matrix, p, q in zip(matrices, lefts, rights):
            p.copy_(_orthonormal(p))
            torch.matmul(matrix.mT, p, out=q)
            matrix.sub_(p @ q.mT)
        residuals[part].nan_to_num_(0.0, 0.0, 0.0)
        reduce(right)
        for place, p, q in zip(self.matrices, lefts, rights):
            torch.matmul(p, q.mT, out=place.view(flat))
        last.copy_(right)

    def _split(self, sides: Tensor, side: int) -> list[Tensor]:
        """Return P (side 0) or Q (side 1) of each matrix, as views `[groups, n, rank]`."""
        parts = sides.split([place.sides(self.rank)[side] for place in self.matrices])
        orders = [(place.groups, place[2 + side]) for place in self.matrices]
        return [part.view(*order, -1) for part, order in zip(parts, orders)]


def _orthonormal(columns: Tensor) -> Tensor:
    """Orthonormalise columns `[groups, n, rank]`; groups with NaN or infinity become NaN."""
    import torch

    finite = columns.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    return torch.linalg.qr(columns.where(finite, 0)).Q.where(finite, torch.nan)


def _renewed(right: Tensor, seed: int) -> Tensor:
    """Return Q `[groups, inputs, rank]`, with unusable columns replaced by random normal ones.

    A column of zeros would stay zero, and a column with NaN would corrupt all later sums.
    """
    import torch

    sizes = right.abs().sum(-2, keepdim=True)
    usable = sizes.isfinite() & (sizes > 0)
    if usable.all():
        return right
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn(right.shape, generator=generator, dtype=torch.float64, device="cpu")
    return right.where(usable, drawn.to(right))
