"""Distribute layers over ranks, which decompose their layers and process all ranks' vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mpikfac.comm import Comm, Group, agree, handed_over
from mpikfac.plan import LayerShape, Message, Shape, message, rows
from mpikfac.trace import Trace

COUNT, QUERIES, ANSWERS, PUBLISH = "count vectors", "send vectors", "return vectors", "publish"
SUMS = "send sums"
ITEMSIZE = 8  # bytes of a float64


def assign(layers: Sequence[LayerShape], ranks: int) -> list[list[str]]:
    """Return the names of each rank's layers, in model order.

    Layers are assigned in order of decreasing work, each to the rank with the least work so far.
    """
    works = {shape.name: sum(factor.work() for factor in shape.factors) for shape in layers}
    loads, owner = [0] * ranks, {}
    for name in sorted(works, key=lambda name: -works[name]):
        owner[name] = loads.index(min(loads))
        loads[owner[name]] += works[name]
    return [[name for name in works if owner[name] == rank] for rank in range(ranks)]


def elements_to(sizes: Sequence[int], examples: Sequence[int]) -> list[list[int]]:
    """Return how many vector elements each rank sends to each owner.

    Args:
        sizes: the number of vector elements that belong to each owner's layers.
        examples: the number of vectors on each rank.
    """
    return [[count * size for size in sizes] for count in examples]


def query_messages(sizes: Sequence[int], examples: Sequence[int], rank: int) -> list[Message]:
    """Return a rank's messages that send vectors to the layers' owners, and the results back."""
    if len(sizes) == 1:
        return []
    count = message(COUNT, "Allgather", "owners", [(0, 1)], len(sizes), ITEMSIZE, rank)
    there = elements_to(sizes, examples)
    back = [list(column) for column in zip(*there)]
    return [
        count,
        *rows(QUERIES, there, ITEMSIZE, rank, "owners"),
        *rows(ANSWERS, back, ITEMSIZE, rank, "owners"),
    ]


def sum_messages(sizes: Sequence[int], rank: int) -> list[Message]:
    """Return the messages in which a rank sends sums to owners.

    Args:
        sizes: the number of elements in the sums of each owner's layers.
    """
    return rows(SUMS, [list(sizes)] * len(sizes), ITEMSIZE, rank, "owners")


def publish_messages(counts: Sequence[int], rank: int) -> list[Message]:
    """Return the message that gathers the given number of elements from each rank on all ranks."""
    if len(counts) == 1:
        return []
    spans = list(pairwise([0, *accumulate(counts)]))
    return [message(PUBLISH, "Allgatherv", "owners", spans, len(counts), ITEMSIZE, rank)]


class Owners:
    """Distribute layers over ranks, and exchange the layers' vectors and tensors.

    Collective over: comm.

    Args:
        comm: None if this rank owns all layers; the methods are then not collective.

    Attributes:
        names: the names of each rank's layers.
        own: the names of this rank's layers.
        shapes: the shape `[groups, outputs, inputs]` of each layer's matrix.
        sizes: the number of vector elements that belong to each rank's layers.
    """

    def __init__(
        self, layers: Sequence[LayerShape], comm: Comm | None, trace: Trace, device: torch.device
    ) -> None:
        self._comm, self._device = comm, device
        self._group = None if comm is None or comm.size == 1 else Group(comm, 0, trace, "owners")
        self.shapes: dict[str, Shape] = {
            shape.name: (shape.groups, shape.outputs, shape.inputs) for shape in layers
        }
        self.names = assign(layers, self._group.size if self._group else 1)
        self.own = self.names[self._group.member if self._group else 0]
        self.sizes = [sum(math.prod(self.shapes[n]) for n in names) for names in self.names]

    def close(self) -> None:
        """Free the communicator.

        Collective over: owners.
        """
        if self._group:
            self._group.free()

    def agree(self, values: Mapping[str, object]) -> None:
        """Check that `values` are the same on every rank.

        Collective over: comm.

        Raises:
            RanksDifferError: the values differ.
        """
        if self._comm is not None:
            agree(self._comm, values)

    def ask(
        self, matrices: Mapping[str, Tensor], answer: Callable[[str, Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Send this rank's matrices to the layers' owners, and return their answers, by layer.

        Args:
            matrices: `[examples, groups, outputs, inputs]` by layer, with any number of examples.
            answer: maps the name of one of this rank's layers, and all ranks' matrices, to
                matrices of the same shape.

        Collective over: owners.
        """
        if self._group is None:
            return {name: answer(name, rows_of) for name, rows_of in matrices.items()}
        examples = self.integers(len(next(iter(matrices.values()))))
        there = elements_to(self.sizes, examples)
        out, back = there[self._group.member], [row[self._group.member] for row in there]
        sent = torch.cat([matrices[n].flatten() for names in self.names for n in names])
        received = self._group.pass_rows(sent, out, back, QUERIES)
        queries = [
            self._split(part, self.own, count)
            for part, count in zip(received.split(back), examples)
        ]
        answers = {
            name: answer(name, torch.cat([query[name] for query in queries])).split(examples)
            for name in self.own
        }
        parts = [answers[n][rank].flatten() for rank in range(len(examples)) for n in self.own]
        returned = self._group.pass_rows(torch.cat([sent[:0], *parts]), back, out, ANSWERS)
        found: dict[str, Tensor] = {}
        for part, names in zip(returned.split(out), self.names):
            found |= self._split(part, names, examples[self._group.member])
        return {name: found[name] for name in self.shapes}

    def publish(
        self, tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]
    ) -> dict[str, Tensor]:
        """Gather layers' tensors on every rank; each rank passes the tensors of its own layers.

        Args:
            shapes: the shape of each layer's tensor, for the layers whose tensors are gathered.

        Collective over: owners.
        """
        if self._group is None:
            return {name: tensors[name] for name in shapes}
        order = [name for names in self.names for name in names if name in shapes]
        flats = [tensors[name].flatten() for name in order if name in tensors]
        sent = torch.cat([torch.empty(0, dtype=torch.float64, device=self._device), *flats])
        flat = self._group.gather_rows(sent, self.counts(shapes), PUBLISH)
        pieces = dict(zip(order, flat.split([math.prod(shapes[name]) for name in order])))
        return {name: pieces[name].view(shape) for name, shape in shapes.items()}

    def counts(self, shapes: Mapping[str, Shape]) -> list[int]:
        """Return the number of elements that each rank publishes."""
        return [sum(math.prod(shapes[n]) for n in names if n in shapes) for names in self.names]

    def sum(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum each layer's vectors over ranks, in rank order; return the sums of the rank's layers.

        Args:
            vectors: a vector for each layer, of the same length on all ranks.

        Collective over: owners.
        """
        if self._group is None:
            return dict(vectors)
        flats = [[vectors[name] for name in names] for names in self.names]
        sizes = [sum(map(len, of_owner)) for of_owner in flats]
        own = sizes[self._group.member]
        sent = torch.cat([vector for of_owner in flats for vector in of_owner])
        received = self._group.pass_rows(sent, sizes, [own] * self._group.size, SUMS)
        total = received.view(self._group.size, own).sum(0)
        return dict(zip(self.own, total.split([len(vectors[name]) for name in self.own])))

    def gather(self, vectors: Tensor, examples: Sequence[int]) -> Tensor:
        """Gather the vectors of all ranks on every rank, in rank order.

        Args:
            vectors: this rank's vectors, `[examples, n]`.
            examples: the number of vectors on each rank.

        Collective over: owners.
        """
        if self._group is None:
            return vectors
        return self._group.gather_rows(vectors, examples, PUBLISH)

    def hand_over(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather the tensors of all ranks on every rank, by name; each name belongs to one rank.

        Collective over: owners.
        """
        if self._comm is None:
            return dict(tensors)
        names = [name for of_rank in self._comm.allgather([*tensors]) for name in of_rank]
        found = handed_over(self._comm, tensors, names)
        return {name: tensor.to(self._device) for name, tensor in found.items()}

    def integers(self, own: int) -> list[int]:
        """Gather one integer from each rank, such as its number of examples.

        Collective over: owners.
        """
        if self._group is None:
            return [own]
        return [
            int(n) for n in self._group.gather(torch.tensor([own], dtype=torch.float64), 0, COUNT)
        ]

    def _split(self, flat: Tensor, names: Sequence[str], examples: int) -> dict[str, Tensor]:
        """Return the matrices of layers that are stored one after the other in `flat`."""
        shapes = [(examples, *self.shapes[name]) for name in names]
        parts = flat.split([math.prod(shape) for shape in shapes])
        return {name: part.view(shape) for name, part, shape in zip(names, parts, shapes)}
