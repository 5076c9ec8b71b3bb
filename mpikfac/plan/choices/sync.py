"""What ranks exchange to train one model, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mpikfac.plan.choices.aggregation import Aggregation, Mean
from mpikfac.plan.choices.choice import Choice, named_types

if TYPE_CHECKING:
    from mpikfac.plan.messages import Message
    from mpikfac.plan.of_rank import RankPlan


@dataclass(frozen=True, kw_only=True, repr=False)
class Synchronization(Choice):
    """What ranks exchange to train one model, and when.

    Attributes:
        local_steps: whether ranks step independently between two exchanges, so their copies of the
            model, the replicas, differ.
        waits_for_all: whether a step waits for all ranks.
    """

    local_steps: ClassVar[bool] = False
    waits_for_all: ClassVar[bool] = True

    @property
    def sync_every(self) -> int:
        """The number of steps from one exchange between all ranks to the next."""
        return 1

    @property
    def aggregation(self) -> Aggregation:
        """How the ranks' vectors are combined: gradients, or weights of replicas."""
        return Mean()

    @property
    def factor_aggregation(self) -> Aggregation:
        """How the ranks' factors are combined."""
        return Mean()

    @property
    def of_vectors(self) -> bool:
        """Whether trained parameters are sent as one vector, without running statistics."""
        return self.local_steps or not self.aggregation.sums

    @property
    def averages_gradients(self) -> bool:
        """Whether ranks ever aggregate gradients over all ranks."""
        return True

    @property
    def server_ranks(self) -> int:
        """The number of ranks that keep weights for others, and do not train."""
        return 0

    def check_aggregations(self) -> None:
        """Check that each rule can aggregate the values for which it is used.

        Raises:
            ValueError: a rule cannot aggregate them.
        """
        given = {"aggregation": "vectors", "factor_aggregation": "factors"}
        for name, what in given.items():
            rule = getattr(self, name)
            if not isinstance(rule, Aggregation):
                raise ValueError(f"{name}={rule!r} must be an Aggregation, such as Mean()")
            if what not in rule.of:
                known = [n for n, kind in named_types(Aggregation).items() if what in kind.of]
                raise ValueError(f"{name}={rule.name!r} must be one of {', '.join(known)}")

    def check_ranks(self, ranks: int) -> None:
        """Check that the method works on `ranks` ranks.

        Raises:
            ValueError: the method does not work on `ranks` ranks.
        """
        self.aggregation.check_ranks(ranks)

    def share_of_steps(self, stage: str) -> float:
        """Return the fraction of steps that end with messages of the exchange stage `stage`."""
        return 1.0

    def messages(self, rank: RankPlan) -> list[Message]:
        """Return the messages that the method adds at the end of a step with an exchange."""
        return []

    def elements(self, rank: RankPlan) -> int:
        """Return the number of values that the rank keeps for exchanges."""
        return 0

    def attach(self, site: Any, gradients: Any) -> Any:
        """Return the part of the trainer that runs exchanges; None if all ranks step together.

        Args:
            site: the rank's `mpikfac.engine.Site`.
            gradients: the rank's `mpikfac.engine.Gradients`.
        """
        return None

    def described(self) -> dict[str, str]:
        """Return the method's values on the axes in `axes`; other axes keep their defaults."""
        return {}


@dataclass(frozen=True, kw_only=True, repr=False)
class Synchronous(Synchronization):
    """Aggregate gradients in every step; all ranks take the same step.

    Attributes:
        aggregation: how the ranks' gradients are combined.
        factor_aggregation: how the ranks' factors are combined.
    """

    name: ClassVar[str] = "synchronous"

    aggregation: Aggregation = Mean()
    factor_aggregation: Aggregation = Mean()

    def __post_init__(self) -> None:
        self.check_aggregations()
