"""Name the choices of an estimate of the curvature, without the code behind the names."""

from __future__ import annotations

from typing import Literal

Fisher = Literal["empirical", "sampled", "exact", "forward-only"]
FISHERS: tuple[Fisher, ...] = ("empirical", "sampled", "exact", "forward-only")
Normalization = Literal["expand", "sc20", "kfac-pytorch"]
NORMALIZATIONS: tuple[Normalization, ...] = ("expand", "sc20", "kfac-pytorch")
