"""Eigenbases of factors, with the damping added to the products of eigenvalues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, ClassVar

from mpikfac import numerics
from mpikfac.plan import Above, Combination, Form, check_count
from mpikfac.preconditioners.preconditioner import Held, Preconditioner

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LOW_RANK = Combination(
    "rank",
    None,
    {"preconditioner": "eigen", "compression.inverses": None, "preconditioner.dtype": None},
    "only some eigenvectors are kept, which must be orthogonal to determine their complement",
)
RENEWED = Combination(
    "preconditioner.iterations",
    None,
    {"refresh.tolerance": Above(0.0)},
    "eigenvectors with a larger misfit are recomputed",
    default=0,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class Eigen(Preconditioner):
    """Eigenvalues and eigenvectors of A and G; the damping can change without a new decomposition.

    Attributes:
        dtype: the dtype in which decompositions are kept, sent and multiplied; None for the
            model's dtype.
        iterations: the number of orthogonal iterations that move the previous eigenvectors towards
            those of a new factor; with 0, the previous eigenvectors are kept unchanged. The result
            is used if its misfit is at most the strategy's `tolerance`; otherwise, the factor is
            decomposed.
    """

    name: ClassVar[str] = "eigen"
    form: ClassVar[Form] = Form(
        name,
        {"vectors": 2, "values": 1},
        denominators=True,
        products=2,
        needs=(LOW_RANK, RENEWED),
    )

    dtype: torch.dtype | None = None
    iterations: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("iterations", self.iterations, 0)

    def decompose(
        self, factor: Tensor, damping: float | Tensor, rank: int | None
    ) -> dict[str, Tensor]:
        """Return eigenvalues and eigenvectors of a factor: all, or the `rank` leading ones."""
        values, vectors = (
            numerics.leading_eigenbasis(factor, rank) if rank else numerics.eigenbasis(factor)
        )
        return {"values": values, "vectors": vectors}

    def renew(
        self, factor: Tensor, blocks: Mapping[str, Tensor], damping: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return iterated eigenvectors, the eigenvalues in their basis, and the misfit."""
        vectors = blocks["vectors"]
        for _ in range(self.iterations):
            vectors = numerics.iterated(factor, vectors)
        values, misfit = numerics.values_in_basis(factor, vectors)
        return {"values": values} | ({"vectors": vectors} if self.iterations else {}), misfit

    def damp(self, held: Sequence[Held], damping: float, relative: bool) -> None:
        """Write the damped products of the layers' eigenvalues to their `denominators`."""
        outs = [layer.denominators for layer in held if layer.denominators is not None]
        values = [layer.sides("values", out.dtype) for layer, out in zip(held, outs)]
        if not relative:
            for layer, (a, g), out in zip(held, values, outs):
                numerics.damped_denominators(a, g, damping, out, layer.scales)
            return
        vectors = chain.from_iterable((*layer.a["vectors"], *layer.g["vectors"]) for layer in held)
        means = iter(
            numerics.mean_eigenvalues([v for a, g in values for v in (*a, *g)], list(vectors))
        )
        for layer, (a, g), out in zip(held, values, outs):
            of_a, of_g = (list(islice(means, len(side))) for side in (a, g))
            numerics.relatively_damped_denominators(a, g, of_a, of_g, damping, out, layer.scales)

    def direction(self, gradient: Tensor, held: Held) -> Tensor:
        """Return `(G (x) A + damping I)^-1` applied to the gradient, `[outputs, inputs]`."""
        assert held.denominators is not None
        return numerics.precondition(
            gradient, held.a["vectors"], held.g["vectors"], held.denominators
        )
