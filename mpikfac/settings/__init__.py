"""The numbers and choices of K-FAC as values that check themselves."""

from __future__ import annotations

from mpikfac.settings.combinations import SETTINGS
from mpikfac.settings.damping import FOR_VECTORS, Damping, LevenbergMarquardt
from mpikfac.settings.estimator import Estimator, Turn, usual_distance
from mpikfac.settings.length import Length, Source
from mpikfac.settings.schedule import Schedule
from mpikfac.settings.settings import Numbers, Settings

__all__ = [
    "FOR_VECTORS",
    "SETTINGS",
    "Damping",
    "Estimator",
    "Length",
    "LevenbergMarquardt",
    "Numbers",
    "Schedule",
    "Settings",
    "Source",
    "Turn",
    "usual_distance",
]
