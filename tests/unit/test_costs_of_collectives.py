"""Costs of collectives, compared with single messages and with a simulation of MPI."""

from __future__ import annotations

import itertools
import random

import pytest

from mpikfac.predict import algorithms
from mpikfac.predict.algorithms import Round, chosen, rounds, transfer

SUMS = ("Reduce_scatter", "Allreduce", "Reduce")


# -- messages one by one: (from, to, blocks), round by round ---------------------------------------


def powers(ranks):
    return [2**k for k in range(12) if 2**k < ranks]


def passed_on(ranks, first):
    """Pass a block on to the next member, first block `r + first` on member r."""
    return [
        [(r, (r + 1) % ranks, {(r + first - k) % ranks}) for r in range(ranks)]
        for k in range(ranks - 1)
    ]


def pairwise(ranks):
    """Send every member its block, the next member first."""
    steps = range(1, ranks)
    return [[(r, (r + k) % ranks, {(r + k) % ranks}) for r in range(ranks)] for k in steps]


def bruck(ranks):
    """Send all blocks that are there, or the blocks that lack, backwards."""
    return [
        [
            (r, (r - d) % ranks, {(r + i) % ranks for i in range(min(d, ranks - d))})
            for r in range(ranks)
        ]
        for d in powers(ranks)
    ]


