"""Combine the vectors of all ranks by a robust rule: each rank combines a shard of all vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpikfac.comm.mpi import MPI
from mpikfac.numerics import BY_COORDINATE, BY_VECTOR, combined
from mpikfac.plan import Message
from mpikfac.trace import Trace


class Combiner:
    """Carry out messages with a rule, on copies in the host's memory.

    Attributes:
        centres: by stage and first element, a shard of the result of the last step.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.centres: dict[tuple[str, int], Tensor] = {}

    def forget(self) -> None:
        """Forget the results of earlier steps: ranks then train on as after a restart."""
        self.centres.clear()

    def exchange(self, comm: MPI.Intracomm, messages: Sequence[Message], flat: Tensor) -> None:
        """Set the messages' span of `flat` to what the rule makes of the span on all ranks.

        Collective over: comm.

        Args:
            messages: the shards of all vectors, perhaps the inner products, and the results.
        """
        deal, *others, gather = messages
        assert deal.rule is not None
        starts = [start for start, _ in deal.spans]
        counts = [stop - start for start, stop in deal.spans]
        first, last = starts[0], starts[0] + sum(counts)
        host = flat[first:last].cpu()
        parts = host.new_empty(comm.size, counts[comm.rank])
        with self._trace.stage(deal.stage, comm.name, deal.bytes):
            received = [parts.numpy(), [parts.shape[1]] * comm.size]
            comm.Alltoallv([host.numpy(), counts], received)
        if deal.rule.combine in BY_COORDINATE:
            shard = BY_COORDINATE[deal.rule.combine](parts, deal.rule)
        else:
            shard = self._by_vector(comm, deal, others[0], parts)
        with self._trace.stage(gather.stage, comm.name, gather.bytes):
            comm.Allgatherv(shard.contiguous().numpy(), [host.numpy(), counts])
        flat[first:last] = host

    def _by_vector(
        self, comm: MPI.Intracomm, deal: Message, products: Message, parts: Tensor
    ) -> Tensor:
        """Return the rank's shard of the weighted sum; ranks add up the inner products."""
        rule = deal.rule
        assert rule is not None
        place = deal.stage, deal.spans[0][0]
        if rule.has_centre:
            centre = self.centres.get(place, torch.zeros_like(parts[0]))
            parts = torch.cat([centre[None], parts])
        wide = parts.double()
        total = wide @ wide.T
        with self._trace.stage(products.stage, comm.name, products.bytes):
            comm.Allreduce(MPI.IN_PLACE, total.numpy())
        shard = combined(parts, BY_VECTOR[rule.combine](total, rule))
        if rule.has_centre:
            self.centres[place] = shard
        return shard
