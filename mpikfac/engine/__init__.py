"""The parts of K-FAC that hold state on one rank, in the order of a step."""

from __future__ import annotations

from mpikfac.engine.bases import Bases
from mpikfac.engine.decomposers import Curvature, check_joins, serve
from mpikfac.engine.directions import Directions
from mpikfac.engine.factors import Factors
from mpikfac.engine.gradients import Gradients
from mpikfac.engine.nonfinite import Nonfinite
from mpikfac.engine.recorder import Recorder
from mpikfac.engine.scales import Scales
from mpikfac.engine.site import Part, Site
from mpikfac.engine.state import (
    common_type,
    describe,
    fitting,
    groups_of,
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
    "Gradients",
    "Nonfinite",
    "Part",
    "Recorder",
    "Scales",
    "Site",
    "check_joins",
    "common_type",
    "describe",
    "fitting",
    "groups_of",
    "load_model_state",
    "missing_state",
    "model_state",
    "needed_state",
    "report_others",
    "serve",
]
