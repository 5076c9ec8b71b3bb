"""Who decomposes factors, preconditions gradients and steps weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from mpikfac.plan.choices.checks import check_count, check_divides, divisors, make_plain, one_of
from mpikfac.plan.choices.choice import Choice

Reduction = Literal["allreduce", "reduce_scatter", "local"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Assignment(Choice):
    """The ranks that decompose the factors of a layer, precondition its gradient and step it.

    Attributes:
        assignment_strategy: the load that the assignment of factors of order n balances over ranks:
            "compute" (n^3) or "memory" (n^2).
        colocate_factors: one rank owns both factors of a layer, A and G; otherwise the factors may
            have two owners.
        replicate_below: the order below which every gradient worker of a layer decomposes a factor
            itself, so no decomposition is sent [SPD-KFAC, Shi et al. 2021]; 0 for no factors.
        factor_reduction: where factors are averaged. "allreduce": on all ranks. "reduce_scatter":
            on the rank that decomposes the factor, its owner; other ranks keep no factors. "local":
            nowhere; an owner uses its own batch only, which is another estimator [DP-KFAC, Zhang et
            al. 2022].
        shard_optimizer: gradients are reduced to the owner of a layer, which preconditions and
            steps the layer; then weights are gathered [ZeRO-1, Rajbhandari et al. 2020]. Otherwise
            each rank steps the whole model.
    """

    assignment_strategy: Literal["compute", "memory"] = "compute"
    colocate_factors: bool = True
    replicate_below: int = 0
    factor_reduction: Reduction = "allreduce"
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        make_plain(self)
        one_of("assignment_strategy", self.assignment_strategy, ("compute", "memory"))
        one_of("colocate_factors", self.colocate_factors, (True, False))
        check_count("replicate_below", self.replicate_below, 0)
        one_of("factor_reduction", self.factor_reduction, ("allreduce", "reduce_scatter", "local"))
        one_of("shard_optimizer", self.shard_optimizer, (True, False))

    def workers(self, ranks: int) -> int:
        """Return how many of `ranks` ranks precondition a layer: its gradient workers.

        Raises:
            ValueError: there is no such number for so many ranks.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, repr=False)
class CommOpt(Assignment):
    """K-FAC-opt of SC20, COMM-OPT of KAISA: every rank preconditions every layer."""

    name: ClassVar[str] = "comm-opt"

    def workers(self, ranks: int) -> int:
        """Return `ranks`."""
        return ranks


@dataclass(frozen=True, kw_only=True, repr=False)
class MemOpt(Assignment):
    """K-FAC-lw of SC20, MEM-OPT of KAISA: one rank preconditions a layer."""

    name: ClassVar[str] = "mem-opt"

    def workers(self, ranks: int) -> int:
        """Return 1."""
        return 1


@dataclass(frozen=True, kw_only=True, repr=False)
class HybridOpt(Assignment):
    """HYBRID-OPT of KAISA: some of the ranks precondition a layer.

    Attributes:
        grad_workers: the number of ranks that precondition a layer; divides the number of ranks.
        grad_worker_fraction: the same as a share of the ranks; at least one rank. At most one of
            both is given; without any, half of the ranks precondition a layer.
    """

    name: ClassVar[str] = "hybrid-opt"

    grad_workers: int | None = None
    grad_worker_fraction: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grad_workers is not None:
            check_count("grad_workers", self.grad_workers, 1)
            if self.grad_worker_fraction is not None:
                raise ValueError(
                    f"grad_workers={self.grad_workers} and grad_worker_fraction="
                    f"{self.grad_worker_fraction} exclude each other; leave one of them out"
                )
        elif not 0 < self._fraction <= 1:
            raise ValueError(
                f"grad_worker_fraction={self.grad_worker_fraction} must be above 0 and at most 1"
            )

    @property
    def _fraction(self) -> float:
        return 0.5 if self.grad_worker_fraction is None else self.grad_worker_fraction

    def workers(self, ranks: int) -> int:
        """Return how many of `ranks` ranks precondition a layer.

        Raises:
            ValueError: the number does not divide the ranks, or the share is no whole number.
        """
        if self.grad_workers is not None:
            check_divides("assignment.grad_workers", self.grad_workers, ranks)
            return self.grad_workers
        share = ranks * self._fraction
        count = max(1, round(share))
        if share > 1 and (not math.isclose(count, share) or ranks % count):
            raise ValueError(
                f"assignment.grad_worker_fraction={self._fraction} of {ranks} ranks is "
                f"no whole number of workers; try one of {[d / ranks for d in divisors(ranks)]}"
            )
        return count
