"""A preconditioner for tests that uses only the diagonals of A and G, and a dense oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import mpikfac
from mpikfac.plan import Form
from support import oracles


@dataclass(frozen=True)
class Diagonal(mpikfac.preconditioners.Preconditioner):
    """Divide gradients by `g a + damping`, where g and a are the diagonals of G and A."""

    form = Form("diagonal", {"diagonal": 1}, work=1)

    def decompose(self, factor, damping, rank):
        """Return the diagonal of a factor."""
        return {"diagonal": factor.diagonal(dim1=-2, dim2=-1)}

    def direction(self, gradient, held):
        """Return the gradient, divided element by element."""
        (a,), (g,) = held.a["diagonal"], held.g["diagonal"]
        return gradient / (g[..., :, None] * a[..., None, :] + held.damping)


def dense_solve(gradient, a, g, damping):
    """Return `(diag(G) (x) diag(A) + damping I)^-1 gradient`, with the product written out."""
    a, g = (torch.diag(factor.diagonal()) for factor in (a, g))
    return oracles.kronecker_solve(gradient, a, g, damping)
