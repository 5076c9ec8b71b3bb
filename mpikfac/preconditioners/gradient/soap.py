"""SOAP: Adam in the eigenbases of the second moments of the gradient's rows and columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mpikfac import numerics
from mpikfac.plan import AdamInEigenbases, Combination, Form
from mpikfac.preconditioners.gradient.needs import needs_of
from mpikfac.preconditioners.gradient.shampoo import Moments
from mpikfac.preconditioners.preconditioner import Defaults, Held

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NEEDS = (
    *needs_of("soap", {"grafting": "adam-in-eigenbases"}),
    Combination(
        "preconditioner",
        ("soap",),
        {"relative": True},
        "SOAP uses the damping as a multiple of the mean eigenvalue and of the root mean square",
    ),
    Combination(
        "grafting",
        ("adam-in-eigenbases",),
        {"preconditioner": "soap"},
        "only SOAP takes Adam's step in eigenbases",
    ),
)


@dataclass(frozen=True, kw_only=True, repr=False)
class SOAP(Moments):
    """The gradient in the eigenbases of running means of `G G'` and `G' G`.

    G is the averaged gradient `[outputs, inputs]`. `AdamInEigenbases` takes Adam's step in the
    eigenbases, and rotates it back [SOAP]. The damping is relative; see `damped_squares`.

    Attributes:
        dtype: the dtype in which eigenbases are kept, sent and multiplied; None for the model's
            dtype.
    """

    name: ClassVar[str] = "soap"
    defaults: ClassVar[Defaults] = Moments.defaults.override(
        grafting=AdamInEigenbases(momentum=0.95), matmul_precision="float32"
    )
    form: ClassVar[Form] = Form(
        name,
        {"vectors": 2, "small": 1},
        of="gradient",
        damped=True,
        products=3,
        timed_as="eigen",
        needs=NEEDS,
    )

    dtype: torch.dtype | None = None

    def decompose(
        self, factor: Tensor, damping: float | Tensor, rank: int | None
    ) -> dict[str, Tensor]:
        """Return all eigenvectors, and a 1 for each eigenvalue up to the damping, else a 0."""
        values, vectors = numerics.eigenbasis(factor)
        bounds = numerics.damp(factor.new_zeros(factor.shape), damping).diagonal(dim1=-2, dim2=-1)
        return {"vectors": vectors, "small": (values <= bounds).to(values.dtype)}

    def direction(self, gradient: Tensor, held: Held) -> Tensor:
        """Return `QL' gradient QR`, `[outputs, inputs]`, for eigenvectors QL and QR."""
        a, g = held.a["vectors"], held.g["vectors"]
        rotated = numerics.from_left(g, gradient.to((*a, *g)[0].dtype), transpose=True)
        return numerics.from_right(rotated, a)
