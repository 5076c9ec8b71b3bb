"""Embedding tables that ranks own, and the exchange of their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

import mpikfac
from mpikfac.plan import Message, names, rows, spread
from mpikfac_apps.programs.draws import generator

OF_TABLE, OF_SQUARES = "tables/{}", "tables/{}/squares"
FORWARD, BACKWARD = names.EXCHANGE_ACTIVATIONS, names.EXCHANGE_ACTIVATION_GRADIENTS


class Tables:
    """Embedding tables, each on one rank; ranks send row indices to the owners and receive rows.

    Tables are placed from the largest to the smallest, each on the rank with the fewest rows so
    far. The owner updates a table with Adagrad [Duchi et al. 2011], which updates only the rows
    used in the batch.

    Collective over: comm.

    Args:
        sizes: the number of rows of each table, by name.
        width: the number of elements per row.
        rate: the learning rate of Adagrad.
        trace: counts the bytes of the messages.

    Attributes:
        owners: the rank that owns each table, by the table's name.
    """

    def __init__(
        self,
        comm: mpikfac.comm.Comm,
        sizes: Mapping[str, int],
        width: int,
        rate: float,
        seed: int,
        device: torch.device,
        trace: mpikfac.Trace,
    ) -> None:
        self.width, self._group = width, mpikfac.comm.Group(comm, 0, trace, "world")
        self.owners = spread([(name, (size,)) for name, size in sizes.items()], comm.size, {})
        tables = list(sizes)
        self._order = sorted(range(len(tables)), key=lambda k: self.owners[tables[k]])
        self._back = torch.tensor(self._order, device=device).argsort()
        of_ranks = Counter(self.owners.values())
        self._counts = [of_ranks[rank] for rank in range(comm.size)]
        self._sizes = {name: sizes[name] for name in sizes if self.owners[name] == comm.rank}
        first = [0, *accumulate(self._sizes.values())]
        self._first = torch.tensor(first[:-1], dtype=torch.int64, device=device)
        # The rank's tables are concatenated into one table.
        self._own = nn.Embedding(first[-1], width, sparse=True, device=device)
        for name, table in self._parts(self._own.weight.detach()):
            bound = self._sizes[name] ** -0.5  # as published
            draws = generator(seed, tables.index(name))
            drawn = torch.rand(table.shape, generator=draws, device="cpu")
            table.copy_(bound * (2 * drawn - 1))
        self.optimizer = torch.optim.Adagrad(self._own.parameters(), rate)

    def rows(self, categories: Tensor, shares: Sequence[int]) -> Tensor:
        """Return the rows of the tables for this rank's examples, `[examples, tables, width]`.

        The backward pass sends the gradients of the rows to the owners of the tables.

        Collective over: comm, forward and backward.

        Args:
            categories: row indices for this rank's examples, `[examples, tables]`.
            shares: the number of examples on each rank.
        """
        asked, given = self._counts_of(shares)
        wanted = categories[:, self._order].T.flatten()
        received = mpikfac.lab.exchange_rows(wanted, self._group, asked, given)
        found = mpikfac.lab.exchange_rows(
            self._looked_up(received, shares), self._group, given, asked
        )
        by_owner = found.unflatten(0, (len(self._order), len(categories)))
        return by_owner.transpose(0, 1)[:, self._back]

    def _counts_of(self, shares: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return how many rows this rank receives from each rank, and sends to each rank."""
        member = self._group.member
        asked = [shares[member] * count for count in self._counts]
        return asked, [self._counts[member] * share for share in shares]

    def _looked_up(self, wanted: Tensor, shares: Sequence[int]) -> Tensor:
        """Return rows of this rank's tables, sorted by the rank that needs them, then by table."""
        count = len(self._first)
        blocks = wanted.split([count * share for share in shares])
        by_table = torch.cat([b.view(count, share) for b, share in zip(blocks, shares)], 1)
        found = self._own(by_table + self._first[:, None])
        return torch.cat([part.flatten(0, 1) for part in found.split(list(shares), 1)])

    def messages(self, shares: Sequence[int]) -> list[Message]:
        """Return this rank's messages in a step: row indices, rows, and gradients of rows."""
        member, itemsize = self._group.member, self._own.weight.itemsize
        given = [[count * share for share in shares] for count in self._counts]
        asked = [list(counts) for counts in zip(*given)]
        return [
            *rows(FORWARD, asked, torch.int64.itemsize, member),
            *rows(FORWARD, given, self.width * itemsize, member),
            *rows(BACKWARD, asked, self.width * itemsize, member),
        ]

    def step(self) -> None:
        """Update the rows of the rank's tables that have gradients; not collective."""
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # otherwise, torch warns
            self.optimizer.step()
        self.optimizer.zero_grad()

    # -- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return this rank's tables, and Adagrad's sums of squared gradients for them, by name."""
        return {
            item.format(name): part
            for item, whole in self._items()
            for name, part in self._parts(whole)
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state` for the tables that this rank owns."""
        for name, place in self.state().items():
            place.copy_(state[name])

    def _items(self) -> list[tuple[str, Tensor]]:
        [weight] = self._own.parameters()
        return [(OF_TABLE, weight.detach()), (OF_SQUARES, self.optimizer.state[weight]["sum"])]

    def _parts(self, whole: Tensor) -> list[tuple[str, Tensor]]:
        """Split a tensor of the concatenated tables into this rank's tables, with their names."""
        return list(zip(self._sizes, whole.split(list(self._sizes.values()))))
