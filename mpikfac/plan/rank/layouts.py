"""What a rank computes, and where the rank's numbers lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpikfac.plan import layouts
from mpikfac.plan.choices import Strategy
from mpikfac.plan.distribution import Split
from mpikfac.plan.layout import Layout, Shape, lay_out
from mpikfac.plan.layouts import Layouts
from mpikfac.plan.roles import Factor, PlannedLayer, RankGrid


class Itemsizes(NamedTuple):
    """Bytes of a number: in sums and gradients, in running averages, and in decompositions."""

    numbers: int
    averages: int
    bases: int


@dataclass(frozen=True)
class RankLayouts:
    """What a rank computes and keeps: factors, layers and layouts, made once.

    Attributes:
        grid: all ranks as rows and columns.
        layers: the covered layers.
        others: names and shapes of uncovered tensors that travel with the gradients.
        means: names of `others` of which ranks always take the mean.
        updaters: rank to step a layer or uncovered parameter if update="owner".
        solvers: the run's solver, then the layers with a different solver: "eigen, fc: rank-one".
        split: the split layers of the model.
    """

    rank: int
    grid: RankGrid
    strategy: Strategy
    layers: tuple[PlannedLayer, ...]
    others: tuple[tuple[str, Shape], ...]
    means: tuple[str, ...]
    updaters: Mapping[str, int]
    itemsizes: Itemsizes
    solvers: str
    split: Split

    # -- who does what ---------------------------------------------------------------------------

    @cached_property
    def column(self) -> int:
        """The rank's column."""
        return self.grid.position(self.rank)[1]

    @property
    def late(self) -> bool:
        """Whether a rank averages factors over time first, and over ranks only at a refresh."""
        return self.strategy.transport.reduce_at == "bases"

    @property
    def parts(self) -> int:
        """Parts of a batch that the rank takes in turn; 0 if the rank takes a share as a whole."""
        return (self.strategy.transport.parts or 0) // self.grid.count

    @property
    def pooled(self) -> int:
        """The number of equal shares of a batch that factors come from: parts, ranks, or 1."""
        alone = self.strategy.exchange.robust.combine_factors == "near"
        alone |= self.strategy.reduction == "none"
        return 1 if alone else self.strategy.transport.parts or self.grid.count

    @property
    def shares(self) -> list[int | None]:
        """None for all layers, and then, with `stagger`, the shares of a refresh."""
        stagger = self.strategy.refresh.stagger
        return [None, *range(stagger)] if stagger > 1 else [None]

    @property
    def owner_updates(self) -> bool:
        """Whether a layer or parameter is stepped by the updater only."""
        return self.strategy.update == "owner"

    @cached_property
    def in_slices(self) -> Split:
        """The split layers whose gradients travel in slices; nothing if gradients travel whole."""
        transport = self.strategy.transport
        whole = self.owner_updates or transport.overlap or self.strategy.exchange.of_copies
        whole |= transport.wires.gradient_wire is not None
        whole |= (transport.parts, transport.ranks_per_node) != (None, None)
        return Split() if whole or self.grid.count == 1 else self.split

    @property
    def member(self) -> int:
        """The place of the rank in the group of split layers."""
        return self.grid.team(self.rank, "group").index(self.rank)

    def steps(self, name: str) -> bool:
        """Return whether the rank steps the layer or parameter `name`."""
        return not self.owner_updates or self.updaters[name] == self.rank

    @cached_property
    def factors(self) -> tuple[Factor, ...]:
        """All factors in model order."""
        return tuple(factor for layer in self.layers for factor in layer.factors)

    @cached_property
    def recorded(self) -> tuple[Factor, ...]:
        """Factors with statistics of the rank's own batch."""
        return self.owned if self.strategy.reduction == "none" else self.factors

    @cached_property
    def averaged(self) -> tuple[Factor, ...]:
        """Factors with running averages on the rank."""
        to_owners = self.strategy.reduction == "owners" and not self.late
        return self.owned if to_owners else self.recorded

    def decomposed(self, share: int | None = None) -> tuple[Factor, ...]:
        """Return factors to decompose for the column, then factors for the rank alone.

        Args:
            share: the share of a refresh; None for all layers.
        """
        factors = self.owned + self._own
        return tuple(f for f in factors if share in (None, f.share))

    @cached_property
    def preconditioned(self) -> tuple[PlannedLayer, ...]:
        """Layers to precondition on the rank, in model order."""
        if self.owner_updates:
            return tuple(layer for layer in self.layers if layer.updater == self.rank)
        return self._workers_of(self.column)

    @cached_property
    def rescaled(self) -> tuple[PlannedLayer, ...]:
        """Layers with scales."""
        return tuple(layer for layer in self.layers if layer.rescaled)

    @cached_property
    def owned(self) -> tuple[Factor, ...]:
        """Factors to decompose on the rank for the column, in model order."""
        return self._owned(self.rank)

    @cached_property
    def _own(self) -> tuple[Factor, ...]:
        """Factors decomposed by every worker of the column, the rank included."""
        return tuple(f for f in self.factors if f.replicated and f.column == self.column)

    def _owned(self, rank: int) -> tuple[Factor, ...]:
        """Return factors to decompose on `rank` for the column, in model order."""
        return tuple(f for f in self.factors if f.owner == rank and not f.replicated)

    def _workers_of(self, column: int) -> tuple[PlannedLayer, ...]:
        return tuple(layer for layer in self.layers if layer.column == column)

    @cached_property
    def _publishes_bases(self) -> bool:
        """Whether a layer's bases are needed by a rank without the decompositions."""
        alone = self.owner_updates and self.strategy.colocate
        return self.grid.workers > 1 and not alone

    @property
    def node(self) -> int:
        """The number of ranks that step the same copy of the model."""
        of_nodes = self.strategy.exchange.copies_of == "node"
        return (self.strategy.transport.ranks_per_node or 1) if of_nodes else 1

    @property
    def first(self) -> int:
        """The first of the ranks that step the rank's copy of the model."""
        return self.rank // self.node * self.node

    @property
    def copies(self) -> int:
        """The number of copies of the model that may differ."""
        return self.grid.count // self.node

    # -- where numbers lie -----------------------------------------------------------------------

    @cached_property
    def layouts(self) -> Layouts:
        """The layouts of the rank's arenas."""
        ranks, strategy = self.grid.count, self.strategy
        square = self.recorded if strategy.transport.packing == "square" else ()
        scales = layouts.of_gradients(self.rescaled)
        return Layouts(
            statistics=layouts.of_statistics(self.recorded, ranks, strategy),
            squares=layouts.of_statistics(square, ranks, strategy, square=True),
            averages=layouts.of_averages(self.averaged),
            bases=self._bases(),
            denominators=layouts.of_denominators(self.preconditioned),
            scales=lay_out([scales]),
            scale_sums=lay_out([layouts.counted(scales)]),
            gradients=self._gradients(),
            slices=self.in_slices.layout(),
            directions=self._directions(),
            copies=self._gradients() if self.strategy.exchange.of_copies else lay_out([]),
        )

    def _bases(self) -> Layout:
        if not self._publishes_bases:
            return layouts.of_blocks([self.decomposed()])
        columns = self.grid.columns
        owned = (self._owned(row * columns + self.column) for row in range(self.grid.workers))
        return layouts.of_blocks(map(layouts.by_share, (*owned, self._own)))

    def _gradients(self) -> Layout:
        exchange = self.strategy.exchange
        # A rule takes whole vectors, and copies are combined as vectors: means lie behind.
        vectors = exchange.of_copies or exchange.robust.combine != "mean"
        others = sorted(self.others, key=lambda other: vectors and other[0] in self.means)
        blocks = [*layouts.of_gradients(self.layers), *others]
        if not self.owner_updates:
            return lay_out([blocks])
        return lay_out(layouts.by_rank(blocks, self.updaters, self.grid.count))

    def _directions(self) -> Layout:
        if self.owner_updates:
            return lay_out([layouts.of_gradients(self.preconditioned)])
        columns = map(self._workers_of, range(self.grid.columns))
        return lay_out(map(layouts.of_gradients, columns))

    def request(self, share: int | None = None) -> Layout:
        """Return the layout of the factors sent to a curvature rank."""
        return layouts.of_requests(self.decomposed(share))

    def reply(self, share: int | None = None) -> Layout:
        """Return the layout of the answer to a `request`: decompositions, NaN for a failure."""
        return layouts.of_blocks([self.decomposed(share)])
