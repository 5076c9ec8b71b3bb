"""The preconditioners by name. To add one, add a file and an entry in `TYPES`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpikfac.plan import Form, LayerShape, Plan, Shape, Sharding, Strategy, one_of, plan_for
from mpikfac.preconditioners.eigen import Eigen
from mpikfac.preconditioners.ekfac import EKFAC
from mpikfac.preconditioners.eva import Eva
from mpikfac.preconditioners.gradient import SOAP, KLShampoo, Muon, NorMuon, Shampoo
from mpikfac.preconditioners.inverse import Inverse
from mpikfac.preconditioners.newton_muon import NewtonMuon
from mpikfac.preconditioners.preconditioner import Preconditioner

PreconditionerName = str
TYPES = (
    *(Eigen, EKFAC, Inverse, Eva),
    *(Shampoo, KLShampoo, SOAP, Muon, NorMuon, NewtonMuon),
)
PRECONDITIONERS: dict[PreconditionerName, Preconditioner] = {kind.name: kind() for kind in TYPES}
"""The preconditioners that layers can name, with their default settings."""


def named_preconditioner(preconditioner: PreconditionerName | Preconditioner) -> Preconditioner:
    """Return the preconditioner with the given name; a `Preconditioner` is returned unchanged.

    Raises:
        ValueError: no preconditioner has this name.
    """
    if isinstance(preconditioner, Preconditioner):
        return preconditioner
    one_of("preconditioner", preconditioner, tuple(PRECONDITIONERS))
    return PRECONDITIONERS[preconditioner]


def preconditioners_by_name(
    preconditioner: PreconditionerName | Preconditioner,
) -> dict[PreconditionerName, Preconditioner]:
    """Return the run's preconditioner, followed by all others that layers can name.

    Raises:
        ValueError: no preconditioner has this name.
    """
    first = named_preconditioner(preconditioner)
    others = {n: entry for n, entry in PRECONDITIONERS.items() if n != first.form.name}
    return {first.form.name: first} | others


def forms(preconditioner: PreconditionerName | Preconditioner) -> tuple[Form, ...]:
    """Return the forms of all preconditioners, for a plan: the run's own first."""
    return tuple(entry.form for entry in preconditioners_by_name(preconditioner).values())


def make_plan(
    layers: Sequence[LayerShape],
    ranks: int,
    strategy: Strategy,
    others: Iterable[tuple[str, Shape]] = (),
    preconditioner: PreconditionerName | Preconditioner = "inverse",
    itemsize: int = 4,
    factor_itemsize: int | None = None,
    basis_itemsize: int | None = None,
    sharding: Sharding | None = None,
) -> Plan:
    """Return the plan for `layers` on `ranks` ranks; it is the same on every rank.

    Args:
        others: names and shapes of uncovered parameters and buffers.
        preconditioner: the preconditioner of layers that do not set their own.
        itemsize: bytes per element.
        factor_itemsize: bytes per element of running averages; `itemsize` if None.
        basis_itemsize: bytes per element of decompositions; `itemsize` if None.
        sharding: the parameters of which each rank holds a shard; all other tensors in `others` are
            then averaged over ranks. None if every rank holds whole parameters.

    Raises:
        ValueError: choices cannot be combined; the message states what is required.
    """
    itemsizes, others = (itemsize, factor_itemsize, basis_itemsize), list(others)
    sharded = {parameter.block for parameter in sharding.parameters} if sharding else set[str]()
    means = [name for name, _ in others if name not in sharded] if sharding else []
    return plan_for(
        layers, ranks, strategy, others, forms(preconditioner), *itemsizes, means, sharding=sharding
    )
