"""Second moments of layer inputs and output gradients, and their normalisation.

With B examples in the batch, S positions that a weight is shared over (outputs of a convolution,
tokens), `a` a layer's inputs `[batch, shared, inputs]` (1 appended where there is a bias) and `g`
the gradient of the *mean* loss at its outputs `[batch, shared, outputs]`:

    expand         A = sum(a a^T) / (B S)      G = B sum(g g^T)

so that `A (x) G` is the layer's Fisher block if positions are independent, exactly so for linear
layers [Grosse & Martens 2016; Eschenhagen et al. 2023]. Two other scalings exist for comparison;
they change what a damping value means:

    sc20           A = sum(a a^T) / (B S^2)    G = B S sum(g g^T)       product as expand
    kfac-pytorch   A = sum(a a^T) / (B S^3)    G = sum(g g^T) / (B S^3) product B^2 S^5 smaller

For linear layers both of the latter count positions as examples (S = 1).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from mpikfac.kron import product

Normalization = Literal["expand", "sc20", "kfac-pytorch"]
NORMALIZATIONS: tuple[Normalization, ...] = ("expand", "sc20", "kfac-pytorch")


def factor_scales(normalization: Normalization, batch: int, shared: float) -> tuple[float, float]:
    """What to multiply `sum(a a^T)` and `sum(g g^T)` by to get A and G."""
    if normalization == "expand":
        return 1 / (batch * shared), float(batch)
    if normalization == "sc20":
        return 1 / (batch * shared**2), batch * shared
    return 1 / (batch * shared**3), 1 / (batch * shared**3)


def linear_input_sum(x: Tensor, bias: bool) -> Tensor:
    """`sum(a a^T)` `[inputs, inputs]` of a linear layer's input `[..., features]`."""
    rows = x.reshape(-1, x.shape[-1])
    total = product(rows.T, rows)
    return with_bias(total, rows.sum(0), len(rows)) if bias else total


def linear_output_sum(g: Tensor) -> Tensor:
    """`sum(g g^T)` `[outputs, outputs]` of gradients `[..., outputs]`."""
    rows = g.reshape(-1, g.shape[-1])
    return product(rows.T, rows)


def with_bias(total: Tensor, sums: Tensor, count: int) -> Tensor:
    """`sum(a a^T)` after a 1 is appended to each of the `count` vectors `a`.

    Args:
        total: `sum(a a^T)` without it, `[n, n]`.
        sums: `sum(a)`, `[n]`.
    """
    n = len(total)
    grown = total.new_empty(n + 1, n + 1)
    grown[:n, :n] = total
    grown[:n, n] = grown[n, :n] = sums
    grown[n, n] = count
    return grown
