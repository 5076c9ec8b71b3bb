"""Shampoo: inverse roots of the second moments of the gradient's rows and columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mpikfac import numerics
from mpikfac.plan import AdamGrafting, Form, OneOf, check_positive
from mpikfac.preconditioners.gradient.needs import needs_of
from mpikfac.preconditioners.preconditioner import Defaults, Held, Means, Preconditioner
from mpikfac.settings import Damping

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Moments(Preconditioner):
    """The base class of preconditioners that use second moments of the gradient's rows and columns.

    The damping e, if relative, is in units of the factor's mean eigenvalue.
    """

    defaults: ClassVar[Defaults] = Defaults(
        damping=Damping(relative=1e-3),
        grafting=AdamGrafting(orthogonalize=False),
        factor_update_steps=1,
    )

    def added(self, means: Means, damping: float, relative: bool) -> Tensor:
        """Return the damping of a factor, `[]` or `[groups]`."""
        mean = means.factor
        unit = numerics.damping_unit(mean) if relative else mean.new_ones(mean.shape)
        return unit * damping


class Roots(Moments):
    """The base class of preconditioners that use inverse roots of damped factors.

    Attributes:
        exponent: the p in the roots `(L + e I)^-p` and `(R + e I)^-p` of factors L and R with
            damping e.
    """

    exponent: float

    def decompose(
        self, factor: Tensor, damping: float | Tensor, rank: int | None
    ) -> dict[str, Tensor]:
        """Return the inverse root of a damped factor."""
        values, vectors = numerics.eigenbasis(numerics.damp(factor, damping))
        roots = values.pow(-self.exponent)
        return {"root": numerics.product(vectors * roots[..., None, :], vectors.mT)}

    def direction(self, gradient: Tensor, held: Held) -> Tensor:
        """Return `(L + e I)^-p gradient (R + e I)^-p`, `[outputs, inputs]`."""
        return numerics.between(held.g["root"], gradient, held.a["root"])


def form_of(name: str) -> Form:
    """Return the plan's description of a preconditioner with roots."""
    needs = needs_of(
        name, {"grafting": OneOf(("none", "sgd", "adam")), "grafting.orthogonalize": False}
    )
    return Form(name, {"root": 2}, of="gradient", damped=True, timed_as="shampoo", needs=needs)


@dataclass(frozen=True, kw_only=True, repr=False)
class Shampoo(Roots):
    """Use inverse roots of running means of `G G'` and `G' G`.

    G is the averaged gradient `[outputs, inputs]`; R replaces K-FAC's A, and L replaces K-FAC's G
    [Gupta et al. 2018; Anil et al. 2020].

    Attributes:
        exponent: the exponent of each factor: 1/4 as published, or 1/2 [Morwani et al. 2024]. A
            layer with one factor, such as a scale, uses the same exponent.
        dtype: the dtype in which roots are kept, sent and multiplied; None for the model's dtype.

    Raises:
        ValueError: the exponent is not positive.
    """

    name: ClassVar[str] = "shampoo"
    form: ClassVar[Form] = form_of(name)

    exponent: float = 0.25
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("exponent", self.exponent)
