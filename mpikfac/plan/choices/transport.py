"""When values are sent, and in which messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpikfac.plan.choices.checks import check_count, make_plain, one_of
from mpikfac.plan.choices.choice import differing


@dataclass(frozen=True, kw_only=True, repr=False)
class Transport:
    """When values are sent, and in which messages.

    Attributes:
        reduce_factors_at: when ranks average factors. "factors": in each step with new statistics;
            "inverses": only before a decomposition; until then, each rank keeps running averages
            of its own shards of the data. Averages over time and over ranks commute.
        packing: the form in which a factor is sent: a folded "triangle", or the full "square".
        fusion: the number of layers whose factors, decompositions or preconditioned gradients share
            a message, or a list with this number for each message. None: a single message contains
            all layers; with `overlap`, layers form buckets of 25 MiB in float32, but the first one
            holds 1 MiB, as in torch's DistributedDataParallel.
        overlap: whether reductions overlap with the backward pass: a thread sends each message with
            gradients or factors as soon as the backward pass has reached the message's layers,
            gradients before factors. Factors can be in transit until they are needed. A step must
            have a single backward pass.
        owner_sums: who computes sums for owners: MPI ("reduce"), or the owners themselves, in rank
            order ("alltoall").
        balanced_shards: whether reductions to owners and gathers from owners pass through equal
            shards on all ranks, which is fast with every MPI library. None: only if messages are
            large and the largest owner has more than twice the mean number of elements.
        ranks_per_node: the number of consecutive ranks on a node: messages then have two levels,
            within nodes and between nodes. None: messages have one level.
        virtual_ranks: the number of parts into which a batch is divided. Gradients and statistics
            of the parts are added in order, so results are bitwise equal for all numbers of ranks
            that divide it [VirtualFlow, Or et al. 2022]. None: MPI adds them in any order.
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
        """Return the call that constructs the value, omitting fields with default values."""
        return differing(self)
