"""Muon: the gradient with all singular values set to 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mpikfac.plan import AdamGrafting, Combination, Form
from mpikfac.preconditioners.gradient.needs import needs_of
from mpikfac.preconditioners.preconditioner import Defaults, Held, Preconditioner

if TYPE_CHECKING:
    from torch import Tensor


def form_of(name: str, grafting: str) -> Form:
    """Return the plan's description of a preconditioner without factors."""
    needs = (
        *needs_of(name, {grafting: True}),
        Combination(
            "preconditioner",
            (name,),
            {"diagonal": ""},
            "embeddings and scales are not matrices; skip the layer with coverage=mpikfac.Coverage("
            "skip=[...]), so that it takes Adam's step",
        ),
        Combination(
            "preconditioner",
            (name,),
            {"assignment.replicate_below": 0, "refresh.staleness": 0, "refresh.stagger": 1},
            "nothing is decomposed",
        ),
    )
    return Form(name, {}, of="gradient", needs=needs)


@dataclass(frozen=True, kw_only=True, repr=False)
class Muon(Preconditioner):
    """The gradient, or its momentum, unchanged: `AdamGrafting()` computes the polar factor.

    A layer needs no state, and owners share the work of orthogonalising directions. A bias is a
    column of the matrix [Jordan et al. 2024].
    """

    name: ClassVar[str] = "muon"
    form: ClassVar[Form] = form_of(name, "grafting.orthogonalize")
    defaults: ClassVar[Defaults] = Defaults(grafting=AdamGrafting(momentum=0.95))

    def direction(self, gradient: Tensor, held: Held) -> Tensor:
        """Return the gradient, `[outputs, inputs]`."""
        return gradient
