"""When factors are decomposed, and by which ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mpikfac.plan.choices.checks import check_count, check_size, make_plain
from mpikfac.plan.choices.choice import Choice

MOST_TURNS = 1000
"""The largest `stagger`; it is bounded because a plan lists all slots."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Refresh(Choice):
    """When the owners of factors decompose them.

    Attributes:
        staleness: the number of steps after which the decomposition of a factor is used, or fewer
            if the next refresh begins earlier. The decomposition runs in the background. Results do
            not depend on timing, because a decomposition that is ready early is not used early. 0:
            steps wait for the decomposition.
        stagger: the number of steps over which a refresh is spread; each of them decomposes some of
            the layers.
        tolerance: the relative error up to which a refresh keeps the last decomposition of a
            factor. For eigenvectors, the error is the norm of the off-diagonal part; for inverses,
            it is the error of typical directions. Eigenvalues are always updated, and with
            `Eigen(iterations=1)`, so are eigenvectors. The owner of a factor decides; messages are
            the same in both cases. 0: every factor is decomposed.
    """

    name: ClassVar[str] = "owners"

    staleness: int = 0
    stagger: int = 1
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        make_plain(self)
        check_count("staleness", self.staleness, 0)
        check_count("stagger", self.stagger, 1)
        if self.stagger > MOST_TURNS:
            raise ValueError(f"stagger={self.stagger} must be at most {MOST_TURNS}")
        check_size("tolerance", self.tolerance)

    def attach(self, plan: Any, preconditioners: Any, team: Any) -> Any:
        """Return a factory for the rank's decomposer; None for the default.

        Args:
            plan: the plan of all ranks.
            preconditioners: the preconditioners of layers by name.
            team: the `mpikfac.comm.SplitComm` of the ranks.
        """
        return None

    @property
    def servers(self) -> int:
        """The number of ranks that decompose for others, and do not train."""
        return 0
