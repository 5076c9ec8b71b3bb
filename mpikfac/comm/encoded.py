"""Collectives of encoded numbers: MPI passes on bytes, and ranks add up what they decode.

All ranks that get a number decode the same bytes, the one that it comes from included, and add up
parts in the order of ranks: they hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from mpi4py import MPI
from torch import Tensor

from mpikfac.comm.buffers import settle
from mpikfac.numerics import add_decoded, encode
from mpikfac.plan import Codec, Message, shard_length

Span = tuple[int, int]


class Encoded:
    """What carries out messages with a codec, but for sums that MPI makes itself.

    Attributes:
        lost: by stage, what encoding lost of its arena and what is yet to be sent.
    """

    def __init__(self, direct: bool) -> None:
        """`direct`: MPI takes device buffers."""
        self._direct = direct
        self.lost: dict[str, Tensor] = {}

    def exchange(self, comm: MPI.Intracomm, message: Message, flat: Tensor) -> None:
        """Sends what the message says of `flat`.

        Collective over: comm.
        """
        assert message.codec is not None
        handed = PRIMITIVES[message.primitive](self, comm, message, message.codec, flat)
        assert handed == message.bytes

    def forget(self) -> None:
        """Drops what was lost: ranks go on as after a restart."""
        for lost in self.lost.values():
            lost.zero_()

    def _in_shards(self, comm: MPI.Intracomm, message: Message, codec: Codec, flat: Tensor) -> int:
        """Each member adds up one shard and sends the sum to all, encoded as the parts are."""
        (span,) = message.spans
        length = shard_length(span[1] - span[0], comm.size)
        mine = self._encoded(flat, span, message.stage, codec)
        parts = mine.new_zeros(comm.size, codec.size(length, flat.element_size()))
        parts.view(-1)[: len(mine)] = mine
        total = flat.new_zeros(length)
        for part in self._passed(comm.Alltoall, parts, parts.numel()).view(parts.shape):
            add_decoded(total, part, codec)
        missing = torch.zeros_like(total) if codec.feedback else None
        shard = encode(total, codec, missing)
        if missing is not None:  # this rank adds it to its next part
            start = min(span[0] + comm.rank * length, span[1])
            lost = self.lost[message.stage][start : min(start + length, span[1])]
            lost += missing[: len(lost)]
        whole = self._passed(comm.Allgather, shard, parts.numel())
        _decode(flat, span, [whole[: len(mine)]], codec)
        return parts.numel() + len(shard)

    def _to_all(self, comm: MPI.Intracomm, message: Message, codec: Codec, flat: Tensor) -> int:
        """Every member gets all parts of a span and adds them up."""
        (span,) = message.spans
        mine = self._encoded(flat, span, message.stage, codec)
        parts = self._passed(comm.Allgather, mine, comm.size * len(mine))
        _decode(flat, span, parts.split(len(mine)), codec)
        return len(mine)

    def _to_owners(self, comm: MPI.Intracomm, message: Message, codec: Codec, flat: Tensor) -> int:
        """Each member gets all parts of its span and adds them up."""
        mine = [self._encoded(flat, span, message.stage, codec) for span in message.spans]
        counts = [len(part) for part in mine]
        own = [counts[comm.rank]] * comm.size

        def deal(sent: Tensor, received: Tensor) -> None:
            comm.Alltoallv([sent, counts], [received, own])

        parts = self._passed(deal, torch.cat(mine), sum(own))
        _decode(flat, message.spans[comm.rank], parts.split(own), codec)
        return sum(counts)

    def _gather(self, comm: MPI.Intracomm, message: Message, codec: Codec, flat: Tensor) -> int:
        """Every member gets all spans."""
        counts = [codec.size(stop - start, flat.element_size()) for start, stop in message.spans]
        mine = self._encoded(flat, message.spans[comm.rank], message.stage, codec)

        def gather(sent: Tensor, received: Tensor) -> None:
            comm.Allgatherv(sent, [received, counts])

        parts = self._passed(gather, mine, sum(counts)).split(counts)
        for span, part in zip(message.spans, parts):
            _decode(flat, span, [part], codec)
        return len(mine)

    def _broadcast(self, comm: MPI.Intracomm, message: Message, codec: Codec, flat: Tensor) -> int:
        """Every member gets the root's span."""
        (span,) = message.spans
        mine = flat.new_empty(0, dtype=torch.uint8)
        if comm.rank == message.root:
            mine = self._encoded(flat, span, message.stage, codec)

        def broadcast(sent: Tensor, received: Tensor) -> None:
            received[: len(sent)] = sent
            settle(received)
            comm.Bcast(received, message.root)

        size = codec.size(span[1] - span[0], flat.element_size())
        _decode(flat, span, [self._passed(broadcast, mine, size)], codec)
        return len(mine)

    def _encoded(self, flat: Tensor, span: Span, stage: str, codec: Codec) -> Tensor:
        """A span of `flat` as it travels; what that loses is kept for the next time."""
        here = slice(*span)
        if not codec.feedback:
            return encode(flat[here], codec)
        if stage not in self.lost:
            self.lost[stage] = torch.zeros_like(flat)
        return encode(flat[here], codec, self.lost[stage][here])

    def _passed(
        self, collective: Callable[[Tensor, Tensor], object], sent: Tensor, size: int
    ) -> Tensor:
        """What `collective(sent, received)` puts into `received`, `[size]` bytes."""
        place = sent.device if self._direct else torch.device("cpu")
        received = torch.empty(size, dtype=torch.uint8, device=place)
        readable = sent.to(place)
        settle(readable)
        collective(readable, received)
        return received.to(sent.device)


PRIMITIVES = {
    "Alltoall, Allgather": Encoded._in_shards,
    "Allgather": Encoded._to_all,
    "Alltoall": Encoded._to_owners,
    "Allgatherv": Encoded._gather,
    "Bcast": Encoded._broadcast,
}
"""What carries out a message, by the name that plans give it."""


def _decode(flat: Tensor, span: Span, parts: Iterable[Tensor], codec: Codec) -> None:
    """A span of `flat` becomes the sum of what was encoded."""
    total = flat[slice(*span)].zero_()
    for part in parts:
        add_decoded(total, part, codec)
