"""The recommended hyperparameters of K-FAC, which are the defaults of the library and the programs.

They have the best worst-case result on ten networks, as found by `benchmarks/defaults.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from mpikfac.plan import BASIS_EVERY, FACTOR_EVERY
from mpikfac.settings.schedule import Schedule, growing

RATE = 0.0075
MOMENTUM = 0.9
WEIGHT_DECAY = 0.0005
SHARE = 10.0  # the relative damping, as a multiple of the mean eigenvalue


class Intervals(NamedTuple):
    """The numbers of steps between updates of factors, and between decompositions."""

    factor_update_steps: Schedule
    inv_update_steps: Schedule


def usual_intervals(stagger: int = 1) -> Intervals:
    """Return the default intervals, for decompositions in `stagger` slots."""
    return Intervals(growing(FACTOR_EVERY), growing(BASIS_EVERY, multiple=stagger))
