"""Copies of the model that differ between exchanges: who steps a copy, and what is exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mpikfac.plan import names
from mpikfac.plan.choices import Outer
from mpikfac.plan.extensions import robust
from mpikfac.plan.layout import Layout, lay_out
from mpikfac.plan.messages import BETWEEN_NODES, IN_NODE, Message, message
from mpikfac.plan.of_rank import RankPlan
from mpikfac.plan.stages import (
    codec_of_sums,
    in_levels,
    reduce_gradients,
    summed,
    with_uncovered,
)


@dataclass(frozen=True)
class PlannedCopies:
    """The copies of the model, as a rank sees the copies; nothing if ranks exchange gradients."""

    rank: RankPlan

    @property
    def node(self) -> int:
        """The number of ranks that step the same copy of the model."""
        of_nodes = self.rank.strategy.exchange.copies_of == "node"
        return (self.rank.strategy.transport.ranks_per_node or 1) if of_nodes else 1

    @property
    def first(self) -> int:
        """The first of the ranks that step the rank's copy of the model."""
        return self.rank.rank // self.node * self.node

    @property
    def count(self) -> int:
        """The number of copies of the model that may differ."""
        return self.rank.grid.count // self.node

    @property
    def always(self) -> bool:
        """Whether ranks step copies from the first step on, and never average gradients."""
        return self.rank.strategy.exchange.alone(0)

    @cached_property
    def changes(self) -> bool:
        """Whether changes of copies travel, and not weights: see `Outer`, `Wires`."""
        strategy = self.rank.strategy
        exchange, wires = strategy.exchange, strategy.transport.wires
        plain = exchange.outer == Outer() and wires.gradient_wire is None
        plain = (plain and not exchange.streams) or exchange.merging.merge != "mean"
        return exchange.of_copies and not plain

    # -- where numbers lie -----------------------------------------------------------------------

    @cached_property
    def layout(self) -> Layout:
        """The layout of the rank's copy, as of the gradients."""
        return self.rank.layouts.gradients if self.rank.strategy.exchange.of_copies else lay_out([])

    @cached_property
    def trained(self) -> int:
        """Elements of the trained tensors of a copy; means lie behind."""
        offsets = self.layout.offsets
        means = (offsets[name] for name in self.rank.means if name in offsets)
        return min(means, default=self.layout.size)

    @cached_property
    def fragments(self) -> dict[str, int]:
        """The part of the model that each block of a copy belongs to; parts are about equal."""
        layout, count = self.layout, self.rank.strategy.exchange.stream.fragments
        return {n: offset * count // layout.size for n, offset in layout.offsets.items()}

    @property
    def elements(self) -> int:
        """The elements that the rank keeps for exchanges, in vectors as long as the model."""
        exchange = self.rank.strategy.exchange
        if exchange.merging.merge == "leader":
            vectors = 1 + len(self.led)
        elif exchange.merging.merge == "elastic":
            # the copy, the weights of the last exchange, the average of the steps, the momentum
            vectors = 3 + (exchange.outer.outer_momentum > 0)
        else:  # beside the copy, the weights of the last exchange, and the outer step's momentum
            vectors = 1 + self.changes + (exchange.outer.outer_momentum > 0)
        return vectors * self.layout.size

    # -- messages --------------------------------------------------------------------------------

    def reduce_in_node(self) -> list[Message]:
        """Return the sum of the gradients of the ranks that step the same copy."""
        size = self.rank.itemsizes.numbers
        if self.node == 1:
            return []
        over, everything = IN_NODE.format("world"), [(0, self.rank.layouts.gradients.size)]
        return [message(names.REDUCE_GRADIENTS, "Allreduce", over, everything, self.node, size)]

    def exchange_weights(self) -> list[Message]:
        """Return the sums of all copies of the model, or of changes since the last exchange."""
        exchange, stage = self.rank.strategy.exchange, names.EXCHANGE_WEIGHTS
        if not exchange.of_copies:
            return []
        if exchange.robust.combine != "mean":
            return robust.combine(self.rank, stage, self.layout)
        if exchange.merging.merge == "leader":
            teams = self.led.items()
            led = [m for over, team in teams for m in self.from_leader(over, team.start)]
            return led + self.average_statistics()
        if exchange.streams:
            return self._streams()
        return self.average_copies()

    def average_statistics(self) -> list[Message]:
        """Return the sums of running statistics and votes."""
        means = dict.fromkeys(self.rank.means, 0)
        return summed(self.rank, names.EXCHANGE_WEIGHTS, self.layout, means)

    def average_copies(self) -> list[Message]:
        """Return the sums of all copies of the model, and of running statistics and votes."""
        kinds, stage = dict.fromkeys(self.rank.messages_of, -1), names.EXCHANGE_WEIGHTS
        return [
            message
            for codec, kinds in with_uncovered(
                self.rank, codec_of_sums(self.rank, self.layout), kinds, -1
            )
            for message in summed(self.rank, stage, self.layout, kinds, codec)
        ]

    def _streams(self) -> list[Message]:
        """Return the sums of the parts of a copy; of nodes, in a turn of the rank's, and Bcasts."""
        stage, size = names.EXCHANGE_WEIGHTS, self.rank.itemsizes.numbers
        if self.rank.strategy.exchange.copies_of == "rank":
            return summed(self.rank, stage, self.layout, self.fragments)
        spans = [[(span.start, span.stop)] for span in self.layout.spans(self.fragments.get)]
        between, inside = BETWEEN_NODES.format("world"), IN_NODE.format("world")
        count, node, place = self.count, self.node, self.rank.rank % self.node
        sums = [message(stage, "Allreduce", between, part, count, size) for part in spans]
        mean = [message(stage, "Bcast", inside, part, node, size, place, 0) for part in spans]
        return (sums if count > 1 else []) + (mean if node > 1 else [])

    @cached_property
    def led(self) -> dict[str, range]:
        """The ranks that a leader leads, by communicator: all ranks, and ranks of a node."""
        ranks, per_node = self.rank.grid.count, self.rank.strategy.transport.ranks_per_node or 1
        teams = {"world": range(ranks)}
        if 1 < per_node < ranks and self.node == 1:  # else a node has one copy
            first = self.rank.rank // per_node * per_node
            teams[IN_NODE.format("world")] = range(first, first + per_node)
        return teams

    def from_leader(self, over: str, root: int) -> list[Message]:
        """Return the messages with the copy of rank `root` to the ranks that the rank leads.

        A copy of a node travels once between nodes, and then inside the nodes.
        """
        if self.count == 1:
            return []
        team, span, size = self.led[over], [(0, self.trained)], self.rank.itemsizes.numbers
        member, leader = self.rank.rank - team.start, root - team.start
        stage = names.EXCHANGE_WEIGHTS if over == "world" else names.EXCHANGE_IN_NODE
        copy = message(stage, "Bcast", over, span, len(team), size, member, leader)
        return in_levels(self.rank, [copy], team, size) if self.node > 1 else [copy]

    @property
    def dealt(self) -> list[Message]:
        """The messages that deal out vectors for a robust rule; the stages share no memory."""
        gradients = [] if self.always else reduce_gradients(self.rank)
        vectors = [m for m in gradients + self.exchange_weights() if m.rule]
        return [message for message in vectors if message.primitive == "Alltoall"]

    @property
    def shards(self) -> int:
        """The elements of the rank's shards of all vectors that a robust rule combines."""
        spans = (message.spans[self.rank.rank] for message in self.dealt)
        return sum(stop - start for start, stop in spans)
