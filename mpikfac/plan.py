"""Who computes what, in which order, and where every number lies: a pure function of few numbers.

Ranks form a grid of `rows` x `columns`. A column owns a group of layers and its ranks are the
gradient workers of those layers; a row crosses all columns. `rows` is the number of workers of a
layer: all ranks in COMM-OPT, one in MEM-OPT [Pauloski et al., TPDS22].

Every rank makes the same plan without talking, and sends what its messages say.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mpikfac import placement
from mpikfac.layout import Layout, Shape, lay_out
from mpikfac.levels import IN_NODE, Seat, in_two_levels, seat
from mpikfac.messages import Codec, Kind, Message, across, gathers, in_order, message, sums
from mpikfac.shapes import BLOCKS, FactorShape, LayerShape, Solver, added_to, count_of, parent
from mpikfac.strategy import Strategy, one_of


@dataclass(frozen=True)
class Plan:
    """The communication plan: placement, layouts and messages of every rank.

    Attributes:
        layers: covered layers in model order.
        others: names and shapes of what no layer covers but travels with the gradients.
        columns_of: column of each layer.
        owners: rank that decomposes each factor ("conv1.A").
        updaters: rank that steps each layer or other parameter when `update="owner"`.
        factors: shape of each factor.
        shares_of: the share of a refresh that each layer belongs to, from 0 to `stagger` - 1.
    """

    layers: tuple[LayerShape, ...]
    others: tuple[tuple[str, Shape], ...]
    ranks: int
    strategy: Strategy
    solver: Solver
    itemsize: int
    columns_of: dict[str, int]
    owners: dict[str, int]
    updaters: dict[str, int]
    factors: dict[str, FactorShape] = field(repr=False)
    shares_of: dict[str, int]

    @property
    def rows(self) -> int:
        """Ranks in a column: the gradient workers of a layer."""
        return self.strategy.workers

    @property
    def columns(self) -> int:
        """Layer groups."""
        return self.ranks // self.rows

    def position(self, rank: int) -> tuple[int, int]:
        """Row and column of a rank."""
        return divmod(rank, self.columns)

    def team(self, rank: int, over: str) -> range:
        """The ranks that a message of `rank` over that communicator is between.

        Curvature ranks follow upon those that train.
        """
        if over == "curvature":
            peer = self.ranks + self.curvature_rank(rank)
            return range(rank, peer + 1, peer - rank)
        row, column = self.position(rank)
        whole, _, level = over.partition(" ")
        team = {
            "world": range(self.ranks),
            "column": range(column, self.ranks, self.columns),
            "row": range(row * self.columns, (row + 1) * self.columns),
        }[whole]
        at = self.seat(team, rank)
        if at is None or not level:
            return team
        first = at.node * at.places
        inside, across = team[first : first + at.places], team[at.place :: at.places]
        return inside if over == IN_NODE.format(whole) else across

    def seat(self, team: range, rank: int) -> Seat | None:
        """Where `rank` sits in a team that sends in two levels."""
        per_node = self.strategy.ranks_per_node
        return None if per_node is None else seat(team, rank, per_node)

    def digest(self) -> str:
        """A hash that two ranks share only if they hold the same plan."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    # -- who does what ---------------------------------------------------------------------------

    def owned(self, rank: int) -> list[str]:
        """Factors that `rank` decomposes for others too, in model order."""
        return [n for n, owner in self.owners.items() if owner == rank and not self.replicated(n)]

    def replicated(self, factor: str) -> bool:
        """Whether every worker decomposes that factor for itself."""
        everywhere = (self.strategy.reduction, self.strategy.update) == ("everyone", "everyone")
        # A vector is used as it is: where all have it, sending it would be for nothing.
        free = self.vectors and everywhere
        return free or self.factors[factor].order < self.strategy.replicate_below

    def decomposed(self, rank: int, share: int | None = None) -> list[str]:
        """Factors that `rank` decomposes: those it owns, then those it decomposes for itself.

        Of all layers, or of one share of a refresh.
        """
        column = self.position(rank)[1]
        own = [
            n for n in self.owners if self.replicated(n) and self.columns_of[parent(n)] == column
        ]
        names = self.owned(rank) + own
        return [name for name in names if self.in_share(name, share)]

    def decompositions(self, factors: Iterable[str]) -> list[tuple[str, Shape]]:
        """Names and shapes of what these factors are decomposed into."""
        return [
            (f"{name}.{block}", self.factors[name].part(dimensions))
            for name in factors
            for block, dimensions in BLOCKS[self.solver].items()
        ]

    def kept(self, factors: Iterable[str]) -> dict[str, int]:
        """Of these factors, those of low rank, and how many eigenvectors are kept of each."""
        ranks = {name: self.factors[name].rank for name in factors}
        return {name: rank for name, rank in ranks.items() if rank is not None}

    def inverted(self, factors: Iterable[str]) -> dict[str, Shape]:
        """Of these factors, those that are inverted, and the shape of what is added to each.

        One number, `[]`, or one for each group of the layer, `[groups]`.
        """
        if "inverse" not in BLOCKS[self.solver]:
            return {}
        groups = {name: self.shapes[parent(name)].groups for name in factors}
        return {name: () if count == 1 else (count,) for name, count in groups.items()}

    def splits(self, layer: str) -> bool:
        """Whether A and G of a layer take a part of the damping each, not all of it."""
        return self.solver == "inverse" and self.shapes[layer].sides == "AG"

    def curvature_rank(self, rank: int) -> int:
        """The curvature rank that decomposes what `rank` owns: owners are dealt out in turn."""
        return rank % self.strategy.curvature_ranks

    @property
    def eigenbases(self) -> bool:
        """Whether factors are decomposed into eigenvalues and eigenvectors."""
        return "values" in BLOCKS[self.solver]

    @property
    def vectors(self) -> bool:
        """Whether a factor is kept as the vector of which it is the square."""
        return self.solver == "rank-one"

    def packed(self, factor: FactorShape) -> Shape:
        """The shape in which a factor is recorded, kept and sent."""
        return factor.block(1) if self.vectors else factor.triangle

    @property
    def parts_per_rank(self) -> int:
        """Parts of a batch that a rank takes one by one; 0 if it takes its share as a whole."""
        return (self.strategy.parts or 0) // self.ranks

    def recorded(self, rank: int) -> list[str]:
        """Factors of which `rank` records statistics of its own batch."""
        return self.owned(rank) if self.strategy.reduction == "none" else list(self.owners)

    @property
    def shares(self) -> list[int | None]:
        """The shares that refreshes are dealt out in, after None, which stands for all layers."""
        stagger = self.strategy.stagger
        return [None, *range(stagger)] if stagger > 1 else [None]

    def in_share(self, factor: str, share: int | None) -> bool:
        """Whether a factor is decomposed with that share of the layers; all are with None."""
        return share is None or self.shares_of[parent(factor)] == share

    @property
    def late(self) -> bool:
        """Whether ranks average their own factors over time before they are averaged over ranks."""
        return self.strategy.reduce_at == "bases"

    def preconditioned(self, rank: int) -> list[str]:
        """Layers that `rank` preconditions, in model order."""
        if self.strategy.update == "owner":
            return [layer.name for layer in self.layers if self.updaters[layer.name] == rank]
        column = self.position(rank)[1]
        return [layer.name for layer in self.layers if self.columns_of[layer.name] == column]

    @property
    def publishes_bases(self) -> bool:
        """Whether a layer's bases are needed by a rank that did not compute them."""
        alone = self.strategy.update == "owner" and self.strategy.colocate
        return self.rows > 1 and not alone

    @cached_property
    def shapes(self) -> dict[str, LayerShape]:
        """The layers by name."""
        return {layer.name: layer for layer in self.layers}

    @property
    def publishes_changes(self) -> bool:
        """Whether weights travel as what a step changed of them, which bears rounding."""
        owner = self.strategy.update == "owner" and self.ranks > 1
        return owner and self.strategy.gradient_wire is not None

    # -- where numbers lie -----------------------------------------------------------------------

    def statistics(self, rank: int) -> Layout:
        """A batch's factors: model order, or owner by owner if owners reduce.

        Each is a sum, beside which is the number of examples in it.
        """
        return self._factors(self.recorded(rank), self.packed)

    def squares(self, rank: int) -> Layout:
        """The same as squares, if they travel in that form; else nothing."""
        square = self.strategy.packing == "square"
        return self._factors(self.recorded(rank) if square else [], lambda f: f.block(2))

    def averages(self, rank: int) -> Layout:
        """Running averages that `rank` keeps."""
        kept = self.recorded(rank)
        if self.strategy.reduction == "owners" and not self.late:
            kept = self.owned(rank)
        return lay_out([self._matrices_of(self._by_share(kept), self.packed)])

    def bases(self, rank: int) -> Layout:
        """Decompositions that `rank` holds: a segment for each row of its column, and its own."""
        if not self.publishes_bases:
            return lay_out([self.decompositions(self.decomposed(rank))])
        column = self.position(rank)[1]
        owned = [self.owned(row * self.columns + column) for row in range(self.rows)]
        own = [name for name in self.decomposed(rank) if self.replicated(name)]
        return lay_out(self.decompositions(self._by_share(names)) for names in [*owned, own])

    def denominators(self, rank: int) -> Layout:
        """Damped eigenvalues of each layer that `rank` preconditions; for eigenbases only."""
        names = self.preconditioned(rank) if self.eigenbases else []
        return lay_out([[(name, self.shapes[name].denominators) for name in names]])

    @property
    def rescaled(self) -> list[str]:
        """Layers whose gradients' second moments in the eigenbases are estimated: their scales."""
        return [layer.name for layer in self.layers if self.solver == "ekfac" and layer.rescaled]

    def scales(self) -> Layout:
        """Running averages of scales, in the form of gradients."""
        return lay_out([self._matrices(self.rescaled)])

    def scale_sums(self) -> Layout:
        """A batch's scales: each is a sum, beside which is the number of examples in it."""
        counted = ((block, (count_of(block[0]), (1,))) for block in self._matrices(self.rescaled))
        return lay_out([[part for pair in counted for part in pair]])

    def gradients(self) -> Layout:
        """All gradients: model order, or updater by updater if owners update."""
        blocks = [*self._matrices(layer.name for layer in self.layers), *self.others]
        if self.strategy.update == "everyone":
            return lay_out([blocks])
        return lay_out(self._by_rank(blocks, self.updaters))

    def directions(self, rank: int) -> Layout:
        """Preconditioned gradients: column by column, or `rank`'s own if owners update."""
        if self.strategy.update == "owner":
            return lay_out([self._matrices(self.preconditioned(rank))])
        return lay_out(self._matrices(self.preconditioned(c)) for c in range(self.columns))

    def request(self, rank: int, share: int | None = None) -> Layout:
        """What a curvature rank needs to decompose for `rank`: triangles of factors.

        And what is added to each before it is inverted, which may depend on the other factor of
        its layer: "conv1.A+".
        """
        names = self.decomposed(rank, share)
        added = [(added_to(name), shape) for name, shape in self.inverted(names).items()]
        return lay_out([[*added, *self._matrices_of(names, lambda factor: factor.triangle)]])

    def reply(self, rank: int, share: int | None = None) -> Layout:
        """What comes back of a `request`: decompositions, NaN where there are none."""
        return lay_out([self.decompositions(self.decomposed(rank, share))])

    def memory(self, rank: int) -> dict[str, int]:
        """Bytes of each arena that `rank` keeps, and of what they held for parts of a batch."""
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
        sizes = {name: layout.size * self.itemsize for name, layout in arenas.items()}
        if count := self.parts_per_rank:
            sizes["parts"] = count * (sizes["statistics"] + sizes["gradients"])
        if kept := self._kept_for_wires(rank):
            sizes["wires"] = kept * self.itemsize
        return sizes

    # -- what travels ----------------------------------------------------------------------------

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
        layout = self.squares(rank) if self.strategy.packing == "square" else self.statistics(rank)
        kind = self._kind(share)
        # Averages over time make up for what a batch's factors lost; nothing does where the
        # averages themselves travel.
        codec = self._codec(self.strategy.factor_wire, feedback=not self.late)
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
        if not self.strategy.curvature_ranks:
            return []
        layout, peer = self.request(rank, share), self.curvature_rank(rank)
        return across("send factors", "Send", layout, peer, self.itemsize)

    def receive_bases(self, rank: int, share: int | None = None) -> list[Message]:
        """Their decompositions from there."""
        if not self.strategy.curvature_ranks:
            return []
        layout, peer = self.reply(rank, share), self.curvature_rank(rank)
        return across("receive bases", "Recv", layout, peer, self.itemsize)

    def publish_bases(self, rank: int, share: int | None = None) -> list[Message]:
        """Decompositions to the workers of a column, of all layers or of one share."""
        if not self.publishes_bases:
            return []
        kind, layout = self._kind(share), self.bases(rank)
        codec = self._codec(self.strategy.basis_wire, feedback=False)
        return self._gathers(
            "publish bases", "column", layout, lambda n: kind(parent(n)), rank, codec
        )

    def reduce_gradients(self, rank: int) -> list[Message]:
        """Sums of all gradients."""
        fused = self._fused() if self.strategy.overlap else {}
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
        codec = self._codec(self.strategy.gradient_wire)
        return self._gathers("publish gradients", "row", layout, kind, rank, codec)

    def publish_weights(self, rank: int) -> list[Message]:
        """Weights to the ranks that did not step them."""
        if self.strategy.update == "everyone":
            return []
        layout = self.gradients()
        return [
            message
            for codec, kind in self._encoded_and_others(lambda name: 0)
            for message in self._gathers("publish weights", "world", layout, kind, rank, codec)
        ]

    def clip(self) -> list[Message]:
        """The sum that the step is bounded by, where no rank holds all directions."""
        if not self.layers or self.ranks == 1 or self.strategy.update == "everyone":
            return []
        return [message("clip", "Allreduce", "world", [(0, 1)], self.ranks, self.itemsize)]

    def load(self, rank: int) -> int:
        """Work of `rank` in a refresh, as the sum of n^3 over the factors that it decomposes."""
        return 0 if self.vectors else sum(self.factors[n].work() for n in self.decomposed(rank))

    def _sums(
        self, stage: str, layout: Layout, kind: Kind, rank: int, codec: Codec | None
    ) -> list[Message]:
        if self.parts_per_rank:
            return in_order(stage, layout, self.ranks, self.itemsize)
        by_owners = self.strategy.sums == "alltoall" or (codec and not codec.summable)
        primitive: str | None = "Alltoall" if by_owners else "Reduce_scatter"
        if self.strategy.overlap:  # what is sent beside the backward pass is cut into pieces
            primitive = None
        found = sums(stage, layout, kind, self.ranks, self.itemsize, primitive, codec)
        return self._in_levels(found, self.team(rank, "world"), rank)

    def _gathers(
        self, stage: str, over: str, layout: Layout, kind: Kind, rank: int, codec: Codec | None
    ) -> list[Message]:
        team = self.team(rank, over)
        own = team.index(rank)
        found = gathers(stage, over, layout, kind, own, len(team), self.itemsize, codec)
        return self._in_levels(found, team, rank)

    def _in_levels(self, found: list[Message], team: range, rank: int) -> list[Message]:
        at = self.seat(team, rank)
        return in_two_levels(found, at, self.itemsize) if at else found

    def _codec(self, wire: str | None, feedback: bool = True) -> Codec | None:
        """What carries out a wire; bfloat16 loses too little for it to be kept."""
        if wire is None:
            return None
        share = self.strategy.top_share if wire == "top-k" else 1.0
        return Codec(wire, share, feedback and wire != "bfloat16")

    def _encoded_and_others(self, kind: Kind) -> list[tuple[Codec | None, Kind]]:
        """Codecs of what the gradients' arena holds, and `kind` of the blocks that each is for.

        What no layer covers travels as it is: votes are counts, running statistics are replaced
        and not added up, and together with the other parameters they are few.
        """
        codec = self._codec(self.strategy.gradient_wire)
        if codec is None:
            return [(None, kind)]
        return [
            (codec, lambda name: kind(name) if name in self.shapes else None),
            (None, lambda name: None if name in self.shapes else kind(name)),
        ]

    def _kept_for_wires(self, rank: int) -> int:
        """Elements of what encoding lost, and of weights of which only changes travel."""
        square = self.strategy.packing == "square"
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

    def _by_rank(
        self, blocks: Iterable[tuple[str, Shape]], ranks: dict[str, int]
    ) -> list[list[tuple[str, Shape]]]:
        segments: list[list[tuple[str, Shape]]] = [[] for _ in range(self.ranks)]
        for name, shape in blocks:
            segments[ranks[name]].append((name, shape))
        return segments

    def _factors(self, names: Iterable[str], shape: Callable[[FactorShape], Shape]) -> Layout:
        blocks = self._counted(self._by_share(names), shape)
        if self.strategy.reduction == "owners":
            counts = {count_of(name): owner for name, owner in self.owners.items()}
            return lay_out(self._by_rank(blocks, self.owners | counts))
        return lay_out([blocks])

    def _counted(
        self, factors: Iterable[str], shape: Callable[[FactorShape], Shape]
    ) -> list[tuple[str, Shape]]:
        """Factors and their counts: side by side, or all counts last where they travel apart."""
        blocks = self._matrices_of(factors, shape)
        counts: list[tuple[str, Shape]] = [(count_of(name), (1,)) for name, _ in blocks]
        if self.strategy.factor_wire is not None:
            return blocks + counts
        return [block for pair in zip(blocks, counts) for block in pair]

    def _matrices_of(
        self, factors: Iterable[str], shape: Callable[[FactorShape], Shape]
    ) -> list[tuple[str, Shape]]:
        return [(name, shape(self.factors[name])) for name in factors]

    def _by_share(self, factors: Iterable[str]) -> list[str]:
        """In model order, those first that are refreshed first."""
        return sorted(factors, key=lambda name: self.shares_of[parent(name)])

    def _matrices(self, names: Iterable[str]) -> list[tuple[str, Shape]]:
        return [(name, self.shapes[name].gradient) for name in names]

    def _fused(self) -> dict[str, int]:
        """The message of a stage that each layer belongs to."""
        fusion = self.strategy.fusion
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
) -> Plan:
    """The plan for `layers` on `ranks` ranks; the same on every rank.

    Args:
        others: names and shapes of parameters (and buffers) that no layer covers.
        solver: one of the damped inverses, "eigen" (eigenvectors and eigenvalues), "ekfac" (the
            same, and scales), or "rank-one" (factors are squares of vectors, and nothing is
            decomposed).
        itemsize: bytes of one element.

    Raises:
        ValueError: a choice that cannot work, with what would.
    """
    one_of("solver", solver, tuple(BLOCKS))
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    strategy.check_ranks(ranks)
    if solver == "inverse" and not strategy.colocate and strategy.reduction != "everyone":
        raise ValueError(
            f"solver='inverse' balances the damping of A and G by both traces, so with "
            f"reduction='{strategy.reduction}' both need one owner; use colocate=True or "
            f"solver='eigen'"
        )
    unfit = strategy.packing == "square" or strategy.tolerance or strategy.curvature_ranks
    if solver == "rank-one" and unfit:
        raise ValueError(
            f"solver='rank-one' has vectors, which are neither squares nor decomposed: it needs "
            f"packing='triangle', tolerance=0 and curvature_ranks=0, not {strategy.packing!r}, "
            f"{strategy.tolerance} and {strategy.curvature_ranks}"
        )
    if solver == "ekfac":
        _check_scales(ranks, strategy)
    if strategy.parts is not None and (strategy.parts < 1 or strategy.parts % ranks):
        raise ValueError(
            f"parts={strategy.parts} must be a multiple of the number of ranks ({ranks})"
        )
    for layer in layers:
        _check_rank(layer, solver)
    shares_of = placement.deal(layers, strategy.stagger)
    owners, columns_of = placement.place(layers, ranks, strategy, shares_of)
    updaters = {layer.name: owners[layer.factors[0].name] for layer in layers}
    others = tuple((name, tuple(shape)) for name, shape in others)
    updaters |= placement.spread(others, ranks)
    factors = {factor.name: factor for layer in layers for factor in layer.factors}
    given = (tuple(layers), others, ranks, strategy, solver, itemsize)
    return Plan(*given, columns_of, owners, updaters, factors, shares_of)


def _check_scales(ranks: int, strategy: Strategy) -> None:
    """Every rank rotates gradients of its own examples, all ranks into the same bases."""
    needed: dict[str, object] = {
        **{"workers": ranks, "reduction": "everyone", "update": "everyone", "parts": None},
        **{"replicate_below": 0, "reduce_at": "factors", "overlap": False},
    }
    for name, value in needed.items():
        if (chosen := getattr(strategy, name)) != value:
            raise ValueError(
                f"solver='ekfac' takes every rank's gradients in the bases of all layers, at each "
                f"step with statistics: it needs {name}={value!r}, not {chosen!r}"
            )


def _check_rank(layer: LayerShape, solver: Solver) -> None:
    if layer.rank is not None and layer.rank < 1:
        raise ValueError(f"rank={layer.rank} of layer {layer.name!r} must be at least 1, or None")
    if layer.rank is not None and solver != "eigen":
        raise ValueError(
            f"rank={layer.rank} of layer {layer.name!r} keeps some eigenvectors only: it needs "
            f"solver='eigen', not {solver!r}, or rank=None"
        )
