"""The parts of K-FAC on a rank, in the order of a step; "the rank" is the rank that runs code."""

from __future__ import annotations

from mpikfac.engine.bases import Bases
from mpikfac.engine.cautions import Cautions
from mpikfac.engine.checks import (
    check_kind,
    check_loaded_momentum,
    check_momentum,
    check_optimizer,
    check_plain,
    check_synchronous,
    common_type,
    describe,
    groups_of,
    report_others,
    taking_up,
)
from mpikfac.engine.copies import Replicas, of_copies
from mpikfac.engine.decomposers import Curvature, check_joins, serve
from mpikfac.engine.directions import Directions
from mpikfac.engine.gradients import Gradients, reduce_scaled, usable_scaler
from mpikfac.engine.nonfinite import Flags, Nonfinite
from mpikfac.engine.server import VERSION, on_host, serve_updates, spans
from mpikfac.engine.site import Part, Site
from mpikfac.engine.state import (
    fitting,
    group_settings,
    hand_over_state,
    laid_out,
    load_model_state,
    missing_state,
    model_state,
    needed_state,
)
from mpikfac.engine.statistics import Factors, Recorder, Scales

__all__ = [
    "VERSION",
    "Bases",
    "Cautions",
    "Curvature",
    "Directions",
    "Factors",
    "Flags",
    "Gradients",
    "Nonfinite",
    "Part",
    "Recorder",
    "Replicas",
    "Scales",
    "Site",
    "check_joins",
    "check_kind",
    "check_loaded_momentum",
    "check_momentum",
    "check_optimizer",
    "check_plain",
    "check_synchronous",
    "common_type",
    "describe",
    "fitting",
    "group_settings",
    "groups_of",
    "hand_over_state",
    "laid_out",
    "load_model_state",
    "missing_state",
    "model_state",
    "needed_state",
    "of_copies",
    "on_host",
    "reduce_scaled",
    "report_others",
    "serve",
    "serve_updates",
    "spans",
    "taking_up",
    "usable_scaler",
]
