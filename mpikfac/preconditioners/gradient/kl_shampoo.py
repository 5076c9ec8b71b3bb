"""KL-Shampoo: Shampoo in which each factor is whitened by the other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from mpikfac import numerics
from mpikfac.plan import Form
from mpikfac.preconditioners.gradient.shampoo import Roots, form_of
from mpikfac.preconditioners.preconditioner import Held

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, repr=False)
class KLShampoo(Roots):
    """Use inverse square roots of running means of `G R^-1 G' / inputs` and `G' L^-1 G / outputs`.

    G is the averaged gradient `[outputs, inputs]`, and the means are L and R. `L (x) R` is then the
    best approximation of the gradient's second moment in terms of the Kullback-Leibler divergence
    [Lin et al. 2025]. The inverses are the squares of the damped roots in use; before the first
    decomposition, they are the identity.

    Attributes:
        dtype: the dtype in which roots are kept, sent and multiplied; None for the model's dtype.
    """

    name: ClassVar[str] = "kl-shampoo"
    form: ClassVar[Form] = replace(form_of(name), whitened=True)
    exponent = 0.5

    dtype: torch.dtype | None = None

    def squared(self, gradient: Tensor, held: Held | None) -> tuple[Tensor, Tensor]:
        """Return `L^-1/2 gradient / sqrt(outputs)` and `gradient R^-1/2 / sqrt(inputs)`."""
        a, g = (held.a["root"], held.g["root"]) if held else ((), ())
        outputs, inputs = gradient.shape[-2:]
        x, y = numerics.between(g, gradient, ()), numerics.between((), gradient, a)
        return x.to(gradient.dtype) / math.sqrt(outputs), y.to(gradient.dtype) / math.sqrt(inputs)
