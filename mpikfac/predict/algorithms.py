"""The algorithms that MPI libraries choose for collectives, and their rounds.

In a round, members send at the same time, and the next round begins when the busiest link is done.
Links can send and receive at the same time. The time of a collective is therefore the sum, over its
rounds, of a latency plus the bytes of the busiest link divided by the bandwidth. `parts` are the
bytes of every member's part, in the order of members; an undivided buffer is treated as equal
parts. For Alltoallv, `parts` are the bytes from every member to every member. `together` is the
number of neighbouring members that share a node.

The rounds follow the definitions in [Thakur et al. 2005]: rings, trees, and exchanges at distances
that double or halve. If the number of members is not a power of two, some members first pass their
values to a neighbour.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

Parts = Sequence[Any]
"""The bytes of every member's part or, for Alltoallv, from every member to every member."""
Value = TypeVar("Value")
Table = Mapping[str, Mapping[int, Mapping[int, str]]]
"""The algorithm by primitive, minimum number of ranks, and minimum number of bytes. The bytes are
those of the whole buffer or, for the libraries and primitives in `BY_PART`, of the mean part.
"""
KIB, MIB = 2**10, 2**20
CHAINED_PIECE = 32 * KIB  # bytes per piece in a chain of coll/libnbc
RADIX = 4  # 1 + the number of children per level of a k-nomial tree

OF_ALLTOALLV = {
    2: {0: "pairwise"},
    4: {0: "linear"},
    64: {0: "pairwise"},
    128: {0: "linear"},
    256: {0: "pairwise"},
    1024: {0: "linear"},
}
# Open MPI at 8efebee, ompi/mca/coll/tuned/coll_tuned_decision_fixed.c and coll/libnbc, for
# commutative sums and ranks that share nodes. Ranges of a few KiB are merged with their neighbours.
# Not included: coll/han, Open MPI's own two-level collectives for several ranks on several nodes.
OPEN_MPI: Table = {
    "Allreduce": {
        2: {0: "doubling", 16 * KIB: "ring", 256 * KIB: "rabenseifner"},
        4: {0: "doubling", 8 * KIB: "rabenseifner"},
        16: {0: "doubling", 4 * KIB: "rabenseifner"},
        32: {0: "ring", 128: "rabenseifner"},
        64: {0: "doubling", 256 * KIB: "rabenseifner"},
        128: {0: "binomial", 128 * KIB: "doubling", 256 * KIB: "rabenseifner"},
        256: {0: "binomial", 4 * KIB: "rabenseifner"},
        512: {0: "binomial", 2 * KIB: "doubling", 16 * KIB: "rabenseifner"},
        4096: {0: "binomial", 2 * KIB: "ring", 16 * KIB: "doubling", 32 * KIB: "rabenseifner"},
    },
    "Reduce_scatter": {
        2: {0: "ring", 64 * KIB: "butterfly", 128 * KIB: "ring"},
        4: {0: "halving", 256 * KIB: "ring"},
        32: {0: "halving", 2 * KIB: "butterfly", 512 * KIB: "ring"},
        64: {0: "halving", 4 * KIB: "butterfly"},
        512: {0: "halving", 16 * KIB: "butterfly"},
        1024: {0: "halving", 32 * KIB: "butterfly"},
        2048: {0: "halving", 8 * KIB: "butterfly"},
    },
    "Alltoall": OF_ALLTOALLV,  # mpikfac calls Alltoallv if parts can differ in size
    "Alltoallv": OF_ALLTOALLV,
    "Allgatherv": {
        2: {0: "ring"},
        3: {0: "neighbour", 4 * KIB: "ring", 8 * KIB: "neighbour"}
        | {16 * KIB: "bruck", 256 * KIB: "neighbour"},
        8: {0: "bruck"},
        16: {0: "bruck", 256 * KIB: "ring"},
        32: {0: "bruck", 8 * KIB: "ring"},
        64: {0: "bruck", 4 * KIB: "ring"},
        128: {0: "bruck", 1 * KIB: "neighbour", 64 * KIB: "ring"},
        256: {0: "bruck", 1 * KIB: "ring"},
        512: {0: "bruck", 4 * KIB: "neighbour", 1 * MIB: "ring"},
        1024: {0: "bruck", 4 * KIB: "neighbour"},
    },
    "Allgather": {
        2: {0: "doubling"},
        32: {0: "doubling", 1 * KIB: "neighbour", 64 * KIB: "ring"},
        128: {0: "doubling", 512: "neighbour", 128 * KIB: "ring"}
        | {512 * KIB: "neighbour", 1 * MIB: "ring"},
        512: {0: "doubling", 2 * KIB: "neighbour"},
        1024: {0: "doubling", 4 * KIB: "neighbour"},
    },
    "Reduce": {
        2: {0: "linear"},
        4: {0: "binomial", 256 * KIB: "linear", 512 * KIB: "binomial", 1 * MIB: "linear"},
        8: {0: "binomial"},
    },
    "Bcast": {
        2: {0: "linear"},
        4: {0: "binomial", 8 * KIB: "linear", 1 * MIB: "pipeline"},
        8: {0: "knomial", 4 * KIB: "binomial", 32 * KIB: "linear"},
        16: {0: "knomial", 4 * KIB: "binomial", 1 * MIB: "scatter"},
        32: {0: "knomial"},
        1024: {0: "knomial", 512 * KIB: "scatter"},
        2048: {0: "knomial", 256 * KIB: "scatter"},
    },
    "Send": {2: {0: "pipeline"}},
    "Iallreduce": {2: {0: "binomial"}, 4: {0: "binomial", 64 * KIB: "rabenseifner"}},
    "Ireduce": {2: {0: "binomial", 64 * KIB: "chain"}, 5: {0: "binomial"}},
}
# MPICH at 07f13b4, src/mpi/coll/coll_selection.json, for commutative sums. Not included: different
# limits if the number of ranks is not a power of two, and MPICH's own two-level collectives.
MPICH: Table = {
    "Allreduce": {2: {0: "doubling", 9: "rabenseifner"}},
    "Reduce_scatter": {2: {0: "halving", 512 * KIB: "pairwise"}},
    "Alltoall": {2: {0: "linear"}},
    "Alltoallv": {2: {0: "linear"}},
    "Allgatherv": {2: {0: "doubling", 512 * KIB: "ring"}},
    "Allgather": {2: {0: "doubling", 512 * KIB: "ring"}},
    "Reduce": {2: {0: "binomial", 2 * KIB + 1: "rabenseifner"}},
    "Bcast": {
        2: {0: "binomial"},
        8: {0: "binomial", 12 * KIB + 1: "scatter", 512 * KIB + 1: "scatter, ring"},
    },
    "Send": {2: {0: "pipeline"}},
    "Iallreduce": {2: {0: "doubling", 2 * KIB + 1: "rabenseifner"}},
    "Ireduce": {2: {0: "binomial", 2 * KIB + 1: "rabenseifner"}},
}
LIBRARIES: Mapping[str, Table] = {"Open MPI": OPEN_MPI, "MPICH": MPICH}
BY_PART = ("Open MPI", "Allgather"), ("Open MPI", "Allgatherv")


