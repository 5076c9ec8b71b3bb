"""The plan of replicas that differ between exchanges: who trains them, and what is exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mpikfac.plan import (
    BETWEEN_NODES,
    IN_NODE,
    Layout,
    Message,
    RankPlan,
    lay_out,
    message,
    names,
    robust,
    stages,
)


@dataclass(frozen=True)
class PlannedCopies:
    """A rank's view of the replicas of the model; empty if ranks exchange gradients."""

    rank: RankPlan

    @property
    def sync(self) -> Any:
        """The strategy's `sync`, which is a `mpikfac.lab.Replicas` if ranks train replicas."""
        return self.rank.strategy.sync

    @property
    def node(self) -> int:
        """The number of ranks that train the same replica."""
        of_nodes = self.sync.local_steps and self.sync.replicas == "node"
        return (self.rank.strategy.transport.ranks_per_node or 1) if of_nodes else 1

    @property
    def first(self) -> int:
        """The first rank that trains this rank's replica."""
        return self.rank.rank // self.node * self.node

    @property
    def count(self) -> int:
        """The number of replicas that can differ."""
        return self.rank.grid.count // self.node

    @cached_property
    def changes(self) -> bool:
        """Whether replicas send their changes instead of their weights."""
        return self.sync.local_steps and self.sync.sends_changes(self)

    # -- where values are stored -----------------------------------------------------------------

    @cached_property
    def layout(self) -> Layout:
        """The layout of the rank's replica, which is also the layout of the gradients."""
        return self.rank.layouts.gradients if self.sync.local_steps else lay_out([])

    @cached_property
    def trained(self) -> int:
        """The number of elements in a replica's trained tensors, which precede running means."""
        offsets = self.layout.offsets
        means = (offsets[name] for name in self.rank.means if name in offsets)
        return min(means, default=self.layout.size)

    @cached_property
    def fragments(self) -> dict[str, int]:
        """The index of the model part to which each block belongs; parts have similar sizes."""
        layout, count = self.layout, self.sync.fragments
        return {n: offset * count // layout.size for n, offset in layout.offsets.items()}

    # -- messages --------------------------------------------------------------------------------

    def reduce_in_node(self) -> list[Message]:
        """Return the reduction of gradients over the ranks that train the same replica."""
        size = self.rank.itemsizes.numbers
        if self.node == 1:
            return []
        over, everything = IN_NODE.format("world"), [(0, self.rank.layouts.gradients.size)]
        return [message(names.REDUCE_GRADIENTS, "Allreduce", over, everything, self.node, size)]

    def exchange_weights(self) -> list[Message]:
        """Return the messages in which replicas exchange their weights or changes."""
        exchange: list[Message] = self.sync.exchange(self)
        return exchange

    def combine_copies(self) -> list[Message]:
        """Return the messages that combine replicas by a rule other than the mean."""
        return robust.combine(self.rank, names.EXCHANGE_WEIGHTS, self.layout)

    def average_statistics(self) -> list[Message]:
        """Return the reductions of running statistics and votes."""
        means = dict.fromkeys(self.rank.means, 0)
        return stages.summed(self.rank, names.EXCHANGE_WEIGHTS, self.layout, means)

    def average_copies(self) -> list[Message]:
        """Return the reductions of all replicas, running statistics and votes."""
        kinds, stage = dict.fromkeys(self.rank.messages_of, -1), names.EXCHANGE_WEIGHTS
        return [
            message
            for codec, kinds in stages.with_uncovered(
                self.rank, stages.codec_of_sums(self.rank, self.layout), kinds, -1
            )
            for message in stages.summed(self.rank, stage, self.layout, kinds, codec)
        ]

    def streams(self) -> list[Message]:
        """Return the reductions of a replica's parts, and Bcasts in nodes that train replicas."""
        stage, size = names.EXCHANGE_WEIGHTS, self.rank.itemsizes.numbers
        if self.sync.replicas == "rank":
            return stages.summed(self.rank, stage, self.layout, self.fragments)
        spans = [[(span.start, span.stop)] for span in self.layout.spans(self.fragments.get)]
        between, inside = BETWEEN_NODES.format("world"), IN_NODE.format("world")
        count, node, place = self.count, self.node, self.rank.rank % self.node
        sums = [message(stage, "Allreduce", between, part, count, size) for part in spans]
        mean = [message(stage, "Bcast", inside, part, node, size, place, 0) for part in spans]
        return (sums if count > 1 else []) + (mean if node > 1 else [])

    @cached_property
    def led(self) -> dict[str, range]:
        """The ranks that each leader leads, by communicator: all ranks, and those of a node."""
        ranks, per_node = self.rank.grid.count, self.rank.strategy.transport.ranks_per_node or 1
        teams = {"world": range(ranks)}
        if 1 < per_node < ranks and self.node == 1:  # otherwise, a node has one replica
            first = self.rank.rank // per_node * per_node
            teams[IN_NODE.format("world")] = range(first, first + per_node)
        return teams

    def from_leader(self, over: str, root: int) -> list[Message]:
        """Return the messages that send rank `root`'s replica to the ranks that it leads.

        If nodes train replicas, the replica is sent between nodes first, and then within nodes.
        """
        if self.count == 1:
            return []
        team, span, size = self.led[over], [(0, self.trained)], self.rank.itemsizes.numbers
        member, leader = self.rank.rank - team.start, root - team.start
        stage = names.EXCHANGE_WEIGHTS if over == "world" else names.EXCHANGE_IN_NODE
        copy = message(stage, "Bcast", over, span, len(team), size, member, leader)
        return stages.in_levels(self.rank, [copy], team, size) if self.node > 1 else [copy]
