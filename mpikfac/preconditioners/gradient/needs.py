"""The requirements of preconditioners whose factors come from the averaged gradient."""

from __future__ import annotations

from collections.abc import Mapping

from mpikfac.plan import Combination, OneOf

NO_STATISTICS = {
    **{"fisher_type": "empirical", "mc_samples": 1, "subsample": None, "initial_factor": "first"},
    **{"normalization": "expand", "statistics_dtype": None},
}
NOT_SENT = {
    "assignment.factor_reduction": OneOf(("allreduce", "reduce_scatter")),
    **{"transport.reduce_factors_at": "factors", "transport.packing": "triangle"},
    **{"compression.factors": None, "sync.factor_aggregation": "mean", "refresh.servers": 0},
}
NO_REPLICAS = {"sync.local_steps": False}


def needs_of(name: str, grafting: Mapping[str, object]) -> tuple[Combination, ...]:
    """Return the requirements of a preconditioner that uses the averaged gradient.

    Args:
        grafting: the settings of the grafting that the preconditioner requires, by name.
    """
    one, usual = (name,), {"refresh.tolerance": 0, "adapted": None, "rank": None}
    return (
        Combination(
            "preconditioner", one, NO_STATISTICS, "no statistics of the passes are recorded"
        ),
        Combination("preconditioner", one, NOT_SENT, "factors are not sent"),
        Combination(
            "preconditioner",
            one,
            {"assignment.colocate_factors": True, "assignment.shard_optimizer": False},
            "owners compute both factors from the averaged gradient",
            any_of=True,
        ),
        Combination(
            "preconditioner", one, {"sync.local_steps": False}, "factors need averaged gradients"
        ),
        Combination(
            "preconditioner", one, usual, "neither the loss nor a root's misfit is predicted"
        ),
        Combination("preconditioner", one, grafting, "other graftings would undo the direction"),
    )
