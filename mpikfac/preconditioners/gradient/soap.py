"""SOAP: Adam in the eigenbases of the second moments of the gradient's rows and columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mpikfac.numerics import Side, from_left, from_right
from mpikfac.plan import AdamInEigenbases, Combination, Form
from mpikfac.preconditioners.eigen import eigenbasis
from mpikfac.preconditioners.gradient.needs import needs_of
from mpikfac.preconditioners.gradient.shampoo import Moments
from mpikfac.preconditioners.inverse import damp
from mpikfac.preconditioners.preconditioner import Defaults, Held

NEEDS = (
    *needs_of("soap", {"grafting": "adam-in-eigenbases"}),
    Combination(
        "preconditioner",
        ("soap",),
        {"relative": True},
        "the damping is a share of the mean eigenvalue, and of the root of the mean square",
    ),
    Combination(
        "grafting",
        ("adam-in-eigenbases",),
        {"preconditioner": "soap"},
        "no other preconditioner steps in eigenbases",
    ),
)


@dataclass(frozen=True)
class SOAP(Moments):
    """The gradient in the eigenbases of running means of `G G'` and `G' G`.

    `AdamInEigenbases` takes Adam's step there, and turns the step back [SOAP]. For the
    damping, a share, see `damped_squares`.

    Attributes:
        dtype: eigenbases are kept, sent and multiplied in this dtype; None for the model's.
    """

    dtype: torch.dtype | None = None
    defaults: ClassVar[Defaults] = replace(
        Moments.defaults, grafting=AdamInEigenbases(momentum=0.95), matmul_precision="float32"
    )
    form: ClassVar[Form] = Form(
        "soap",
        {"vectors": 2, "small": 1},
        of="gradient",
        damped=True,
        products=3,
        timed_as="eigen",
        needs=NEEDS,
    )

    def decompose(
        self, factor: Tensor, damping: float | Tensor, rank: int | None
    ) -> dict[str, Tensor]:
        """Return all eigenvectors, and 1 for each eigenvalue up to the damping, else 0."""
        values, vectors = eigenbasis(factor)
        bounds = damp(torch.zeros_like(factor), damping).diagonal(dim1=-2, dim2=-1)
        return {"vectors": vectors, "small": (values <= bounds).to(values.dtype)}

    def direction(self, gradient: Tensor, held: Held) -> Tensor:
        """Return `QL' gradient QR`, `[outputs, inputs]`."""
        a, g = held.a["vectors"], held.g["vectors"]
        rotated = from_left(g, gradient.to((*a, *g)[0].dtype), transpose=True)
        return from_right(rotated, a)


def turned_back(step: Tensor, held: Held) -> Tensor:
    """Return `QL step QR'`, `[outputs, inputs]`."""
    a, g = held.a["vectors"], held.g["vectors"]
    return from_right(from_left(g, step.to((*a, *g)[0].dtype)), a, transpose=True)


def damped_squares(rotated: Tensor, held: Held) -> Tensor:
    """Return squares of a gradient in eigenbases, `[outputs, inputs]`, with the damping in them.

    Eigenvectors of small eigenvalues are any basis of their space, so all of them have the mean of
    their squares: steps do not depend on the basis. The square of the damping, as a share of the
    mean square of the matrix, is added, so that rounding errors give no steps.
    """
    squares = rotated.square()
    squares = _shared(squares, held.a["small"])
    squares = _shared(squares.mT, held.g["small"]).mT
    return squares + held.damping**2 * squares.mean((-2, -1), keepdim=True)


def _shared(squares: Tensor, small: Side) -> Tensor:
    """Return rows `[..., n]` with a row's mean over the small eigenvalues in their places."""
    if not small:
        return squares
    chosen = torch.cat(tuple(small), -1)[..., None, :].to(squares.dtype)
    count = chosen.sum(-1, keepdim=True).clamp_min(1)
    return torch.lerp(squares, (squares * chosen).sum(-1, keepdim=True) / count, chosen)
