"""The recommended numbers of K-FAC, which the library and the programs take by default.

`benchmarks/defaults.py` has chosen the numbers over ten networks, by the worst of the ten.
"""

from __future__ import annotations

from typing import NamedTuple

from mpikfac.plan import BASIS_EVERY, FACTOR_EVERY
from mpikfac.settings.schedule import Schedule, growing

RATE = 0.0075
MOMENTUM = 0.9
WEIGHT_DECAY = 0.0005
SHARE = 10.0  # of the mean eigenvalue: the relative damping


class Intervals(NamedTuple):
    """The steps between updates of factors, and between decompositions."""

    factor_update_steps: Schedule
    inv_update_steps: Schedule


def usual_intervals(stagger: int = 1) -> Intervals:
    """Return the usual intervals, for decompositions in `stagger` turns."""
    return Intervals(growing(FACTOR_EVERY), growing(BASIS_EVERY, multiple=stagger))
