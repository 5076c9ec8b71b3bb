"""Describe embeddings as matrices: inputs are unit vectors, so A is a diagonal matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpikfac.layers.layer import Layer, NotCovered
from mpikfac.plan import LayerShape


class EmbeddingLayer(Layer):
    """Cover an `Embedding`: the weight is the transpose of a matrix that multiplies unit vectors.

    The unit vector of `padding_idx` counts as zero.
    """

    dimensions = 1
    module: nn.Embedding

    def __init__(self, name: str, module: nn.Embedding) -> None:
        for choice, plain in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            if (value := getattr(module, choice)) != plain:
                raise NotCovered(f"Embedding with {choice}={value} is not covered")
        super().__init__(name, module)

    def whole_shape(self) -> LayerShape:
        """Return the shape: A is a diagonal of frequencies, and G has the order `embedding_dim`.

        An example's gradient would be as large as the weight and consist almost entirely of zeros,
        so per-example gradients are never computed (`rescaled=False`).
        """
        inputs, outputs = self.module.weight.shape
        return LayerShape(self.name, inputs, outputs, diagonal="A", rescaled=False)

    def second_moment(self, side: str, x: Tensor, g: Tensor) -> Tensor:
        """Return `sum(a a^T)`, which counts how often each entry is used, or `sum(g g^T)`."""
        if side == "A" and self.shape.kfac_approx == "expand":
            used = self.input_vector(x)
            return used.view(-1, 1, 1) if "A" in self.shape.diagonal else used.diag()
        return super().second_moment(side, x, g)

    def input_vector(self, x: Tensor) -> Tensor:
        """Return how often each entry is used, `[inputs]`."""
        used = torch.bincount(x.flatten(), minlength=len(self.module.weight)).to(self._dtype)
        if self.module.padding_idx is not None:
            used[self.module.padding_idx] = 0
        return used

    def input_means(self, x: Tensor) -> Tensor:
        """Return the fraction of an example's positions that use each entry, `[batch, inputs]`."""
        entries, count = x.reshape(len(x), -1), len(self.module.weight)
        means = torch.zeros(len(x), count, dtype=self._dtype, device=x.device)
        share = torch.full_like(entries, 1 / entries.shape[1], dtype=means.dtype)
        means.scatter_add_(1, entries, share)
        if self.module.padding_idx is not None:
            means[:, self.module.padding_idx] = 0
        return means

    def projections(
        self, x: Tensor, g: Tensor, of_inputs: Tensor, of_outputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return unit vectors times `of_inputs`, which are its rows, and `g` times `of_outputs`."""
        rows = of_inputs[0].clone()
        if self.module.padding_idx is not None:
            rows[self.module.padding_idx] = 0
        vectors = self.outputs(g).flatten(0, self._last).to(of_outputs.dtype)
        return rows[x.flatten()], vectors @ of_outputs[0]

    def pairs(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the unit vectors, with `inputs` elements per position, and the gradients."""
        entries, count = x.reshape(len(x), -1), len(self.module.weight)
        units = F.one_hot(entries, count).to(g.dtype)
        if self.module.padding_idx is not None:
            units[..., self.module.padding_idx] = 0
        return units, self.outputs(g)

    @property
    def _dtype(self) -> torch.dtype:
        """Return the dtype for counts, which require more precision than bfloat16."""
        return torch.promote_types(self.module.weight.dtype, torch.float32)

    def arranged(self, parameter: Tensor) -> Tensor:
        """Return the weight's transpose."""
        return parameter.T
