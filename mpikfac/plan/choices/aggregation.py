"""Rules that combine the values of all ranks into one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from mpikfac.plan.choices.choice import Choice


@dataclass(frozen=True, kw_only=True, repr=False)
class Aggregation(Choice):
    """Combine the vectors of all ranks, some of which may be faulty, into one.

    A coordinate-wise rule defines `combine`. Other rules give each rank a weight: `products` is the
    number of inner products of the ranks' vectors that the rule needs, and `weights` returns the
    weights. Vectors and products are tensors.

    Attributes:
        sums: whether the rule is a sum over ranks, which MPI computes.
        of: what the rule can aggregate: "vectors" (of gradients or weights) and "factors".
    """

    sums: ClassVar[bool] = False
    of: ClassVar[tuple[str, ...]] = ("vectors",)

    def check_ranks(self, ranks: int) -> None:
        """Check that there are enough ranks to identify the faulty ones.

        Raises:
            ValueError: there are too few ranks.
        """

    def products(self, ranks: int) -> int:
        """Return the number of inner products that the rule needs; 0 for coordinate-wise rules."""
        return 0

    def remembered(self, ranks: int) -> int:
        """Return the number of vectors that the rule keeps from step to step."""
        return 0

    def combine(self, vectors: Any) -> Any:
        """Combine the vectors of all ranks, `[ranks, n]`, into one, `[n]`, coordinate-wise."""
        raise NotImplementedError

    def weights(self, products: Any) -> Any:
        """Return the vectors' weights `[ranks]`, given their inner products `[ranks, ranks]`."""
        raise NotImplementedError

    def combiner(self, ranks: int, like: Any, first: int) -> Any:
        """Return an object that combines shards using inner products, and remembers earlier steps.

        It is a `mpikfac.numerics.ByVector` with the same arguments. Return None if the rule needs
        nothing but `weights`.
        """
        return None

    def attach(self, site: Any) -> Iterable[Any]:
        """Return the parts of the trainer that keep what the rule remembers between steps.

        Args:
            site: the rank's `mpikfac.engine.Site`.
        """
        return ()

    def of_factors(self, blocks: tuple[tuple[int, int, int], ...]) -> FactorAggregation:
        """Return the rule for messages that contain factors, a `FactorAggregation`.

        Args:
            blocks: the start and stop of each factor's elements, and the position of its number of
                examples.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class FactorAggregation:
    """A rule that combines blocks of statistics, each with its number of examples.

    Attributes:
        blocks: the start and stop of each block's elements, and the position of its number of
            examples.
    """

    blocks: tuple[tuple[int, int, int], ...]

    def products(self, ranks: int) -> int:
        """Return the number of inner products that the rule needs."""
        raise NotImplementedError

    def combiner(self, first: int) -> Any:
        """Return an object that combines the shards that start at element `first`.

        Its `products(parts)` returns inner products in float64, to be reduced over ranks, and its
        `combine(products, parts)` returns the shard of the result, `[n]`; parts are `[ranks, n]`.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, repr=False)
class Mean(Aggregation):
    """Average vectors over all ranks, and factors over the examples of all ranks."""

    name: ClassVar[str] = "mean"
    sums: ClassVar[bool] = True
    of: ClassVar[tuple[str, ...]] = ("vectors", "factors")
