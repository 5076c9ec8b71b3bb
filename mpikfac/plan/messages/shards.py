"""Reductions to owners and gathers from owners that pass through equal shards on all members.

The cost of a collective with unequal parts depends on MPI's algorithm: in a ring of many ranks,
every round takes as long as sending the largest part. A reduction to owners therefore first reduces
values to equal shards on all members, which then pass them on to the owners. In a gather, the
owners first pass their values on to equal shards. In two levels, shards are ordered by position, so
each level needs a single collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from mpikfac.plan.messages.levels import BETWEEN_NODES, IN_NODE, Seat, in_two_levels
from mpikfac.plan.messages.messages import Message, cut, message

Spans = Sequence[tuple[int, int]]
LEAST = 2**18  # elements; with fewer, latency costs more than unequal parts
PASSED = "Isend, Irecv"


class Passed(NamedTuple):
    """Neighbouring elements that one member sends to another."""

    source: int
    target: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start


def in_shards(
    of_team: Iterable[Message],
    members: int,
    member: int,
    seat: Seat | None,
    itemsize: int,
    always: bool = True,
) -> list[Message]:
    """Return the messages of member `member` that replace messages of one level.

    Only reductions to owners and gathers of parts are replaced.

    Args:
        seat: the member's seat; None for one level.
        always: whether to use shards even if parts are small or nearly equal.
    """
    parts: list[Message] = []
    for whole in of_team:
        if _divided(whole) and (always or _unequal(whole)):
            parts += _by_way_of_shards(whole, members, member, seat, itemsize)
        else:
            parts += in_two_levels([whole], seat, itemsize) if seat else [whole]
    return [part for part in parts if part.size]


def _divided(whole: Message) -> bool:
    """Return whether a message is an unencoded reduction or gather of neighbouring parts."""
    first, last = whole.spans[0][0], whole.spans[-1][1]
    return (
        whole.primitive in ("Reduce_scatter", "Allgatherv")
        and whole.codec is None
        and sum(stop - start for start, stop in whole.spans) == last - first
    )


def _unequal(whole: Message) -> bool:
    """Return whether a ring of the parts takes more than twice as long as a ring of shards."""
    counts = [stop - start for start, stop in whole.spans]
    return sum(counts) >= LEAST and max(counts) * len(counts) > 2 * sum(counts)


def _by_way_of_shards(
    whole: Message, members: int, member: int, seat: Seat | None, itemsize: int
) -> list[Message]:
    start, stop = whole.spans[0][0], whole.spans[-1][1]

    def of(primitive: str, over: str, spans: Spans, position: int) -> Message:
        return message(whole.stage, primitive, over, spans, len(spans), itemsize, position)

    def passing(spans: Spans, to: Spans) -> Message:
        return _passing(whole.stage, whole.over, spans, to, member, itemsize)

    if seat is None:
        shards = cut(start, stop, members)
        levels = [of(whole.primitive, whole.over, shards, member)]
    else:
        of_places = cut(start, stop, seat.places)
        of_nodes = [cut(*span, seat.nodes) for span in of_places]
        shards = [of_place[node] for node in range(seat.nodes) for of_place in of_nodes]
        inside, between = IN_NODE.format(whole.over), BETWEEN_NODES.format(whole.over)
        levels = [
            of(whole.primitive, inside, of_places, seat.place),
            of(whole.primitive, between, of_nodes[seat.place], seat.node),
        ]
    if whole.primitive == "Reduce_scatter":
        return [*levels, passing(shards, whole.spans)]
    return [passing(whole.spans, shards), *reversed(levels)]


def _passing(stage: str, over: str, spans: Spans, to: Spans, member: int, itemsize: int) -> Message:
    """Return the message that moves elements from members' `spans` to the members' parts `to`."""
    spans, to = tuple(spans), tuple(to)
    moves = passed(spans, to)
    size = itemsize * sum(move.size for move in moves)
    sent = itemsize * sum(move.size for move in moves if move.source == member)
    return Message(stage, PASSED, over, spans, -1, size, sent, sent, to=to)


@lru_cache(maxsize=64)
def passed(
    spans: tuple[tuple[int, int], ...], to: tuple[tuple[int, int], ...]
) -> tuple[Passed, ...]:
    """Return what members send to each other when `spans` become `to`, in the order of elements.

    Both list the parts of all members and cover the same elements. Elements that stay on the same
    member are left out.
    """
    sources, targets = _in_order(spans), _in_order(to)
    moves: list[Passed] = []
    place = 0
    for start, stop, source in sources:
        while place < len(targets) and targets[place][1] <= start:
            place += 1
        for first, last, target in targets[place:]:
            if first >= stop:
                break
            if source != target:
                moves.append(Passed(source, target, max(start, first), min(stop, last)))
    return tuple(moves)


def _in_order(spans: Spans) -> list[tuple[int, int, int]]:
    """Return the start, stop and member of each non-empty part, in the order of elements."""
    return sorted((start, stop, m) for m, (start, stop) in enumerate(spans) if stop > start)
