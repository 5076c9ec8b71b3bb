"""When numbers travel, and in which messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpikfac.plan.choices.checks import check_count, make_plain, one_of
from mpikfac.plan.choices.choice import differing


@dataclass(frozen=True, kw_only=True, repr=False)
class Transport:
    """When numbers travel, and in which messages.

    Attributes:
        reduce_factors_at: when ranks average factors. "factors": at each step with new statistics;
            "inverses": only before a decomposition, and until then each rank keeps running averages
            of its own share of the data. Averages over time and over ranks commute.
        packing: the form in which a factor travels: a folded "triangle", or the full "square".
        fusion: the number of layers whose factors, decompositions or preconditioned gradients share
            a message, or a list with the number of layers of each message in turn. Without a
            number, a single message holds all layers.
        overlap: sums are overlapped with the backward pass: a thread sends each message with
            gradients or factors as soon as the backward pass has passed the message's layers,
            gradients before factors. Factors may travel until a factor is needed. A step must have
            a single backward pass.
        owner_sums: who adds up a sum for an owner: MPI ("reduce"), or the owner itself, in the
            order of the ranks ("alltoall").
        balanced_shards: sums to owners and gathers from owners pass through equal shards of all
            ranks, which no MPI slows down: always, never, or (None) where the largest owner has
            more than twice the mean, and numbers are many.
        ranks_per_node: the number of consecutive ranks that share a node: messages have two levels,
            inside nodes and between nodes. Without a number, messages have one level.
        virtual_ranks: the number of parts of a batch. Gradients and statistics of the parts are
            added in order, so all numbers of ranks that divide the number of virtual ranks give the
            same bits [VirtualFlow, Or et al. 2022]. Without a number, MPI adds.
    """

    reduce_factors_at: Literal["factors", "inverses"] = "factors"
    packing: Literal["triangle", "square"] = "triangle"
    fusion: int | tuple[int, ...] | None = None
    overlap: bool = False
    owner_sums: Literal["reduce", "alltoall"] = "reduce"
    balanced_shards: bool | None = None
    ranks_per_node: int | None = None
    virtual_ranks: int | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        one_of("reduce_factors_at", self.reduce_factors_at, ("factors", "inverses"))
        one_of("packing", self.packing, ("triangle", "square"))
        one_of("overlap", self.overlap, (True, False))
        one_of("owner_sums", self.owner_sums, ("reduce", "alltoall"))
        one_of("balanced_shards", self.balanced_shards, (None, True, False))
        several = self.fusion if isinstance(self.fusion, tuple) and self.fusion else (self.fusion,)
        for number in several if self.fusion is not None else ():
            check_count("fusion", number, 1)
        if self.ranks_per_node is not None:
            check_count("ranks_per_node", self.ranks_per_node, 1)
        if self.virtual_ranks is not None:
            check_count("virtual_ranks", self.virtual_ranks, 1)

    def __repr__(self) -> str:
        """Return the call that makes the value, without fields that have their defaults."""
        return differing(self)
