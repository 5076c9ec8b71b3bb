"""Linear layers inside a module that multiplies by several weights of its own."""

from mpikfac.layers.inner.attention import attention_layers as attention_layers
from mpikfac.layers.inner.cell import cell_layers as cell_layers
