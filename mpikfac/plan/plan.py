"""Who computes what, where every number lies, and what travels: a pure function of few numbers.

Every rank makes the same plan without talking, and sends what its messages say.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from mpikfac.plan import placement
from mpikfac.plan.combinations import SOLVERS, check_layers
from mpikfac.plan.layout import Layout, Shape
from mpikfac.plan.layouts import Holdings
from mpikfac.plan.messages import Codec, Kind, Message, across, gathers, in_order, message, sums
from mpikfac.plan.shapes import BLOCKS, LayerShape, Solver, count_of, parent
from mpikfac.plan.strategy import Strategy, one_of
from mpikfac.plan.two_levels import in_two_levels


@dataclass(frozen=True)
class Plan(Holdings):
    """The communication plan: who does what, the layouts and the messages of every rank."""

    def digest(self) -> str:
        """A hash that two ranks share only if they hold the same plan."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def memory(self, rank: int) -> dict[str, int]:
        """Bytes of each arena of the plan that `rank` keeps, and of what they held for parts."""
        arenas = {
            "statistics": self.statistics(rank),
            "squares": self.squares(rank),
            "averages": self.averages(rank),
            "bases": self.bases(rank),
            "denominators": self.denominators(rank),
            "scales": self.scales(),
            "scale sums": self.scale_sums(),
            "gradients": self.gradients(),
            "directions": self.directions(rank),
        }
        each = {"averages": self.factor_itemsize, "bases": self.basis_itemsize}
        sizes = {n: layout.size * each.get(n, self.itemsize) for n, layout in arenas.items()}
        if count := self.parts_per_rank:
            sizes["parts"] = count * (sizes["statistics"] + sizes["gradients"])
        if kept := self._kept_for_wires(rank):
            sizes["wires"] = kept * self.itemsize
        return sizes

    def messages(
        self,
        rank: int,
        statistics: bool,
        refresh: bool,
        clip: bool = True,
        share: int | None = None,
    ) -> list[Message]:
        """Messages of one step in order, as `rank` sees them.

        A refresh counts as this step's, also where its decompositions are published later.

        Args:
            statistics: the step makes new factors (`factor_every`).
            refresh: the step decomposes them (`basis_every`).
            clip: the step is clipped; a message only where no rank holds all directions.
            share: the share of the layers that is refreshed; None for all.
        """
        found = self.reduce_scales(rank) if statistics else []
        if refresh if self.late else statistics:
            found += self.reduce_statistics(rank, share if self.late else None)
        if refresh:
            found += self.send_factors(rank, share) + self.receive_bases(rank, share)
            found += self.publish_bases(rank, share)
        found += self.reduce_gradients(rank)
        found += self.publish_directions(rank)
        return found + (self.clip() if clip else []) + self.publish_weights(rank)

    def reduce_statistics(self, rank: int, share: int | None = None) -> list[Message]:
        """Sums of factors, of all layers or of one share of a refresh."""
        if self.strategy.reduction == "none":
            return []
        layout = (
            self.squares(rank)
            if self.strategy.transport.packing == "square"
            else self.statistics(rank)
        )
        kind = self._kind(share)
        # Averages over time make up for what a batch's factors lost; nothing does where the
        # averages themselves travel.
        codec = self._codec(self.strategy.transport.wires.factor_wire, feedback=not self.late)
        kinds: list[tuple[Codec | None, Kind]] = [(codec, kind)]
        if codec is not None:  # but counts travel as they are
            kinds = [
                (codec, lambda name: kind(name) if name in self.factors else None),
                (None, lambda name: None if name in self.factors else self.in_share(name, share)),
            ]
        return [
            message
            for codec, kind in kinds
            for message in self._sums("reduce statistics", layout, kind, rank, codec)
        ]

    def reduce_scales(self, rank: int) -> list[Message]:
        """Sums of scales, which travel as they are."""
        fused = self._fused()
        kinds = fused | {count_of(layer): number for layer, number in fused.items()}
        return self._sums("reduce scales", self.scale_sums(), kinds.__getitem__, rank, None)

    def send_factors(self, rank: int, share: int | None = None) -> list[Message]:
        """Factors to the rank that decomposes them, where that is a curvature rank."""
        if not self.strategy.refresh.curvature_ranks:
            return []
        layout, peer = self.request(rank, share), self.curvature_rank(rank)
        return across("send factors", "Send", layout, peer, self.itemsize)

    def receive_bases(self, rank: int, share: int | None = None) -> list[Message]:
        """Their decompositions from there."""
        if not self.strategy.refresh.curvature_ranks:
            return []
        layout, peer = self.reply(rank, share), self.curvature_rank(rank)
        return across("receive bases", "Recv", layout, peer, self.itemsize)

    def publish_bases(self, rank: int, share: int | None = None) -> list[Message]:
        """Decompositions to the workers of a column, of all layers or of one share."""
        if not self.publishes_bases:
            return []
        kind, layout = self._kind(share), self.bases(rank)
        codec = self._codec(self.strategy.transport.wires.basis_wire, feedback=False)
        size, of_block = self.basis_itemsize, lambda name: kind(parent(name))
        return self._gathers("publish bases", "column", layout, of_block, rank, size, codec)

    def reduce_gradients(self, rank: int) -> list[Message]:
        """Sums of all gradients."""
        fused = self._fused() if self.strategy.transport.overlap else {}
        layout = self.gradients()
        return [
            message
            for codec, kind in self._encoded_and_others(lambda name: fused.get(name, -1))
            for message in self._sums("reduce gradients", layout, kind, rank, codec)
        ]

    def publish_directions(self, rank: int) -> list[Message]:
        """Preconditioned gradients to the ranks that did not compute them."""
        if self.strategy.update == "owner":
            return []
        kind, layout = self._fused().__getitem__, self.directions(rank)
        codec = self._codec(self.strategy.transport.wires.gradient_wire)
        size = self.itemsize
        return self._gathers("publish gradients", "row", layout, kind, rank, size, codec)

    def publish_weights(self, rank: int) -> list[Message]:
        """Weights to the ranks that did not step them."""
        if self.strategy.update == "everyone":
            return []
        layout, size = self.gradients(), self.itemsize
        return [
            message
            for codec, kind in self._encoded_and_others(lambda name: 0)
            for message in self._gathers(
                "publish weights", "world", layout, kind, rank, size, codec
            )
        ]

    def clip(self) -> list[Message]:
        """The sum that the step is bounded by, where no rank holds all directions."""
        if not self.layers or self.ranks == 1 or self.strategy.update == "everyone":
            return []
        return [message("clip", "Allreduce", "world", [(0, 1)], self.ranks, self.itemsize)]

    def _sums(
        self, stage: str, layout: Layout, kind: Kind, rank: int, codec: Codec | None
    ) -> list[Message]:
        if self.parts_per_rank:
            return in_order(stage, layout, self.ranks, self.itemsize)
        by_owners = self.strategy.transport.sums == "alltoall" or (codec and not codec.summable)
        primitive: str | None = "Alltoall" if by_owners else "Reduce_scatter"
        if (
            self.strategy.transport.overlap
        ):  # what is sent beside the backward pass is cut into pieces
            primitive = None
        found = sums(stage, layout, kind, self.ranks, self.itemsize, primitive, codec)
        return self._in_levels(found, self.team(rank, "world"), rank, self.itemsize)

    def _gathers(
        self,
        stage: str,
        over: str,
        layout: Layout,
        kind: Kind,
        rank: int,
        itemsize: int,
        codec: Codec | None,
    ) -> list[Message]:
        team = self.team(rank, over)
        own = team.index(rank)
        found = gathers(stage, over, layout, kind, own, len(team), itemsize, codec)
        return self._in_levels(found, team, rank, itemsize)

    def _in_levels(
        self, found: list[Message], team: range, rank: int, itemsize: int
    ) -> list[Message]:
        at = self.seat(team, rank)
        return in_two_levels(found, at, itemsize) if at else found

    def _codec(self, wire: str | None, feedback: bool = True) -> Codec | None:
        """What carries out a wire; bfloat16 loses too little for it to be kept."""
        if wire is None:
            return None
        share = self.strategy.transport.wires.top_share if wire == "top-k" else 1.0
        return Codec(wire, share, feedback and wire != "bfloat16")

    def _encoded_and_others(self, kind: Kind) -> list[tuple[Codec | None, Kind]]:
        """Codecs of what the gradients' arena holds, and `kind` of the blocks that each is for.

        What no layer covers travels as it is: votes are counts, running statistics are replaced
        and not added up, and together with the other parameters they are few.
        """
        codec = self._codec(self.strategy.transport.wires.gradient_wire)
        if codec is None:
            return [(None, kind)]
        return [
            (codec, lambda name: kind(name) if name in self.shapes else None),
            (None, lambda name: None if name in self.shapes else kind(name)),
        ]

    def _kept_for_wires(self, rank: int) -> int:
        """Elements of what encoding lost, and of weights of which only changes travel."""
        square = self.strategy.transport.packing == "square"
        kept = self.gradients().size if self.publishes_changes else 0
        for messages, layout in (
            (self.reduce_statistics(rank), self.squares(rank) if square else self.statistics(rank)),
            (self.reduce_gradients(rank), self.gradients()),
            (self.publish_directions(rank), self.directions(rank)),
            (self.publish_weights(rank), self.gradients()),
        ):
            if any(message.codec and message.codec.feedback for message in messages):
                kept += layout.size
        return kept

    def _fused(self) -> dict[str, int]:
        """The message of a stage that each layer belongs to."""
        fusion = self.strategy.transport.fusion
        if not isinstance(fusion, tuple):
            every = fusion or max(1, len(self.layers))
            return {layer.name: number // every for number, layer in enumerate(self.layers)}
        ends = list(itertools.accumulate(fusion[:-1]))
        return {
            layer.name: sum(end <= number for end in ends)
            for number, layer in enumerate(self.layers)
        }

    def _kind(self, share: int | None) -> Callable[[str], Hashable]:
        """Of a factor: the message that it belongs to; None if it is not of that share."""
        fused = self._fused()

        def kind(factor: str) -> Hashable:
            return fused[parent(factor)] if self.in_share(factor, share) else None

        return kind


def make_plan(
    layers: Sequence[LayerShape],
    ranks: int,
    strategy: Strategy,
    others: Iterable[tuple[str, Shape]] = (),
    solver: Solver = "inverse",
    itemsize: int = 4,
    factor_itemsize: int | None = None,
    basis_itemsize: int | None = None,
) -> Plan:
    """The plan for `layers` on `ranks` ranks; the same on every rank.

    Args:
        others: names and shapes of parameters (and buffers) that no layer covers.
        solver: one of the damped inverses, "eigen" (eigenvectors and eigenvalues), "ekfac" (the
            same, and scales), or "rank-one" (factors are squares of vectors, and nothing is
            decomposed); of the layers that have none of their own.
        itemsize: bytes of one element.
        factor_itemsize: the same of running averages; `itemsize` if None.
        basis_itemsize: the same of decompositions.

    Raises:
        ValueError: a choice that cannot work, with what would.
    """
    one_of("solver", solver, tuple(BLOCKS))
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    strategy.check_ranks(ranks)
    for layer in layers:
        one_of(f"layer {layer.name!r}: solver", layer.solver, (None, *BLOCKS))
        if layer.rank is not None and layer.rank < 1:
            raise ValueError(
                f"rank={layer.rank} of layer {layer.name!r} must be at least 1, or None"
            )
    check_layers(SOLVERS, layers, strategy.choices() | {"ranks": ranks, "solver": solver})
    vectors = {layer.name for layer in layers if (layer.solver or solver) == "rank-one"}
    shares_of = placement.deal(layers, vectors, strategy.refresh.stagger)
    owners, columns_of = placement.place(layers, vectors, ranks, strategy, shares_of)
    updaters = {layer.name: owners[layer.factors[0].name] for layer in layers}
    others = tuple((name, tuple(shape)) for name, shape in others)
    updaters |= placement.spread(others, ranks)
    factors = {factor.name: factor for layer in layers for factor in layer.factors}
    itemsizes = itemsize, factor_itemsize or itemsize, basis_itemsize or itemsize
    given = (tuple(layers), others, ranks, strategy, solver)
    return Plan(*given, *itemsizes, columns_of, owners, updaters, factors, shares_of)
