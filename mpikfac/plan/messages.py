"""Messages as plain data: which elements of an arena travel, over whom, by which primitive."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from mpikfac.plan.layout import ALIGNMENT, Layout, Span

Kind = Callable[[str], Hashable]
PLACE = 4  # bytes that say where a number lies
# Elements that are summed at once: MPI's temporaries stay small and in cache, which is faster than
# a reduction of everything and takes less memory.
PIECE = 2**22


@dataclass(frozen=True)
class Codec:
    """How numbers travel in fewer bytes than they have; `codecs` carries it out.

    Attributes:
        name: "bfloat16"; "int8", 16 numbers with a common exponent; "top-k", the largest numbers.
        share: of the numbers, those that travel with "top-k".
        feedback: what encoding lost is added to what is encoded next.
    """

    name: str
    share: float = 1.0
    feedback: bool = False

    @property
    def summable(self) -> bool:
        """Whether MPI can add up encoded numbers, by a function of ours."""
        return self.name == "bfloat16"

    def count(self, elements: int) -> int:
        """How many of so many numbers travel."""
        return math.ceil(self.share * elements)

    def size(self, elements: int, itemsize: int) -> int:
        """Bytes of so many encoded numbers, a multiple of `ALIGNMENT`."""
        if self.name == "bfloat16":
            return 2 * elements
        if self.name == "int8":
            return elements + elements // ALIGNMENT
        return self.count(elements) * (itemsize + PLACE)


# How ranks get what they add up themselves, as MPI cannot.
EVERYWHERE = {"int8": "Alltoall, Allgather", "top-k": "Allgather"}


@dataclass(frozen=True)
class Message:
    """One message of a step as one rank sees it.

    Attributes:
        stage: the stage of `KFAC.step` that sends it.
        primitive: the MPI collective, or several in turn; or Send or Recv.
        over: "world", "column" or "row", or a part of one as in `levels`; or "curvature", which
            joins this rank to curvature ranks.
        spans: where in the stage's arena it is: first and last (exclusive) element, of each
            member's part in turn for Reduce_scatter, Alltoall and Allgatherv.
        root: the member that a Reduce or Send goes to, or that a Bcast or Recv comes from.
        size: bytes of all spans as they travel, and of all members' where each sends its own.
        bytes: of these, what this rank hands to MPI.
        wire: bytes that this rank sends if the collective is a ring.
        codec: how the numbers travel; None for as they are.
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


def sums(
    stage: str,
    layout: Layout,
    kind: Kind,
    ranks: int,
    itemsize: int,
    primitive: str | None = "Reduce_scatter",
    codec: Codec | None = None,
) -> list[Message]:
    """What sums an arena over the world: everywhere, or segment r on rank r if it has several.

    Neighbouring blocks of one `kind` share a message; those of kind None are left out. Where all
    segments are of one kind, their sums are one `primitive`, Reduce_scatter or Alltoall, if given.
    """
    spans = [span for span in layout.spans(kind) if span.kind is not None]
    if ranks == 1 or not spans:
        return []

    def to(primitive: str, parts: Sequence[tuple[int, int]], root: int = -1) -> Message:
        return message(stage, primitive, "world", parts, ranks, itemsize, 0, root, codec)

    if len(layout.bounds) == 2:
        everywhere = EVERYWHERE.get(codec.name, "Allreduce") if codec else "Allreduce"
        return [to(everywhere, [(span.start, span.stop)]) for span in spans]
    if primitive is not None and _alike(spans):
        return [to(primitive, _parts(layout, spans, ranks))]
    if codec and not codec.summable:
        return [to("Alltoall", _parts(layout, [span], ranks)) for span in spans]
    return [to("Reduce", [(span.start, span.stop)], span.segment) for span in spans]


def in_order(stage: str, layout: Layout, ranks: int, itemsize: int) -> list[Message]:
    """What sums an arena from rank to rank, the same to the last bit on any number of them."""
    if ranks == 1 or layout.size == 0:
        return []
    return [message(stage, "Send, Bcast", "world", [(0, layout.size)], ranks, itemsize)]


def gathers(
    stage: str,
    over: str,
    layout: Layout,
    kind: Kind,
    own: int,
    members: int,
    itemsize: int,
    codec: Codec | None = None,
) -> list[Message]:
    """What gives every member of `over` the segments of all; this rank is member `own`.

    Neighbouring blocks of one `kind` share a message; those of kind None are left out, as are
    segments behind those of the members.
    """
    spans = [s for s in layout.spans(kind) if s.kind is not None and s.segment < members]
    if members == 1 or not spans:
        return []

    def to(primitive: str, parts: Sequence[tuple[int, int]], root: int = -1) -> Message:
        return message(stage, primitive, over, parts, members, itemsize, own, root, codec)

    if _alike(spans):
        return [to("Allgatherv", _parts(layout, spans, members))]
    return [to("Bcast", [(span.start, span.stop)], span.segment) for span in spans]


