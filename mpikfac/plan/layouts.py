"""Where every number lies: the layouts of what each rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mpikfac.plan.layout import Layout, Shape, lay_out
from mpikfac.plan.roles import Roles
from mpikfac.plan.shapes import BLOCKS, FactorShape, added_to, count_of, parent


class Holdings(Roles):
    """Who does what, and the layouts of every rank's arenas."""

    def decompositions(self, factors: Iterable[str]) -> list[tuple[str, Shape]]:
        """Names and shapes of what these factors are decomposed into."""
        return [
            (f"{name}.{block}", self.factors[name].part(dimensions))
            for name in factors
            for block, dimensions in BLOCKS[self.solver_of(parent(name))].items()
        ]

    def packed(self, factor: FactorShape) -> Shape:
        """The shape in which a factor is recorded, kept and sent."""
        return factor.block(1) if parent(factor.name) in self.vectors else factor.triangle

    def statistics(self, rank: int) -> Layout:
        """A batch's factors: model order, or owner by owner if owners reduce.

        Each is a sum, beside which is the number of examples in it.
        """
        return self._factors(self.recorded(rank), self.packed)

    def squares(self, rank: int) -> Layout:
        """The same as squares, if they travel in that form; else nothing."""
        square = self.strategy.transport.packing == "square"
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
        names = [name for name in self.preconditioned(rank) if name in self.eigenbases]
        return lay_out([[(name, self.shapes[name].denominators) for name in names]])

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
        if self.strategy.transport.wires.factor_wire is not None:
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
