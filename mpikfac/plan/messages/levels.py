"""Messages in two levels: within nodes, and between nodes.

The ranks of a node sum their values before these are sent to other nodes, and distribute the values
that arrive. The members of a team are numbered node by node, with the same number on each node. The
members on a node form a team, and so do the members at the same position on their nodes. A
collective of the whole team becomes a few collectives of these smaller teams, so the plan, not MPI,
determines what crosses the network. Values are encoded only between nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpikfac.plan.codec import EVERYWHERE
from mpikfac.plan.messages.messages import Message, cut, message

IN_NODE = "{} in node"
BETWEEN_NODES = "{} between nodes"


@dataclass(frozen=True)
class Seat:
    """The position of a rank in a team on `nodes` nodes, with `places` members per node.

    Member `m` of the team has position `m % places` on node `m // places`.
    """

    nodes: int
    places: int
    node: int
    place: int


def seat(team: Sequence[int], rank: int, ranks_per_node: int) -> Seat | None:
    """Return the seat of `rank`, with rank r on node `r // ranks_per_node`.

    Return None if two levels would not help: the team is on one node, has one member per node, or
    is spread unevenly.
    """
    members = Counter(member // ranks_per_node for member in team)
    places = members[rank // ranks_per_node]
    if len(set(members.values())) > 1 or places == 1 or len(members) == 1:
        return None
    return Seat(len(members), places, *divmod(team.index(rank), places))


def in_two_levels(of_one_level: Iterable[Message], seat: Seat, itemsize: int) -> list[Message]:
    """Return the messages of the rank at `seat` that replace messages of one level.

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

    if primitive in EVERYWHERE:
        shards = cut(*spans[0], places, of_team.codec)
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
