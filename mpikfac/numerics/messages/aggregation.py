"""Aggregate shards of all ranks' vectors with weights that depend on the whole vectors.

Each rank has a shard of every vector. The inner products are all-reduced, so all ranks compute the
same weights. Rules can have a state that they keep from step to step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpikfac.plan import Aggregation


class ByVector:
    """Aggregate shards of vectors with a stateless rule; the base class for rules with state.

    Attributes:
        memory: tensors that the rule keeps from step to step, by name; initially zero.
    """

    def __init__(self, rule: Aggregation, ranks: int, like: Tensor, first: int = 0) -> None:
        """Create the initial state.

        Args:
            like: a shard of a vector, `[n]`.
            first: the offset of the shard in a vector.
        """
        self.rule: Any = rule
        self.first = first
        self.memory: dict[str, Tensor] = self._empty(ranks, like)

    def _empty(self, ranks: int, like: Tensor) -> dict[str, Tensor]:
        return {}

    def reset(self) -> None:
        """Discard the state of earlier steps."""
        for tensor in self.memory.values():
            tensor.zero_()

    def products(self, parts: Tensor) -> Tensor:
        """Return the inner products of `rows`, `[..., rows, rows]` in float64, to be all-reduced.

        Args:
            parts: the shards of all ranks' vectors, `[ranks, n]`.
        """
        wide = self.rows(parts).double()
        return wide @ wide.mT

    def rows(self, parts: Tensor) -> Tensor:
        """Return the rows `[..., rows, n]` whose inner products are all-reduced: here, `parts`."""
        return parts

    def combine(self, products: Tensor, parts: Tensor) -> Tensor:
        """Return this rank's shard of the aggregated vector, `[n]`.

        Args:
            products: the sum of the `products` of all shards.
            parts: the shards of all ranks' vectors, `[ranks, n]`.
        """
        return combined(parts, self.rule.weights(products))


def by_vector(rule: Aggregation, ranks: int, like: Tensor, first: int = 0) -> ByVector:
    """Return the object that applies a rule to shards; the arguments are those of `ByVector`."""
    return rule.combiner(ranks, like, first) or ByVector(rule, ranks, like, first)


def combined(vectors: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of `vectors` `[ranks, n]`, ignoring vectors with weight 0."""
    chosen = weights != 0
    return weights[chosen].to(vectors.dtype) @ vectors[chosen]
