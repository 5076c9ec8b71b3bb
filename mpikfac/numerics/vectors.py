"""Directions for factors that are outer products `v v^T` of vectors [Zhang et al. 2023, Eva]."""

from __future__ import annotations

import torch
from torch import Tensor

from mpikfac.numerics.products import Side


def precondition_by_vectors(
    gradient: Tensor, input_vector: Side, output_vector: Side, damping: float
) -> Tensor:
    """Return `(g g^T (x) a a^T + damping I)^-1` applied to `gradient`, all `[outputs, inputs]`.

    Uses the Sherman-Morrison formula [Zhang et al. 2023, Eva].
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
