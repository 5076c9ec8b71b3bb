"""The base class of codecs, which encode the values of messages as bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

# How ranks sum values that MPI cannot sum.
IN_SHARDS, IN_TWO_SUMS = "Alltoall, Allgather", "Allreduce, Allreduce"
EVERYWHERE = ("Allreduce", "Allgather", IN_SHARDS, IN_TWO_SUMS)
"""The collectives that compute sums on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """An encoding that sends values in fewer bytes.

    Derive from this class to define an encoding: set `name`, and define `size`, `encode` and
    `add_decoded`. Plans compare codecs by their type and fields, so a codec with fields must be a
    frozen dataclass. Plans work without torch, so methods that compute on tensors import it
    themselves.

    Attributes:
        name: the name of the encoding in plans and predictions.
        everywhere: the collective that computes sums on all ranks. "Allgather": all ranks gather
            the encoded values of all ranks, and sum the decoded values in rank order.
            "Alltoall, Allgather": each rank sums a shard, and encodes the sum again; encoded values
            are cut into shards, so each block of 16 values must be encoded separately, in the same
            number of bytes, without a header per message. "Allreduce": MPI reduces values rounded
            to bfloat16. "Allreduce, Allreduce": `all_reduce` computes the sums.
        feedback: whether the encoding error is added to the next values to encode.
    """

    name: ClassVar[str] = "custom"
    everywhere: ClassVar[str] = "Allgather"

    feedback: bool = False

    @property
    def summable(self) -> bool:
        """Whether MPI can reduce encoded values, with a user-defined operation."""
        return self.everywhere == "Allreduce"

    @property
    def delays(self) -> bool:
        """Whether values accumulate, with momentum, until they are sent; see `accumulate`."""
        return False

    @property
    def borders(self) -> tuple[int, ...]:
        """The offsets in an arena where a message can be cut; empty if it can be cut anywhere."""
        return ()

    @property
    def reductions(self) -> tuple[int, ...]:
        """The number of elements per reduction in `all_reduce`; the last one's result is kept."""
        return ()

    @property
    def arenas(self) -> int:
        """The number of values kept from step to step for each value of an arena."""
        return self.feedback + self.delays

    def within(self, start: int, stop: int) -> Codec:
        """Return the codec for messages that contain only the elements from `start` to `stop`."""
        return self

    def size(self, elements: int, itemsize: int) -> int:
        """Return the size in bytes of `elements` encoded values.

        Args:
            itemsize: the number of bytes per value.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define size()")

    def size_of(self, start: int, stop: int, itemsize: int) -> int:
        """Return the size in bytes of an encoded span of an arena."""
        return self.within(start, stop).size(stop - start, itemsize)

    def encode(self, values: Any) -> Any:
        """Return `values`, a tensor `[n]`, as a tensor of bytes `[size(n)]`."""
        raise NotImplementedError(f"{type(self).__name__} does not define encode()")

    def add_decoded(self, total: Any, encoded: Any, weight: int) -> None:
        """Add the decoded values, times `weight`, to `total` `[n]`, in place."""
        raise NotImplementedError(f"{type(self).__name__} does not define add_decoded()")

    def accumulate(self, velocity: Any, values: Any) -> Any:
        """Return the tensor to encode in place of `values` `[n]`, and update `velocity` `[n]`.

        Called only if `delays` is true.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define accumulate()")

    def clear_sent(self, velocity: Any, encoded: Any) -> None:
        """Set `velocity` `[n]` to 0 where values were sent. Called only if `delays` is true."""
        raise NotImplementedError(f"{type(self).__name__} does not define clear_sent()")

    def all_reduce(
        self,
        flat: Any,
        span: tuple[int, int],
        residuals: Any,
        last: Any,
        reduce: Callable[[Any], None],
    ) -> None:
        """Set a span of an arena to the sum over ranks. Called only for "Allreduce, Allreduce".

        Args:
            flat: the arena.
            residuals: what previous reductions left out, for each element; updated in place.
            last: the last reduction's result in the previous step, initially 0; updated in place.
            reduce: all-reduces a tensor in place.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define all_reduce()")
