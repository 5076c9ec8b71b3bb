"""Plan and send the messages of a step: records round a ring, inner products, solutions, sums.

For each pair of ranks, one of the two computes their block of inner products, so records are passed
round half of the ring. Rank 0 receives all blocks and solves the system; the other ranks receive
their parts of the solution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpikfac.comm import Comm, Group
from mpikfac.lab.sample_space.parameters import F64
from mpikfac.lab.sample_space.products import chunks, gram
from mpikfac.lab.sample_space.records import Block, Rows
from mpikfac.plan import Message, Shape, message, rows
from mpikfac.trace import Trace

EXCHANGE_RECORDS, GATHER_PRODUCTS, SCATTER_SOLUTION = "exchange records", "reduce gram", "solve"
REDUCE_GRADIENTS, LENGTH = "reduce gradients", "length"
ITEMSIZE = 8  # bytes of a float64
NUMBERS = 4
"""The number of scalars that are sent with a rank's part of a solution."""
Counts = Sequence[Sequence[int]]
"""The number of elements that each rank sends to each rank."""


class Form(NamedTuple):
    """The number of a term's rows on a rank, and the number of streams of each matrix."""

    rows: int
    streams: tuple[int, ...]

    def elements(self, shapes: Sequence[Shape]) -> int:
        """Return the number of elements in the rows' vectors."""
        return self.rows * sum(s * sum(shape) for s, shape in zip(self.streams, shapes))


Forms = Sequence[Form]
"""The forms of a rank's terms."""


def form_of(of_term: Rows) -> Form:
    """Return the form of a term's rows."""
    return Form(len(of_term[0].a), tuple(block.streams for block in of_term))


# -- the plan --------------------------------------------------------------------------------------


