"""The numbers and choices of K-FAC as values that check themselves."""

from __future__ import annotations

from mpikfac.settings.combinations import SETTINGS
from mpikfac.settings.damping import Damping, LevenbergMarquardt
from mpikfac.settings.estimator import Estimator, Turn
from mpikfac.settings.length import DECAY, EPSILON, Clip, Graft
from mpikfac.settings.schedule import Schedule
from mpikfac.settings.settings import Settings

__all__ = [
    "DECAY",
    "EPSILON",
    "SETTINGS",
    "Clip",
    "Damping",
    "Estimator",
    "Graft",
    "LevenbergMarquardt",
    "Schedule",
    "Settings",
    "Turn",
]
