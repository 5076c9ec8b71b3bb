"""The parts of a trainer on one rank; "this rank" is the rank that runs the code."""

from __future__ import annotations

from mpikfac.engine.curvature import AtOnce as AtOnce
from mpikfac.engine.curvature import Bases as Bases
from mpikfac.engine.curvature import Decomposed as Decomposed
from mpikfac.engine.curvature import Directions as Directions
from mpikfac.engine.curvature import DistributedPreconditioner as DistributedPreconditioner
from mpikfac.engine.curvature import FactorRequest as FactorRequest
from mpikfac.engine.curvature import Factors as Factors
from mpikfac.engine.curvature import Graft as Graft
from mpikfac.engine.curvature import PreconditionerFactory as PreconditionerFactory
from mpikfac.engine.curvature import Ready as Ready
from mpikfac.engine.curvature import Running as Running
from mpikfac.engine.curvature import Stack as Stack
from mpikfac.engine.curvature import leave_out_broken as leave_out_broken
from mpikfac.engine.curvature import merge as merge
from mpikfac.engine.extension import OneModel as OneModel
from mpikfac.engine.extension import attached as attached
from mpikfac.engine.gradients import Gradients as Gradients
from mpikfac.engine.gradients import check_weighable as check_weighable
from mpikfac.engine.gradients import divided_by_ranks as divided_by_ranks
from mpikfac.engine.method import CoveredModel as CoveredModel
from mpikfac.engine.method import Method as Method
from mpikfac.engine.method import MethodFactory as MethodFactory
from mpikfac.engine.nonfinite import Flags as Flags
from mpikfac.engine.nonfinite import Nonfinite as Nonfinite
from mpikfac.engine.part import Item as Item
from mpikfac.engine.part import Part as Part
from mpikfac.engine.part import PreconditionerPart as PreconditionerPart
from mpikfac.engine.readers import Slot as Slot
from mpikfac.engine.readers import slots_in as slots_in
from mpikfac.engine.scaled import average_scaled as average_scaled
from mpikfac.engine.scaled import usable_scaler as usable_scaler
from mpikfac.engine.site import Site as Site
from mpikfac.engine.update import Everyone as Everyone
