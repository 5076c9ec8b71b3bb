"""The numbers and choices of K-FAC as values that check themselves."""

from __future__ import annotations

from mpikfac.settings.combinations import check_damping, check_rounding, check_solvers
from mpikfac.settings.damping import LevenbergMarquardt
from mpikfac.settings.estimator import Estimator, Turn
from mpikfac.settings.length import DECAY, EPSILON, Graft
from mpikfac.settings.schedule import Schedule, Settings

__all__ = [
    "DECAY",
    "EPSILON",
    "Estimator",
    "Graft",
    "LevenbergMarquardt",
    "Schedule",
    "Settings",
    "Turn",
    "check_damping",
    "check_rounding",
    "check_solvers",
]
