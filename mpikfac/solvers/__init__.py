"""From a factor to a decomposition, and from a gradient to a direction; a file per solver."""

from __future__ import annotations

from mpikfac.solvers.decompose import decomposed, decomposed_together
from mpikfac.solvers.eigen import Eigen, eigenbasis, products_of_values, values_in_basis
from mpikfac.solvers.eigenvalues import beside, mean_eigenvalues
from mpikfac.solvers.ekfac import Ekfac, squares_in_bases
from mpikfac.solvers.inverse import Inverse, damped_inverse, error_of_inverse, tikhonov_share
from mpikfac.solvers.rank_one import RankOne
from mpikfac.solvers.registry import (
    SOLVERS,
    SolverName,
    forms,
    make_plan,
    named_solver,
    solvers_by_name,
)
from mpikfac.solvers.solver import Held, Means, Solver

__all__ = [
    "SOLVERS",
    "Eigen",
    "Ekfac",
    "Held",
    "Inverse",
    "Means",
    "RankOne",
    "Solver",
    "SolverName",
    "beside",
    "damped_inverse",
    "decomposed",
    "decomposed_together",
    "eigenbasis",
    "error_of_inverse",
    "forms",
    "make_plan",
    "mean_eigenvalues",
    "named_solver",
    "products_of_values",
    "solvers_by_name",
    "squares_in_bases",
    "tikhonov_share",
    "values_in_basis",
]
