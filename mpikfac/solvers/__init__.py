"""From a factor to a decomposition, and from a gradient to a direction; a file per solver."""

from mpikfac.solvers.decompose import decomposed as decomposed
from mpikfac.solvers.decompose import decomposed_together as decomposed_together
from mpikfac.solvers.eigen import Eigen as Eigen
from mpikfac.solvers.eigen import eigenbasis as eigenbasis
from mpikfac.solvers.eigen import products_of_values as products_of_values
from mpikfac.solvers.eigen import values_in_basis as values_in_basis
from mpikfac.solvers.eigenvalues import mean_eigenvalues as mean_eigenvalues
from mpikfac.solvers.eigenvalues import repeated as repeated
from mpikfac.solvers.ekfac import Ekfac as Ekfac
from mpikfac.solvers.ekfac import squares_in_bases as squares_in_bases
from mpikfac.solvers.gradient import Muon as Muon
from mpikfac.solvers.gradient import Shampoo as Shampoo
from mpikfac.solvers.inverse import Inverse as Inverse
from mpikfac.solvers.inverse import damped_inverse as damped_inverse
from mpikfac.solvers.inverse import error_of_inverse as error_of_inverse
from mpikfac.solvers.inverse import tikhonov_share as tikhonov_share
from mpikfac.solvers.rank_one import RankOne as RankOne
from mpikfac.solvers.registry import SOLVERS as SOLVERS
from mpikfac.solvers.registry import SolverName as SolverName
from mpikfac.solvers.registry import forms as forms
from mpikfac.solvers.registry import make_plan as make_plan
from mpikfac.solvers.registry import named_solver as named_solver
from mpikfac.solvers.registry import solvers_by_name as solvers_by_name
from mpikfac.solvers.solver import Held as Held
from mpikfac.solvers.solver import Means as Means
from mpikfac.solvers.solver import Solver as Solver
