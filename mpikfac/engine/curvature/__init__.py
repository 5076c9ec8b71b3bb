"""K-FAC's preconditioner on one rank, from hooks to directions."""

from __future__ import annotations

from mpikfac.engine.curvature.bases import Bases as Bases
from mpikfac.engine.curvature.decomposers import AtOnce as AtOnce
from mpikfac.engine.curvature.decomposers import Decomposed as Decomposed
from mpikfac.engine.curvature.decomposers import FactorRequest as FactorRequest
from mpikfac.engine.curvature.decomposers import Ready as Ready
from mpikfac.engine.curvature.directions import Directions as Directions
from mpikfac.engine.curvature.distributed import (
    DistributedPreconditioner as DistributedPreconditioner,
)
from mpikfac.engine.curvature.distributed import PreconditionerFactory as PreconditionerFactory
from mpikfac.engine.curvature.factors import Factors as Factors
from mpikfac.engine.curvature.factors import Running as Running
from mpikfac.engine.curvature.factors import leave_out_broken as leave_out_broken
from mpikfac.engine.curvature.factors import merge as merge
from mpikfac.engine.curvature.grafting import Graft as Graft
from mpikfac.engine.curvature.grafting import Stack as Stack
