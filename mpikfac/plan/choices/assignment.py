"""Which ranks decompose factors, precondition gradients and update weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from mpikfac.plan.choices.checks import check_count, check_divides, divisors, make_plain, one_of
from mpikfac.plan.choices.choice import Choice

Reduction = Literal["allreduce", "reduce_scatter", "local"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Assignment(Choice):
    """The ranks that decompose the factors of a layer, precondition its gradient and update it.

    Attributes:
        assignment_strategy: the load that is balanced over ranks when factors of order n are
            assigned: "compute" (n^3) or "memory" (n^2).
        colocate_factors: whether one rank owns both factors of a layer, A and G; otherwise, they
            can have different owners.
        replicate_below: the order below which factors are decomposed by every gradient worker of
            their layer, and not sent [SPD-KFAC, Shi et al. 2021]; 0 for no factors.
        factor_reduction: where factors are averaged. "allreduce": on all ranks. "reduce_scatter":
            on the owner of each factor, which decomposes it; other ranks keep no factors. "local":
            not at all; an owner uses only its own batch, which is a different estimator [DP-KFAC,
            Zhang et al. 2022].
        shard_optimizer: whether gradients are reduced to the owner of a layer, which preconditions
            them and updates the layer, after which weights are gathered [ZeRO-1, Rajbhandari et al.
            2020]. Otherwise, each rank updates the whole model.
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
        """Return the number of gradient workers, the ranks that precondition a layer.

        Raises:
            ValueError: the assignment does not work with `ranks` ranks.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, repr=False)
class CommOpt(Assignment):
    """Every rank preconditions every layer: K-FAC-opt of SC20, COMM-OPT of KAISA."""

    name: ClassVar[str] = "comm-opt"

    def workers(self, ranks: int) -> int:
        """Return `ranks`."""
        return ranks


@dataclass(frozen=True, kw_only=True, repr=False)
class MemOpt(Assignment):
    """One rank preconditions each layer: K-FAC-lw of SC20, MEM-OPT of KAISA."""

    name: ClassVar[str] = "mem-opt"

    def workers(self, ranks: int) -> int:
        """Return 1."""
        return 1


@dataclass(frozen=True, kw_only=True, repr=False)
class HybridOpt(Assignment):
    """Some of the ranks precondition each layer: HYBRID-OPT of KAISA.

    Attributes:
        grad_workers: the number of ranks that precondition a layer; it must divide the number of
            ranks.
        grad_worker_fraction: the same number as a fraction of all ranks; at least one rank is used.
            Set at most one of the two; by default, half of the ranks precondition a layer.
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
        """Return the number of gradient workers, the ranks that precondition a layer.

        Raises:
            ValueError: the number does not divide the number of ranks, or the fraction does not
                give a whole number of ranks.
        """
        if self.grad_workers is not None:
            check_divides("assignment.grad_workers", self.grad_workers, ranks)
            return self.grad_workers
        share = ranks * self._fraction
        count = max(1, round(share))
        if share > 1 and (not math.isclose(count, share) or ranks % count):
            raise ValueError(
                f"assignment.grad_worker_fraction={self._fraction} of {ranks} ranks is "
                f"not a whole number of workers; try one of {[d / ranks for d in divisors(ranks)]}"
            )
        return count
