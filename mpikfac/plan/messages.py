"""Messages as plain data: elements, communicator and primitive, in one level or two levels.

With two levels, the ranks of a node first add up sums that leave the node, and hand values that
come to the node on to each other. Members of a team sit on nodes, node by node, and equally many on
every node. The members of a node form a team, and the members with the same place in their nodes
form a team. A collective of the whole team becomes a few collectives of the smaller teams: the plan
says what crosses the network, whatever MPI does. Encoded messages are encoded between nodes only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from mpikfac.plan.choices import Robust
from mpikfac.plan.codec import EVERYWHERE, IN_SHARDS, IN_TWO_SUMS, Codec
from mpikfac.plan.layout import ALIGNMENT, Layout, Span

Kind = Callable[[str], Hashable]
# Elements that are summed at once: MPI's temporaries stay small and in cache, which is faster than
# a reduction of everything and takes less memory.
PIECE = 2**22


@dataclass(frozen=True)
class NearMost:
    """A rule that adds up blocks of numbers of the ranks whose blocks are near most ranks' blocks.

    Attributes:
        factor: the farthest distance of a block that counts, in distances that hold most ranks.
        blocks: first and last (exclusive) element of each block, and the place of the number of
            examples in the block.
    """

    factor: float
    blocks: tuple[tuple[int, int, int], ...]

    def products(self, ranks: int) -> int:
        """Return the number of inner products that the rule takes: of blocks and of counts."""
        return 2 * len(self.blocks) * ranks**2


@dataclass(frozen=True)
class Message:
    """A message of a step, as a rank sees the message.

    Attributes:
        stage: the stage of `KFAC.step` that sends the message.
        primitive: the MPI collective, or several in turn; or Send or Recv.
        over: "world", "column" or "row", or a part as in two levels; or "curvature", the link to
            curvature ranks.
        spans: the place in the stage's arena: first and last (exclusive) element; for
            Reduce_scatter, Alltoall and Allgatherv, of every member's part in turn.
        root: the destination of a Reduce or Send, or the source of a Bcast or Recv.
        size: bytes of all spans as sent, of all members where every member sends a part.
        bytes: the bytes of `size` that the rank hands to MPI.
        wire: bytes sent by the rank if the collective is a ring.
        codec: the encoding; None for plain numbers.
        rule: the rule that combines the numbers of ranks; None for sums and copies.
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
    rule: Robust | NearMost | None = None


def sums(
    stage: str,
    layout: Layout,
    kind: Kind,
    ranks: int,
    itemsize: int,
    primitive: str | None = "Reduce_scatter",
    codec: Codec | None = None,
) -> list[Message]:
    """Return messages to sum an arena over the world: everywhere, or segment r on rank r.

    An arena of several segments is summed segment by segment. Neighbouring blocks of a `kind` share
    a message; blocks of kind None are left out. If all segments have the same kind, the sums are a
    single `primitive`, Reduce_scatter or Alltoall, if given.
    """
    spans = [span for span in layout.spans(kind) if span.kind is not None]
    if ranks == 1 or not spans:
        return []

    def to(primitive: str, parts: Sequence[tuple[int, int]], root: int = -1) -> Message:
        return message(stage, primitive, "world", parts, ranks, itemsize, 0, root, codec)

    # The second sum of PowerSGD needs the first one everywhere, so owners gain nothing.
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
    rule: Robust | NearMost,
) -> list[Message]:
    """Return messages to combine an arena of one segment by a rule; the rank is rank `member`.

    Each rank gets a shard of all vectors, and sends the result to all. In between, rules by vector
    need the sum of the shards' inner products, in float64.
    """
    messages: list[Message] = []
    for span in layout.spans(kind) if ranks > 1 else ():
        if span.kind is None:
            continue
        shards = _cut(span.start, span.stop, ranks, None)
        messages.append(message(stage, "Alltoall", "world", shards, ranks, itemsize))
        if products := rule.products(ranks):
            messages.append(message(stage, "Allreduce", "world", [(0, products)], ranks, 8))
        messages.append(message(stage, "Allgatherv", "world", shards, ranks, itemsize, member))
    return [replace(message, rule=rule) for message in messages]


def in_order(stage: str, layout: Layout, ranks: int, itemsize: int) -> list[Message]:
    """Return messages to sum an arena in order of ranks: no bit depends on the number of ranks."""
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
    """Return messages to give all segments to every member of `over`; the rank is member `member`.

    Neighbouring blocks of a `kind` share a message; blocks of kind None are left out, as are
    segments behind the members' segments.
    """
    spans = [s for s in layout.spans(kind) if s.kind is not None and s.segment < members]
    if members == 1 or not spans:
        return []

    def to(primitive: str, parts: Sequence[tuple[int, int]], root: int = -1) -> Message:
        return message(stage, primitive, over, parts, members, itemsize, member, root, codec)

    if _alike(spans):
        return [to("Allgatherv", _parts(layout, spans, members))]
    return [to("Bcast", [(span.start, span.stop)], span.segment) for span in spans]


