"""What K-FAC keeps of a layer, as numbers: its Kronecker factors and the form of its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from mpikfac.plan.combinations import Choices, Combination, check
from mpikfac.plan.layout import Shape, triangle_shape


@dataclass(frozen=True)
class Form:
    """Describe, as plain data, how a solver treats a factor: all that a plan knows of a solver.

    Attributes:
        name: the solver's name, for example "eigen".
        blocks: name of each block that a factor is decomposed into, and how many dimensions of the
            factor's order the block has. Gradients are multiplied by the first block.
        keeps: "matrix": sums and averages of a factor are packed triangles. "vector": sums and
            averages are vectors, whose squares stand for the factor; vectors are used as blocks
            without a decomposition.
        damped: damping is part of a decomposition; a factor's owner computes the damping.
        both: the damping of A depends on G and the damping of G depends on A.
        denominators: a layer's products of eigenvalues ("values") are kept, damped.
        rescaled: eigenvalues of `G (x) A` are estimated from gradients of single examples.
        work: operations of a decomposition grow with this power of the order.
        products: products of a gradient with each side that a direction takes.
        timed_as: the solver whose measured times hold for this solver; "" for the solver itself.
        needs: choices that the solver needs.
    """

    name: str
    blocks: Mapping[str, int]
    keeps: Literal["matrix", "vector"] = "matrix"
    damped: bool = False
    both: bool = False
    denominators: bool = False
    rescaled: bool = False
    work: int = 3
    products: int = 1
    timed_as: str = ""
    needs: tuple[Combination, ...] = field(default=(), repr=False)

    @cached_property
    def vector(self) -> bool:
        """Whether factors are kept as vectors."""
        return self.keeps == "vector"


@dataclass(frozen=True)
class FactorShape:
    """A symmetric matrix, or several of one order: the groups of a layer, or a diagonal.

    Attributes:
        name: "conv1.A"; "conv1.A0" and so on are the blocks along the diagonal of a large factor.
        order: of each matrix; counts the bias coordinate.
        count: of matrices. Those of order 1 are a diagonal where the layer has no groups.
        rank: eigenvectors that are kept of each; None for all.
    """

    name: str
    order: int
    count: int = 1
    rank: int | None = None

    @cached_property
    def size(self) -> int:
        """Order of the factor as one matrix."""
        return self.count * self.order

    @property
    def triangle(self) -> Shape:
        """The shape of its packed triangles."""
        return self._several(triangle_shape(self.order))

    def block(self, dimensions: int) -> Shape:
        """The shape of it as a vector, `[order]`, or as a square, `[order, order]`."""
        return self._several((self.order,) * dimensions)

    def part(self, dimensions: int) -> Shape:
        """The shape of a block of its decomposition: as `block`, but for one of low rank.

        That has the `rank` eigenvectors that are kept, `[order, rank]`, and `[rank + 1]` values:
        the mean of the others before their own.
        """
        if self.rank is None:
            return self.block(dimensions)
        return self._several((self.rank + 1,) if dimensions == 1 else (self.order, self.rank))

    @property
    def values(self) -> int:
        """Eigenvalues that differ, of each matrix."""
        return self.order if self.rank is None else self.rank + 1

    def work(self, power: int = 3) -> int:
        """Operations of a decomposition, in units of `order^3`, or elements (2)."""
        if power == 3 and self.rank is not None and few(self.rank, self.order):
            return 2 * self.count * self.order**2 * self.rank
        return self.count * self.order**power

    def _several(self, shape: Shape) -> Shape:
        return shape if self.count == 1 else (self.count, *shape)


@dataclass(frozen=True)
class LayerShape:
    """A layer's Kronecker factors, and the form of its gradient `[outputs, inputs]`.

    Attributes:
        name: the module's name in the model.
        inputs: order of the input factor A; counts the bias coordinate.
        outputs: order of the output factor G.
        groups: parts of the layer that share no weight, each with factors of these orders.
        sides: the factors that it has; the identity stands for one that is missing.
        diagonal: of `sides`, those of which only the diagonal is kept.
        largest: order above which a factor falls into equal blocks along its diagonal, each a
            factor of its own, that are decomposed apart; None for no such order.
        rank: of a factor (or block) of a larger order only so many eigenvectors are kept; the rest
            of its spectrum counts with its mean eigenvalue. None for all. Eigenbases only.
        sharing: what a weight that an example uses at several positions is taken for: "expand",
            each position is an example; "reduce", an example has the mean of their inputs and the
            sum of their gradients [Eschenhagen et al. 2023]. Calls of a module count one by one.
        rescaled: whether solver="ekfac" estimates eigenvalues of `G (x) A` from gradients of single
            examples; where not, they stay the products of those of G and A.
        solver: what is made of its factors; None: the run's.
    """

    name: str
    inputs: int
    outputs: int
    groups: int = 1
    sides: Literal["AG", "A", "G"] = "AG"
    diagonal: Literal["", "A", "G", "AG"] = ""
    largest: int | None = None
    rank: int | None = None
    sharing: Literal["expand", "reduce"] = "expand"
    rescaled: bool = True
    solver: str | None = None

    @property
    def gradient(self) -> Shape:
        """`[outputs, inputs]`, or of several groups `[groups, outputs, inputs]`."""
        own = (self.outputs, self.inputs)
        return own if self.groups == 1 else (self.groups, *own)

    @property
    def denominators(self) -> Shape:
        """Shape of the products of eigenvalues: the gradient's, but for sides of low rank."""
        outputs, inputs = (self._values(side) for side in "GA")
        return (*self.gradient[:-2], outputs, inputs)

    @property
    def factors(self) -> tuple[FactorShape, ...]:
        """All factors, A's before G's."""
        return tuple(factor for side in self.sides for factor in self.side(side))

    def side(self, side: str) -> tuple[FactorShape, ...]:
        """The factors that stand for A or for G; none if that is the identity."""
        if side not in self.sides:
            return ()
        name, order = f"{self.name}.{side}", self.inputs if side == "A" else self.outputs
        if side in self.diagonal:
            return (FactorShape(name, 1, self.groups * order),)
        parts = math.ceil(order / (self.largest or order))
        if parts == 1:
            return (self._factor(name, order),)
        ends = [order * number // parts for number in range(parts + 1)]
        return tuple(
            self._factor(f"{name}{number}", stop - start)
            for number, (start, stop) in enumerate(zip(ends, ends[1:]))
        )

    def products(self) -> list[int]:
        """Multiplications that the gradient takes with each side that is not a diagonal.

        With A, it has the rows that multiplying with G has left beside its own.
        """
        across = {"A": self.outputs + sum(f.rank or 0 for f in self.side("G")), "G": self.inputs}
        whole = (side for side in self.sides if side not in self.diagonal)
        return [across[s] * sum(map(_elements, self.side(s))) for s in whole]

    def _values(self, side: str) -> int:
        """Eigenvalues of a side that differ, of each group."""
        if side not in self.sides or side in self.diagonal:
            return self.inputs if side == "A" else self.outputs
        return sum(factor.values for factor in self.side(side))

    def _factor(self, name: str, order: int) -> FactorShape:
        kept = self.rank if self.rank is not None and self.rank < order else None
        return FactorShape(name, order, self.groups, kept)


def _elements(factor: FactorShape) -> int:
    """Elements of the matrices that gradients are multiplied by."""
    return factor.count * factor.order * (factor.rank or factor.order)


def check_layers(
    table: Sequence[Combination], layers: Iterable[LayerShape], choices: Choices
) -> None:
    """Return if `choices` meet the needs of `table` with the solver and the rank of each layer.

    Raises:
        ValueError: see `check`; the text names a layer with a solver or a rank of its own.
    """
    for layer in layers:
        own = {"solver": layer.solver or choices["solver"], "rank": layer.rank}
        usual = own == {"solver": choices["solver"], "rank": None}
        check(table, {**choices, **own}, "" if usual else f" of layer {layer.name!r}")


def few(rank: int, order: int) -> bool:
    """Whether so few eigenvectors take less time than all of them, see `leading_eigenbasis`."""
    return 4 * rank <= order


def count_of(name: str) -> str:
    """Return the name of the block that holds how many examples, or how much weight, a sum has."""
    return f"{name}#"


HUGE = 16384
"""Order above which `usual_rule` keeps a diagonal; the whole matrix has a gigabyte."""


def usual_rule(layer: LayerShape) -> LayerShape:
    """Whole factors, but a diagonal for one of more than `HUGE` inputs or outputs.

    A rule of your own starts from it and replaces what it likes:

        def rule(layer):
            return dataclasses.replace(mpikfac.usual_rule(layer), largest=1024)
    """
    orders = {"A": layer.inputs, "G": layer.outputs}
    huge = (side for side in layer.sides if side in layer.diagonal or orders[side] > HUGE)
    return replace(layer, diagonal="".join(huge))  # type: ignore[arg-type]


def forward_only(layer: LayerShape) -> LayerShape:
    """The layer without G; a bias alone has nothing else and keeps it [Benzing 2022]."""
    if "A" not in layer.sides:
        return layer
    return replace(layer, sides="A", diagonal="A" if "A" in layer.diagonal else "")
