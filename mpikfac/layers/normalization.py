"""Cover the scale and shift of normalisation layers with a 2 x 2 Fisher block per unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mpikfac.layers.layer import Call, Layer
from mpikfac.plan import LayerShape, Normalization


class NormLayer(Layer):
    """Cover a normalisation's scale and shift, with every unit as a group with 1 output.

    An example's gradient for a unit is the sum of `(g x, g)` over positions, where `x` is the
    normalised input. The mean of the gradients' outer products is exactly the unit's block of the
    Fisher matrix, not a product of expectations. The block replaces A; there is no G.
    """

    quadratic = "A"
    module: nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | _BatchNorm

    def __init__(self, name: str, module: nn.Module) -> None:
        self.channels_last = isinstance(module, nn.LayerNorm | nn.RMSNorm)
        super().__init__(name, module)
        self._by_running = False  # whether the last call normalised with running statistics
        if self.channels_last:
            self.dimensions = 1 + self.parameters[0].dim()

    def whole_shape(self) -> LayerShape:
        """Return the shape, with one group per unit."""
        trained = len(self.parameters)
        return LayerShape(self.name, trained, 1, self.parameters[0].numel(), sides="A")

    def watch(self, positional: Sequence[Any], named: dict[str, Any], output: Any) -> Call | None:
        """Record the call's training mode, which can change before the backward pass."""
        module = self.module
        if isinstance(module, _BatchNorm):
            self._by_running = not module.training and module.running_mean is not None
        return super().watch(positional, named, output)

    def prepared(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the normalised input, before the scale."""
        module = self.module
        if isinstance(module, nn.GroupNorm):
            return F.group_norm(x, module.num_groups, eps=module.eps)
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(x, module.normalized_shape, eps=module.eps)
        if isinstance(module, nn.RMSNorm):
            return F.rms_norm(x, module.normalized_shape, eps=module.eps)
        if self._by_running:
            running = module.running_mean, module.running_var
            return F.batch_norm(x, *running, training=False, eps=module.eps)
        return F.batch_norm(x, None, None, training=True, eps=module.eps)

    def second_moment(self, side: str, x: Tensor, g: Tensor) -> Tensor:
        """Return `sum(u u^T)` `[units, inputs, inputs]` over the examples' gradients `u`."""
        gradients = self._gradients(x, g)
        if side in self.shape.diagonal:
            return gradients.square().sum(0).view(-1, 1, 1)
        return torch.einsum("bui,buj->uij", gradients, gradients)

    def first_moment(self, side: str, x: Tensor, g: Tensor) -> Tensor:
        """Return `sum(u)` `[units, inputs]` over the examples' gradients `u`."""
        return self._gradients(x, g).sum(0)

    def pairs(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return each unit's gradient and the number 1, as if every example had one position."""
        gradients = self._gradients(x, g).transpose(0, 1).unsqueeze(2)
        pair = gradients, gradients.new_ones(*gradients.shape[:-1], 1)
        return pair if self.shape.groups > 1 else (pair[0][0], pair[1][0])

    def scales(
        self, normalization: Normalization, batch: int, positions: int, vectors: bool
    ) -> dict[str, float]:
        """Return the multiplier for A: 1 for vectors, else `batch`, because the loss is a mean."""
        return {"A": 1.0 if vectors else float(batch)}

    def positions(self, g: Tensor) -> int:
        """Return the number of examples, because positions are summed within examples."""
        return len(g)

    def parts(self, matrix: Tensor) -> list[Tensor]:
        """Return views of `matrix` `[units, 1, inputs]`, shaped like the scale and shift."""
        columns = matrix.view(self.shape.groups, self.shape.inputs).unbind(1)
        return [column.view(p.shape) for column, p in zip(columns, self.parameters)]

    def _gradients(self, x: Tensor, g: Tensor) -> Tensor:
        """Return per-example gradients `[batch, units, 1 or 2]` of scale and shift, if trained."""
        gradients = [g * x, g][2 - len(self.parameters) :] if self.bias else [g * x]
        return torch.stack(list(map(self._totals, gradients)), -1)

    def _totals(self, values: Tensor) -> Tensor:
        """Return sums over the positions of each example, `[batch, units]`."""
        if self.channels_last:
            return values.reshape(len(values), -1, self.shape.groups).sum(1)
        return values.reshape(*values.shape[:2], -1).sum(2)
