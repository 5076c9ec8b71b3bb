"""EKFAC: eigenbases with eigenvalues from per-example gradients [George et al. 2018]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpikfac.plan import Combination, Form, OneOf, Same
from mpikfac.preconditioners.eigen import RENEWED, Eigen

EVERYWHERE = Combination(
    "preconditioner",
    ("ekfac",),
    {
        **{"grad_workers": Same("ranks"), "assignment.factor_reduction": "allreduce"},
        **{"assignment.shard_optimizer": False, "assignment.replicate_below": 0},
        **{"transport.virtual_ranks": None, "transport.reduce_factors_at": "factors"},
        "transport.overlap": False,
    },
    "every rank rotates gradients into the bases of all layers when it records statistics",
)
AS_THEY_ARE = Combination(
    "preconditioner",
    ("ekfac",),
    {"normalization": "expand", "fisher_type": OneOf(("empirical", "mc", "type-2"))},
    "scales are second moments of unscaled per-example gradients",
)


@dataclass(frozen=True, kw_only=True, repr=False)
class EKFAC(Eigen):
    """Eigenbases, with eigenvalues of `G (x) A` estimated from per-example gradients.

    `mpikfac.engine.curvature.scales.Scales` keeps the estimates.
    """

    name: ClassVar[str] = "ekfac"
    form: ClassVar[Form] = Form(
        name,
        {"vectors": 2, "values": 1},
        denominators=True,
        rescaled=True,
        products=2,
        timed_as="eigen",
        needs=(EVERYWHERE, AS_THEY_ARE, RENEWED),
    )
