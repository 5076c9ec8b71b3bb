"""The shapes of layers: Kronecker factors and the form of the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from mpikfac.plan.choices import Choices, Combination, check
from mpikfac.plan.layout import Shape, triangle_shape


@dataclass(frozen=True)
class Form:
    """The description of a preconditioner as plain data: everything a plan needs.

    Attributes:
        name: the preconditioner's name, for example "eigen".
        blocks: for each block of a decomposition, by name, how many of its dimensions have the size
            of the factor's order. Gradients are multiplied by the first block. A preconditioner
            without blocks has no factors.
        of: where factors come from: "statistics" of the passes, reduced over ranks, or the averaged
            "gradient", from which owners compute the factors without messages.
        sides: the sides with factors. "A": the identity replaces G, unless only a bias is trained.
        keeps: "matrix": sums and averages of a factor are packed triangles. "vector": they are
            vectors, whose squares are the factors; vectors are used as blocks without a
            decomposition.
        damped: whether damping is part of a decomposition; the factor's owner computes it.
        both: whether the damping of A depends on G, and the damping of G on A.
        denominators: whether damped products of a layer's eigenvalues ("values") are kept.
        rescaled: whether eigenvalues of `G (x) A` are estimated from per-example gradients.
        work: the exponent with which the operations of a decomposition grow with the order.
        products: how many times each side multiplies the gradient to compute a direction.
        whitened: whether the gradient is multiplied by the sides before its factors are computed.
        timed_as: the name of another preconditioner whose measured times apply; "" for the times of
            this preconditioner.
        kept_as: the name of the decompositions in a state, if a setting of the preconditioner
            changes the decompositions; "" for `name`.
        needs: what the preconditioner requires of other choices.
    """

    name: str
    blocks: Mapping[str, int]
    of: Literal["statistics", "gradient"] = "statistics"
    sides: Literal["AG", "A"] = "AG"
    keeps: Literal["matrix", "vector"] = "matrix"
    damped: bool = False
    both: bool = False
    denominators: bool = False
    rescaled: bool = False
    work: int = 3
    products: int = 1
    whitened: bool = False
    timed_as: str = ""
    kept_as: str = ""
    needs: tuple[Combination, ...] = field(default=(), repr=False)

    @cached_property
    def vector(self) -> bool:
        """Whether factors are kept as vectors."""
        return self.keeps == "vector"

    @cached_property
    def kept(self) -> str:
        """The name of the decompositions in a state; runs with another name do not load them."""
        return self.kept_as or self.name


@dataclass(frozen=True)
class FactorShape:
    """The shape of a symmetric matrix, or of several of equal order, as for groups or a diagonal.

    Attributes:
        name: the factor's name, such as "conv1.A"; "conv1.A0", "conv1.A1", ... are blocks along the
            diagonal of a large factor.
        order: the order of a matrix, including the bias coordinate.
        count: the number of matrices. Without groups, matrices of order 1 together form a
            diagonal matrix.
        rank: the number of eigenvectors kept per matrix; None for all.
    """

    name: str
    order: int
    count: int = 1
    rank: int | None = None

    @cached_property
    def size(self) -> int:
        """The order of the single block-diagonal matrix that consists of all matrices."""
        return self.count * self.order

    @property
    def triangle(self) -> Shape:
        """The shape in which the lower triangles of the matrices are packed."""
        return self._several(triangle_shape(self.order))

    def block(self, dimensions: int) -> Shape:
        """Return the shape of vectors `[order]`, or of squares `[order, order]`, one per matrix."""
        return self._several((self.order,) * dimensions)

    def part(self, dimensions: int) -> Shape:
        """Return the shape of a block of the decomposition; with a full rank, that of `block`.

        With a low rank, `rank` eigenvectors `[order, rank]` are kept, and `[rank + 1]` values, of
        which the first is the mean of all dropped values.
        """
        if self.rank is None:
            return self.block(dimensions)
        return self._several((self.rank + 1,) if dimensions == 1 else (self.order, self.rank))

    @property
    def values(self) -> int:
        """The number of distinct eigenvalues of each matrix; all dropped ones count as one."""
        return self.order if self.rank is None else self.rank + 1

    def work(self, power: int = 3) -> int:
        """Return the operations of a decomposition or, with `power=2`, the number of elements.

        A full decomposition counts as `order^3` operations.
        """
        if power == 3 and self.rank is not None and few(self.rank, self.order):
            return 2 * self.count * self.order**2 * self.rank
        return self.count * self.order**power

    def _several(self, shape: Shape) -> Shape:
        return shape if self.count == 1 else (self.count, *shape)


@dataclass(frozen=True)
class LayerShape:
    """The shape of a layer: Kronecker factors, and the gradient `[outputs, inputs]`.

    Attributes:
        name: the module's name in the model.
        inputs: the order of the input factor A, including the bias coordinate.
        outputs: the order of the output factor G.
        groups: the number of parts of the layer that share no weights; every group has factors of
            the orders `inputs` and `outputs`.
        sides: the factors of the layer; the identity replaces a missing factor. "" for
            preconditioners without factors.
        diagonal: the sides of which only the diagonal is kept.
        largest: the order above which a factor is cut into equal blocks along the diagonal; each
            block is a factor that is decomposed separately. None for no limit.
        rank: the number of eigenvectors to keep for a factor (or block) of a larger order; the
            rest of the spectrum is replaced by its mean. None for all. Eigenbases only.
        kfac_approx: how the positions at which an example uses a weight enter the factors.
            "expand": each position counts as an example. "reduce": each example contributes the
            mean of its inputs and the sum of its gradients over positions [Eschenhagen et al.
            2023]. Several calls of a module count separately.
        rescaled: whether preconditioner="ekfac" estimates the eigenvalues of `G (x) A` from
            per-example gradients; otherwise, they remain the products of the eigenvalues of G and
            A.
        preconditioner: the name of the layer's preconditioner; None for the run's preconditioner.
    """

    name: str
    inputs: int
    outputs: int
    groups: int = 1
    sides: Literal["AG", "A", "G", ""] = "AG"
    diagonal: Literal["", "A", "G", "AG"] = ""
    largest: int | None = None
    rank: int | None = None
    kfac_approx: Literal["expand", "reduce"] = "expand"
    rescaled: bool = True
    preconditioner: str | None = None

    @property
    def gradient(self) -> Shape:
        """The gradient's shape, `[outputs, inputs]`; with groups, `[groups, outputs, inputs]`."""
        matrix = (self.outputs, self.inputs)
        return matrix if self.groups == 1 else (self.groups, *matrix)

    @property
    def maps_vectors(self) -> bool:
        """Whether the layer maps vectors to vectors; an embedding and a scale do not."""
        return not self.diagonal and min(self.outputs, self.inputs) > 1

    @property
    def apart(self) -> tuple[int, ...]:
        """The orders of the parts of the smaller side that are made orthogonal separately."""
        side, order = min(("G", self.outputs), ("A", self.inputs), key=lambda pair: pair[1])
        factors = () if side in self.diagonal else self.side(side)
        return tuple(factor.order for factor in factors) or (order,)

    @property
    def denominators(self) -> Shape:
        """The shape of the eigenvalues' products: `gradient`, with smaller sides for a low rank."""
        outputs, inputs = (self._values(side) for side in "GA")
        return (*self.gradient[:-2], outputs, inputs)

    @property
    def factors(self) -> tuple[FactorShape, ...]:
        """All factors, those of A before those of G."""
        return tuple(factor for side in self.sides for factor in self.side(side))

    @property
    def owned(self) -> tuple[str, ...]:
        """The names of everything that has an owner: the factors, or the layer if it has none."""
        return tuple(factor.name for factor in self.factors) or (self.name,)

    def side(self, side: str) -> tuple[FactorShape, ...]:
        """Return the factors of A or of G; none if this side is the identity."""
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
        """Return how many multiplications the gradient's product with each non-diagonal side takes.

        The product with A comes second: the product with a low-rank block of G, its input, has
        more rows than the gradient.
        """
        across = {"A": self.outputs + sum(f.rank or 0 for f in self.side("G")), "G": self.inputs}
        matrices = (side for side in self.sides if side not in self.diagonal)
        return [across[s] * sum(map(_elements, self.side(s))) for s in matrices]

    def orthogonalising(self) -> list[int]:
        """Return the number of multiplications in each product that orthogonalises a direction."""
        if not self.maps_vectors:
            return []
        large = max(self.outputs, self.inputs)
        return [
            self.groups * multiplications
            for small in self.apart
            # One product with the gradient at each end; in between, one product for each of the
            # four polynomials, and three products from each polynomial to the next.
            for multiplications in [small**2 * large] * 2 + [small**3] * (4 + 3 * 3)
        ]

    def _values(self, side: str) -> int:
        """Return the number of distinct eigenvalues of a side in a group."""
        if side not in self.sides or side in self.diagonal:
            return self.inputs if side == "A" else self.outputs
        return sum(factor.values for factor in self.side(side))

    def _factor(self, name: str, order: int) -> FactorShape:
        rank = self.rank if self.rank is not None and self.rank < order else None
        return FactorShape(name, order, self.groups, rank)


