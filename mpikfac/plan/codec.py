"""Encodings of values in messages as plain data, with the size of encoded values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mpikfac.plan.layout import ALIGNMENT, Shape

PLACE = 4  # size of a value's index in bytes
# How ranks sum values that MPI cannot sum. PowerSGD needs two small sums, one after the other.
IN_SHARDS, IN_TWO_SUMS = "Alltoall, Allgather", "Allreduce, Allreduce"
CODECS = ("bfloat16", "int8", "top-k", "power-sgd")
EVERYWHERE = {"int8": IN_SHARDS, "top-k": "Allgather", "power-sgd": IN_TWO_SUMS}


class Matrix(NamedTuple):
    """The location of a gradient `[groups, outputs, inputs]`: elements from `start` of an arena."""

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
    """Return the matrix of a block; the first dimension of a parameter counts outputs.

    A vector is a single row.

    Args:
        of_groups: three dimensions are groups, outputs and inputs.
    """
    groups = shape[0] if of_groups and len(shape) == 3 else 1
    if of_groups:
        outputs = shape[-2]
    elif len(shape) > 1:
        outputs = shape[0]
    else:
        outputs = 1
    return Matrix(start, groups, outputs, math.prod(shape) // max(1, groups * outputs))


@dataclass(frozen=True)
class Codec:
    """An encoding that sends values in fewer bytes; `numerics.messages` implements it.

    Attributes:
        name: "bfloat16"; "int8", 16 values with a common exponent; "top-k", the largest values;
            "power-sgd", a product `P Q^T` in place of a matrix.
        share: the fraction of the values that "top-k" sends.
        feedback: whether the error of an encoding is added to the next values to encode.
        momentum: the momentum of values that wait until "top-k" sends them.
        rank: the number of columns of P and Q.
        matrices: the matrices in a message with "power-sgd".
        padding: the padding of an arena with "top-k", as first and last (exclusive) elements, which
            does not count towards `share`.
    """

    name: str
    share: float = 1.0
    feedback: bool = False
    momentum: float = 0.0
    rank: int = 0
    matrices: tuple[Matrix, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if type(self) is Codec and self.name not in CODECS:
            raise ValueError(
                f"codec {self.name!r} must be one of {', '.join(CODECS)}; derive your own encoding "
                f"from mpikfac.plan.CustomCodec"
            )

    @property
    def summable(self) -> bool:
        """Whether MPI can reduce encoded values, by a function of the library."""
        return self.name == "bfloat16"

    @property
    def everywhere(self) -> str:
        """The collective that computes sums on all ranks."""
        return EVERYWHERE.get(self.name, "Allreduce")

    def within(self, start: int, stop: int) -> Codec:
        """Return the codec of a span, with its matrices and padding."""
        return replace(
            self,
            matrices=tuple(matrix for matrix in self.matrices if start <= matrix.start < stop),
            padding=tuple(gap for gap in self.padding if start <= gap[0] < stop),
        )

    def count(self, elements: int) -> int:
        """Return the number of values sent for `elements` elements of a span."""
        return math.ceil(
            self.share * (elements - sum(stop - start for start, stop in self.padding))
        )

    def sides(self) -> tuple[int, int]:
        """Return the elements of all P, and of all Q."""
        sides = [matrix.sides(self.rank) for matrix in self.matrices]
        return sum(left for left, _ in sides), sum(right for _, right in sides)

    def size(self, elements: int, itemsize: int) -> int:
        """Return the size in bytes of `elements` encoded values."""
        if self.name == "bfloat16":
            return 2 * elements
        if self.name == "int8":
            return elements + elements // ALIGNMENT
        if self.name == "power-sgd":
            return sum(self.sides()) * itemsize
        return self.count(elements) * (itemsize + PLACE)

    def size_of(self, start: int, stop: int, itemsize: int) -> int:
        """Return the size in bytes of an encoded span of an arena."""
        return self.within(start, stop).size(stop - start, itemsize)

    @property
    def arenas(self) -> int:
        """The number of values kept from step to step for each value of an arena."""
        return self.feedback + (self.momentum > 0)


@dataclass(frozen=True)
class CustomCodec(Codec):
    """The base of encodings defined by users.

    All ranks gather the encoded values of all ranks, and sum the decoded values in rank order.
    """

    @property
    def everywhere(self) -> str:
        """The collective that computes sums on all ranks."""
        return "Allgather"

    def size(self, elements: int, itemsize: int) -> int:
        """Return the size in bytes of `elements` encoded values.

        Args:
            itemsize: the bytes of a value.
        """
        raise NotImplementedError

    def encode(self, values: Any) -> Any:
        """Return `values`, a tensor `[n]`, as a tensor of bytes `[size(n)]`."""
        raise NotImplementedError

    def add_decoded(self, total: Any, encoded: Any, weight: int) -> None:
        """Add the decoded values, times `weight`, to `total` `[n]`, in place."""
        raise NotImplementedError