def partners(rank: int, ranks: int) -> Iterator[int]:
    """Yield, in ring order, the ranks with which a rank computes inner products of rows."""
    for hop in range(1, ranks // 2 + 1):
        if 2 * hop < ranks or rank >= hop:  # only one of two opposite ranks computes their block
            yield (rank - hop) % ranks


def ring(elements: Sequence[int]) -> list[Counts]:
    """Return the number of elements sent in each hop, given the size of each rank's records.

    In each hop, a rank passes the records that it received in the previous hop to the next rank.
    """
    ranks = len(elements)
    hops: list[Counts] = []
    for hop in range(1, ranks // 2 + 1):
        counts = [[0] * ranks for _ in elements]
        for rank in range(ranks):
            owner = (rank - hop) % ranks
            if owner in partners(rank, ranks):
                counts[(rank - 1) % ranks][rank] = elements[owner]
        hops.append(counts)
    return hops


def products_to(counts: Sequence[int], vectors: int) -> Counts:
    """Return the number of elements that ranks send to rank 0, given their numbers of rows.

    Args:
        vectors: how many vectors, such as the residuals, are sent with the inner products.
    """
    ranks = len(counts)
    return [
        [own * (own + sum(counts[p] for p in partners(rank, ranks)) + vectors)] + [0] * (ranks - 1)
        for rank, own in enumerate(counts)
    ]


def solution_to(counts: Sequence[int]) -> Counts:
    """Return the number of elements that rank 0 sends to each rank with the solution."""
    none = [0] * len(counts)
    return [[NUMBERS + count for count in counts], *([none] * (len(counts) - 1))]


def vector_to(counts: Sequence[int]) -> Counts:
    """Return the number of elements that ranks send to rank 0, for one element per row."""
    return [[count] + [0] * (len(counts) - 1) for count in counts]


def vector_from(counts: Sequence[int]) -> Counts:
    """Return the number of elements that rank 0 sends to each rank, for one element per row."""
    return [list(counts), *([[0] * len(counts)] * (len(counts) - 1))]


def planned_messages(
    forms: Sequence[Forms],
    shapes: Sequence[Shape],
    rank: int,
    *,
    tries: int = 1,
    losses: int,
    momentum: bool = False,
    acceleration: bool,
) -> list[Message]:
    """Return a rank's messages in a step.

    Args:
        forms: the forms of each rank's terms.
        shapes: the shapes of the parameter matrices.
        tries: how many times the system is solved.
        losses: the number of losses that are summed over ranks: one before the step, and one for
            each trial.
        momentum: whether the step uses momentum.
        acceleration: whether the acceleration is computed, which requires a positive step length.
    """
    ranks = len(forms)
    if ranks == 1:
        return []
    counts = [sum(form.rows for form in of_rank) for of_rank in forms]
    elements = [sum(form.elements(shapes) for form in of_rank) for of_rank in forms]
    over = "ranks"

    def passing(stage: str, of_all: Counts) -> list[Message]:
        return rows(stage, of_all, ITEMSIZE, rank, over)

    solved = passing(SCATTER_SOLUTION, solution_to(counts))
    shard = shard_of(sum(o * i for o, i in shapes), ranks)
    parts = [(part * shard, (part + 1) * shard) for part in range(ranks)]
    summed = [
        message(REDUCE_GRADIENTS, "Reduce_scatter", over, parts, ranks, ITEMSIZE, rank),
        message(REDUCE_GRADIENTS, "Allgather", over, [(0, shard)], ranks, ITEMSIZE, rank),
    ]
    accelerated = [
        *passing(SCATTER_SOLUTION, vector_to(counts)),
        *passing(SCATTER_SOLUTION, vector_from(counts)),
        *summed,
    ]
    loss = message(LENGTH, "Allgather", over, [(0, 1)], ranks, ITEMSIZE, rank)
    return [
        *chain.from_iterable(passing(EXCHANGE_RECORDS, hop) for hop in ring(elements)),
        *passing(GATHER_PRODUCTS, products_to(counts, 1 + momentum)),
        *(solved + summed) * tries,
        *accelerated * acceleration,
        *[loss] * losses,
    ]


def shard_of(size: int, ranks: int) -> int:
    """Return the number of elements of a vector that each rank sums."""
    return -(-size // ranks)


# -- the execution of the plan ---------------------------------------------------------------------


class Ring:
    """Send the messages of a step.

    Collective over: comm.
    """

    def __init__(
        self, comm: Comm, shapes: Sequence[Shape], trace: Trace, device: torch.device
    ) -> None:
        self._device = device
        self.size, self.rank = comm.size, comm.rank
        self._group = Group(comm, 0, trace, "ranks") if comm.size > 1 else None
        self._shapes, self._trace = shapes, trace

    def close(self) -> None:
        """Free the communicator.

        Collective over: ranks.
        """
        if self._group is not None:
            self._group.free()

    def products(self, own: Sequence[Rows], forms: Sequence[Forms]) -> list[Tensor]:
        """Return the inner products of the rank's rows with each other and with partners' rows.

        Collective over: ranks.

        Args:
            own: the rows of the rank's terms.
            forms: the forms of each rank's terms.
        """
        mine = _in_chunks(own)
        with self._trace.stage("gram"):
            found = [gram(mine, mine)]
        if self._group is None:
            return found
        vectors = (x.flatten() for of_term in own for b in of_term for x in (b.a, b.g))
        held = torch.cat([*vectors])
        elements = [sum(form.elements(self._shapes) for form in of_rank) for of_rank in forms]
        for hop, counts in enumerate(ring(elements), 1):
            received = self._pass(held, counts, EXCHANGE_RECORDS)
            owner = (self.rank - hop) % self.size
            if owner in partners(self.rank, self.size):
                held = received
                with self._trace.stage("gram"):
                    found.append(gram(mine, _in_chunks(self._rows(held, forms[owner]))))
        return found

    def _rows(self, flat: Tensor, forms: Forms) -> Iterator[Rows]:
        """Yield the rows of each term in a message."""
        for form in forms:
            blocks = []
            for streams, (outputs, inputs) in zip(form.streams, self._shapes):
                sizes = [form.rows * streams * n for n in (inputs, outputs)]
                a, g, flat = flat.split([*sizes, len(flat) - sum(sizes)])
                shape = form.rows, streams
                blocks.append(Block(a.view(*shape, inputs), g.view(*shape, outputs)))
            yield blocks

    def gather(
        self, products: Sequence[Tensor], vectors: Sequence[Tensor], counts: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Return all inner products and vectors, in rank order, on rank 0; None on other ranks.

        Collective over: ranks.

        Args:
            products: the result of `products`.
            vectors: vectors with one element for each of the rank's rows, `[rows]`.
            counts: the number of rows on each rank.
        """
        if self._group is None:
            return products[0], list(vectors)
        flat = torch.cat([x.flatten() for x in (*products, *vectors)])
        found = self._pass(flat, products_to(counts, len(vectors)), GATHER_PRODUCTS)
        if self.rank:
            return None
        total = found.new_empty(sum(counts), sum(counts))
        lines = [line.split(list(counts), 1) for line in total.split(list(counts))]
        gathered: list[list[Tensor]] = [[] for _ in vectors]
        for rank, own in enumerate(counts):
            for other in (rank, *partners(rank, self.size)):
                part, found = found.split([own * counts[other], len(found) - own * counts[other]])
                lines[rank][other].copy_(part.view(own, counts[other]))
                lines[other][rank].copy_(part.view(own, counts[other]).T)
            for of_rank in gathered:
                part, found = found.split([own, len(found) - own])
                of_rank.append(part)
        return total, [torch.cat(of_rank) for of_rank in gathered]

    def scatter(
        self, solution: tuple[Tensor, Tensor] | None, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return rank 0's scalars, `[NUMBERS]`, and this rank's part of the solution.

        Collective over: ranks.

        Args:
            solution: on rank 0, the scalars, and a vector with an element for each row of any rank;
                None on other ranks.
            counts: the number of rows on each rank.
        """
        if self._group is None:
            assert solution is not None
            return solution
        held = torch.empty(0, dtype=F64, device=self._device)
        if solution is not None:
            numbers, vector = solution
            parts = vector.split(list(counts))
            held = torch.cat([x for part in parts for x in (numbers, part)])
        found = self._pass(held, solution_to(counts), SCATTER_SOLUTION)
        return found[:NUMBERS], found[NUMBERS:]

    def solve_again(self, vector: Tensor, factor: Tensor | None, counts: Sequence[int]) -> Tensor:
        """Solve a factorised system for another right-hand side; return this rank's part.

        Collective over: ranks.

        Args:
            vector: the right-hand side for the rank's rows.
            factor: the Cholesky factor on rank 0; None on other ranks.
            counts: the number of rows on each rank.
        """
        if self._group is not None:
            vector = self._pass(vector, vector_to(counts), SCATTER_SOLUTION)
        if factor is not None:
            with self._trace.stage("decompose"):
                vector = torch.cholesky_solve(vector[:, None], factor)[:, 0]
        if self._group is None:
            return vector
        return self._pass(vector, vector_from(counts), SCATTER_SOLUTION)

    def sum(self, vector: Tensor) -> Tensor:
        """Return the sum of all ranks' vectors, which is bitwise identical on all ranks.

        Collective over: ranks.
        """
        if self._group is None:
            return vector
        shard = shard_of(len(vector), self.size)
        padded = nn.functional.pad(vector, (0, shard * self.size - len(vector)))
        part = self._group.sum_parts(padded, 0, REDUCE_GRADIENTS)
        return self._group.gather(part, 0, REDUCE_GRADIENTS)[: len(vector)]

    def sum_number(self, number: Tensor) -> float:
        """Return the sum of all ranks' numbers, added in rank order.

        Collective over: ranks.
        """
        if self._group is None:
            return float(number)
        return float(self._group.gather(number.view(1), 0, LENGTH).cpu().sum())

    def _pass(self, held: Tensor, counts: Counts, stage: str) -> Tensor:
        """Send every rank its part of `held`, and return the received parts."""
        assert self._group is not None
        out, back = counts[self.rank], [of_rank[self.rank] for of_rank in counts]
        return self._group.pass_rows(held[: sum(out)], out, back, stage)


def _in_chunks(terms: Sequence[Rows] | Iterator[Rows]) -> list[Rows]:
    return [part for of_term in terms for part in chunks(of_term)]
