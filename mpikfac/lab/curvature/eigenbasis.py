"""A layer's curvature in its eigenbasis, where every function of the curvature is elementwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpikfac.numerics import eigenbasis
from mpikfac.plan import LayerShape

Function = Callable[[Tensor], Tensor]
"""A function of a layer's eigenvalues `[groups, outputs, inputs]` that keeps their shape."""


@dataclass(frozen=True)
class Eigenbasis:
    """The curvature `Q diag(values) Q^T` of a layer, with `Q = Q_G (x) Q_A`.

    The eigenvectors of a block-diagonal factor are block-diagonal. For a diagonal factor, and for a
    side without a factor, they are the identity.

    Attributes:
        a: the diagonal blocks of Q_A, each `[groups, n, n]`; empty for the identity.
        g: the diagonal blocks of Q_G, each `[groups, n, n]`; empty for the identity.
        values: the eigenvalues `[groups, outputs, inputs]`.
    """

    a: Sequence[Tensor]
    g: Sequence[Tensor]
    values: Tensor

    @classmethod
    def of_factors(
        cls, shape: LayerShape, factors: Mapping[str, Sequence[Tensor]], device: torch.device
    ) -> Eigenbasis:
        """Decompose a layer's factors in float64.

        Args:
            factors: the diagonal blocks of factors "A" and "G", each `[n, n]` or `[count, n, n]`.

        Raises:
            ValueError: a factor's shape does not match the layer, or a factor is not finite.
            ArithmeticError: LAPACK's iteration does not converge.
        """
        on_device = {side: [f.to(device, torch.float64) for f in factors[side]] for side in "AG"}
        (of_a, a), (of_g, g) = (_decomposed(shape, s, fs, device) for s, fs in on_device.items())
        return cls(a, g, of_g[..., :, None] * of_a[..., None, :])

    def parts(self) -> dict[str, Tensor]:
        """Return all tensors by name: "a0", "a1", ..., "g0", ... and "values"."""
        blocks = {f"{s}{i}": b for s in "ag" for i, b in enumerate(getattr(self, s))}
        return blocks | {"values": self.values}

    @classmethod
    def of_parts(cls, parts: Mapping[str, Tensor]) -> Eigenbasis:
        """Return the eigenbasis that consists of the given `parts`."""
        counts = {side: sum(name[0] == side for name in parts) for side in "ag"}
        a, g = ([parts[f"{side}{i}"] for i in range(count)] for side, count in counts.items())
        return cls(a, g, parts["values"])

    def of_groups(self, groups: slice) -> Eigenbasis:
        """Return the eigenbasis restricted to a slice of the layer's groups."""
        a, g = ([block[groups] for block in side] for side in (self.a, self.g))
        return Eigenbasis(a, g, self.values[groups])

    def rotate(self, matrices: Tensor) -> Tensor:
        """Return `Q_G^T matrix Q_A` for matrices `[..., groups, outputs, inputs]`."""
        return self.rotate_inputs(self.rotate_outputs(matrices.mT).mT)

    def rotate_inputs(self, rows: Tensor) -> Tensor:
        """Return `Q_A^T row` for rows `[..., groups, rows, inputs]`."""
        return _from_left([block.mT for block in self.a], rows.mT).mT

    def rotate_outputs(self, rows: Tensor) -> Tensor:
        """Return `Q_G^T row` for rows `[..., groups, rows, outputs]`."""
        return _from_left([block.mT for block in self.g], rows.mT).mT

    def rotate_back(self, matrices: Tensor) -> Tensor:
        """Return `Q_G matrix Q_A^T` for matrices `[..., groups, outputs, inputs]`."""
        return _from_left(self.a, _from_left(self.g, matrices).mT).mT

    def apply(self, function: Function, matrices: Tensor) -> Tensor:
        """Return `Q f(values) Q^T` applied to matrices `[..., groups, outputs, inputs]`."""
        return self.rotate_back(function(self.values) * self.rotate(matrices))


def _decomposed(
    shape: LayerShape, side: str, factors: Sequence[Tensor], device: torch.device
) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the eigenvalues `[groups, n]` of factor A or G, and the blocks of its eigenvectors."""
    groups, order = shape.groups, shape.inputs if side == "A" else shape.outputs
    name = f"{shape.name}.{side}"
    if not factors:
        return torch.ones(groups, order, dtype=torch.float64, device=device), ()
    if not all(factor.isfinite().all() for factor in factors):
        raise ValueError(f"factor {name!r} contains NaN or infinity; use an earlier checkpoint")
    if len(factors) == 1 and factors[0].shape == (groups * order, 1, 1):
        return factors[0].view(groups, order).clamp(min=0), ()
    if sum(factor.shape[-1] for factor in factors) != order:
        shapes = ", ".join(str([*factor.shape]) for factor in factors)
        raise ValueError(
            f"factor {name!r} has shape {shapes}, but the model's layer needs order {order}: the "
            f"run used a different model or coverage"
        )
    blocks = [factor.reshape(groups, *factor.shape[-2:]) for factor in factors]
    values, vectors = zip(*map(eigenbasis, blocks))
    return torch.cat(values, -1), vectors


def _from_left(blocks: Sequence[Tensor], matrices: Tensor) -> Tensor:
    """Multiply matrices `[..., groups, rows, n]` from the left by a block-diagonal matrix."""
    if not blocks:
        return matrices
    if len(blocks) == 1:
        return blocks[0] @ matrices
    parts = matrices.split([block.shape[-1] for block in blocks], -2)
    return torch.cat([block @ part for block, part in zip(blocks, parts)], -2)
