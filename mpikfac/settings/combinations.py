"""Which settings of K-FAC need which other choices, as a table."""

from __future__ import annotations

from mpikfac.plan import Combination, OneOf

SETTINGS: tuple[Combination, ...] = (
    Combination(
        "graft",
        None,
        {"adapted": None},
        "grafting replaces the length that an adapted damping changes",
    ),
    Combination(
        "basis_dtype",
        None,
        {"basis_wire": None},
        "decompositions that are kept in a dtype also travel in the dtype",
    ),
    Combination(
        "solver",
        ("rank-one",),
        {"relative": False},
        "a relative damping takes mean eigenvalues, and vectors have no eigenvalues",
    ),
    Combination(
        "solver",
        ("rank-one",),
        {"fisher": OneOf(("empirical", "forward-only"))},
        "mean gradients are 0 at labels that the model gives",
    ),
    Combination(
        "solver",
        ("rank-one",),
        {"start": "first", "statistics_dtype": None, "factor_dtype": None, "basis_dtype": None},
        "vectors are no matrices to start at the identity or to round",
    ),
    Combination(
        "solver",
        ("ekfac",),
        {"normalization": "expand", "fisher": OneOf(("empirical", "sampled", "exact"))},
        "scales are second moments of the gradients of single examples, as the gradients are",
    ),
)
"""The needs of the settings of `KFAC`."""
