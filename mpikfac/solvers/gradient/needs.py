"""The needs of solvers whose factors come from the averaged gradient."""

from __future__ import annotations

from mpikfac.plan import Combination, OneOf

NO_STATISTICS = {
    **{"fisher": "empirical", "samples": 1, "subsample": None, "start": "first"},
    **{"normalization": "expand", "statistics_dtype": None},
}
NOT_SENT = {
    **{"reduction": OneOf(("everyone", "owners")), "reduce_at": "factors", "packing": "triangle"},
    **{"factor_wire": None, "combine_factors": "mean", "curvature_servers": 0},
}


def needs_of(name: str, *lengths: str) -> tuple[Combination, ...]:
    """Return the needs of a solver of the averaged gradient.

    Args:
        lengths: the lengths of directions that the solver goes with.
    """
    one, usual = (name,), {"tolerance": 0, "adapted": None, "rank": None}
    return (
        Combination("solver", one, NO_STATISTICS, "no statistics of the passes are recorded"),
        Combination("solver", one, NOT_SENT, "factors are not sent"),
        Combination(
            "solver",
            one,
            {"colocate_factors": True, "update": "everyone"},
            "an owner makes factors of the gradient that the owner holds",
            any_of=True,
        ),
        Combination("solver", one, {"exchanged": "gradients"}, "factors are of averaged gradients"),
        Combination("solver", one, usual, "nothing predicts the loss, or the misfit of a root"),
        Combination("solver", one, {"length": OneOf(lengths)}, "other lengths undo the direction"),
    )
