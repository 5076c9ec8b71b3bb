"""Linear layers inside a module that multiplies by several weights of its own."""

from __future__ import annotations

from mpikfac.layers.inner.attention import attention_layers
from mpikfac.layers.inner.cell import cell_layers

__all__ = ["attention_layers", "cell_layers"]
