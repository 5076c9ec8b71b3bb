"""The plan of a rank: messages, and the bytes that the rank keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cached_property

from mpikfac.plan.choices import Outer
from mpikfac.plan.codec import Codec, matrix
from mpikfac.plan.layout import Layout
from mpikfac.plan.messages import (
    BETWEEN_NODES,
    IN_NODE,
    Message,
    NearMost,
    across,
    combinations,
    gathers,
    in_order,
    in_two_levels,
    message,
    sums,
)
from mpikfac.plan.rank.layouts import RankLayouts
from mpikfac.plan.roles import in_messages
from mpikfac.plan.shapes import count_of

Kinds = Mapping[str, Hashable]
"""The message of a stage that each block belongs to, by name; other blocks are left out."""


class RankPlan(RankLayouts):
    """The plan of a rank: what the rank computes, where numbers lie, and what travels."""

    @cached_property
    def publishes_changes(self) -> bool:
        """Whether a step's changes of weights travel: changes bear rounding, weights do not."""
        owner = self.owner_updates and self.grid.count > 1
        return owner and self._codec_of_copies() is not None

    @cached_property
    def exchanges_changes(self) -> bool:
        """Whether changes of copies of the model travel, and not weights: see `Outer`, `Wires`."""
        exchange, wires = self.strategy.exchange, self.strategy.transport.wires
        plain = exchange.outer == Outer() and wires.gradient_wire is None
        plain = (plain and not exchange.streams) or exchange.merging.merge != "mean"
        return exchange.of_copies and not plain

    def messages(
        self, statistics: bool, refresh: bool, clip: bool = True, share: int | None = None
    ) -> list[Message]:
        """Return the messages of a step in order, see `Plan.messages`."""
        found = self.reduce_scales() if statistics else []
        if refresh if self.late else statistics:
            found += self.reduce_statistics(share if self.late else None)
        if refresh:
            found += self.send_factors(share) + self.receive_bases(share)
            found += self.publish_bases(share)
        # With copies of the model, a step that ends with an exchange.
        copies = self.strategy.exchange.of_copies
        if copies:
            found += self.reduce_in_node() + self.exchange_weights()
        else:
            found += self.reduce_gradients() + self.reduce_slices()
        found += self.publish_directions()
        return found + (self.clip() if clip else []) + self.publish_weights()

    def reduce_statistics(self, share: int | None = None) -> list[Message]:
        """Return the sums of factors, of all layers or of a share of a refresh."""
        if self.strategy.reduction == "none":
            return []
        square = self.strategy.transport.packing == "square"
        layout = self.layouts.squares if square else self.layouts.statistics
        if self.strategy.exchange.robust.combine_factors == "near":
            return self._near_factors(layout, share)
        fused = self._fused(share)
        factors = {factor.name: fused.get(factor.name) for factor in self.factors}
        counts = {factor.counted: fused.get(factor.name) for factor in self.factors}
        # Averages over time make up for losses of a batch's factors; nothing makes up for losses
        # of averages that travel.
        codec = self._codec(self.strategy.transport.wires.factor_wire, feedback=not self.late)
        if codec is None:
            return self._sums("reduce statistics", layout, factors | counts, None)
        # Counts travel as they are, in one message.
        apart: dict[str, Hashable] = {f.counted: share in (None, f.share) for f in self.factors}
        encoded = self._sums("reduce statistics", layout, factors, codec)
        return encoded + self._sums("reduce statistics", layout, apart, None)

    def _near_factors(self, layout: Layout, share: int | None) -> list[Message]:
        """Return the messages that add up the factors of ranks with factors near most ranks'."""
        chosen = [factor for factor in self.factors if share in (None, factor.share)]
        kinds = {name: 0 for factor in chosen for name in (factor.name, factor.counted)}
        rule = NearMost(
            self.strategy.exchange.robust.safe_factor,
            tuple((*layout.place(f.name), layout.offsets[f.counted]) for f in chosen),
        )
        members, itemsize = (self.grid.count, self.rank), self.itemsizes.numbers
        return combinations("reduce statistics", layout, kinds.get, *members, itemsize, rule)

    def reduce_scales(self) -> list[Message]:
        """Return the sums of scales, without encoding."""
        fused = {layer.name: layer.fused for layer in self.rescaled}
        kinds = fused | {count_of(name): number for name, number in fused.items()}
        return self._sums("reduce scales", self.layouts.scale_sums, kinds, None)

    def send_factors(self, share: int | None = None) -> list[Message]:
        """Return the messages with factors to the curvature rank."""
        return self._across("send factors", "Send", self.request, share)

    def receive_bases(self, share: int | None = None) -> list[Message]:
        """Return the messages with decompositions from the curvature rank."""
        return self._across("receive bases", "Recv", self.reply, share)

    def publish_bases(self, share: int | None = None) -> list[Message]:
        """Return the messages with decompositions to workers, of all layers or of a share."""
        if not self._publishes_bases:
            return []
        fused = self._fused(share)
        kinds = {b.name: fused.get(f.name) for f in self.factors for b in f.blocks}
        codec = self._codec(self.strategy.transport.wires.basis_wire, feedback=False)
        layout, size = self.layouts.bases, self.itemsizes.bases
        return self._gathers("publish bases", "column", layout, kinds, size, codec)

    def reduce_gradients(self) -> list[Message]:
        """Return the sums of all gradients that do not travel in slices."""
        layout, wires = self.layouts.gradients, self.strategy.transport.wires
        if self.strategy.exchange.robust.combine != "mean":
            return self._combinations("reduce gradients", layout)
        apart = self.strategy.transport.overlap
        kinds = {name: number if apart else -1 for name, number in self.messages_of.items()}
        codec = self._codec_of_sums(layout)
        if codec and codec.name == "top-k":
            codec = replace(codec, momentum=wires.top_momentum)
        apart_from = dict.fromkeys(self.in_slices.blocks)
        return [
            message
            for codec, some in self._encoded_and_others(codec, kinds, -1)
            for message in self._sums("reduce gradients", layout, {**some, **apart_from}, codec)
        ]

    def reduce_slices(self) -> list[Message]:
        """Return the sums of slices over peers, and the messages that give all slices to all.

        A member of a group makes the gradient of a slice from all examples of the group.
        """
        layout, size = self.layouts.slices, self.itemsizes.numbers
        peers, group = (len(self.grid.team(self.rank, over)) for over in ("peers", "group"))
        if layout.size == 0:
            return []
        stage, own = "reduce gradients", self.member
        mine = layout.segments()[own : own + 1]
        found = [message(stage, "Allreduce", "peers", mine, peers, size)]
        gathered = gathers(stage, "group", layout, lambda _: 0, own, group, size)
        return (found if peers > 1 else []) + gathered

    def exchange_weights(self) -> list[Message]:
        """Return the sums of all copies of the model, or of changes since the last exchange."""
        if not self.strategy.exchange.of_copies:
            return []
        layout, kinds = self.layouts.copies, dict.fromkeys(self.messages_of, -1)
        if self.strategy.exchange.robust.combine != "mean":
            return self._combinations("exchange weights", layout)
        if self.strategy.exchange.merging.merge == "leader":
            means = dict.fromkeys(self.means, 0)
            led = [m for over, team in self.led.items() for m in self.from_leader(over, team.start)]
            return led + self._sums("exchange weights", layout, means, None)
        if self.strategy.exchange.streams:
            return self._streams(layout)
        return [
            message
            for codec, some in self._encoded_and_others(self._codec_of_sums(layout), kinds, -1)
            for message in self._sums("exchange weights", layout, some, codec)
        ]

    @property
    def trained(self) -> int:
        """Elements of the trained tensors of a copy of the model; means lie behind."""
        layout = self.layouts.copies
        return min(
            (layout.offsets[n] for n in self.means if n in layout.offsets), default=layout.size
        )

    @cached_property
    def fragments(self) -> dict[str, int]:
        """The part of the model that each block of a copy belongs to; parts are about equal."""
        layout, count = self.layouts.copies, self.strategy.exchange.stream.fragments
        return {n: offset * count // layout.size for n, offset in layout.offsets.items()}

    def _streams(self, layout: Layout) -> list[Message]:
        """Return the sums of the parts of a copy; of nodes, in a turn of the rank's, and Bcasts."""
        stage, size, own = "exchange weights", self.itemsizes.numbers, self.rank % self.node
        if self.strategy.exchange.copies_of == "rank":
            return self._sums(stage, layout, self.fragments, None)
        spans = [[(span.start, span.stop)] for span in layout.spans(self.fragments.get)]
        world, found = "world", []
        if self.copies > 1:
            over = BETWEEN_NODES.format(world)
            found += [message(stage, "Allreduce", over, s, self.copies, size) for s in spans]
        if self.node > 1:
            over = IN_NODE.format(world)
            found += [message(stage, "Bcast", over, s, self.node, size, own, 0) for s in spans]
        return found

    def reduce_in_node(self) -> list[Message]:
        """Return the sum of the gradients of the ranks that step the same copy."""
        layout, size = self.layouts.gradients, self.itemsizes.numbers
        if self.node == 1:
            return []
        over, whole = IN_NODE.format("world"), [(0, layout.size)]
        return [message("reduce gradients", "Allreduce", over, whole, self.node, size)]

    @cached_property
    def led(self) -> dict[str, range]:
        """The ranks that a leader leads, by communicator: all ranks, and ranks of a node."""
        ranks, per_node = self.grid.count, self.strategy.transport.ranks_per_node or 1
        teams = {"world": range(ranks)}
        if 1 < per_node < ranks and self.node == 1:  # else a node has one copy
            first = self.rank // per_node * per_node
            teams[IN_NODE.format("world")] = range(first, first + per_node)
        return teams

    def from_leader(self, over: str, root: int) -> list[Message]:
        """Return the messages with the copy of rank `root` to the ranks that the rank leads.

        A copy of a node travels once between nodes, and then inside the nodes.
        """
        team, layout = self.led[over], [(0, self.trained)]
        if self.copies == 1:
            return []
        size, own, leader = self.itemsizes.numbers, self.rank - team.start, root - team.start
        whole = message("exchange weights", "Bcast", over, layout, len(team), size, own, leader)
        return self._in_levels([whole], team, size) if self.node > 1 else [whole]

    @property
    def combined(self) -> list[Message]:
        """The messages that deal out vectors for a robust rule; the stages share no memory."""
        never = self.strategy.exchange.alone(0)  # ranks combine gradients
        found = [*([] if never else self.reduce_gradients()), *self.exchange_weights()]
        return [m for m in found if m.rule and m.primitive == "Alltoall"]

    def _shard(self, message: Message) -> int:
        """Return the elements of the rank's part of a message."""
        start, stop = message.spans[self.rank]
        return stop - start

    def publish_directions(self) -> list[Message]:
        """Return the messages with preconditioned gradients to ranks without these gradients."""
        if self.owner_updates:
            return []
        kinds = {layer.name: layer.fused for layer in self.layers}
        codec = self._codec_of_copies()
        layout, size = self.layouts.directions, self.itemsizes.numbers
        return self._gathers("publish gradients", "row", layout, kinds, size, codec)

    def publish_weights(self) -> list[Message]:
        """Return the messages with weights to ranks without the new weights."""
        if not self.owner_updates:
            return []
        kinds = dict.fromkeys(self.messages_of, 0)
        layout, size = self.layouts.gradients, self.itemsizes.numbers
        return [
            message
            for codec, some in self._encoded_and_others(self._codec_of_copies(), kinds, 0)
            for message in self._gathers("publish weights", "world", layout, some, size, codec)
        ]

    def clip(self) -> list[Message]:
        """Return the sum to bound a step by, if no rank holds all directions."""
        ranks = self.grid.count
        if not self.layers or ranks == 1 or not self.owner_updates:
            return []
        return [message("clip", "Allreduce", "world", [(0, 1)], ranks, self.itemsizes.numbers)]

    def _across(
        self, stage: str, primitive: str, layout: Callable[[int | None], Layout], share: int | None
    ) -> list[Message]:
        if not self.strategy.refresh.curvature_ranks:
            return []
        peer = self.grid.curvature_rank(self.rank)
        return across(stage, primitive, layout(share), peer, self.itemsizes.numbers)

    def _sums(self, stage: str, layout: Layout, kinds: Kinds, codec: Codec | None) -> list[Message]:
        ranks, itemsize = self.grid.count, self.itemsizes.numbers
        if self.parts:
            return in_order(stage, layout, ranks, itemsize)
        by_owners = self.strategy.transport.sums == "alltoall" or (codec and not codec.summable)
        primitive: str | None = "Alltoall" if by_owners else "Reduce_scatter"
        if self.strategy.transport.overlap:  # an overlapped message is sent in pieces
            primitive = None
        found = sums(stage, layout, kinds.get, ranks, itemsize, primitive, codec)
        return self._in_levels(found, self.grid.team(self.rank, "world"), itemsize)

    def _combinations(self, stage: str, layout: Layout) -> list[Message]:
        """Return the messages of a robust rule, and the sums of the tensors to average."""
        means = dict.fromkeys(self.means, 0)
        trained = dict.fromkeys(layout.shapes.keys() - means.keys(), 0)
        members = self.grid.count, self.rank
        rule, itemsize = self.strategy.exchange.robust, self.itemsizes.numbers
        found = combinations(stage, layout, trained.get, *members, itemsize, rule)
        return found + self._sums(stage, layout, means, None)

    def _gathers(
        self,
        stage: str,
        over: str,
        layout: Layout,
        kinds: Kinds,
        itemsize: int,
        codec: Codec | None,
    ) -> list[Message]:
        team = self.grid.team(self.rank, over)
        own = team.index(self.rank)
        found = gathers(stage, over, layout, kinds.get, own, len(team), itemsize, codec)
        return self._in_levels(found, team, itemsize)

    def _in_levels(self, found: list[Message], team: range, itemsize: int) -> list[Message]:
        at = self.grid.seat(team, self.rank)
        return in_two_levels(found, at, itemsize) if at else found

    def _codec(self, wire: str | None, feedback: bool = True) -> Codec | None:
        """Return the codec of a wire; losses of bfloat16 are too small to keep."""
        if wire is None:
            return None
        share = self.strategy.transport.wires.top_share if wire == "top-k" else 1.0
        return Codec(wire, share, feedback and wire != "bfloat16")

    def _codec_of_sums(self, layout: Layout) -> Codec | None:
        """Return the codec of sums of gradients, or of changes of weights, in the form of both."""
        wires = self.strategy.transport.wires
        codec = self._codec(wires.gradient_wire)
        if codec is None or codec.name != "power-sgd":
            return codec
        layers = {layer.name for layer in self.layers}
        matrices = [
            matrix(layout.offsets[name], layout.shapes[name], name in layers)
            for name in layout.offsets
            if name in self.messages_of and math.prod(layout.shapes[name]) > 0
        ]
        return replace(codec, rank=wires.power_rank, matrices=tuple(matrices))

    def _codec_of_copies(self) -> Codec | None:
        """Return the codec of numbers that a rank sends to others; PowerSGD only adds up."""
        wire = self.strategy.transport.wires.gradient_wire
        return self._codec(None if wire == "power-sgd" else wire)

    @cached_property
    def messages_of(self) -> dict[str, int]:
        """The message of a stage, by number, of every block that gradient wires encode.

        Only layers are encoded. Votes are counts, running statistics are replaced and not added up,
        and uncovered blocks are few; but without K-FAC, trained parameters count as layers.
        """
        if self.layers:
            return {layer.name: layer.fused for layer in self.layers}
        trained = [name for name, _ in self.others if name not in self.means]
        return dict(zip(trained, in_messages(len(trained), self.strategy.transport.fusion)))

    def _encoded_and_others(
        self, codec: Codec | None, kinds: Mapping[str, Hashable], of_others: Hashable
    ) -> list[tuple[Codec | None, Kinds]]:
        """Return codecs of the gradients' arena, with the kinds of the blocks to encode."""
        others = {name: of_others for name, _ in self.others if name not in kinds}
        return [(None, {**kinds, **others})] if codec is None else [(codec, kinds), (None, others)]

    def _fused(self, share: int | None) -> dict[str, int]:
        """Return the message of a stage, by number, of every factor of a share."""
        layers = (layer for layer in self.layers if share in (None, layer.share))
        return {factor.name: layer.fused for layer in layers for factor in layer.factors}

    # -- bytes -----------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Return the bytes of every arena on the rank, parts of a batch included."""
        numbers, averages, bases = self.itemsizes
        each = {"averages": averages, "bases": bases}
        sizes = {
            name.replace("_", " "): layout.size * each.get(name, numbers)
            for name, layout in vars(self.layouts).items()
        }
        if not self.split.parameters:
            del sizes["slices"]
        sizes["copies"] *= self._copies
        if kept := self.strategy.exchange.robust.remembered(self.grid.count):
            sizes["rule"] = kept * numbers * sum(map(self._shard, self.combined))
        if count := self.parts:
            sizes["parts"] = count * (sizes["statistics"] + sizes["gradients"])
        wires = self.strategy.transport.wires
        if wires.factor_wire or wires.basis_wire or wires.gradient_wire:
            sizes["wires"] = self._kept_for_wires() * numbers
        return sizes

    @property
    def _copies(self) -> int:
        """Vectors as long as the model that the rank keeps for exchanges of weights."""
        if self.strategy.exchange.merging.merge == "leader":
            return 1 + len(self.led)
        if self.strategy.exchange.merging.merge == "elastic":
            return 3  # the copy, the weights of the last exchange, and the average of the steps
        # Beside the copy, the weights of the last exchange, and the momentum of the outer step.
        momentum = self.strategy.exchange.outer.outer_momentum > 0
        return 1 + self.exchanges_changes + momentum

    def _kept_for_wires(self) -> int:
        """Return the elements kept of encoding's losses, and of weights sent as changes."""
        found = self.layouts
        square = self.strategy.transport.packing == "square"
        kept = found.gradients.size if self.publishes_changes else 0
        never = self.strategy.exchange.alone(0)  # ranks add up gradients
        for messages, layout in (
            (self.reduce_statistics(), found.squares if square else found.statistics),
            ([] if never else self.reduce_gradients(), found.gradients),
            (self.publish_directions(), found.directions),
            (self.publish_weights(), found.gradients),
            (self.exchange_weights(), found.copies),
        ):
            # A rank that sends nothing encoded, such as no root of any Bcast, loses nothing.
            codecs = [m.codec for m in messages if m.codec and m.bytes]
            kept += layout.size * max((codec.arenas for codec in codecs), default=0)
            kept += sum(codec.sides()[1] for codec in codecs)
        return kept
