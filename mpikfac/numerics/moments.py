"""Compute and normalise first and second moments of layer inputs and output gradients.

B is the number of examples in the batch, and S the number of positions that share a weight, such as
output pixels or tokens. `a` is a layer's inputs `[batch, shared, inputs]`, with 1 appended for a
bias, and `g` the *mean* loss's gradient with respect to the outputs `[batch, shared, outputs]`.
Then

    expand         A = sum(a a^T) / (B S)      G = B sum(g g^T)

make `G (x) A` an approximation of the layer's Fisher block that treats positions as independent; it
is exact in a linear network if each position has its own loss [Grosse & Martens 2016; Eschenhagen
et al. 2023]. Two more scalings exist for comparison; both change the meaning of a damping value:

    sc20           A = sum(a a^T) / (B S^2)    G = B S sum(g g^T)       same product as expand
    kfac-pytorch   A = sum(a a^T) / (B S^3)    G = sum(g g^T) / (B S^3) product B^2 S^5 smaller

For linear layers, "sc20" and "kfac-pytorch" count positions as examples (S = 1).

Eva [Zhang et al. 2023] uses means instead of second moments: A and G become `v v^T` with

    expand         v = sum(a) / (B S)          v = sum(g) / sqrt(S)

If all vectors are equal, `v v^T` equals the factors above. For linear layers (S = 1), the vectors
are, as in the paper, means over examples of the inputs and of the gradients of each example's loss.
The paper's published code uses `sum(g) / (B S)`, so a damping acts like one `B^2 S` times as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mpikfac.numerics.products import product
from mpikfac.plan import Normalization

ADDED_IN_FLOAT32 = frozenset(() if torch.version.hip else (torch.bfloat16, torch.float16))
"""Dtypes whose products are exact in float32, in which CUDA accumulates them."""


def factor_scales(normalization: Normalization, batch: int, shared: float) -> tuple[float, float]:
    """Return the multipliers that turn `sum(a a^T)` into A and `sum(g g^T)` into G."""
    if normalization == "expand":
        return 1 / (batch * shared), float(batch)
    if normalization == "sc20":
        return 1 / (batch * shared**2), batch * shared
    return 1 / (batch * shared**3), 1 / (batch * shared**3)


def vector_scales(normalization: Normalization, batch: int, shared: float) -> tuple[float, float]:
    """Return the multipliers that turn `sum(a)` and `sum(g)` into vectors `v`.

    If all vectors `a` and all vectors `g` are equal, `v v^T` equals A or G.
    """
    a, g = factor_scales(normalization, batch, shared)
    return math.sqrt(a / (batch * shared)), math.sqrt(g / (batch * shared))


def squares(columns: Tensor, multiply: Callable[[Tensor, Tensor], Tensor] = product) -> Tensor:
    """Return `sum(v v^T)` `[..., n, n]` over vectors `v`, the columns of `[..., n, vectors]`.

    On a GPU, 16-bit values are multiplied without conversion, and summed in float32.
    """
    if columns.is_cuda and columns.dtype in ADDED_IN_FLOAT32:
        multiply = partial(torch.mm if columns.dim() == 2 else torch.bmm, out_dtype=torch.float32)
    return multiply(columns, columns.mT)


def sum_of(rows: Tensor, bias: bool = False) -> Tensor:
    """Return `sum(a)` `[..., n]` over `rows` `[vectors, ..., n]`; `bias` appends a 1 to each."""
    total = rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32))
    return F.pad(total, (0, 1), value=len(rows)) if bias else total


def with_bias(total: Tensor, vector: Tensor) -> Tensor:
    """Return `sum(a a^T)` after appending a 1 to every vector `a`.

    Args:
        total: `sum(a a^T)` without the 1, `[..., n, n]`.
        vector: `sum(a)` with the 1, `[..., n + 1]`.
    """
    n = total.shape[-1]
    grown = total.new_empty(*total.shape[:-2], n + 1, n + 1)
    grown[..., :n, :n] = total
    grown[..., n, :] = grown[..., :, n] = vector
    return grown
