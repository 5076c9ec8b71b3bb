"""Mean vectors, with A and G as the squares of vectors [Zhang et al. 2023, Eva]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpikfac.numerics import Side
from mpikfac.plan import Combination, Form, OneOf
from mpikfac.preconditioners.preconditioner import Defaults, Held, Preconditioner
from mpikfac.settings import Damping

NEEDS = (
    Combination(
        "preconditioner",
        ("eva",),
        {"transport.packing": "triangle", "refresh.tolerance": 0, "refresh.servers": 0},
        "vectors are neither squares nor decomposed",
    ),
    Combination(
        "preconditioner",
        ("eva",),
        {"relative": False},
        "a relative damping takes mean eigenvalues, and vectors have no eigenvalues",
    ),
    Combination(
        "preconditioner",
        ("eva",),
        {"fisher_type": OneOf(("empirical", "forward-only"))},
        "mean gradients are 0 at labels that the model gives",
    ),
    Combination(
        "preconditioner",
        ("eva",),
        {
            "initial_factor": "first",
            "statistics_dtype": None,
            "factor_dtype": None,
            "basis_dtype": None,
        },
        "vectors are no matrices to start at the identity or to round",
    ),
)


@dataclass(frozen=True)
class Eva(Preconditioner):
    """Mean vectors of inputs and of output gradients; nothing is decomposed."""

    form: ClassVar[Form] = Form("eva", {"vector": 1}, keeps="vector", work=1, needs=NEEDS)
    # Vectors have no eigenvalues to take a share of.
    defaults: ClassVar[Defaults] = Defaults(damping=Damping(0.003))

    def decompose(
        self, factor: Tensor, damping: float | Tensor, rank: int | None
    ) -> dict[str, Tensor]:
        """Return the vector itself."""
        return {"vector": factor}

    def direction(self, gradient: Tensor, held: Held) -> Tensor:
        """Return `(g g^T (x) a a^T + damping I)^-1` applied to the gradient."""
        a, g = held.a["vector"], held.g["vector"]
        return precondition_by_vectors(gradient, a, g, held.damping)


def precondition_by_vectors(
    gradient: Tensor, input_vector: Side, output_vector: Side, damping: float
) -> Tensor:
    """Return `(g g^T (x) a a^T + damping I)^-1` applied to `gradient`, all `[outputs, inputs]`.

    By the Sherman-Morrison formula [Zhang et al. 2023, Eva].
    """
    along, size = gradient, gradient.new_ones(())
    if input_vector:
        a = torch.cat(tuple(input_vector), -1)[..., None, :]
        along, size = along @ a.mT, size * a.square().sum(-1, keepdim=True)
    if output_vector:
        g = torch.cat(tuple(output_vector), -1)[..., :, None]
        along, size = g.mT @ along, size * g.square().sum(-2, keepdim=True)
    away = along / (size + damping)
    away = g * away if output_vector else away
    return (gradient - (away * a if input_vector else away)) / damping
