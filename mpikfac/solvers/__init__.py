"""From a factor to a decomposition, and from a gradient to a direction."""

from __future__ import annotations

from mpikfac.solvers.decompose import decompositions
from mpikfac.solvers.eigen import (
    damped_denominators,
    damping_unit,
    eigenbasis,
    mean_eigenvalues,
    precondition,
    products_of_values,
    relatively_damped_denominators,
    values_in_basis,
)
from mpikfac.solvers.ekfac import squares_in_bases
from mpikfac.solvers.inverse import (
    damp,
    damped_inverse,
    error_of_inverse,
    precondition_by_inverse,
    tikhonov_share,
)
from mpikfac.solvers.rank_one import precondition_by_vectors

__all__ = [
    "damp",
    "damped_denominators",
    "damped_inverse",
    "damping_unit",
    "decompositions",
    "eigenbasis",
    "error_of_inverse",
    "mean_eigenvalues",
    "precondition",
    "precondition_by_inverse",
    "precondition_by_vectors",
    "products_of_values",
    "relatively_damped_denominators",
    "squares_in_bases",
    "tikhonov_share",
    "values_in_basis",
]