class Round(NamedTuple):
    """The bytes on the busiest links in a round of a collective.

    Attributes:
        size: the bytes that the busiest member sends or receives, whichever is more.
        leaving: the bytes that leave or enter the busiest node, whichever is more.
        times: the number of rounds of this kind.
    """

    size: float
    leaving: float
    times: int = 1


def chosen(primitive: str, parts: Parts, library: str = "Open MPI") -> str:
    """Return the algorithm that the library chooses for a collective."""
    size = sum(np.ravel(parts)) / (len(parts) if (library, primitive) in BY_PART else 1)
    by_size = _last(LIBRARIES[library][primitive], len(parts))
    return _last(by_size, size)


def rounds(primitive: str, algorithm: str, parts: Parts, together: int = 1) -> list[Round]:
    """Return the rounds of a collective; the last entry is the final round.

    Args:
        together: the number of neighbouring members on a node.
    """
    alone = together >= len(parts)  # on one node, so nothing leaves it
    found = ROUNDS[primitive][algorithm](np.asarray(parts, float), 1 if alone else together)
    return [Round(float(r.size), 0.0 if alone else float(r.leaving), r.times) for r in found]


def transfer(messages: Iterable[tuple[int, int, float]], together: int = 1) -> Round:
    """Return the round that sends `messages`, given as source, destination and bytes.

    All messages are in flight at once, so their latencies overlap.
    """
    sources, targets, sizes = map(np.asarray, zip(*messages))
    return _busiest(sources, targets, sizes, together)


# -- one round -------------------------------------------------------------------------------------


def _exchange(size: float, distance: int, together: int) -> Round:
    """Return a round of exchanges with the member at `distance`, a power of two."""
    return Round(size, size * together if distance >= _whole(together) else 0.0)


