"""Scale and shift of normalisation layers: a Fisher block of two numbers for each unit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mpikfac.layers.layer import Layer
from mpikfac.numerics import Normalization
from mpikfac.plan import LayerShape


class NormLayer(Layer):
    """A normalisation's scale and shift: each unit is a group with one output.

    An example's gradient for a unit is `sum(g x, g)` over its positions, `x` what is scaled. The
    mean of its outer products is the unit's block of the Fisher matrix as it is, without a product
    of expectations; it stands in the place of A, and nothing in that of G.
    """

    quadratic = "A"
    module: nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | _BatchNorm

    def __init__(self, name: str, module: nn.Module) -> None:
        self.channels_last = isinstance(module, nn.LayerNorm | nn.RMSNorm)
        super().__init__(name, module)
        if self.channels_last:
            self.dimensions = 1 + self.parameters[0].dim()

    def whole_shape(self) -> LayerShape:
        """A group for each unit."""
        trained = len(self.parameters)
        return LayerShape(self.name, trained, 1, self.parameters[0].numel(), sides="A")

    def prepared(self, x: Tensor, g: Tensor) -> Tensor:
        """What is scaled: the input, normalised."""
        module = self.module
        if isinstance(module, nn.GroupNorm):
            return F.group_norm(x, module.num_groups, eps=module.eps)
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(x, module.normalized_shape, eps=module.eps)
        if isinstance(module, nn.RMSNorm):
            return F.rms_norm(x, module.normalized_shape, eps=module.eps)
        return F.batch_norm(x, None, None, training=True, eps=module.eps)

    def second_moment(self, side: str, x: Tensor, g: Tensor) -> Tensor:
        """`sum(u u^T)` `[units, inputs, inputs]` over examples with gradients `u`."""
        gradients = self._gradients(x, g)
        if side in self.shape.diagonal:
            return gradients.square().sum(0).view(-1, 1, 1)
        return torch.einsum("bui,buj->uij", gradients, gradients)

    def first_moment(self, side: str, x: Tensor, g: Tensor) -> Tensor:
        """`sum(u)` `[units, inputs]` over examples with gradients `u`."""
        return self._gradients(x, g).sum(0)

    def pairs(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Each unit's gradient, and the number 1, as if examples had one position."""
        gradients = self._gradients(x, g).transpose(0, 1).unsqueeze(2)
        pair = gradients, gradients.new_ones(*gradients.shape[:-1], 1)
        return pair if self.shape.groups > 1 else (pair[0][0], pair[1][0])

    def scales(
        self, normalization: Normalization, batch: int, positions: int, vectors: bool
    ) -> dict[str, float]:
        """Gradients are those of a mean over the batch: blocks are `batch` times too small."""
        return {"A": 1.0 if vectors else float(batch)}

    def positions(self, g: Tensor) -> int:
        """Examples: positions of one are added up."""
        return len(g)

    def parts(self, matrix: Tensor) -> list[Tensor]:
        """Views of `matrix` `[units, 1, inputs]`, shaped as scale and shift."""
        columns = matrix.view(self.shape.groups, -1).unbind(1)
        return [column.view(p.shape) for column, p in zip(columns, self.parameters)]

    def _gradients(self, x: Tensor, g: Tensor) -> Tensor:
        """Examples' gradients of what is trained of scale and shift `[batch, units, 1 or 2]`."""
        found = [g * x, g][2 - len(self.parameters) :] if self.bias else [g * x]
        return torch.stack(list(map(self._totals, found)), -1)

    def _totals(self, values: Tensor) -> Tensor:
        """Sums over an example's positions `[batch, units]`."""
        if self.channels_last:
            return values.reshape(len(values), -1, self.shape.groups).sum(1)
        return values.reshape(*values.shape[:2], -1).sum(2)
