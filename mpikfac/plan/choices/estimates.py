"""Choices of the curvature estimate that plans and predictions need, without torch."""

from __future__ import annotations

from typing import Literal

Fisher = Literal["empirical", "mc", "type-2", "forward-only"]
FISHERS: tuple[Fisher, ...] = ("empirical", "mc", "type-2", "forward-only")
Normalization = Literal["expand", "sc20", "kfac-pytorch"]
NORMALIZATIONS: tuple[Normalization, ...] = ("expand", "sc20", "kfac-pytorch")
FACTOR_EVERY, BASIS_EVERY = 10, 50
"""The default numbers of steps between updates of factors, and between decompositions."""
