"""Embeddings as matrices: inputs are unit vectors, so A is a diagonal of frequencies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpikfac.layers.layer import Layer
from mpikfac.plan import LayerShape


class EmbeddingLayer(Layer):
    """An `Embedding`: its weight is the transpose of a matrix that multiplies unit vectors.

    That of `padding_idx` counts as zero.
    """

    dimensions = 1
    module: nn.Embedding

    def __init__(self, name: str, module: nn.Embedding) -> None:
        for choice, plain in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            if (value := getattr(module, choice)) != plain:
                raise ValueError(
                    f"layer {name!r}: Embedding with {choice}={value} is not covered; "
                    f"add {name!r} to skip to train it first-order"
                )
        super().__init__(name, module)

    def whole_shape(self) -> LayerShape:
        """A diagonal of frequencies, and a factor of the order of a vector.

        An example's gradient is as large as the weight, nearly all of it zeros, and none is made.
        """
        inputs, outputs = self.module.weight.shape
        return LayerShape(self.name, inputs, outputs, diagonal="A", rescaled=False)

    def second_moment(self, side: str, x: Tensor, g: Tensor) -> Tensor:
        """How often each entry is used, or `sum(g g^T)`; A's squares are what is squared."""
        if side == "A" and self.shape.sharing == "expand":
            used = self.input_vector(x)
            return used.view(-1, 1, 1) if "A" in self.shape.diagonal else used.diag()
        return super().second_moment(side, x, g)

    def input_vector(self, x: Tensor) -> Tensor:
        """How often each entry is used `[inputs]`."""
        used = torch.bincount(x.flatten(), minlength=len(self.module.weight)).to(self._dtype)
        if self.module.padding_idx is not None:
            used[self.module.padding_idx] = 0
        return used

    def input_means(self, x: Tensor) -> Tensor:
        """Of each example, the share of positions that use each entry, `[batch, inputs]`."""
        entries, count = x.reshape(len(x), -1), len(self.module.weight)
        means = torch.zeros(len(x), count, dtype=self._dtype, device=x.device)
        share = torch.full_like(entries, 1 / entries.shape[1], dtype=means.dtype)
        means.scatter_add_(1, entries, share)
        if self.module.padding_idx is not None:
            means[:, self.module.padding_idx] = 0
        return means

    @property
    def _dtype(self) -> torch.dtype:
        """Of counts, for which bfloat16 has too few digits."""
        return torch.promote_types(self.module.weight.dtype, torch.float32)

    def arranged(self, parameter: Tensor) -> Tensor:
        """The weight's transpose."""
        return parameter.T
