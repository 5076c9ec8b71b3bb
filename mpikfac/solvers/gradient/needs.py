"""The needs of solvers whose factors come from the averaged gradient."""

from __future__ import annotations

from collections.abc import Mapping

from mpikfac.plan import Combination, OneOf

NO_STATISTICS = {
    **{"fisher": "empirical", "samples": 1, "subsample": None, "start": "first"},
    **{"normalization": "expand", "statistics_dtype": None},
}
NOT_SENT = {
    "assignment.factor_reduction": OneOf(("allreduce", "reduce_scatter")),
    **{"transport.reduce_factors_at": "factors", "transport.packing": "triangle"},
    **{"compression.factors": None, "sync.factor_aggregation": "mean", "refresh.servers": 0},
}
NO_REPLICAS = {"sync.local_steps": False}


def needs_of(name: str, grafting: Mapping[str, object]) -> tuple[Combination, ...]:
    """Return the needs of a solver of the averaged gradient.

    Args:
        grafting: the grafting that the solver goes with.
    """
    one, usual = (name,), {"refresh.tolerance": 0, "adapted": None, "rank": None}
    return (
        Combination("solver", one, NO_STATISTICS, "no statistics of the passes are recorded"),
        Combination("solver", one, NOT_SENT, "factors are not sent"),
        Combination(
            "solver",
            one,
            {"assignment.colocate_factors": True, "assignment.shard_optimizer": False},
            "an owner makes factors of the gradient that the owner holds",
            any_of=True,
        ),
        Combination(
            "solver", one, {"sync.local_steps": False}, "factors are of averaged gradients"
        ),
        Combination("solver", one, usual, "nothing predicts the loss, or the misfit of a root"),
        Combination("solver", one, grafting, "other grafting undoes the direction"),
    )
