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
        "basis_dtype",
        None,
        {"basis_wire": None},
        "decompositions that are kept in a dtype also travel in the dtype",
    ),
)
"""The needs of the settings of `KFAC`; the needs of a solver stand in the solver's file."""
