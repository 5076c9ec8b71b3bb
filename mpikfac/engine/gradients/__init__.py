"""A model's gradients on a rank: blocks in an arena, slices of split layers, scaled losses."""

from __future__ import annotations

from mpikfac.engine.gradients.gradients import Gradients
from mpikfac.engine.gradients.scaled import reduce_scaled, usable_scaler
from mpikfac.engine.gradients.slots import share_out, slots_in

__all__ = ["Gradients", "reduce_scaled", "share_out", "slots_in", "usable_scaler"]