def _elements(factor: FactorShape) -> int:
    """Return the number of elements of the matrices by which a factor multiplies gradients."""
    return factor.count * factor.order * (factor.rank or factor.order)


def check_layers(
    table: Sequence[Combination], layers: Iterable[LayerShape], choices: Choices
) -> None:
    """Check that `choices`, with each layer's preconditioner, rank and diagonal, satisfy `table`.

    Raises:
        ValueError: see `check`; the message names a layer that sets its own preconditioner, rank or
            diagonal.
    """
    for layer in layers:
        of_layer = {
            "preconditioner": layer.preconditioner or choices["preconditioner"],
            "rank": layer.rank,
        }
        of_layer |= {"diagonal": layer.diagonal}
        usual = of_layer == {
            "preconditioner": choices["preconditioner"],
            "rank": None,
            "diagonal": "",
        }
        check(table, choices | of_layer, "" if usual else f" of layer {layer.name!r}")


def few(rank: int, order: int) -> bool:
    """Return whether `rank` eigenvectors are computed faster than all; see `leading_eigenbasis`."""
    return 4 * rank <= order


def count_of(name: str) -> str:
    """Return the name of the block with the number of examples, or the weight, of sum `name`."""
    return f"{name}#"


HUGE = 16384
"""The order above which `default_rule` keeps only a diagonal; a full matrix would take 1 GiB."""


def default_rule(layer: LayerShape) -> LayerShape:
    """Return the layer with full factors, but with a diagonal for each side above order `HUGE`.

    A custom rule starts from this one and replaces fields:

        def rule(layer):
            return dataclasses.replace(mpikfac.default_rule(layer), largest=1024)
    """
    orders = {"A": layer.inputs, "G": layer.outputs}
    huge = (side for side in layer.sides if side in layer.diagonal or orders[side] > HUGE)
    return replace(layer, diagonal="".join(huge))  # type: ignore[arg-type]


def forward_only(layer: LayerShape) -> LayerShape:
    """Return the layer without G; a layer with only a bias has no A and keeps G [Benzing 2022]."""
    if "A" not in layer.sides:
        return layer
    return replace(layer, sides="A", diagonal="A" if "A" in layer.diagonal else "")
