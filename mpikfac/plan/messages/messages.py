"""Messages as plain data: elements, communicator, primitive and bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from mpikfac.plan.choices import Aggregation, FactorAggregation
from mpikfac.plan.codec import IN_SHARDS, IN_TWO_SUMS, Codec
from mpikfac.plan.layout import ALIGNMENT, Layout, Span

Kind = Callable[[str], Hashable]
# The number of elements to reduce at once: MPI's temporary buffers then stay small and in the
# cache, which is faster and needs less memory than reducing everything at once.
PIECE = 2**22
BATCH = 2**18  # elements per batch of overlapped reductions, and per piece of one reduction


@dataclass(frozen=True)
class Message:
    """A message of a step, from the point of view of a rank.

    Attributes:
        stage: the stage of `KFAC.step` that sends the message.
        primitive: the MPI collective, or several in order; Send or Recv; or "Isend, Irecv", which
            divides the same elements among the members in another way.
        over: "world", "column" or "row", or one level of these; or "curvature", the
            intercommunicator to curvature servers.
        spans: starts and stops of elements in the stage's arena. For Reduce_scatter,
            Alltoall, Allgatherv and "Isend, Irecv": every member's part, in order; for Alltoallv:
            the rows for every member, in order.
        root: the destination of a Reduce or Send, or the source of a Bcast or Recv.
        size: the encoded bytes of all spans, including those of all members if every member sends a
            part; for Alltoallv, the bytes of the rank's parts.
        bytes: how many of these bytes the rank passes to MPI.
        wire: the bytes that the rank sends if the collective is a ring.
        codec: the encoding; None for unencoded values.
        rule: the rule that combines the values of ranks; None for sums and copies.
        to: for "Isend, Irecv", every member's part after the message, in order.
        sizes: for Alltoallv, the bytes from every member to every member.
    """

    stage: str
    primitive: str
    over: str
    spans: tuple[tuple[int, int], ...]
    root: int
    size: int
    bytes: int
    wire: int
    codec: Codec | None = None
    rule: Aggregation | FactorAggregation | None = None
    to: tuple[tuple[int, int], ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()


def sums(
    stage: str,
    layout: Layout,
    kind: Kind,
    ranks: int,
    itemsize: int,
    primitive: str | None = "Reduce_scatter",
    codec: Codec | None = None,
) -> list[Message]:
    """Return messages that sum an arena over the world: on all ranks, or segment r on rank r only.

    An arena of several segments is summed segment by segment. Neighbouring blocks of a `kind` share
    a message; blocks of kind None are left out. If all segments have the same kind, and a
    `primitive` (Reduce_scatter or Alltoall) is given, a single message computes all sums.
    """
    spans = [span for span in layout.spans(kind) if span.kind is not None]
    if ranks == 1 or not spans:
        return []

    def to(primitive: str, parts: Sequence[tuple[int, int]], root: int = -1) -> Message:
        return message(stage, primitive, "world", parts, ranks, itemsize, 0, root, codec)

    # PowerSGD's second sum needs the first one everywhere, so reducing to owners would save
    # nothing.
    if len(layout.bounds) == 2 or (codec and codec.everywhere == IN_TWO_SUMS):
        everywhere = codec.everywhere if codec else "Allreduce"
        return [to(everywhere, [(span.start, span.stop)]) for span in spans]
    if primitive is not None and _alike(spans):
        return [to(primitive, _parts(layout, spans, ranks))]
    if codec and not codec.summable:
        return [to("Alltoall", _parts(layout, [span], ranks)) for span in spans]
    return [to("Reduce", [(span.start, span.stop)], span.segment) for span in spans]


def combinations(
    stage: str,
    layout: Layout,
    kind: Kind,
    ranks: int,
    member: int,
    itemsize: int,
    rule: Aggregation | FactorAggregation,
) -> list[Message]:
    """Return the messages of rank `member` that apply a rule to all ranks' arenas of one segment.

    Each rank receives a shard of all vectors, and sends the result to all. In between, rules with
    weights need the sum of the shards' inner products, in float64.
    """
    messages: list[Message] = []
    for span in layout.spans(kind) if ranks > 1 else ():
        if span.kind is None:
            continue
        shards = cut(span.start, span.stop, ranks)
        messages.append(message(stage, "Alltoall", "world", shards, ranks, itemsize))
        if products := rule.products(ranks):
            messages.append(message(stage, "Allreduce", "world", [(0, products)], ranks, 8))
        messages.append(message(stage, "Allgatherv", "world", shards, ranks, itemsize, member))
    return [replace(message, rule=rule) for message in messages]


def in_order(stage: str, layout: Layout, ranks: int, itemsize: int) -> list[Message]:
    """Return messages that sum an arena in rank order: bitwise equal for any number of ranks."""
    if ranks == 1 or layout.size == 0:
        return []
    return [message(stage, "Send, Bcast", "world", [(0, layout.size)], ranks, itemsize)]


def gathers(
    stage: str,
    over: str,
    layout: Layout,
    kind: Kind,
    member: int,
    members: int,
    itemsize: int,
    codec: Codec | None = None,
) -> list[Message]:
    """Return the messages of `member` that send all segments to every member of `over`.

    Neighbouring blocks of a `kind` share a message; blocks of kind None are left out, as are
    segments beyond the number of members.
    """
    spans = [s for s in layout.spans(kind) if s.kind is not None and s.segment < members]
    if members == 1 or not spans:
        return []

    def to(primitive: str, parts: Sequence[tuple[int, int]], root: int = -1) -> Message:
        return message(stage, primitive, over, parts, members, itemsize, member, root, codec)

    if _alike(spans):
        return [to("Allgatherv", _parts(layout, spans, members))]
    return [to("Bcast", [(span.start, span.stop)], span.segment) for span in spans]


def rows(
    stage: str, counts: Sequence[Sequence[int]], size: int, member: int, over: str = "world"
) -> list[Message]:
    """Return the message of rank `member` in an exchange of rows between members.

    Args:
        counts: the number of rows from every member to every member.
        size: the number of bytes per row.
    """
    own = counts[member]
    if len(own) == 1:
        return []
    edges = [0, *accumulate(own)]
    sizes = tuple(tuple(size * count for count in row) for row in counts)
    sent = sum(sizes[member])
    wire = sent - sizes[member][member]
    spans = tuple(pairwise(edges))
    return [Message(stage, "Alltoallv", over, spans, -1, sent, sent, wire, sizes=sizes)]


def across(stage: str, primitive: str, layout: Layout, peer: int, itemsize: int) -> list[Message]:
    """Return the message to or from curvature server `peer`; none if the layout is empty."""
    if layout.size == 0:
        return []
    size = layout.size * itemsize
    sent = size if primitive == "Send" else 0
    return [Message(stage, primitive, "curvature", ((0, layout.size),), peer, size, sent, sent)]


def message(
    stage: str,
    primitive: str,
    over: str,
    spans: Sequence[tuple[int, int]],
    members: int,
    itemsize: int,
    member: int = 0,
    root: int = -1,
    codec: Codec | None = None,
) -> Message:
    """Return the message of one of `members` members, with its sizes."""
    parts = list(spans)
    codec = codec.within(spans[0][0], spans[-1][1]) if codec else None
    if primitive == IN_SHARDS:
        ((start, stop),) = spans
        _check_shards(codec, itemsize)
        parts = [(0, shard_length(stop - start, members))] * members
    elif primitive == "Allgather":
        parts *= members
    sizes = [codec.size_of(a, z, itemsize) if codec else (z - a) * itemsize for a, z in parts]
    size = handed = sum(sizes)
    if primitive in ("Allgatherv", "Allgather"):
        handed = sizes[member]
    elif primitive == IN_SHARDS:
        handed += sizes[member]
    elif primitive == "Bcast" and root != member:
        handed = 0
    ring = size * (members - 1) // members
    twice = ("Allreduce", IN_SHARDS, IN_TWO_SUMS)
    wire = 2 * ring if primitive in twice else {"Send, Bcast": size}.get(primitive, ring)
    return Message(stage, primitive, over, tuple(spans), root, size, handed, wire, codec)


def _check_shards(codec: Codec | None, itemsize: int) -> None:
    """Check that encoded values can be cut into shards.

    Raises:
        ValueError: two blocks of values do not take twice the bytes of one.
    """
    if codec is None:
        return
    one, two = (codec.size(blocks * ALIGNMENT, itemsize) for blocks in (1, 2))
    if two != 2 * one:
        raise ValueError(
            f"codec {codec.name!r}: size({2 * ALIGNMENT})={two} must be 2 size({ALIGNMENT})="
            f"{2 * one}, because everywhere={IN_SHARDS!r} cuts encoded values into shards; use "
            f"'Allgather' for a codec with a header per message"
        )


def shard_length(elements: int, members: int) -> int:
    """Return the number of elements per shard if `elements` are divided equally among members."""
    blocks = -(-elements // ALIGNMENT)
    return -(-blocks // members) * ALIGNMENT


def _parts(layout: Layout, spans: Sequence[Span], members: int) -> list[tuple[int, int]]:
    """Return the span of every member's segment, which can be empty."""
    parts = [(bound, bound) for bound in layout.bounds[:members]]
    for span in spans:
        parts[span.segment] = (span.start, span.stop)
    return parts


def _alike(spans: Sequence[Span]) -> bool:
    return len({span.kind for span in spans}) == 1


def cut(start: int, stop: int, count: int, codec: Codec | None = None) -> list[tuple[int, int]]:
    """Return `count` neighbouring aligned spans of about equal size, cut at the codec's borders."""
    blocks = (stop - start) // ALIGNMENT
    edges = [start + blocks * k // count * ALIGNMENT for k in range(count)]
    if codec and codec.borders:
        borders = [*codec.borders, stop]
        edges = [min(border for border in borders if border >= edge) for edge in edges]
    return list(zip(edges, [*edges[1:], stop]))
