"""Steps in eigenbases, for `AdamInEigenbases`."""

from __future__ import annotations

import torch
from torch import Tensor

from mpikfac.numerics import Side, from_left, from_right
from mpikfac.preconditioners.preconditioner import Held


def turned_back(step: Tensor, held: Held) -> Tensor:
    """Return `QL step QR'`, `[outputs, inputs]`: a step rotated back from eigenbases QL and QR."""
    a, g = held.a["vectors"], held.g["vectors"]
    return from_right(from_left(g, step.to((*a, *g)[0].dtype)), a, transpose=True)


def damped_squares(rotated: Tensor, held: Held) -> Tensor:
    """Return the squares of a gradient in eigenbases, `[outputs, inputs]`, with the damping added.

    Eigenvectors with small eigenvalues are an arbitrary basis of their subspace, so the squares
    along them are replaced by their mean, which makes steps independent of the basis. The mean of
    all squares, times the square of the damping, is added so that rounding errors do not cause
    steps.
    """
    squares = rotated.square()
    squares = _shared(squares, held.a["small"])
    squares = _shared(squares.mT, held.g["small"]).mT
    return squares + held.damping**2 * squares.mean((-2, -1), keepdim=True)


def _shared(squares: Tensor, small: Side) -> Tensor:
    """Return `squares`, with those of small eigenvalues replaced by their mean in each row."""
    if not small:
        return squares
    chosen = torch.cat(tuple(small), -1)[..., None, :].to(squares.dtype)
    count = chosen.sum(-1, keepdim=True).clamp_min(1)
    return torch.lerp(squares, (squares * chosen).sum(-1, keepdim=True) / count, chosen)