def neighbours(ranks):
    """Exchange with both neighbours by turns: the own block, then what came last, as pairs."""
    last = {r: {r, r ^ 1} for r in range(ranks)}
    found = [[(r, r ^ 1, {r}) for r in range(ranks)]]
    for turn in range(1, ranks // 2):
        partner = {r: (r + (1 if (r + turn) % 2 == 0 else -1)) % ranks for r in range(ranks)}
        found.append([(r, partner[r], last[r]) for r in range(ranks)])
        last = {partner[r]: last[r] for r in range(ranks)}
    return found


def doubled(ranks):
    """Exchange all blocks at distances that double."""
    have = {r: {r} for r in range(ranks)}
    found = []
    for d in powers(ranks):
        found.append([(r, r ^ d, have[r]) for r in range(ranks)])
        have = {r: have[r] | have[r ^ d] for r in range(ranks)}
    return found


def halved(ranks, distances):
    """Keep a half of the blocks and send the other half, the earlier members the upper half."""
    keep = {r: list(range(ranks)) for r in range(ranks)}
    found = []
    for d in distances:
        messages = []
        for r in range(ranks):
            half = len(keep[r]) // 2
            low, high = keep[r][:half], keep[r][half:]
            keep[r], away = (high, low) if r & d else (low, high)
            messages.append((r, r ^ d, set(away)))
        found.append(messages)
    return found, keep


def butterfly(ranks):
    """Halve at distances that double, then hand every block to its member."""
    found, keep = halved(ranks, powers(ranks))
    return [*found, [(r, keep[r][0], {keep[r][0]}) for r in range(ranks) if keep[r][0] != r]]


def rabenseifner(ranks):
    """Halve at distances that double, and send the sums back the same way."""
    found, keep = halved(ranks, powers(ranks))
    for d in reversed(powers(ranks)):
        found.append([(r, r ^ d, set(keep[r])) for r in range(ranks)])
        keep = {r: keep[r] + keep[r ^ d] for r in range(ranks)}
    return found


def all_doubled(ranks):
    return [[(r, r ^ d, set(range(ranks))) for r in range(ranks)] for d in powers(ranks)]


def tree(ranks):
    """Add up on member 0, neighbours first."""
    whole = set(range(ranks))
    return [[(r, r - d, whole) for r in range(d, ranks, 2 * d)] for d in powers(ranks)]


def copied(ranks, radix=2):
    """Copy from member 0; with 2, neighbours first, with more, all copies of a member at once."""
    whole = set(range(ranks))
    if radix == 2:
        return [[(r, r + d, whole) for r in range(d) if r + d < ranks] for d in powers(ranks)]
    distances = [radix**k for k in range(6) if radix**k < ranks]
    return [
        [
            (r, r + near * k, whole)
            for r in range(0, ranks, radix * d)
            for near in distances[: distances.index(d) + 1]
            for k in range(1, radix)
            if r + near * k < ranks
        ]
        for d in reversed(distances)
    ]


def scattered(ranks):
    """Scatter along a tree, far members first, and gather by doubling."""
    there = [
        [(r, r + d, set(range(r + d, min(r + 2 * d, ranks)))) for r in range(0, ranks, 2 * d)]
        for d in reversed(powers(ranks))
    ]
    return there + doubled(ranks)


def scattered_ring(ranks):
    """Scatter along a tree, far members first, and gather in a ring."""
    return scattered(ranks)[: len(powers(ranks))] + passed_on(ranks, 0)


def collected(ranks):
    """Halve at distances that double, and collect the sums along a tree on member 0."""
    found, keep = halved(ranks, powers(ranks))
    for d in reversed(powers(ranks)):
        found.append([(r + d, r, set(keep[r + d])) for r in range(0, d)])
        keep = {r: keep[r] + keep[r + d] for r in range(0, d)}
    return found


def star(ranks):
    return [[(r, 0, set(range(ranks))) for r in range(1, ranks)]]


def moved(messages, primitive, ranks):
    """Carry out the messages; return what every member has at the end, by block: whose numbers."""
    gathers = primitive.startswith("Allgather")
    have = {
        (r, b): (
            {r}
            if primitive in SUMS or (gathers and b == r) or (primitive == "Bcast" and r == 0)
            else set()
        )
        for r in range(ranks)
        for b in range(ranks)
    }
    for one in messages:
        before = dict(have)
        for source, to, blocks in one:
            for b in blocks:
                assert before[source, b], "a member sends what it has not"
                have[to, b] = have[to, b] | before[source, b]
    return have


def busiest(one, parts, together):
    """Return the bytes of the busiest member and of the busiest node, in or out."""
    members, nodes = {}, {}
    for source, to, blocks in one:
        size = sum(parts[b] for b in blocks)
        for end in (("out", source), ("in", to)):
            members[end] = members.get(end, 0) + size
        if source // together != to // together:
            for end in (("out", source // together), ("in", to // together)):
                nodes[end] = nodes.get(end, 0) + size
    return max(members.values(), default=0), max(nodes.values(), default=0)


POWERS, ANY, EVEN = (2, 4, 8, 16), (2, 3, 5, 6, 8, 12), (2, 4, 6, 8, 12)
WAYS = {
    ("Allgatherv", "ring"): (lambda p: passed_on(p, 0), ANY),
    ("Allgatherv", "bruck"): (bruck, ANY),
    ("Allgatherv", "neighbour"): (neighbours, EVEN),
    ("Allgather", "doubling"): (doubled, POWERS),
    ("Reduce_scatter", "ring"): (lambda p: passed_on(p, -1), ANY),
    ("Reduce_scatter", "pairwise"): (pairwise, ANY),
    ("Reduce_scatter", "halving"): (lambda p: halved(p, powers(p)[::-1])[0], POWERS),
    ("Reduce_scatter", "butterfly"): (butterfly, POWERS),
    ("Allreduce", "rabenseifner"): (rabenseifner, POWERS),
    ("Allreduce", "doubling"): (all_doubled, POWERS),
    ("Allreduce", "binomial"): (lambda p: tree(p) + copied(p), ANY),
    ("Reduce", "binomial"): (tree, ANY),
    ("Reduce", "linear"): (star, ANY),
    ("Reduce", "rabenseifner"): (collected, POWERS),
    ("Bcast", "binomial"): (copied, ANY),
    ("Bcast", "knomial"): (lambda p: copied(p, 4), ANY),
    ("Bcast", "scatter"): (scattered, POWERS),
    ("Bcast", "scatter, ring"): (scattered_ring, POWERS),
}
CASES = [(*way, ranks) for way, (_, counts) in WAYS.items() for ranks in counts]
WHOLE = ("Allreduce", "Reduce", "Bcast")  # buffers without parts


@pytest.mark.parametrize(("primitive", "algorithm", "ranks"), CASES)
def test_rounds_are_those_of_messages_moved_one_by_one(primitive, algorithm, ranks):
    """Oracle: messages by the algorithm's definition, whose sums and copies are complete."""
    program = WAYS[primitive, algorithm][0](ranks)
    have = moved(program, primitive, ranks)
    everywhere, everyone = primitive in ("Allreduce", "Bcast"), set(range(ranks))
    for r, b in itertools.product(range(ranks), repeat=2):
        if primitive.startswith("Allgather"):
            assert have[r, b] == {b}
        elif primitive == "Bcast":
            assert have[r, b] == {0}
        elif everywhere or (r == 0 if primitive == "Reduce" else r == b):
            assert have[r, b] == everyone
    draws = random.Random(ranks)
    parts = [float(draws.choice([0, 1, 2, 50])) + 1.0 for _ in range(ranks)]
    for sizes in (parts, [3.0] * ranks):
        if primitive in WHOLE:
            sizes = [sum(sizes) / ranks] * ranks
        for together in (1, 2, 4):
            if ranks % together:
                continue
            found = rounds(primitive, algorithm, sizes, together)
            seen = [busiest(one, sizes, together) for one in program]
            each = [(one.size, one.leaving) for one in found for _ in range(one.times)]
            if algorithm in ("ring", "pairwise", "neighbour"):  # kinds of rounds, in another order
                each, seen = sorted(each), sorted(seen)
            assert [size for size, _ in each] == pytest.approx([size for size, _ in seen])
            exact = sizes != parts or together == 1 or algorithm in ("ring", "halving", "neighbour")
            for (_, leaving), (_, crossed) in zip(each, seen):
                assert leaving == pytest.approx(crossed) if exact else leaving >= crossed - 1e-9


@pytest.mark.parametrize("ranks", [2, 7, 64, 100, 1024])
def test_equal_parts_have_closed_formulas(ranks):
    """Oracle: a share (P-1)/P of the bytes, in rings and in halves of a power of two."""
    share = 1000 * (ranks - 1) / ranks
    parts = [1000 / ranks] * ranks

    def total(primitive, algorithm):
        return sum(one.size * one.times for one in rounds(primitive, algorithm, parts))

    assert (
        total("Allgatherv", "ring") == total("Reduce_scatter", "pairwise") == pytest.approx(share)
    )
    assert total("Allgatherv", "bruck") == pytest.approx(share)
    assert total("Allreduce", "ring") == pytest.approx(2 * share)
    if ranks in (2, 64, 1024):
        assert total("Allreduce", "rabenseifner") == pytest.approx(2 * share)
        assert total("Reduce_scatter", "halving") == pytest.approx(share)
        mirrored = 1000 / ranks if ranks > 2 else 0
        assert total("Reduce_scatter", "butterfly") == pytest.approx(share + mirrored)


def test_the_worst_parts_are_bounded_by_the_formulas_of_pages():
    """Oracle: m (P-1) in a ring; (P/2) pairs of m; n and m for each halving, by hand."""
    parts = [0.0, 0.0, 0.0, 0.0, 800.0, 0.0, 0.0, 0.0]

    def total(primitive, algorithm):
        return sum(one.size * one.times for one in rounds(primitive, algorithm, parts))

    assert total("Allgatherv", "ring") == total("Reduce_scatter", "ring") == 7 * 800
    assert total("Allgatherv", "neighbour") == 4 * 800
    assert total("Reduce_scatter", "butterfly") == 4 * 800
    assert total("Allgatherv", "bruck") == 3 * 800


def test_without_a_power_of_two_pairs_join_first():
    """Oracle: by hand: 6 members: 2 pairs, 4 members' halves; results go back to 2 members."""
    assert rounds("Reduce_scatter", "halving", [1, 2, 3, 4, 5, 6]) == [
        *(Round(21, 21), Round(11, 11), Round(7, 7), Round(3, 3)),
    ]
    sizes = [one.size for one in rounds("Allreduce", "rabenseifner", [4.0] * 6)]
    assert sizes == [12, 12, 12, 6, 6, 12, 24]
    assert [one.size for one in rounds("Allreduce", "doubling", [4.0] * 6)] == [24] * 4


def test_a_chain_of_pieces():
    """Oracle: by hand: 3 pieces over 2 links."""
    size = 3 * algorithms.CHAINED_PIECE
    assert rounds("Ireduce", "chain", [size / 3] * 3) == [Round(size / 3, size / 3, 4)]


def test_an_exchange_of_parts_is_a_round_of_all_messages():
    """Oracle: by hand: member 0 sends to 1 and 2, on the node of 2 members, and to the next."""
    messages = [(0, 1, 5.0), (0, 2, 3.0), (3, 2, 4.0)]
    for turned in (messages, [(to, source, size) for source, to, size in messages]):
        assert transfer(turned) == Round(8, 8)
        assert transfer(turned, together=2) == Round(8, 3)


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["pairwise", "linear"])
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_rows_between_all_pairs_are_rounds_of_messages(ranks, algorithm, together):
    """Oracle: messages one by one, in P - 1 rounds or all at once; equal parts of an Alltoall."""
    draws = random.Random(ranks)
    members = range(ranks)
    sizes = [[draws.choice([0.0, 1.0, 7.0, 50.0]) for _ in members] for _ in members]
    parts = {(r, to): sizes[r][to] for r in members for to in members}
    program = [[(r, (r + k) % ranks, {(r, (r + k) % ranks)}) for r in members] for k in members[1:]]
    if algorithm == "linear":
        program = [list(itertools.chain(*program))]
    found = rounds("Alltoallv", algorithm, sizes, together)
    assert found == [Round(*busiest(one, parts, together)) for one in program]
    if ranks % together == 0:
        equal = rounds("Alltoall", algorithm, [3.0] * ranks, together)
        rows = rounds("Alltoallv", algorithm, [[3.0] * ranks] * ranks, together)
        assert sum(r.size * r.times for r in equal) == sum(r.size for r in rows)
        assert sum(r.leaving * r.times for r in equal) == sum(r.leaving for r in rows)


# -- Open MPI's choices ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("primitive", "ranks", "size", "algorithm"),
    [
        ("Reduce_scatter", 63, 2**24, "ring"),
        ("Reduce_scatter", 64, 2**24, "butterfly"),
        ("Reduce_scatter", 1024, 2**15, "butterfly"),
        ("Allgatherv", 64, 64 * 2**12, "ring"),
        ("Allgatherv", 64, 64 * 2**12 - 64, "bruck"),
        ("Allgatherv", 1024, 2**22, "neighbour"),
        ("Allgather", 16, 2**24, "doubling"),
        ("Allreduce", 16, 2**24, "rabenseifner"),
        ("Reduce", 64, 2**24, "binomial"),
        ("Iallreduce", 4, 2**16, "rabenseifner"),
        ("Iallreduce", 3, 2**16, "binomial"),
        ("Alltoallv", 3, 2**16, "pairwise"),
        ("Alltoallv", 4, 2**16, "linear"),
        ("Alltoallv", 64, 2**16, "pairwise"),
    ],
)
def test_open_mpi_chooses_by_ranks_and_bytes(primitive, ranks, size, algorithm):
    """Oracle: coll_tuned_decision_fixed.c and nbc_iallreduce.c, read."""
    assert chosen(primitive, [size / ranks] * ranks) == algorithm


@pytest.mark.parametrize(
    ("primitive", "ranks", "size", "algorithm"),
    [
        ("Reduce_scatter", 64, 2**19 - 64, "halving"),
        ("Reduce_scatter", 64, 2**19, "pairwise"),
        ("Allgatherv", 1024, 2**19, "ring"),
        ("Reduce", 16, 2**12, "rabenseifner"),
        ("Bcast", 16, 2**20, "scatter, ring"),
    ],
)
def test_mpich_chooses_by_bytes(primitive, ranks, size, algorithm):
    """Oracle: coll_selection.json of MPICH, read."""
    assert chosen(primitive, [size / ranks] * ranks, "MPICH") == algorithm


def test_every_choice_has_rounds():
    """Oracle: the tables."""
    for table in algorithms.LIBRARIES.values():
        for primitive, by_ranks in table.items():
            for algorithm in {name for by_size in by_ranks.values() for name in by_size.values()}:
                parts = [[1.0] * 6] * 6 if primitive == "Alltoallv" else [1.0] * 6
                assert sum(one.times for one in rounds(primitive, algorithm, parts)) > 0


# -- beside SMPI -----------------------------------------------------------------------------------

OWNED = (  # elements of ResNet-50's gradients on 64 owners in order of their load, over 256
    *(9224, 9224, 9224, 2312, 2312, 2312, 2312, 2312, 2312, 8200, 8012, 4104, 4104, 4104, 4104),
    *(4104, 582, 582, 582, 582, 2054, 2054, 1030, 1030, 1030, 1030, 1030, 1030, 1030, 1030, 1030),
    *(1030, 1030, 150, 150, 150, 518, 518, 262, 262, 262, 262, 262, 262, 262, 134, 70, 70, 70),
    *(70, 70, 70, 42, 22, 6, 6, 6, 6, 6, 6, 5, 5, 5, 5),
)
LATENCY, BANDWIDTH = 19e-6, 12.5e9 / 256


@pytest.mark.parametrize(
    ("primitive", "algorithm", "simulated"),
    [
        ("Reduce_scatter", "butterfly", 23.56),
        ("Reduce_scatter", "halving", 22.66),
        ("Allgatherv", "bruck", 22.66),
        ("Allgatherv", "neighbour", 48.60),
        ("Reduce_scatter", "ring", 55.30),  # 68.66 with acknowledgments, which no other row feels
        ("Allreduce", "ring", 19.56),
        ("Allreduce", "rabenseifner", 17.21),
    ],
)
def test_rounds_beside_a_simulated_mpi(primitive, algorithm, simulated):
    """Oracle: ms of SMPI (SimGrid 3.32) on 64 hosts, a link of 12.5 GB/s and 19 us each.

    Bytes and bandwidth are both divided by 256.
    """
    sizes = [4.0 * count for count in OWNED]
    if primitive in WHOLE:
        sizes = [sum(sizes) / 64] * 64
    found = rounds(primitive, algorithm, sizes)
    seconds = sum(one.times * (LATENCY + one.size / BANDWIDTH) for one in found)
    assert seconds * 1e3 == pytest.approx(simulated, rel=0.13)
