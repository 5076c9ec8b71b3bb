"""The layers of a DLRM, without its embedding tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Dlrm(nn.Module):
    """Score examples, given numerical features and rows of embedding tables [Naumov et al. 2019].

    Args:
        numbers: the number of numerical features per example.
        tables: the number of tables.
        width: the number of elements per row.
        bottom: the widths of the hidden layers that map the numerical features to a vector.
        top: the widths of the hidden layers that map this vector, and the products of all pairs of
            vectors, to the score.
    """

    def __init__(
        self, numbers: int, tables: int, width: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        self.bottom = layers([numbers, *bottom, width], nn.ReLU())
        self.top = layers([width + tables * (tables + 1) // 2, *top, 1])

    def forward(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """Return a logit per example, `[examples]`.

        Args:
            numbers: `[examples, numbers]`.
            rows: `[examples, tables, width]`.
        """
        first = self.bottom(numbers)
        vectors = torch.cat([first[:, None], rows], 1)
        count = vectors.shape[1]
        left, right = torch.tril_indices(count, count, -1, device=rows.device)
        products = (vectors @ vectors.mT)[:, left, right]
        return self.top(torch.cat([first, products], 1)).squeeze(1)


def layers(widths: Sequence[int], *last: nn.Module) -> nn.Sequential:
    """Return linear layers with ReLU in between, followed by the modules `last`."""
    pairs = list(zip(widths, widths[1:]))
    found = [module for pair in pairs for module in (nn.Linear(*pair), nn.ReLU())][:-1]
    return nn.Sequential(*found, *last)
