"""Execute collectives on encoded values: MPI moves bytes, and the ranks decode and sum them.

The sender decodes the same bytes as the receivers, and all of them sum in rank order, so the
results are bitwise equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial

import torch
from torch import Tensor

from mpikfac.comm.messages.buffers import MAX_COUNT, check_sendable, synchronize
from mpikfac.comm.mpi import MPI
from mpikfac.numerics import encode
from mpikfac.plan import IN_SHARDS, IN_TWO_SUMS, Codec, Message, shard_length

Span = tuple[int, int]
LATER, LAST = "later", "last"  # parts of the keys of `Encoded.memory`, besides the stage


class Encoded:
    """Execute messages that have a codec, except for reductions that MPI computes itself.

    Attributes:
        memory: what a rank keeps for the next step, by key. `stage`: the residuals of the stage's
            arena, which are the encoding errors that are added to the next message. `(stage,
            LATER)`: the velocity of values that have not been sent yet. `(stage, span, LAST)`: the
            result of the last reduction of a message's codec.
    """

    def __init__(self, direct: bool, memory: dict[Hashable, Tensor] | None = None) -> None:
        """Start with `memory`, if given; `direct` means that MPI accepts device buffers."""
        self._direct = direct
        self.memory = {} if memory is None else memory

    def exchange(self, comm: MPI.Intracomm, message: Message, flat: Tensor) -> None:
        """Exchange the message's spans of `flat`.

        Collective over: comm.
        """
        assert message.codec is not None
        sent = PRIMITIVES[message.primitive](self, comm, message, message.codec, flat)
        assert sent == message.bytes

    def reset(self) -> None:
        """Set the memory to zero, as after a restart."""
        for tensor in self.memory.values():
            tensor.zero_()

    def _in_shards(self, comm: MPI.Intracomm, message: Message, codec: Codec, flat: Tensor) -> int:
        """All-reduce: every member sums one shard, encodes the sum and sends it to all members."""
        (span,) = message.spans
        length = shard_length(span[1] - span[0], comm.size)
        encoded = self._encoded(flat, span, message.stage, codec)
        parts = encoded.new_zeros(comm.size, codec.size(length, flat.element_size()))
        parts.view(-1)[: len(encoded)] = encoded
        total = flat.new_zeros(length)
        for part in self._passed(comm.Alltoall, parts, parts.numel()).view(parts.shape):
            codec.add_decoded(total, part, 1)
        residual = torch.zeros_like(total) if codec.feedback else None
        shard = encode(total, codec, residual)
        # Only the sum of all ranks' residuals matters, so this rank can add the error of encoding
        # the sum to its own residual.
        if residual is not None:
            start = min(span[0] + comm.rank * length, span[1])
            residuals = self.memory[message.stage][start : min(start + length, span[1])]
            residuals += residual[: len(residuals)]
        gathered = self._passed(comm.Allgather, shard, parts.numel())
        _decode(flat, span, [gathered[: len(encoded)]], codec)
        return parts.numel() + len(shard)

    def _to_all(self, comm: MPI.Intracomm, message: Message, codec: Codec, flat: Tensor) -> int:
        """All-reduce: every member receives the encoded spans of all members and sums them."""
        (span,) = message.spans
        encoded = self._encoded(flat, span, message.stage, codec)
        parts = self._passed(comm.Allgather, encoded, comm.size * len(encoded))
        _decode(flat, span, parts.split(len(encoded)), codec)
        return len(encoded)

    def _to_owners(self, comm: MPI.Intracomm, message: Message, codec: Codec, flat: Tensor) -> int:
        """Reduce to the owners: every member receives the values of its span from all members."""
        encoded = [self._encoded(flat, span, message.stage, codec) for span in message.spans]
        counts = [len(part) for part in encoded]
        incoming = [counts[comm.rank]] * comm.size

        def deal(sent: Tensor, received: Tensor) -> None:
            comm.Alltoallv([sent, counts], [received, incoming])

        check_sendable(message.stage, max(sum(counts), comm.size * max(counts)))
        parts = self._passed(deal, torch.cat(encoded), sum(incoming))
        _decode(flat, message.spans[comm.rank], parts.split(incoming), codec)
        return sum(counts)

    def _in_two_sums(
        self, comm: MPI.Intracomm, message: Message, codec: Codec, flat: Tensor
    ) -> int:
        """All-reduce with the two reductions that the codec defines."""
        (span,), residuals = message.spans, self._memory_of(message.stage, flat)
        last = self._memory_of((message.stage, span, LAST), flat.new_empty(codec.reductions[-1]))
        codec.all_reduce(flat, span, residuals, last, partial(self._add_up, comm))
        return sum(codec.reductions) * flat.element_size()

    def _gather(self, comm: MPI.Intracomm, message: Message, codec: Codec, flat: Tensor) -> int:
        """All-gather: send every member's span to all members."""
        counts = [codec.size_of(*span, flat.element_size()) for span in message.spans]
        encoded = self._encoded(flat, message.spans[comm.rank], message.stage, codec)

        def gather(sent: Tensor, received: Tensor) -> None:
            if len(received) <= MAX_COUNT:
                comm.Allgatherv(sent, [received, counts])
                return
            for root, part in enumerate(received.split(counts)):
                if comm.rank == root:
                    part.copy_(sent)
                    synchronize(part)
                for piece in part.split(MAX_COUNT):
                    comm.Bcast(piece, root)

        parts = self._passed(gather, encoded, sum(counts)).split(counts)
        for span, part in zip(message.spans, parts):
            _decode(flat, span, [part], codec)
        return len(encoded)

    def _broadcast(self, comm: MPI.Intracomm, message: Message, codec: Codec, flat: Tensor) -> int:
        """Broadcast the root's span."""
        (span,) = message.spans
        encoded = flat.new_empty(0, dtype=torch.uint8)
        if comm.rank == message.root:
            encoded = self._encoded(flat, span, message.stage, codec)

        def broadcast(sent: Tensor, received: Tensor) -> None:
            received[: len(sent)] = sent
            synchronize(received)
            comm.Bcast(received, message.root)

        size = codec.size_of(*span, flat.element_size())
        _decode(flat, span, [self._passed(broadcast, encoded, size)], codec)
        return len(encoded)

    def _encoded(self, flat: Tensor, span: Span, stage: str, codec: Codec) -> Tensor:
        """Return a span of `flat`, encoded as bytes; with feedback, keep the error as residual."""
        part, codec = slice(*span), codec.within(*span)
        if not codec.feedback or part.start == part.stop:
            return encode(flat[part], codec)
        residuals, velocity = self._memory_of(stage, flat), None
        if codec.delays:
            velocity = self._memory_of((stage, LATER), flat)[part]
        return encode(flat[part], codec, residuals[part], velocity)

    def _memory_of(self, name: Hashable, like: Tensor) -> Tensor:
        """Return the memory stored under a name; it starts as zeros."""
        if name not in self.memory:
            self.memory[name] = torch.zeros_like(like)
        return self.memory[name]

    def _add_up(self, comm: MPI.Intracomm, numbers: Tensor) -> None:
        """All-reduce `numbers` in place."""
        place = numbers.device if self._direct else torch.device("cpu")
        buffer = numbers.to(place)
        synchronize(buffer)
        comm.Allreduce(MPI.IN_PLACE, buffer)
        numbers.copy_(buffer)

    def _passed(
        self, collective: Callable[[Tensor, Tensor], object], sent: Tensor, size: int
    ) -> Tensor:
        """Call `collective(sent, received)` and return `received`, `[size]` bytes."""
        place = sent.device if self._direct else torch.device("cpu")
        received = torch.empty(size, dtype=torch.uint8, device=place)
        readable = sent.to(place)
        synchronize(readable)
        collective(readable, received)
        return received.to(sent.device)


PRIMITIVES = {
    IN_SHARDS: Encoded._in_shards,
    IN_TWO_SUMS: Encoded._in_two_sums,
    "Allgather": Encoded._to_all,
    "Alltoall": Encoded._to_owners,
    "Allgatherv": Encoded._gather,
    "Bcast": Encoded._broadcast,
}
"""The methods that execute a message, by the name of its primitive in the plan."""


def _decode(flat: Tensor, span: Span, parts: Iterable[Tensor], codec: Codec) -> None:
    """Set a span of `flat` to the sum of the decoded parts."""
    total = flat[slice(*span)].zero_()
    for part in parts:
        codec.add_decoded(total, part, 1)
