"""The configuration of curvature servers [LBANN]."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from mpikfac.plan import Combination, Refresh, check_count


@dataclass(frozen=True, kw_only=True, repr=False)
class CurvatureServers(Refresh):
    """Send factors to ranks that do not train but decompose factors and return the bases.

    Attributes:
        staleness, stagger, tolerance: see `Refresh`; the staleness must be at least 1, and the
            tolerance must be 0.
        servers: the number of ranks that decompose factors and do not train.
    """

    name: ClassVar[str] = "curvature-servers"
    needs: ClassVar[tuple[Combination, ...]] = (
        Combination(
            "refresh",
            ("curvature-servers",),
            {"assignment.replicate_below": 0},
            "curvature servers return each factor's decomposition to a single owner",
        ),
    )

    staleness: int = 1
    servers: int = 1

    def attach(self, plan: Any, preconditioners: Any, team: Any) -> Any:
        """Return a factory for the rank's decomposer."""
        from mpikfac.lab.curvature_servers.decomposer import OnCurvatureServers

        return partial(OnCurvatureServers, plan, preconditioners, team)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("servers", self.servers, 1)
        check_count("staleness", self.staleness, 1)
        if self.tolerance:
            raise ValueError(
                f"tolerance={self.tolerance} must be 0 with curvature servers, which do not keep "
                f"previous decompositions"
            )
