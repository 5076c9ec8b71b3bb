"""Newton-Muon: orthogonal directions from K-FAC's A alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mpikfac import numerics
from mpikfac.plan import AdamGrafting, Combination, Form
from mpikfac.preconditioners.inverse import BLOCKS, Inverses
from mpikfac.preconditioners.preconditioner import Defaults, Means
from mpikfac.settings import Damping, Estimator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALONE = Combination(
    "preconditioner",
    ("newton-muon",),
    {"fisher_type": "forward-only"},
    "the identity replaces G",
)


@dataclass(frozen=True, kw_only=True, repr=False)
class NewtonMuon(Inverses):
    """The inverse `(A + 0.2 mean(A) I)^-1` of the inputs' second moments alone [Newton-Muon].

    `mean(A)` is the mean eigenvalue. `AdamGrafting()` computes the polar factor of the gradient
    times this inverse. A layer in which only the bias is trained uses G instead.

    Attributes:
        dtype: the dtype in which inverses are kept, sent and multiplied; None for the model's
            dtype.
    """

    name: ClassVar[str] = "newton-muon"
    form: ClassVar[Form] = Form(
        name, BLOCKS, sides="A", damped=True, timed_as="inverse", needs=(ALONE,)
    )
    defaults: ClassVar[Defaults] = Defaults(
        damping=Damping(relative=0.2),
        grafting=AdamGrafting(momentum=0.95),
        estimator=Estimator(fisher_type="forward-only"),
    )

    dtype: torch.dtype | None = None

    def added(self, means: Means, damping: float, relative: bool) -> Tensor:
        """Return the damping of a factor, `[]` or `[groups]`."""
        if relative:
            return numerics.damping_unit(means.factor) * damping
        return means.factor.new_full(means.factor.shape, damping)
