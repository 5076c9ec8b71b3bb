"""Exchange activations within a group of ranks: gather, reduce-scatter, all-to-all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mpikfac.comm.job import cuda_aware
from mpikfac.comm.messages import MAX_COUNT, SUMMABLE, Buffers
from mpikfac.comm.mpi import MPI
from mpikfac.errors import UserError
from mpikfac.trace import Trace

Call = Callable[[Any, Any], None]
FIRST = 16
"""The number of initial exchanges in which a group checks the `requires_grad` of rows."""


class Group:
    """Exchange activations between ranks, for example the ranks over which layers are split.

    Collective over: comm.

    Args:
        color: ranks that pass the same color form a group.
        name: the name of the communicator in the trace.

    Attributes:
        size: the number of ranks in the group.
        member: the position of this rank in the group.
    """

    def __init__(self, comm: MPI.Intracomm, color: int, trace: Trace, name: str = "group") -> None:
        self._comm = cast(MPI.Intracomm, comm.Split(color, comm.rank))
        self._comm.name = name
        self.size, self.member, self.trace = self._comm.size, self._comm.rank, trace
        self._compared = 0  # number of exchanges checked so far
        self._buffers = Buffers(trace, cuda_aware(comm))

    def free(self) -> None:
        """Free the communicator.

        Collective over: group.
        """
        self._comm.Free()

    def check_alike(self, layer: str, x: Tensor) -> None:
        """Check that all ranks of a group call the same layer, with inputs of one shape and dtype.

        Collective over: group.

        Raises:
            UserError: the layers, shapes or dtypes differ; the message contains both calls.
        """
        first, *calls = self._comm.allgather((layer, tuple(x.shape), str(x.dtype)))
        for member, call in enumerate(calls, start=1):
            if call != first:
                (name, shape, dtype), (other_name, other_shape, other_dtype) = first, call
                raise UserError(
                    f"split layers need the same call on all ranks of a group: layer {name!r} gets "
                    f"{list(shape)} {dtype} on member 0, layer {other_name!r} gets "
                    f"{list(other_shape)} {other_dtype} on member {member}"
                )

    def check_gradients(self, x: Tensor) -> None:
        """Check, in the first exchanges, that tensors require gradients on all members or on none.

        Collective over: group.

        Raises:
            UserError: tensors require gradients on some members only, which would wait forever in
                the backward pass.
        """
        if self.size == 1 or self._compared == FIRST:
            return
        self._compared += 1
        required = self._comm.allgather(x.requires_grad and torch.is_grad_enabled())
        if len(set(required)) > 1:
            raise UserError(
                f"rows require gradients on member {required.index(True)} but not on member "
                f"{required.index(False)}: call rows.requires_grad_() on all members, even with 0 "
                f"rows, or rows.detach() on all"
            )

    def gather(self, x: Tensor, dim: int, stage: str) -> Tensor:
        """Return the tensors of all members, concatenated along `dim`.

        Collective over: group.
        """
        sent = x.contiguous()
        received = sent.new_empty(self.size, *sent.shape)
        self._send(self._comm.Allgather, sent, received, stage)
        return _joined(received, dim)

    def gather_rows(self, x: Tensor, counts: Sequence[int], stage: str) -> Tensor:
        """Return the rows of all members, ordered by member; `counts` are the row counts by member.

        Collective over: group.
        """
        if self.size == 1:
            return x
        sent = x.contiguous()
        received = sent.new_empty(sum(counts), *sent.shape[1:])
        row = _elements_per_row(sent)

        def allgatherv(outgoing: Any, incoming: Any) -> None:
            self._comm.Allgatherv(outgoing, [incoming, [row * count for count in counts]])

        self._send(allgatherv, sent, received, stage)
        return received

    def sum_parts(self, x: Tensor, dim: int, stage: str) -> Tensor:
        """Return this rank's part, along `dim`, of the sum of all members' tensors.

        Values of fewer than 32 bits are summed in float32.

        Collective over: group.
        """
        if x.dtype not in SUMMABLE:
            return self.sum_parts(x.float(), dim, stage).to(x.dtype)
        sent = _parts(x, self.size, dim)
        received = torch.empty_like(sent[0])
        self._send(self._comm.Reduce_scatter_block, sent, received, stage)
        return received

    def turn(self, x: Tensor, cut: int, join: int, stage: str) -> Tensor:
        """Split `x` along `cut`, send each member a part, and join the received parts along `join`.

        Collective over: group.
        """
        sent = _parts(x, self.size, cut)
        received = torch.empty_like(sent)
        self._send(self._comm.Alltoall, sent, received, stage)
        return _joined(received, join)

    def pass_rows(
        self, x: Tensor, counts_out: Sequence[int], counts_in: Sequence[int], stage: str
    ) -> Tensor:
        """Send each member consecutive rows of `x`; return the received rows, ordered by member.

        `counts_out` and `counts_in` are the numbers of rows sent to and received from each member.

        Collective over: group.
        """
        if self.size == 1:
            return x
        sent = x.contiguous()
        received = sent.new_empty(sum(counts_in), *sent.shape[1:])
        row = _elements_per_row(sent)

        def alltoallv(outgoing: Any, incoming: Any) -> None:
            elements = [[row * count for count in counts] for counts in (counts_out, counts_in)]
            self._comm.Alltoallv([outgoing, elements[0]], [incoming, elements[1]])

        self._send(alltoallv, sent, received, stage)
        return received

    def _send(self, call: Call, sent: Tensor, received: Tensor, stage: str) -> None:
        # A view of an activation requires gradients, and DLPack does not export such tensors.
        flats = sent.detach().view(-1), received.view(-1)
        if sent.dtype not in SUMMABLE:  # MPI copies bytes if it does not know the dtype
            flats = flats[0].view(torch.uint8), flats[1].view(torch.uint8)
        count = max(map(len, flats))
        if count > MAX_COUNT:
            raise ValueError(
                f"a message of the stage {stage!r} has {count} elements, and MPI accepts at most "
                f"{MAX_COUNT}: use smaller batches"
            )
        with (
            self._buffers.both(*flats, stage) as buffers,
            self.trace.stage(stage, self._comm.name, sent.nbytes),
        ):
            call(*buffers)


def _elements_per_row(x: Tensor) -> int:
    """Return the number of elements in a row, or of bytes if MPI does not know the dtype."""
    return math.prod(x.shape[1:]) * (1 if x.dtype in SUMMABLE else x.itemsize)


def _parts(x: Tensor, count: int, dim: int) -> Tensor:
    """Split `x` along `dim` into equal parts; return them as a contiguous tensor `[count, ...]`."""
    return (
        x.unflatten(dim, (count, x.shape[dim] // count))
        .movedim(dim if dim >= 0 else dim - 1, 0)
        .contiguous()
    )


def _joined(parts: Tensor, dim: int) -> Tensor:
    """Join parts along `dim`; the inverse of `_parts`."""
    at = dim if dim >= 0 else parts.dim() - 1 + dim
    return parts.movedim(0, at).flatten(at, at + 1)
