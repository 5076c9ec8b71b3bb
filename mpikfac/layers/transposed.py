"""Describe linear layers that store the transposed weight, such as `Conv1D` in transformers."""

from __future__ import annotations

from torch import Tensor

from mpikfac.layers.layer import Layer


class TransposedLayer(Layer):
    """Cover a linear layer with a weight `[inputs, outputs]`."""

    def arranged(self, parameter: Tensor) -> Tensor:
        """Return the bias unchanged, or the weight's transpose."""
        return parameter.T if parameter.dim() == 2 else parameter
