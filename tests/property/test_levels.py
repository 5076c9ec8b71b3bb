"""Collectives in two levels and through shards, played by hand for any number of nodes."""

from __future__ import annotations

import collections

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpikfac.plan import divisors, lay_out
from mpikfac.plan.messages import PASSED, gathers, in_shards, in_two_levels, seat, sums


def play(queues, values, ranks_per_node):
    """Return the ranks' values after all messages; a collective runs when all members wait.

    Raises:
        AssertionError: ranks wait for each other, or disagree on the collective.
    """
    team = range(len(queues))
    queues = [collections.deque(queue) for queue in queues]
    while any(queues):
        progress = False
        for rank in team:
            if not queues[rank]:
                continue
            over = queues[rank][0].over
            members = {
                "world": list(team),
                "world in node": [r for r in team if r // ranks_per_node == rank // ranks_per_node],
                "world between nodes": [r for r in team if (r - rank) % ranks_per_node == 0],
            }[over]
            if all(queues[r] and queues[r][0].over == over for r in members):
                carry_out([queues[r].popleft() for r in members], [values[r] for r in members])
                progress = True
        assert progress
    return values


def carry_out(messages, values):
    """Carry out a collective of members that hold `values`; undefined elements become -1."""
    (kind,) = {(m.primitive, m.spans, m.root, m.to) for m in messages}
    primitive, spans, root, to = kind
    if primitive == PASSED:
        pass_on(messages, spans, to, values)
        return
    for place, (start, stop) in enumerate(spans):
        part = slice(start, stop)
        if primitive in ("Allgatherv", "Bcast"):
            result = values[place if primitive == "Allgatherv" else root][part].copy()
            getters = range(len(values))
        else:
            result = sum(value[part] for value in values)
            owner = root if primitive == "Reduce" else place
            getters = range(len(values)) if primitive == "Allreduce" else [owner]
        for member, value in enumerate(values):
            value[part] = result if member in getters else -1


def pass_on(messages, spans, to, values):
    """Give every element to the member whose part it is in `to`, and check the bytes."""
    size = max((stop for _, stop in (*spans, *to)), default=0)
    before, after = (holders(parts, size) for parts in (spans, to))
    whole = np.array([values[member][k] for k, member in enumerate(before)])
    for member, (message, value) in enumerate(zip(messages, values)):
        assert message.bytes == message.wire == 4 * np.sum((before == member) & (after != member))
        value[:size] = np.where(after == member, whole, -1)
        assert message.size == 4 * np.sum(before != after)


def holders(spans, size):
    """Return the member that holds every element."""
    found = np.zeros(size, dtype=int)
    for member, (start, stop) in enumerate(spans):
        found[start:stop] = member
    return found


@st.composite
def jobs(draw):
    """Draw ranks, ranks per node, a segment of blocks for every rank, and every block's message."""
    ranks_per_node, nodes = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ranks = ranks_per_node * nodes
    blocks = st.lists(st.integers(0, 40), max_size=3)
    segments = draw(st.lists(blocks, min_size=ranks, max_size=ranks))
    layout = lay_out(
        [(f"{r}.{i}", (n,)) for i, n in enumerate(sizes)] for r, sizes in enumerate(segments)
    )
    kinds = draw(st.sampled_from([lambda name: 0, lambda name: name.partition(".")[2]]))
    return ranks, ranks_per_node, layout, kinds


def in_levels(found, rank, ranks, ranks_per_node):
    at = seat(range(ranks), rank, ranks_per_node)
    return in_two_levels(found, at, 4) if at else found


def by_shards(found, rank, ranks, ranks_per_node):
    return in_shards(found, ranks, rank, seat(range(ranks), rank, ranks_per_node), 4)


WAYS = (in_levels, by_shards)


def contributions(ranks, size):
    """Return numbers whose sums are exact and identify the contributors."""
    return [np.arange(size, dtype=np.int64) + 1000 * 2**rank for rank in range(ranks)]


@given(jobs())
@settings(max_examples=150)
def test_a_sum_is_everywhere(job):
    """Oracle: the sum of all contributions."""
    ranks, per_node, layout, kind = job
    one = lay_out([[(name, shape) for name, shape in layout.shapes.items()]])
    found = sums("stage", one, kind, ranks, 4)
    values = contributions(ranks, one.size)
    expected = sum(values)
    queues = [in_levels(found, rank, ranks, per_node) for rank in range(ranks)]
    for value in play(queues, values, per_node):
        np.testing.assert_array_equal(value, expected)


@given(jobs(), st.sampled_from(["Reduce_scatter", "Alltoall"]), st.sampled_from(WAYS))
@settings(max_examples=200)
def test_owners_get_the_sum_of_their_segment(job, primitive, way):
    """Oracle: the sum of all contributions, at the owner's place."""
    ranks, per_node, layout, kind = job
    found = sums("stage", layout, kind, ranks, 4, primitive)
    values = contributions(ranks, layout.size)
    expected = sum(values)
    queues = [way(found, rank, ranks, per_node) for rank in range(ranks)]
    for (start, stop), value in zip(layout.segments(), play(queues, values, per_node)):
        np.testing.assert_array_equal(value[start:stop], expected[start:stop])


@given(jobs(), st.sampled_from(WAYS))
@settings(max_examples=200)
def test_segments_of_all_members_make_the_whole(job, way):
    """Oracle: every segment with the owner's values."""
    ranks, per_node, layout, kind = job
    values = contributions(ranks, layout.size)
    parts = [value[slice(*span)] for value, span in zip(values, layout.segments())]
    expected = np.concatenate(parts)
    queues = []
    for rank in range(ranks):
        found = gathers("stage", "world", layout, kind, rank, ranks, 4)
        queues.append(way(found, rank, ranks, per_node))
    for value in play(queues, values, per_node):
        np.testing.assert_array_equal(value, expected)


@given(st.integers(2, 6), st.integers(2, 6), st.integers(1, 50))
def test_what_a_rank_sends_between_nodes(nodes, places, count):
    """Oracle: 2 (M-1)/M n/L elements of a sum everywhere; half as many to or from owners."""
    ranks = nodes * places
    blocks = [(f"block{rank}", (16 * count,)) for rank in range(ranks)]
    whole, by_owner = lay_out([blocks]), lay_out([block] for block in blocks)
    half = 4 * (nodes - 1) * 16 * count * ranks // nodes // places
    for found, expected in (
        (sums("stage", whole, lambda name: 0, ranks, 4), 2 * half),
        (sums("stage", by_owner, lambda name: 0, ranks, 4), half),
        (gathers("stage", "world", by_owner, lambda name: 0, 0, ranks, 4), half),
    ):
        levels = in_two_levels(found, seat(range(ranks), 0, places), 4)
        assert [m.wire for m in levels if m.over == "world between nodes"] == [expected]


@given(st.integers(2, 6), st.integers(2, 6), st.integers(1, 50))
def test_shards_are_equal_in_both_levels(nodes, places, count):
    """Oracle: (M-1)/M n/L elements between nodes, (L-1)/L n inside, whatever the owners' parts."""
    ranks = nodes * places
    layout = lay_out([[("all", (16 * count * ranks,))], *([] for _ in range(ranks - 1))])
    elements = 16 * count * ranks
    expected = {
        "world in node": 4 * (elements - elements // places),
        "world between nodes": 4 * (nodes - 1) * elements // nodes // places,
    }
    for found in (
        sums("stage", layout, lambda name: 0, ranks, 4),
        gathers("stage", "world", layout, lambda name: 0, 1, ranks, 4),
    ):
        levels = by_shards(found, 1, ranks, places)
        assert {m.over: m.wire for m in levels if m.primitive != PASSED} == expected
        assert len(levels) == 3


@given(st.integers(1, 24), st.data())
def test_seats(ranks, data):
    """Oracle: the definition: rank r is on node r // ranks_per_node."""
    per_node = data.draw(st.sampled_from(divisors(ranks)))
    team = range(0, ranks, data.draw(st.sampled_from(divisors(ranks))))
    nodes = [rank // per_node for rank in team]
    shares = [nodes.count(node) for node in dict.fromkeys(nodes)]
    for index, rank in enumerate(team):
        at = seat(team, rank, per_node)
        if len(set(shares)) == 1 and 1 < shares[0] < len(team):
            assert (at.nodes, at.places) == (len(shares), shares[0])
            assert (at.node, at.place) == divmod(index, shares[0])
            assert nodes[index] == nodes[at.node * at.places]
        else:
            assert at is None
