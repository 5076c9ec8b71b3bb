"""Mean vectors, whose outer products replace A and G [Zhang et al. 2023, Eva]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mpikfac import numerics
from mpikfac.plan import Combination, Form, OneOf
from mpikfac.preconditioners.preconditioner import Defaults, Held, Preconditioner
from mpikfac.settings import Damping

if TYPE_CHECKING:
    from torch import Tensor

NEEDS = (
    Combination(
        "preconditioner",
        ("eva",),
        {"transport.packing": "triangle", "refresh.tolerance": 0, "refresh.servers": 0},
        "vectors are not matrices, and nothing is decomposed",
    ),
    Combination(
        "preconditioner",
        ("eva",),
        {"relative": False},
        "a relative damping uses mean eigenvalues, and vectors have no eigenvalues",
    ),
    Combination(
        "preconditioner",
        ("eva",),
        {"fisher_type": OneOf(("empirical", "forward-only"))},
        "for labels sampled from the model, gradients have mean 0",
    ),
    Combination(
        "preconditioner",
        ("eva",),
        {
            "initial_factor": "first",
            "statistics_dtype": None,
            "factor_dtype": None,
        },
        "vectors are not matrices, and cannot start at the identity or be rounded",
    ),
)


@dataclass(frozen=True, kw_only=True, repr=False)
class Eva(Preconditioner):
    """Use mean vectors of inputs and of output gradients; nothing is decomposed."""

    name: ClassVar[str] = "eva"
    form: ClassVar[Form] = Form(name, {"vector": 1}, keeps="vector", work=1, needs=NEEDS)
    # Vectors have no eigenvalues, so the damping cannot be relative.
    defaults: ClassVar[Defaults] = Defaults(damping=Damping(0.003))

    def decompose(
        self, factor: Tensor, damping: float | Tensor, rank: int | None
    ) -> dict[str, Tensor]:
        """Return `factor`, a mean vector, unchanged."""
        return {"vector": factor}

    def direction(self, gradient: Tensor, held: Held) -> Tensor:
        """Return `(g g^T (x) a a^T + damping I)^-1` applied to the gradient; a and g are means."""
        a, g = held.a["vector"], held.g["vector"]
        return numerics.precondition_by_vectors(gradient, a, g, held.damping)