def across(stage: str, primitive: str, layout: Layout, peer: int, itemsize: int) -> list[Message]:
    """What is sent to curvature rank `peer`, or comes from there: a layout, unless it is empty."""
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
    own: int = 0,
    root: int = -1,
    codec: Codec | None = None,
) -> Message:
    """The message that member `own` of `members` sends, with its bytes."""
    counts = [stop - start for start, stop in spans]
    if primitive == "Alltoall, Allgather":
        counts = [shard_length(counts[0], members)] * members
    elif primitive == "Allgather":
        counts *= members
    sizes = [codec.size(count, itemsize) if codec else count * itemsize for count in counts]
    size = handed = sum(sizes)
    if primitive in ("Allgatherv", "Allgather"):
        handed = sizes[own]
    elif primitive == "Alltoall, Allgather":
        handed += sizes[own]
    elif primitive == "Bcast" and root != own:
        handed = 0
    ring = size * (members - 1) // members
    twice = ("Allreduce", "Alltoall, Allgather")
    wire = 2 * ring if primitive in twice else {"Send, Bcast": size}.get(primitive, ring)
    return Message(stage, primitive, over, tuple(spans), root, size, handed, wire, codec)


def shard_length(elements: int, members: int) -> int:
    """Elements of the equal shards, one for each member, that so many are dealt out in."""
    blocks = -(-elements // ALIGNMENT)
    return -(-blocks // members) * ALIGNMENT


def _parts(layout: Layout, spans: Sequence[Span], members: int) -> list[tuple[int, int]]:
    """Of each member's segment its span, or nothing."""
    parts = [(bound, bound) for bound in layout.bounds[:members]]
    for span in spans:
        parts[span.segment] = (span.start, span.stop)
    return parts


def _alike(spans: Sequence[Span]) -> bool:
    return len({span.kind for span in spans}) == 1


# -- two levels -----------------------------------------------------------------------------------

IN_NODE = "{} in node"
BETWEEN_NODES = "{} between nodes"


@dataclass(frozen=True)
class Seat:
    """Where a rank sits in a team that is spread over `nodes` nodes, `places` members on each.

    Member `m` of the team has place `m % places` of node `m // places`.
    """

    nodes: int
    places: int
    node: int
    place: int


def seat(team: Sequence[int], rank: int, ranks_per_node: int) -> Seat | None:
    """The seat of `rank`, where rank r is on node `r // ranks_per_node`.

    None where one level is all there is, as the team is on one node or has one member on each, and
    where nodes hold unequal shares of it.
    """
    members = Counter(member // ranks_per_node for member in team)
    places = members[rank // ranks_per_node]
    if len(set(members.values())) > 1 or places == 1 or len(members) == 1:
        return None
    return Seat(len(members), places, *divmod(team.index(rank), places))


def in_two_levels(found: Iterable[Message], seat: Seat, itemsize: int) -> list[Message]:
    """What the rank of that seat sends in place of each of `found`, less what is empty."""
    return [m for whole in found for m in _levels(whole, seat, itemsize) if m.size]


def _levels(whole: Message, seat: Seat, itemsize: int) -> list[Message]:
    spans, primitive, places = whole.spans, whole.primitive, seat.places
    node, place = divmod(whole.root, places)
    at_my_place = spans[seat.place :: places]
    on_each_node = [spans[first : first + places] for first in range(0, len(spans), places)]

    def inside(primitive: str, spans: Sequence[tuple[int, int]], root: int = -1) -> Message:
        over = IN_NODE.format(whole.over)
        return message(whole.stage, primitive, over, spans, places, itemsize, seat.place, root)

    def between(primitive: str, spans: Sequence[tuple[int, int]], root: int = -1) -> Message:
        over = BETWEEN_NODES.format(whole.over)
        return message(whole.stage, primitive, over, spans, seat.nodes, itemsize, seat.node, root)

    if primitive == "Allreduce":
        shards = _cut(*spans[0], places)
        mine = between(primitive, [shards[seat.place]])
        return [inside("Reduce_scatter", shards), mine, inside("Allgatherv", shards)]
    if primitive == "Allgatherv":
        return [between(primitive, at_my_place), *(inside(primitive, s) for s in on_each_node)]
    if primitive in ("Reduce", "Bcast"):
        first = [inside(primitive, spans, place)]
        then = [between(primitive, spans, node)] if place == seat.place else []
        return first + then if primitive == "Reduce" else then + first
    return [*(inside(primitive, s) for s in on_each_node), between(primitive, at_my_place)]


def _cut(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """So many neighbouring spans, as equal as can be."""
    edges = [start + (stop - start) * k // count for k in range(count + 1)]
    return list(zip(edges, edges[1:]))
