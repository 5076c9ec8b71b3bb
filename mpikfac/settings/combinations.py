"""Which settings of K-FAC need which other choices, as a table."""

from __future__ import annotations

from mpikfac.plan import Combination

SETTINGS: tuple[Combination, ...] = (
    Combination(
        "graft",
        None,
        {"adapted": None},
        "grafting replaces the length that an adapted damping changes",
    ),
    Combination(
        "quadratic",
        (True,),
        {"update": "everyone"},
        "the quadratic model multiplies the whole step by derivatives of the outputs",
    ),
    Combination(
        "quadratic",
        (True,),
        {"parts": None},
        "sums of products over ranks would depend on the number of ranks",
    ),
    Combination(
        "quadratic",
        (True,),
        {"relative": False},
        "the quadratic model has the same damping for all parameters",
    ),
    Combination(
        "basis_dtype",
        None,
        {"basis_wire": None},
        "decompositions that are kept in a dtype also travel in the dtype",
    ),
)
"""The needs of the settings of `KFAC`; the needs of a solver stand in the solver's file."""