def _shift(size: float, distance: int, together: int, ranks: int, times: int = 1) -> Round:
    """Return rounds in which all members send to the member at `distance`, cyclically."""
    return Round(size, size * min(distance, together, ranks - distance), times)


def _branch(size: float, distance: int, together: int) -> Round:
    """Return a round of a tree in which one member per node has a partner on another node."""
    return Round(size, size if distance >= _whole(together) else 0.0)


def _busiest(
    sources: np.ndarray,
    targets: np.ndarray,
    sizes: np.ndarray,
    together: int,
) -> Round:
    """Return the round that sends the given messages; messages to oneself are ignored."""

    def most(size: np.ndarray, per: int) -> float:
        return float(max(np.bincount(ends // per, size).max() for ends in (sources, targets)))

    away = np.where(sources != targets, sizes, 0.0)
    far = np.where(sources // together != targets // together, sizes, 0.0)
    return Round(most(away, 1), most(far, together))


# -- algorithms ------------------------------------------------------------------------------------


def _ring(parts: np.ndarray, together: int, first: int = 0) -> list[Round]:
    """Pass all parts on to the next member, starting with part `r + first` on member r.

    The largest part is always in flight. The parts that cross between nodes in a round are at the
    same position in their nodes, which changes from round to round.
    """
    ranks, largest = len(parts), parts.max()
    turns = Counter((together - 1 + first - k) % together for k in range(ranks - 1))
    return [Round(largest, parts[at::together].max(), times) for at, times in turns.items()]


def _ring_both_ways(parts: np.ndarray, together: int) -> list[Round]:
    return 2 * _ring(_equal(parts.sum(), len(parts)), together)


def _pairwise(parts: np.ndarray, together: int) -> list[Round]:
    """Send a part to the member at distance 1, 2, 3, ...; receive one from the other direction."""
    ranks = len(parts)
    leave = Counter(min(k, together, ranks - k) for k in range(1, ranks))
    return [Round(parts.max(), _window(parts, count), n) for count, n in leave.items()]


def _all_at_once(parts: np.ndarray, together: int) -> list[Round]:
    """Send to all members at once, and receive a part from each."""
    ranks, of_node = len(parts), np.add.reduceat(parts, range(0, len(parts), together)).max()
    return [Round((ranks - 1) * parts.max(), (ranks - together) * of_node)]


def _pairwise_rows(sizes: np.ndarray, together: int) -> list[Round]:
    """Send to the member at distance 1, 2, 3, ...; sizes depend on the sender and the receiver."""
    members = np.arange(len(sizes))
    targets = (np.roll(members, -k) for k in members[1:])
    return [_busiest(members, to, sizes[members, to], together) for to in targets]


def _all_rows_at_once(sizes: np.ndarray, together: int) -> list[Round]:
    """Send to all members at once; sizes depend on the sender and the receiver."""
    sources, targets = np.indices(sizes.shape)
    return [_busiest(sources.ravel(), targets.ravel(), sizes.ravel(), together)]


def _neighbour(parts: np.ndarray, together: int) -> list[Round]:
    """Exchange with the two neighbours alternately: first one part, then the last pair received."""
    ranks = len(parts)
    if ranks % 2:
        return _ring(parts, together)
    pairs = parts.reshape(-1, 2).sum(1)
    if together % 2:
        rest = Round(pairs.max(), pairs.max(), ranks // 2 - 1)
        return [_shift(parts.max(), 1, together, ranks), rest]
    inside = Round(pairs.max(), 0.0, (ranks // 2 - 1) // 2)
    crossing = [
        Round(pairs.max(), _crossing(pairs, turn, together // 2)) for turn in range(ranks // 4)
    ]
    return [Round(parts.max(), 0.0), inside, *crossing]


def _crossing(pairs: np.ndarray, turn: int, of_node: int) -> float:
    """Return the bytes that leave or enter the busiest node in the next crossing of pairs.

    Args:
        turn: the number of earlier crossings.
        of_node: the number of pairs per node.
    """
    first = np.arange(0, len(pairs), of_node)  # the first pair of each node
    to_left, to_right = (np.take(pairs, at, mode="wrap") for at in (first + turn, first - 1 - turn))
    return float(
        max((to_left + np.roll(to_right, -1)).max(), (to_right + np.roll(to_left, -1)).max())
    )


def _bruck(parts: np.ndarray, together: int) -> list[Round]:
    """For d = 1, 2, 4, ..., send the first d parts received so far to the member at distance d."""
    ranks = len(parts)
    counts = {distance: min(distance, ranks - distance) for distance in _powers(ranks)}
    return [
        _shift(_window(parts, count), distance, together, ranks)
        for distance, count in counts.items()
    ]


def _butterfly(parts: np.ndarray, together: int) -> list[Round]:
    """Exchange halves at doubling distances, and then send each part to its owner."""
    blocks, extra = _folded(parts)
    first = [_exchange(parts.sum(), 1, together)] if extra else []
    places = np.arange(len(blocks))
    mirrored = sum((places // d % 2) * (len(blocks) // 2 // d) for d in _powers(len(blocks)))
    last = _busiest(np.asarray(mirrored), places, blocks, together)
    return [*first, *_halved(blocks, together), last]


def _halved(blocks: np.ndarray, together: int) -> list[Round]:
    """Return the rounds that exchange halves at doubling distances.

    The members of a node start with different halves.
    """
    found = []
    for distance in _powers(len(blocks)):
        halves = blocks.reshape(2 * distance, -1).sum(1)
        leaving, near = 0.0, _whole(together)
        if distance >= near:
            leaving = halves.reshape(near, -1).sum(0).max() * together / near
        found.append(Round(halves.max(), leaving))
    return found


def _halving(parts: np.ndarray, together: int) -> list[Round]:
    """Exchange halves at halving distances; members of a node send sums of the same parts."""
    blocks, extra = _folded(parts)
    first = [_exchange(parts.sum(), 1, together)] if extra else []
    last = [_exchange(parts[: 2 * extra : 2].max(), 1, together)] if extra else []
    distances = _powers(len(blocks))[::-1]
    halves = [blocks.reshape(-1, distance).sum(1).max() for distance in distances]
    return [*first, *(_exchange(*pair, together) for pair in zip(halves, distances)), *last]


def _rabenseifner(parts: np.ndarray, together: int) -> list[Round]:
    """Exchange halves at doubling distances, and double the parts on the way back."""
    extra = _whole(len(parts)) < len(parts)
    last = [_exchange(parts.sum(), 1, together)] if extra else []
    return [*_there_and_back(parts, together), *last]


def _there_and_back(parts: np.ndarray, together: int) -> list[Round]:
    """Return the rounds that exchange halves, and the same rounds in reverse.

    The last round, in which the members left out of the exchanges get the sums, is not included.
    """
    size, whole = parts.sum(), _whole(len(parts))
    first = 2 * [_exchange(size / 2, 1, together)] if whole < len(parts) else []
    there = _halved(_equal(size, whole), together)
    return [*first, *there, *there[::-1]]


def _doubling_sums(parts: np.ndarray, together: int) -> list[Round]:
    """Exchange the sums of the whole buffer at doubling distances."""
    size, whole = parts.sum(), _whole(len(parts))
    extra = [_exchange(size, 1, together)] if whole < len(parts) else []
    return extra + [_exchange(size, distance, together) for distance in _powers(whole)] + extra


def _doubling_parts(parts: np.ndarray, together: int) -> list[Round]:
    """Exchange the parts received so far at doubling distances.

    If the number of members is not a power of two, use Bruck's algorithm.
    """
    if _whole(len(parts)) < len(parts):
        return _bruck(parts, together)
    return [
        _exchange(parts.reshape(-1, distance).sum(1).max(), distance, together)
        for distance in _powers(len(parts))
    ]


def _reduce_tree(parts: np.ndarray, together: int) -> list[Round]:
    """Reduce along a binomial tree, neighbours first."""
    return [_branch(parts.sum(), distance, together) for distance in _powers(len(parts))]


def _bcast_tree(parts: np.ndarray, together: int) -> list[Round]:
    """Copy along a binomial tree, neighbours first; all members have children on other nodes."""
    return [_exchange(parts.sum(), distance, together) for distance in _powers(len(parts))]


def _reduce_and_bcast(parts: np.ndarray, together: int) -> list[Round]:
    return _reduce_tree(parts, together) + _bcast_tree(parts, together)


def _knomial(parts: np.ndarray, together: int) -> list[Round]:
    """Copy along a tree with `RADIX - 1` children per level, sending to all levels at once.

    Distant children are not served first, although they have children themselves.
    """
    size, ranks, found = parts.sum(), len(parts), []
    distances = _powers(ranks, RADIX)
    for level in range(len(distances), 0, -1):
        near = [distance * k for distance in distances[:level] for k in range(1, RADIX)]
        children = [child for child in near if child < ranks]
        far = sum(child >= together for child in children)
        found.append(Round(size * len(children), size * far))
    return found


def _scatter(parts: np.ndarray, together: int) -> list[Round]:
    """Scatter equal parts along a binomial tree, and gather them by doubling."""
    equal = _equal(parts.sum(), len(parts))
    return _handed_out(equal, together) + _doubling_parts(equal, together)


def _handed_out(parts: np.ndarray, together: int) -> list[Round]:
    """Send equal parts along a binomial tree, to distant members first."""
    size, distances = parts[0], _powers(len(parts))[::-1]
    return [_branch(size * min(d, len(parts) - d), d, together) for d in distances]


def _scatter_and_ring(parts: np.ndarray, together: int) -> list[Round]:
    """Scatter equal parts along a binomial tree, and gather them in a ring."""
    equal = _equal(parts.sum(), len(parts))
    return _handed_out(equal, together) + _ring(equal, together)


def _star(parts: np.ndarray, together: int) -> list[Round]:
    """Send the whole buffer from all members to the root, or from the root to all members."""
    size, ranks = parts.sum(), len(parts)
    return [Round(size * (ranks - 1), size * (ranks - together))]


def _pipeline(parts: np.ndarray, together: int) -> list[Round]:
    """Pass the whole buffer along a chain, without dividing it."""
    return [_shift(parts.sum(), 1, together, len(parts), len(parts) - 1)]


def _chain(parts: np.ndarray, together: int) -> list[Round]:
    """Pass the buffer along a chain in pieces."""
    size, ranks = parts.sum(), len(parts)
    pieces = math.ceil(size / CHAINED_PIECE)
    return [_shift(size / pieces, 1, together, ranks, pieces + ranks - 2)]


ROUNDS: Mapping[str, Mapping[str, Callable[[np.ndarray, int], list[Round]]]] = {
    "Allreduce": {
        "doubling": _doubling_sums,
        "ring": _ring_both_ways,
        "rabenseifner": _rabenseifner,
        "binomial": _reduce_and_bcast,
    },
    "Reduce_scatter": {
        "ring": partial(_ring, first=-1),
        "butterfly": _butterfly,
        "halving": _halving,
        "pairwise": _pairwise,
    },
    "Alltoall": {"pairwise": _pairwise, "linear": _all_at_once},
    "Alltoallv": {"pairwise": _pairwise_rows, "linear": _all_rows_at_once},
    "Allgatherv": {"ring": _ring, "neighbour": _neighbour, "bruck": _bruck}
    | {"doubling": _doubling_parts},
    "Allgather": {"ring": _ring, "neighbour": _neighbour, "doubling": _doubling_parts},
    "Reduce": {"linear": _star, "binomial": _reduce_tree, "rabenseifner": _there_and_back},
    "Bcast": {
        "linear": _star,
        "pipeline": _pipeline,
        "binomial": _bcast_tree,
        "knomial": _knomial,
        "scatter": _scatter,
        "scatter, ring": _scatter_and_ring,
    },
    "Send": {"pipeline": _pipeline},
    "Iallreduce": {
        "binomial": _reduce_and_bcast,
        "doubling": _doubling_sums,
        "rabenseifner": _rabenseifner,
    },
    "Ireduce": {"binomial": _reduce_tree, "chain": _chain, "rabenseifner": _there_and_back},
}
"""The function that returns the rounds of an algorithm, by primitive and algorithm."""

# -- arithmetic ------------------------------------------------------------------------------------


def _powers(ranks: int, base: int = 2) -> list[int]:
    """Return the powers of `base` below `ranks`, ascending."""
    return [base**k for k in range(ranks.bit_length()) if base**k < ranks]


def _whole(ranks: int) -> int:
    """Return the largest power of two up to `ranks`."""
    return 2 ** (ranks.bit_length() - 1)


def _equal(size: float, ranks: int) -> np.ndarray:
    return np.full(ranks, size / ranks)


def _folded(parts: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the parts, joined so that their number is a power of two, and the number of pairs.

    The parts of the first members are joined in pairs.
    """
    extra = len(parts) - _whole(len(parts))
    pairs = parts[: 2 * extra].reshape(-1, 2).sum(1)
    return np.concatenate([pairs, parts[2 * extra :]]), extra


def _window(parts: np.ndarray, count: int) -> float:
    """Return the largest sum of `count` neighbouring parts, cyclically."""
    ends = np.cumsum(np.concatenate([[0.0], parts, parts]))
    return float((ends[count : count + len(parts)] - ends[: len(parts)]).max())


def _last(values: Mapping[int, Value], at: float) -> Value:
    """Return the value of the largest key up to `at`; keys must be in ascending order."""
    return [value for key, value in values.items() if key <= at][-1]
