"""The parts of K-FAC on a rank, in the order of a step; "the rank" is the rank that runs code."""

from __future__ import annotations

from mpikfac.engine.bases import Bases
from mpikfac.engine.decomposers import Curvature, check_joins, serve
from mpikfac.engine.directions import Directions
from mpikfac.engine.factors import Factors
from mpikfac.engine.gradients import Gradients
from mpikfac.engine.nonfinite import Flags, Nonfinite
from mpikfac.engine.recorder import Recorder
from mpikfac.engine.scales import Scales
from mpikfac.engine.site import Part, Site
from mpikfac.engine.state import (
    check_optimizer,
    check_plain,
    common_type,
    describe,
    fitting,
    group_settings,
    groups_of,
    hand_over_state,
    load_model_state,
    missing_state,
    model_state,
    needed_state,
    report_others,
)

__all__ = [
    "Bases",
    "Curvature",
    "Directions",
    "Factors",
    "Flags",
    "Gradients",
    "Nonfinite",
    "Part",
    "Recorder",
    "Scales",
    "Site",
    "check_joins",
    "check_optimizer",
    "check_plain",
    "common_type",
    "describe",
    "fitting",
    "group_settings",
    "groups_of",
    "hand_over_state",
    "load_model_state",
    "missing_state",
    "model_state",
    "needed_state",
    "report_others",
    "serve",
]
