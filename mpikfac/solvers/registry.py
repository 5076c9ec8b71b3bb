"""The solvers by name. A new solver is a new file and a line in `SOLVERS`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass, replace

import torch

from mpikfac.plan import Form, LayerShape, Plan, Shape, Strategy, one_of, plan_for
from mpikfac.solvers.eigen import Eigen
from mpikfac.solvers.ekfac import Ekfac
from mpikfac.solvers.gradient import KLShampoo, Muon, NorMuon, Shampoo, Soap
from mpikfac.solvers.inverse import Inverse
from mpikfac.solvers.newton_muon import NewtonMuon
from mpikfac.solvers.rank_one import RankOne
from mpikfac.solvers.solver import Solver

SolverName = str
SOLVERS: dict[SolverName, Solver] = {
    "eigen": Eigen(),
    "ekfac": Ekfac(),
    "inverse": Inverse(),
    "unsplit-inverse": Inverse(split=False),
    "rank-one": RankOne(),
    "shampoo": Shampoo(),
    "kl-shampoo": KLShampoo(),
    "soap": Soap(),
    "muon": Muon(),
    "normuon": NorMuon(),
    "newton-muon": NewtonMuon(),
}


def named_solver(solver: SolverName | Solver, dtype: torch.dtype | None = None) -> Solver:
    """Return the solver of a name; a `Solver` is returned as given.

    Args:
        dtype: the dtype to keep decompositions in; None for the solver's own choice.

    Raises:
        ValueError: no solver has the name, or the solver has no decompositions to round.
    """
    if not isinstance(solver, Solver):
        one_of("solver", solver, tuple(SOLVERS))
        solver = SOLVERS[solver]
    if dtype is None:
        return solver
    if solver.form.vector or not solver.form.blocks or not is_dataclass(solver):
        raise ValueError(f"solver={solver.name!r} has no decompositions to keep in {dtype}")
    return replace(solver, dtype=dtype)


def solvers_by_name(solver: SolverName | Solver) -> dict[SolverName, Solver]:
    """Return the run's solver, then all solvers that layers may name.

    Raises:
        ValueError: no solver has the name.
    """
    first = named_solver(solver)
    return {first.name: first} | {n: entry for n, entry in SOLVERS.items() if n != first.name}


def forms(solver: SolverName | Solver) -> tuple[Form, ...]:
    """Return descriptions for a plan: of the run's solver, then of all further solvers."""
    return tuple(entry.form for entry in solvers_by_name(solver).values())


def make_plan(
    layers: Sequence[LayerShape],
    ranks: int,
    strategy: Strategy,
    others: Iterable[tuple[str, Shape]] = (),
    solver: SolverName | Solver = "inverse",
    itemsize: int = 4,
    factor_itemsize: int | None = None,
    basis_itemsize: int | None = None,
) -> Plan:
    """Return the plan for `layers` on `ranks` ranks; the same plan on every rank.

    Args:
        others: names and shapes of uncovered parameters and buffers.
        solver: the solver of layers without an own solver.
        itemsize: bytes of an element.
        factor_itemsize: bytes of an element of running averages; `itemsize` if None.
        basis_itemsize: bytes of an element of decompositions; `itemsize` if None.

    Raises:
        ValueError: a choice that cannot work; the text names the needs.
    """
    itemsizes = itemsize, factor_itemsize, basis_itemsize
    return plan_for(layers, ranks, strategy, others, forms(solver), *itemsizes)
