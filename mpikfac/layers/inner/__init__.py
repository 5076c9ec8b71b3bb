"""Cover the linear layers inside a module that uses several weights without submodules."""

from mpikfac.layers.inner.attention import ProjectionLayer as ProjectionLayer
from mpikfac.layers.inner.attention import attention_layers as attention_layers
from mpikfac.layers.inner.cell import CellLayer as CellLayer
from mpikfac.layers.inner.cell import cell_layers as cell_layers