def across(stage: str, primitive: str, layout: Layout, peer: int, itemsize: int) -> list[Message]:
    """Return the message to or from curvature rank `peer`; none for an empty layout."""
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
    """Return the message sent by a member of `members`, with the bytes."""
    counts = [stop - start for start, stop in spans]
    codec = codec.within(spans[0][0], spans[-1][1]) if codec else None
    if primitive == IN_SHARDS:
        counts = [shard_length(counts[0], members)] * members
    elif primitive == "Allgather":
        counts *= members
    sizes = [codec.size(count, itemsize) if codec else count * itemsize for count in counts]
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


def shard_length(elements: int, members: int) -> int:
    """Return the elements of a shard, if members have equal shards of `elements`."""
    blocks = -(-elements // ALIGNMENT)
    return -(-blocks // members) * ALIGNMENT


def _parts(layout: Layout, spans: Sequence[Span], members: int) -> list[tuple[int, int]]:
    """Return the span of every member's segment, or nothing."""
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
    """The place of a rank in a team on `nodes` nodes, with `places` members on a node.

    Member `m` of the team has place `m % places` of node `m // places`.
    """

    nodes: int
    places: int
    node: int
    place: int


def seat(team: Sequence[int], rank: int, ranks_per_node: int) -> Seat | None:
    """Return the seat of `rank`, with rank r on node `r // ranks_per_node`.

    None if two levels make no sense: the team is on one node, has one member per node, or is spread
    unevenly.
    """
    members = Counter(member // ranks_per_node for member in team)
    places = members[rank // ranks_per_node]
    if len(set(members.values())) > 1 or places == 1 or len(members) == 1:
        return None
    return Seat(len(members), places, *divmod(team.index(rank), places))


def in_two_levels(of_one_level: Iterable[Message], seat: Seat, itemsize: int) -> list[Message]:
    """Return the messages of the rank at `seat` in the place of messages of one level.

    Empty messages are left out.
    """
    return [m for of_team in of_one_level for m in _levels(of_team, seat, itemsize) if m.size]


def _levels(of_team: Message, seat: Seat, itemsize: int) -> list[Message]:
    spans, primitive, places = of_team.spans, of_team.primitive, seat.places
    node, place = divmod(of_team.root, places)
    of_place = spans[seat.place :: places]
    on_each_node = [spans[first : first + places] for first in range(0, len(spans), places)]

    def inside(primitive: str, spans: Sequence[tuple[int, int]], root: int = -1) -> Message:
        over = IN_NODE.format(of_team.over)
        return message(of_team.stage, primitive, over, spans, places, itemsize, seat.place, root)

    def between(primitive: str, spans: Sequence[tuple[int, int]], root: int = -1) -> Message:
        over, codec = BETWEEN_NODES.format(of_team.over), of_team.codec
        member, nodes = seat.node, seat.nodes
        return message(of_team.stage, primitive, over, spans, nodes, itemsize, member, root, codec)

    if primitive in ("Allreduce", *EVERYWHERE.values()):
        shards = _cut(*spans[0], places, of_team.codec)
        across_nodes = between(primitive, [shards[seat.place]])
        return [inside("Reduce_scatter", shards), across_nodes, inside("Allgatherv", shards)]
    if primitive == "Allgatherv":
        return [between(primitive, of_place), *(inside(primitive, s) for s in on_each_node)]
    if primitive in ("Reduce", "Bcast"):
        first = [inside(primitive, spans, place)]
        then = [between(primitive, spans, node)] if place == seat.place else []
        return first + then if primitive == "Reduce" else then + first
    added = "Reduce_scatter" if of_team.codec else primitive
    return [*(inside(added, s) for s in on_each_node), between(primitive, of_place)]


def _cut(start: int, stop: int, count: int, codec: Codec | None) -> list[tuple[int, int]]:
    """Return `count` neighbouring aligned spans, as equal as possible; matrices stay of_team."""
    blocks = (stop - start) // ALIGNMENT
    edges = [start + blocks * k // count * ALIGNMENT for k in range(count)]
    if codec and codec.matrices:
        borders = [*(matrix.start for matrix in codec.matrices), stop]
        edges = [min(border for border in borders if border >= edge) for edge in edges]
    return list(zip(edges, [*edges[1:], stop]))
