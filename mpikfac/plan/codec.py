"""Encodings of numbers in messages as plain data, with the bytes of encoded numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from mpikfac.plan.layout import ALIGNMENT, Shape

PLACE = 4  # bytes that say where a number lies
# How ranks get what they add up themselves, as MPI cannot. PowerSGD has two small sums in turn.
IN_SHARDS, IN_TWO_SUMS = "Alltoall, Allgather", "Allreduce, Allreduce"
EVERYWHERE = {"int8": IN_SHARDS, "top-k": "Allgather", "power-sgd": IN_TWO_SUMS}


class Matrix(NamedTuple):
    """The place of a gradient `[groups, outputs, inputs]`: elements of an arena from `start` on."""

    start: int
    groups: int
    outputs: int
    inputs: int

    def sides(self, rank: int) -> tuple[int, int]:
        """Return the elements of P `[groups, outputs, rank]` and Q `[groups, inputs, rank]`.

        The rank is at most the smaller order.
        """
        rank = min(rank, self.outputs, self.inputs)
        return self.groups * self.outputs * rank, self.groups * self.inputs * rank


def matrix(start: int, shape: Shape, of_groups: bool) -> Matrix:
    """Return the matrix of a block: a parameter's first dimension counts outputs.

    A vector is a single row.

    Args:
        of_groups: three dimensions are groups, outputs and inputs.
    """
    groups = shape[0] if of_groups and len(shape) == 3 else 1
    outputs = shape[-2] if of_groups else shape[0] if len(shape) > 1 else 1
    return Matrix(start, groups, outputs, math.prod(shape) // max(1, groups * outputs))


@dataclass(frozen=True)
class Codec:
    """An encoding that sends numbers in fewer bytes; `numerics.messages` encodes.

    Attributes:
        name: "bfloat16"; "int8", 16 numbers with a common exponent; "top-k", the largest numbers;
            "power-sgd", a product `P Q^T` in the place of a matrix.
        share: the share of the numbers that "top-k" sends.
        feedback: the loss of an encoding is added to the next numbers to encode.
        momentum: the momentum of numbers that wait until "top-k" sends the numbers.
        rank: the columns of P and Q.
        matrices: the matrices in a message with "power-sgd".
        padding: the padding in an arena with "top-k", first and last (exclusive) elements: padding
            has no share.
    """

    name: str
    share: float = 1.0
    feedback: bool = False
    momentum: float = 0.0
    rank: int = 0
    matrices: tuple[Matrix, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()

    @property
    def summable(self) -> bool:
        """Whether MPI can add up encoded numbers, by a function of the library."""
        return self.name == "bfloat16"

    @property
    def everywhere(self) -> str:
        """The collective that sums on all ranks."""
        return EVERYWHERE.get(self.name, "Allreduce")

    def within(self, start: int, stop: int) -> Codec:
        """Return the codec of a span, with the matrices and the padding of the span."""
        return replace(
            self,
            matrices=tuple(matrix for matrix in self.matrices if start <= matrix.start < stop),
            padding=tuple(gap for gap in self.padding if start <= gap[0] < stop),
        )

    def count(self, elements: int) -> int:
        """Return the number of sent numbers among `elements` elements of a span."""
        return math.ceil(
            self.share * (elements - sum(stop - start for start, stop in self.padding))
        )

    def sides(self) -> tuple[int, int]:
        """Return the elements of all P, and of all Q."""
        sides = [matrix.sides(self.rank) for matrix in self.matrices]
        return sum(left for left, _ in sides), sum(right for _, right in sides)

    def size(self, elements: int, itemsize: int) -> int:
        """Return the bytes of `elements` encoded numbers."""
        if self.name == "bfloat16":
            return 2 * elements
        if self.name == "int8":
            return elements + elements // ALIGNMENT
        if self.name == "power-sgd":
            return sum(self.sides()) * itemsize
        return self.count(elements) * (itemsize + PLACE)

    def size_of(self, start: int, stop: int, itemsize: int) -> int:
        """Return the bytes of an encoded span of an arena."""
        return self.within(start, stop).size(stop - start, itemsize)

    @property
    def arenas(self) -> int:
        """The numbers that a rank keeps from step to step for a number of an arena."""
        return self.feedback + (self.momentum > 0)
