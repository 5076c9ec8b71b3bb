"""Layers whose channels are dealt over a group of ranks: hybrid of data and model parallelism."""

from __future__ import annotations

from mpikfac.extensions.hybrid.forward import SplitForward as SplitForward
from mpikfac.extensions.hybrid.forward import split_forward as split_forward
from mpikfac.extensions.hybrid.rows import layer_calls as layer_calls
from mpikfac.extensions.hybrid.slices import SlicedGradients as SlicedGradients
from mpikfac.extensions.hybrid.split import SplitLayers as SplitLayers
from mpikfac.extensions.hybrid.split import split_layers as split_layers
from mpikfac.extensions.hybrid.split import split_of as split_of
from mpikfac.extensions.hybrid.transfers import exchange_rows as exchange_rows
