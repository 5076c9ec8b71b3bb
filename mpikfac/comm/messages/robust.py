"""Aggregate all ranks' vectors with a robust rule; each rank combines one shard of all vectors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpikfac.comm.messages.buffers import check_sendable
from mpikfac.comm.mpi import MPI
from mpikfac.numerics import ByVector, by_vector
from mpikfac.plan import Aggregation, FactorAggregation, Message
from mpikfac.trace import Trace


class Combiner:
    """Execute messages that have an aggregation rule, on copies in host memory.

    Attributes:
        rules: the rules that need inner products of whole vectors, with their state, by stage.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.rules: dict[str, ByVector] = {}

    def prepare(self, dealt: Iterable[Message], rank: int, dtype: torch.dtype) -> None:
        """Initialise the rules that need inner products of whole vectors.

        `dealt` are the messages that distribute the shards over the ranks.
        """
        for message in dealt:
            rule, ranks = message.rule, len(message.spans)
            assert isinstance(rule, Aggregation)
            assert message.stage not in self.rules, "a stage combines a single vector"
            if rule.products(ranks):
                start, stop = message.spans[rank]
                like = torch.empty(stop - start, dtype=dtype, device="cpu")
                self.rules[message.stage] = by_vector(rule, ranks, like, start)

    def reset(self) -> None:
        """Discard the state of earlier steps."""
        for rule in self.rules.values():
            rule.reset()

    def exchange(self, comm: MPI.Intracomm, messages: Sequence[Message], flat: Tensor) -> None:
        """Set the messages' span of `flat` to its aggregate over all ranks.

        Collective over: comm.

        Args:
            messages: one for the shards of all vectors, one for the inner products if the rule
                needs them, and one for the results.
        """
        deal, *others, gather = messages
        starts = [start for start, _ in deal.spans]
        counts = [stop - start for start, stop in deal.spans]
        check_sendable(deal.stage, max(sum(counts), comm.size * max(counts)))
        first, last = starts[0], starts[0] + sum(counts)
        host = flat[first:last].cpu()
        parts = host.new_empty(comm.size, counts[comm.rank])
        with self._trace.stage(deal.stage, comm.name, deal.bytes):
            received = [parts.numpy(), [parts.shape[1]] * comm.size]
            comm.Alltoallv([host.numpy(), counts], received)
        if others:
            rule = self._rule(deal, parts, starts[comm.rank])
            shard = self._by_vector(comm, others[0], parts, rule)
        else:
            assert isinstance(deal.rule, Aggregation)
            shard = deal.rule.combine(parts)
        with self._trace.stage(gather.stage, comm.name, gather.bytes):
            comm.Allgatherv(shard.contiguous().numpy(), [host.numpy(), counts])
        flat[first:last] = host

    def _rule(self, deal: Message, parts: Tensor, first: int) -> Any:
        """Return the rule for a message's shard, with its state."""
        if isinstance(deal.rule, FactorAggregation):
            return deal.rule.combiner(first)
        assert isinstance(deal.rule, Aggregation)
        return self.rules.get(deal.stage) or by_vector(deal.rule, len(parts), parts[0])

    def _by_vector(
        self, comm: MPI.Intracomm, products: Message, parts: Tensor, rule: Any
    ) -> Tensor:
        """Return this rank's shard of the result, after all-reducing the inner products."""
        total = rule.products(parts)
        with self._trace.stage(products.stage, comm.name, products.bytes):
            comm.Allreduce(MPI.IN_PLACE, total.numpy())
        return rule.combine(total, parts)
