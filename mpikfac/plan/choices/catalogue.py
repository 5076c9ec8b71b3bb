"""Published methods of distributing training over ranks and over time, by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from mpikfac.plan.choices.assignment import CommOpt, HybridOpt, MemOpt
from mpikfac.plan.choices.bfloat16 import BFloat16
from mpikfac.plan.choices.compression import Compression
from mpikfac.plan.choices.int8 import Int8
from mpikfac.plan.choices.refresh import Refresh
from mpikfac.plan.choices.strategy import Strategy
from mpikfac.plan.choices.transport import Transport


@dataclass(frozen=True)
class Named:
    """A published method of distributing training, with or without K-FAC.

    Attributes:
        what: the method, in one sentence.
        source: the publication, as in docs/reference/references.md.
        cost: the bytes that a rank sends in addition to those for averaging gradients, if values
            are float32 and collectives are rings. The terms are, in this order, for new factors,
            for a refresh and for every step. There are `P` ranks and `w` workers. 4F, 4T and 4V are
            the bytes of all factors as squares, triangles and vectors, 4N are those of all
            gradients, and 4R those of the matrices that replace gradients.
        strategy: the choices, for any number of ranks.
        same: whether the estimator is the same as on one rank. If so, results equal those of a
            single process with the joined batch and the same `refresh`, provided that shards have
            equal sizes or statistics use all examples (`subsample=1`).
        settings: settings of `KFAC` that belong to the method.
    """

    what: str
    source: str
    cost: str
    strategy: Strategy
    same: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)


_EIGEN = {"preconditioner": "eigen"}
_PUBLISHED = Transport(packing="square", fusion=1)
_DEFERRED = Transport(reduce_factors_at="inverses")
_SHARDED = MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)
COMM_OPT_COST = "2 (P-1)/P 4T + (P-1)/P 4F + 0"

NAMED: dict[str, Named] = {
    "kfac-opt": Named(
        "Factors are averaged everywhere and decomposed one by one on their owners; every rank "
        "gets all bases and preconditions every layer",
        "SC20",
        "2 (P-1)/P 4F + (P-1)/P 4F + 0",
        Strategy(CommOpt(colocate_factors=False), transport=_PUBLISHED),
        settings=_EIGEN,
    ),
    "kfac-lw": Named(
        "Factors are averaged everywhere; a layer's owner decomposes and preconditions it and "
        "sends the result to all ranks",
        "SC20",
        "2 (P-1)/P 4F + 0 + (P-1)/P 4N",
        Strategy(MemOpt(), transport=_PUBLISHED),
        settings=_EIGEN,
    ),
    "comm-opt": Named(
        "K-FAC-opt with triangles and one message per stage",
        "TPDS22",
        COMM_OPT_COST,
        Strategy(CommOpt()),
    ),
    "mem-opt": Named(
        "K-FAC-lw with triangles and one message per stage",
        "TPDS22",
        "2 (P-1)/P 4T + 0 + (P-1)/P 4N",
        Strategy(MemOpt()),
    ),
    "hybrid": Named(
        "Ranks form a grid: a layer's workers receive its bases, and each of them sends the "
        "preconditioned gradient to some other ranks; `grad_workers` or `grad_worker_fraction` "
        "sets the number of workers, by default half of the ranks",
        "KAISA, SC21",
        "2 (P-1)/P 4T + (w-1)/P 4F + (P-w)/P 4N",
        Strategy(HybridOpt()),
    ),
    "sharded-optimizer": Named(
        "Gradients and factors are reduced to a layer's owner, which decomposes, preconditions and "
        "updates it; weights are gathered",
        "CVPR19",
        "(P-1)/P 4T + 0 + 0",
        Strategy(_SHARDED),
    ),
    "spd-kfac": Named(
        "Factors are averaged during the backward pass, with three layers per message, and small "
        "ones are decomposed everywhere",
        "SPD-KFAC",
        "2 (P-1)/P 4T + (P-1)/P 4F of the large ones + 0",
        Strategy(
            CommOpt(replicate_below=128, colocate_factors=False),
            transport=Transport(fusion=3, overlap=True),
        ),
    ),
    "dp-kfac": Named(
        "An owner computes factors from its own shard of the batch; none are sent",
        "DP-KFAC",
        "0 + 0 + (P-1)/P 4N",
        Strategy(MemOpt(factor_reduction="local")),
        same=False,
    ),
    "deferred-allreduce": Named(
        "COMM-OPT in which each rank averages the factors of its own shards over time; factors "
        "are averaged over ranks only before they are decomposed",
        "mpikfac",
        "0 + 2 (P-1)/P 4T + (P-1)/P 4F + 0",
        Strategy(CommOpt(), transport=_DEFERRED),
    ),
    "deferred-sharded": Named(
        "`sharded-optimizer`, and factors are averaged over ranks only before they are decomposed",
        "mpikfac",
        "0 + (P-1)/P 4T + 0",
        Strategy(_SHARDED, transport=_DEFERRED),
    ),
    "balanced-shards": Named(
        "`deferred-sharded` with reductions and gathers of equal shards, which are passed on to "
        "and from the owners; `ranks_per_node` is the number of ranks per node",
        "mpikfac",
        "0 + (P-1)/P 4T + 0",
        Strategy(_SHARDED, transport=replace(_DEFERRED, balanced_shards=True)),
    ),
    "staggered": Named(
        "`deferred-sharded` in which each of five steps refreshes some of the layers, so that no "
        "step takes much longer than the others",
        "mpikfac",
        "0 + (P-1)/P 4T + 0",
        Strategy(_SHARDED, refresh=Refresh(stagger=5), transport=_DEFERRED),
    ),
    "stale-inverse": Named(
        "COMM-OPT that decomposes in the background and uses bases one step later",
        "LBANN",
        COMM_OPT_COST,
        Strategy(CommOpt(), refresh=Refresh(staleness=1)),
    ),
    "comm-opt-bf16": Named(
        "COMM-OPT in which factors, bases and gradients are sent in bfloat16",
        "mpikfac",
        "2 (P-1)/P 2T + (P-1)/P 2F - 2 (P-1)/P 2N",
        Strategy(
            CommOpt(),
            compression=Compression(gradients=BFloat16(), factors=BFloat16(), inverses=BFloat16()),
        ),
        same=False,
    ),
    "comm-opt-int8": Named(
        "COMM-OPT in which factors and gradients are sent in 8 bits with error feedback, and bases "
        "in bfloat16",
        "mpikfac",
        "2 (P-1)/P 1.06T + (P-1)/P 2F - 2 (P-1)/P 2.94N",
        Strategy(
            CommOpt(),
            compression=Compression(gradients=Int8(), factors=Int8(), inverses=BFloat16()),
        ),
        same=False,
    ),
    "event-driven": Named(
        "COMM-OPT in which a factor is decomposed again only if its inverse is off by more than "
        "10 %, or if its eigenvectors leave more than 10 % off the diagonal",
        "mpikfac",
        COMM_OPT_COST,
        Strategy(CommOpt(), refresh=Refresh(tolerance=0.1)),
    ),
    "eva": Named(
        "Factors are squares of mean vectors, averaged everywhere; every rank preconditions every "
        "layer, and nothing is decomposed",
        "Eva",
        "2 (P-1)/P 4V + 0 + 0",
        Strategy(CommOpt()),
        same=False,
        settings={"preconditioner": "eva", "inv_update_steps": 1},
    ),
}
"""Published methods of distributing training, by name; `mpikfac.lab` adds more."""


def get_strategy(name: str) -> tuple[Strategy, dict[str, Any]]:
    """Return the strategy with the given name, and the arguments of `KFAC` that belong to it.

        strategy, settings = mpikfac.get_strategy("kfac-opt")
        mpikfac.KFAC(model, optimizer, comm, strategy, **settings)

    Raises:
        ValueError: the name is unknown.
    """
    if name not in NAMED:
        near = get_close_matches(name, NAMED, n=1)
        known = f"did you mean {near[0]!r}?" if near else f"the names are {', '.join(NAMED)}"
        without_lab = " (`import mpikfac.lab` adds the lab's)"
        more = "" if "mpikfac.lab" in sys.modules else without_lab
        raise ValueError(f"strategy={name!r} is unknown; {known}{more}")
    return NAMED[name].strategy, dict(NAMED[name].settings)


def strategy_of(strategy: Strategy | str | None) -> tuple[Strategy, dict[str, Any]]:
    """Return a strategy, passed directly or by name, and the settings of `KFAC` that belong to it.

    Args:
        strategy: the strategy, or its name; None for COMM-OPT.

    Raises:
        ValueError: the name is unknown, or the object is not a strategy.
    """
    if isinstance(strategy, str):
        return get_strategy(strategy)
    strategy = Strategy() if strategy is None else strategy
    if not isinstance(strategy, Strategy):
        raise ValueError(f"strategy={strategy!r} must be a Strategy, the name of one, or None")
    return strategy, {}
