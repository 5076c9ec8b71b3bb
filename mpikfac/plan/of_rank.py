"""The plan of a rank: what it computes, and where its values are stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from mpikfac.plan import layouts
from mpikfac.plan.choices import Sharding, Split, Strategy
from mpikfac.plan.layout import Layout, Shape, lay_out
from mpikfac.plan.layouts import Layouts, grouped
from mpikfac.plan.messages import Message
from mpikfac.plan.roles import Factor, PlannedLayer, RankGrid, in_messages


class Itemsizes(NamedTuple):
    """Bytes per value of statistics and gradients, of running averages, and of decompositions."""

    numbers: int
    averages: int
    bases: int


@dataclass(frozen=True)
class RankPlan:
    """What a rank computes and stores: factors, layers and layouts, created once.

    Attributes:
        grid: the grid of all ranks in rows and columns.
        layers: the covered layers.
        uncovered: names and shapes of uncovered tensors that are sent with the gradients.
        means: the names of those tensors in `uncovered` that are always averaged over ranks.
        updaters: the rank that updates each layer or uncovered parameter, if the optimizer is
            sharded.
        preconditioners: the run's preconditioner, then each layer with a different preconditioner,
            such as "eigen, fc: eva".
        split: which layers are split over groups of ranks, and how.
        sharding: the parameters of which each rank holds a shard.
        replaced: the functions of extensions that replace functions of the module `stages`, by the
            name of the stage.
    """

    rank: int
    grid: RankGrid
    strategy: Strategy
    layers: tuple[PlannedLayer, ...]
    uncovered: tuple[tuple[str, Shape], ...]
    means: tuple[str, ...]
    updaters: Mapping[str, int]
    itemsizes: Itemsizes
    preconditioners: str
    split: Split
    sharding: Sharding
    replaced: Mapping[str, Stage] = field(default_factory=dict)

    # -- who does what ---------------------------------------------------------------------------

    @cached_property
    def column(self) -> int:
        """The rank's column."""
        return self.grid.position(self.rank)[1]

    @property
    def late(self) -> bool:
        """Whether factors are first averaged over time, and over ranks only before a refresh."""
        return self.strategy.transport.reduce_factors_at == "inverses"

    @property
    def parts(self) -> int:
        """The number of parts of the rank's batch; 0 if the batch is processed as a whole."""
        return (self.strategy.transport.virtual_ranks or 0) // self.grid.count

    @property
    def pooled(self) -> int:
        """The number of equal shards of a batch whose statistics are pooled; 1 without pooling."""
        alone = not self.strategy.sync.factor_aggregation.sums
        alone |= self.strategy.assignment.factor_reduction == "local"
        return 1 if alone else self.strategy.transport.virtual_ranks or self.grid.count

    @property
    def turns(self) -> list[int | None]:
        """The values of `turn`: None for all layers, then the slots if the refresh is staggered."""
        stagger = self.strategy.refresh.stagger
        return [None, *range(stagger)] if stagger > 1 else [None]

    @property
    def owner_updates(self) -> bool:
        """Whether each layer or parameter is updated by a single rank, its updater."""
        return self.strategy.assignment.shard_optimizer

    def steps(self, name: str) -> bool:
        """Return whether the rank updates the layer or parameter `name`.

        In a sharded model, the rank that computes the step of a parameter counts as its updater,
        and running statistics are updated by every rank.
        """
        everywhere = not self.owner_updates or (self.sharding and name in self.means)
        return bool(everywhere) or self.updaters[name] == self.rank

    @cached_property
    def factors(self) -> tuple[Factor, ...]:
        """The factors of all covered layers, in model order."""
        return tuple(factor for layer in self.layers for factor in layer.factors)

    @cached_property
    def of_gradient(self) -> bool:
        """Whether owners compute factors from the averaged gradient, without any statistics."""
        return any(layer.preconditioner.of == "gradient" for layer in self.layers)

    @cached_property
    def recorded(self) -> tuple[Factor, ...]:
        """Factors for which the rank records statistics of its batch."""
        if self.of_gradient:
            return ()
        local = self.strategy.assignment.factor_reduction == "local"
        return self.owned if local else self.factors

    @cached_property
    def averaged(self) -> tuple[Factor, ...]:
        """Factors whose running averages the rank keeps."""
        if self.of_gradient:
            return self.decomposed()
        to_owners = self.strategy.assignment.factor_reduction == "reduce_scatter" and not self.late
        return self.owned if to_owners else self.recorded

    def decomposed(self, turn: int | None = None) -> tuple[Factor, ...]:
        """Return the factors that the rank decomposes for its column, then those only for itself.

        Args:
            turn: the slot of a refresh; None for all layers.
        """
        return tuple(f for f in self.owned + self._replicated if turn in (None, f.turn))

    @cached_property
    def preconditioned(self) -> tuple[PlannedLayer, ...]:
        """Layers that the rank preconditions, in model order."""
        if self.owner_updates:
            return tuple(layer for layer in self.layers if layer.updater == self.rank)
        return tuple(self._of_column.get(self.column, ()))

    @cached_property
    def rescaled(self) -> tuple[PlannedLayer, ...]:
        """Layers with scales: eigenvalues estimated from per-example gradients."""
        return tuple(layer for layer in self.layers if layer.rescaled)

    @cached_property
    def owned(self) -> tuple[Factor, ...]:
        """Factors that the rank decomposes for its column, in model order."""
        return tuple(self._of_owner.get(self.rank, ()))

    @cached_property
    def _replicated(self) -> tuple[Factor, ...]:
        """Factors that every worker of the rank's column decomposes, including the rank."""
        return tuple(f for f in self.factors if f.replicated and f.column == self.column)

    @cached_property
    def _of_owner(self) -> dict[int, Sequence[Factor]]:
        """By owner, the factors that it decomposes for its column, in model order."""
        return grouped((f for f in self.factors if not f.replicated), lambda f: f.owner)

    @cached_property
    def _of_column(self) -> dict[int, Sequence[PlannedLayer]]:
        """By column, the layers that the column owns, in model order."""
        return grouped(self.layers, lambda layer: layer.column)

    @cached_property
    def publishes_bases(self) -> bool:
        """Whether any rank needs the bases of a layer without decomposing its factors."""
        alone = self.owner_updates and self.strategy.assignment.colocate_factors
        return self.grid.workers > 1 and not alone

    @cached_property
    def messages_of(self) -> dict[str, int]:
        """For each block that gradient compression encodes, the index of its message in a stage.

        Only layers are encoded: votes are counts, running statistics are replaced rather than
        summed, and uncovered parameters are few. Without K-FAC, trained parameters count as layers.
        """
        if self.layers:
            return {layer.name: layer.fused for layer in self.layers}
        trained = {n: math.prod(shape) for n, shape in self.uncovered if n not in self.means}
        return dict(zip(trained, in_messages(list(trained.values()), self.strategy.transport)))

    # -- where values are stored -----------------------------------------------------------------

    @cached_property
    def layouts(self) -> Layouts:
        """The layouts of the rank's arenas."""
        ranks, strategy = self.grid.count, self.strategy
        square = self.recorded if strategy.transport.packing == "square" else ()
        return Layouts(
            statistics=layouts.of_statistics(self.recorded, ranks, strategy),
            squares=layouts.of_statistics(square, ranks, strategy, square=True),
            averages=layouts.of_averages(self.averaged),
            bases=self._bases(),
            denominators=layouts.of_denominators(self.preconditioned),
            gradients=self._gradients(),
            directions=self._directions(),
        )

    @property
    def sums(self) -> Layout:
        """The layout in which statistics are sent: as squares, or as the rank records them."""
        square = self.strategy.transport.packing == "square"
        return self.layouts.squares if square else self.layouts.statistics

    def _bases(self) -> Layout:
        places = {layer.name: place for place, layer in enumerate(layouts.by_kind(self.layers))}
        segments: list[Sequence[Factor]] = [self.decomposed()]
        if self.publishes_bases:
            owners = self.grid.team(self.rank, "column")
            segments = [*(self._of_owner.get(rank, ()) for rank in owners), self._replicated]
        return layouts.of_blocks(
            sorted(factors, key=lambda factor: (factor.turn, places[factor.layer]))
            for factors in segments
        )

    def _gradients(self) -> Layout:
        vectors = self.strategy.sync.of_vectors  # if true, the means come last
        uncovered = sorted(self.uncovered, key=lambda block: vectors and block[0] in self.means)
        # All ranks reduce all gradients, so the order does not depend on the placement. The blocks
        # of an overlapped message stay together.
        apart = self.strategy.transport.overlap
        layers = layouts.by_kind(self.layers, lambda layer: (apart and layer.fused, layer.form))
        blocks = [*layouts.of_gradients(layers), *uncovered]
        if self.sharding:  # means over ranks, then the gradients that the rank receives
            means = [block for block in blocks if block[0] in self.means]
            own = [block for block in blocks if self.updaters[block[0]] == self.rank]
            return lay_out([means, [block for block in own if block not in means]])
        if not self.owner_updates:
            return lay_out([blocks])
        return lay_out(layouts.by_rank(blocks, self.updaters, self.grid.count))

    def _directions(self) -> Layout:
        if self.owner_updates:
            return lay_out([layouts.of_gradients(layouts.by_kind(self.preconditioned))])
        blocks = {c: layouts.of_gradients(layouts.by_kind(s)) for c, s in self._of_column.items()}
        return lay_out(blocks.get(column, ()) for column in range(self.grid.columns))

    def memory(self) -> dict[str, int]:
        """Return the bytes of every arena of `layouts`, and of the values of a batch's parts."""
        numbers, averages, bases = self.itemsizes
        itemsizes = {"averages": averages, "bases": bases}
        sizes = {
            name: layout.size * itemsizes.get(name, numbers)
            for name, layout in vars(self.layouts).items()
        }
        if count := self.parts:
            sizes["parts"] = count * (sizes["statistics"] + sizes["gradients"])
        return sizes


Stage = Callable[[RankPlan, int | None], list[Message]]
"""A function that returns a rank's messages in a stage, for a slot of a refresh; None for all."""
