"""TODO settings.length."""

from __future__ import annotations

from typing import Literal

Graft = Literal["sgd", "adam"]
GRAFTS = (None, "sgd", "adam")
DECAY, EPSILON = 0.999, 1e-8  # of Adam, as it is usually set
