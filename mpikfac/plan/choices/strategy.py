"""How training is distributed over ranks and over time, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mpikfac.plan.choices.assignment import Assignment, CommOpt, MemOpt
from mpikfac.plan.choices.checks import check_divides
from mpikfac.plan.choices.choice import Choice, differing
from mpikfac.plan.choices.combinations import STRATEGY, Choices, check
from mpikfac.plan.choices.compression import NEEDS, Compression
from mpikfac.plan.choices.refresh import Refresh
from mpikfac.plan.choices.sync import Synchronization, Synchronous
from mpikfac.plan.choices.transport import Transport


@dataclass(frozen=True, repr=False)
class Strategy:
    """How K-FAC is distributed over ranks and over time, for any number of ranks.

        Strategy(CommOpt(), refresh=Refresh(staleness=1), transport=Transport(overlap=True))

    `assignment`, `sync`, `refresh` and the fields of `compression` are extensible: each type is a
    published method, `mpikfac.lab` contains more of them, and you can derive your own.

    Attributes:
        assignment: which ranks decompose factors, precondition gradients and update weights.
        sync: what ranks exchange to train one model, and when.
        compression: how values are encoded in messages.
        refresh: when factors are decomposed, and by which ranks.
        transport: when values are sent, and in which messages.
    """

    assignment: Assignment = field(default_factory=CommOpt)
    sync: Synchronization = field(default_factory=Synchronous)
    compression: Compression = field(default_factory=Compression)
    refresh: Refresh = field(default_factory=Refresh)
    transport: Transport = field(default_factory=Transport)

    def __post_init__(self) -> None:
        kinds = (Assignment, Synchronization, Compression, Refresh, Transport)
        for (name, value), kind in zip(vars(self).items(), kinds):
            if not isinstance(value, kind):
                raise ValueError(f"{name}={value!r} must be of the type {kind.__name__}")
        choices = Choices(self)
        check(STRATEGY + NEEDS, choices)
        for method in self._methods():
            check(method.needs, choices)

    def __repr__(self) -> str:
        """Return the call that constructs the value, omitting fields with default values."""
        return differing(self)

    def _methods(self) -> list[Choice]:
        """Return the methods that make up the strategy."""
        sync, compression = self.sync, self.compression
        methods = (self.assignment, sync, sync.aggregation, sync.factor_aggregation, self.refresh)
        compressors = compression.gradients, compression.factors, compression.inverses
        return [*methods, *(compressor for compressor in compressors if compressor is not None)]

    def first_order(self) -> Strategy:
        """Return the strategy for training without K-FAC.

        Choices about factors and decompositions are reset to their defaults.
        """
        shards = self.assignment.shard_optimizer
        transport = replace(self.transport, reduce_factors_at="factors", packing="triangle")
        if not shards:  # in this case, no owner computes sums
            transport = replace(transport, owner_sums="reduce", balanced_shards=None)
        return replace(
            self,
            assignment=MemOpt(shard_optimizer=shards),
            refresh=Refresh(),
            transport=transport,
        )

    def check_ranks(self, ranks: int) -> None:
        """Check that the number of ranks is compatible with the columns, nodes and virtual ranks.

        Raises:
            ValueError: the number is incompatible with one of them.
        """
        self.assignment.workers(ranks)
        self.sync.check_ranks(ranks)
        if self.transport.ranks_per_node is not None:
            check_divides("transport.ranks_per_node", self.transport.ranks_per_node, ranks)
        if (virtual := self.transport.virtual_ranks) is not None and virtual % ranks:
            raise ValueError(
                f"transport.virtual_ranks={virtual} must be a multiple of the number of ranks "
                f"({ranks})"
            )
