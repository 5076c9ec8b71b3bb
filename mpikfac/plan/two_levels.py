"""Collectives in two levels: a node's ranks add up what leaves it, and pass on what comes to it.

Members of a team sit on nodes, equally many on each and node by node. Those of one node make a team
of their own, and so do those with the same place in their nodes. A collective of the whole team is
a few collectives of these, so that the plan says what crosses the network, whatever MPI does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpikfac.plan.messages import Message, message

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

    def across(primitive: str, spans: Sequence[tuple[int, int]], root: int = -1) -> Message:
        over = BETWEEN_NODES.format(whole.over)
        return message(whole.stage, primitive, over, spans, seat.nodes, itemsize, seat.node, root)

    if primitive == "Allreduce":
        shards = _cut(*spans[0], places)
        mine = across(primitive, [shards[seat.place]])
        return [inside("Reduce_scatter", shards), mine, inside("Allgatherv", shards)]
    if primitive == "Allgatherv":
        return [across(primitive, at_my_place), *(inside(primitive, s) for s in on_each_node)]
    if primitive in ("Reduce", "Bcast"):
        first = [inside(primitive, spans, place)]
        then = [across(primitive, spans, node)] if place == seat.place else []
        return first + then if primitive == "Reduce" else then + first
    return [*(inside(primitive, s) for s in on_each_node), across(primitive, at_my_place)]


def _cut(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """So many neighbouring spans, as equal as can be."""
    edges = [start + (stop - start) * k // count for k in range(count + 1)]
    return list(zip(edges, edges[1:]))
