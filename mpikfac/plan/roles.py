"""Who does what: which ranks own, decompose, precondition and step what.

Ranks form a grid of `rows` x `columns`. A column owns a group of layers and its ranks are the
gradient workers of those layers; a row crosses all columns. `rows` is the number of workers of a
layer: all ranks in COMM-OPT, one in MEM-OPT [Pauloski et al., TPDS22].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from mpikfac.plan.layout import Shape
from mpikfac.plan.shapes import BLOCKS, FactorShape, LayerShape, Solver, parent
from mpikfac.plan.strategy import Strategy
from mpikfac.plan.two_levels import IN_NODE, Seat, seat


@dataclass(frozen=True)
class Roles:
    """Who does what, of every rank.

    Attributes:
        layers: covered layers in model order.
        others: names and shapes of what no layer covers but travels with the gradients.
        solver: of the layers that have none of their own.
        columns_of: column of each layer.
        owners: rank that decomposes each factor ("conv1.A").
        updaters: rank that steps each layer or other parameter when `update="owner"`.
        factors: shape of each factor.
        itemsize: bytes of a number, but for those of running averages and of decompositions.
        shares_of: the share of a refresh that each layer belongs to, from 0 to `stagger` - 1.
    """

    layers: tuple[LayerShape, ...]
    others: tuple[tuple[str, Shape], ...]
    ranks: int
    strategy: Strategy
    solver: Solver
    itemsize: int
    factor_itemsize: int
    basis_itemsize: int
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
        per_node = self.strategy.transport.ranks_per_node
        return None if per_node is None else seat(team, rank, per_node)

    def owned(self, rank: int) -> list[str]:
        """Factors that `rank` decomposes for others too, in model order."""
        return [n for n, owner in self.owners.items() if owner == rank and not self.replicated(n)]

    def replicated(self, factor: str) -> bool:
        """Whether every worker decomposes that factor for itself."""
        everywhere = (self.strategy.reduction, self.strategy.update) == ("everyone", "everyone")
        # A vector is used as it is: where all have it, sending it would be for nothing.
        free = parent(factor) in self.vectors and everywhere
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

    def low_ranks(self, factors: Iterable[str]) -> dict[str, int]:
        """Of these factors, those of low rank, and how many eigenvectors are kept of each."""
        found = {name: self.factors[name].rank for name in factors}
        return {name: rank for name, rank in found.items() if rank is not None}

    def inverted(self, factors: Iterable[str]) -> dict[str, Shape]:
        """Of these factors, those that are inverted, and the shape of what is added to each.

        One number, `[]`, or one for each group of the layer, `[groups]`.
        """
        inverses = [n for n in factors if "inverse" in BLOCKS[self.solver_of(parent(n))]]
        groups = {name: self.shapes[parent(name)].groups for name in inverses}
        return {name: () if count == 1 else (count,) for name, count in groups.items()}

    def splits(self, layer: str) -> bool:
        """Whether A and G of a layer take a part of the damping each, not all of it."""
        return self.solver_of(layer) == "inverse" and self.shapes[layer].sides == "AG"

    def curvature_rank(self, rank: int) -> int:
        """The curvature rank that decomposes what `rank` owns: owners are dealt out in turn."""
        return rank % self.strategy.refresh.curvature_ranks

    def solver_of(self, layer: str) -> Solver:
        """A layer's own solver, or the run's."""
        return self.shapes[layer].solver or self.solver

    def solvers(self, factors: Iterable[str]) -> dict[str, Solver]:
        """Of each of these factors, its layer's solver."""
        return {name: self.solver_of(parent(name)) for name in factors}

    @property
    def all_solvers(self) -> str:
        """The run's solver, followed by the layers that have another: "eigen, fc: rank-one"."""
        own = {layer.name: self.solver_of(layer.name) for layer in self.layers}
        others = (f"{name}: {solver}" for name, solver in own.items() if solver != self.solver)
        return ", ".join([self.solver, *others])

    @cached_property
    def eigenbases(self) -> frozenset[str]:
        """Layers whose factors are decomposed into eigenvalues and eigenvectors."""
        return frozenset(n for n in self.shapes if "values" in BLOCKS[self.solver_of(n)])

    @cached_property
    def vectors(self) -> frozenset[str]:
        """Layers whose factors are kept as the vectors of which they are the squares."""
        return frozenset(n for n in self.shapes if self.solver_of(n) == "rank-one")

    @property
    def parts_per_rank(self) -> int:
        """Parts of a batch that a rank takes one by one; 0 if it takes its share as a whole."""
        return (self.strategy.transport.parts or 0) // self.ranks

    def recorded(self, rank: int) -> list[str]:
        """Factors of which `rank` records statistics of its own batch."""
        return self.owned(rank) if self.strategy.reduction == "none" else list(self.owners)

    @property
    def shares(self) -> list[int | None]:
        """The shares that refreshes are dealt out in, after None, which stands for all layers."""
        stagger = self.strategy.refresh.stagger
        return [None, *range(stagger)] if stagger > 1 else [None]

    def in_share(self, factor: str, share: int | None) -> bool:
        """Whether a factor is decomposed with that share of the layers; all are with None."""
        return share is None or self.shares_of[parent(factor)] == share

    @property
    def late(self) -> bool:
        """Whether ranks average their own factors over time before they are averaged over ranks."""
        return self.strategy.transport.reduce_at == "bases"

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
        return owner and self.strategy.transport.wires.gradient_wire is not None

    @property
    def rescaled(self) -> list[str]:
        """Layers whose gradients' second moments in the eigenbases are estimated: their scales."""
        asked = [layer.name for layer in self.layers if layer.rescaled]
        return [name for name in asked if self.solver_of(name) == "ekfac"]

    def load(self, rank: int) -> int:
        """Work of `rank` in a refresh, as the sum of n^3 over the factors that it decomposes.

        Of low rank, what the iteration takes; of vectors none.
        """
        names = [n for n in self.decomposed(rank) if parent(n) not in self.vectors]
        return sum(self.factors[name].work() for name in names)
