"""Statistics on a rank: from passes to sums, and to running averages of factors and scales."""

from __future__ import annotations

from mpikfac.engine.statistics.factors import Factors
from mpikfac.engine.statistics.recorder import Recorder
from mpikfac.engine.statistics.scales import Scales

__all__ = ["Factors", "Recorder", "Scales"]
