"""Layers whose channels are dealt over a group of ranks: hybrid of data and model parallelism."""

from __future__ import annotations

from mpikfac.hybrid.forward import SplitForward, split_forward
from mpikfac.hybrid.rows import layer_calls
from mpikfac.hybrid.split import SplitLayers, split_layers, split_of

__all__ = [
    "SplitForward",
    "SplitLayers",
    "layer_calls",
    "split_forward",
    "split_layers",
    "split_of",
]
