"""Newton-Muon: K-FAC's A alone, for orthogonal directions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from mpikfac.plan import AdamGrafting, Combination, Form
from mpikfac.preconditioners.inverse import BLOCKS, Inverse
from mpikfac.preconditioners.preconditioner import Defaults
from mpikfac.settings import Damping, Estimator

ALONE = Combination(
    "preconditioner",
    ("newton-muon",),
    {"fisher_type": "forward-only"},
    "the identity takes the place of G",
)
FORM = Form("newton-muon", BLOCKS, sides="A", damped=True, timed_as="inverse", needs=(ALONE,))


@dataclass(frozen=True)
class NewtonMuon(Inverse):
    """The inverse `(A + 0.2 mean(A) I)^-1` of the inputs' second moments alone [Newton-Muon].

    `mean(A)` is the mean eigenvalue. `AdamGrafting()` makes the polar factor of the gradient
    times the inverse. A bias without inputs keeps G.

    Attributes:
        split: never, as there is one factor.
        dtype: inverses are kept, sent and multiplied in this dtype; None for the model's.
    """

    split: bool = field(default=False, init=False)
    defaults: ClassVar[Defaults] = Defaults(
        damping=Damping(relative=0.2),
        grafting=AdamGrafting(momentum=0.95),
        estimator=Estimator(fisher_type="forward-only"),
    )

    @property
    def form(self) -> Form:
        """The description for the plan."""
        return FORM
