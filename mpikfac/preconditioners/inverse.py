"""Damped inverses of factors; the damping is split between A and G, or added to both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mpikfac import numerics
from mpikfac.plan import Combination, Form, one_of
from mpikfac.preconditioners.preconditioner import Held, Means, Preconditioner

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCKS = {"inverse": 2}
ONE_OWNER = Combination(
    "preconditioner",
    ("inverse",),
    {"assignment.colocate_factors": True, "assignment.factor_reduction": "allreduce"},
    "the damping is split by the traces of A and G, so both factors need the same owner, unless "
    "split_damping=False",
    any_of=True,
)


class Inverses(Preconditioner):
    """The base class of preconditioners that invert damped factors."""

    def decompose(
        self, factor: Tensor, damping: float | Tensor, rank: int | None
    ) -> dict[str, Tensor]:
        """Return the damped inverse of a factor."""
        return {"inverse": numerics.damped_inverse(factor, damping)}

    def renew(
        self, factor: Tensor, blocks: Mapping[str, Tensor], damping: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return no blocks, and the error of directions computed with the older inverse."""
        assert damping is not None
        return {}, numerics.error_of_inverse(numerics.damp(factor, damping), blocks["inverse"])

    def direction(self, gradient: Tensor, held: Held) -> Tensor:
        """Return `G^-1 gradient A^-1` `[outputs, inputs]`, computed in the inverses' dtype."""
        a, g = held.a["inverse"], held.g["inverse"]
        # The inverse of A is symmetric, and `product` accepts its transpose without a copy.
        return numerics.from_right(
            numerics.from_left(g, gradient.to((*a, *g)[0].dtype)), a, transpose=True
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Inverse(Inverses):
    """Damped inverses `(A + p I)^-1` and `(G + q I)^-1`.

    A change of damping takes effect at the next decomposition.

    Attributes:
        split_damping: whether A and G split the damping, so that p q is the damping; otherwise, p
            and q are both equal to the damping, as in published implementations.
        dtype: the dtype in which inverses are kept, sent and multiplied; None for the model's
            dtype.
    """

    name: ClassVar[str] = "inverse"

    split_damping: bool = True
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("split_damping", self.split_damping, (True, False))

    @property
    def form(self) -> Form:
        """The plan's description of this preconditioner."""
        return SPLIT if self.split_damping else WHOLE

    def added(self, means: Means, damping: float, relative: bool) -> Tensor:
        """Return the damping of a factor, `[]` or `[groups]`.

        The factor gets all of the damping if the other side is the identity, or if A and G do not
        split the damping.
        """
        ratio = means.ratio if self.split_damping else None
        if relative:
            return numerics.damping_unit(means.factor) * (
                damping if ratio is None else math.sqrt(damping)
            )
        if ratio is None:
            return means.factor.new_full(means.factor.shape, damping)
        return numerics.tikhonov_share(ratio, damping)


SPLIT = Form(Inverse.name, BLOCKS, damped=True, both=True, needs=(ONE_OWNER,))
WHOLE = Form(Inverse.name, BLOCKS, damped=True, kept_as="unsplit-inverse")
