"""LSGD: replicas follow the replica with the lowest loss [Teng et al. 2019]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mpikfac.lab.local_sgd.config import OF_NODES, Replicas
from mpikfac.plan import AtLeast, Combination, check_count, check_share, names

if TYPE_CHECKING:
    from mpikfac.lab.local_sgd.merges import Merge
    from mpikfac.lab.local_sgd.messages import PlannedCopies
    from mpikfac.plan import Message


@dataclass(frozen=True, kw_only=True, repr=False)
class LSGD(Replicas):
    """Pull each replica towards the one with the lowest mean loss since the last exchange.

    Replicas remain separate. With `ranks_per_node`, each replica also moves towards the best
    replica on its node.

    Attributes:
        replicas: "rank" or "node": who trains a replica; see `LocalSGD`.
        local_sync_every: the number of steps from one exchange with the node's leader to the next,
            which must divide `sync_every`; None for `sync_every`.
        leader_step: the fraction of the distance to a leader that an exchange covers.
        leader_pull: the total fraction of this distance that the steps between two exchanges cover.
    """

    name: ClassVar[str] = "lsgd"
    needs: ClassVar[tuple[Combination, ...]] = (
        OF_NODES,
        Combination(
            "sync",
            ("lsgd",),
            {"compression.gradients": None},
            "the leader sends uncompressed weights, and the replicas are never merged into one",
        ),
        Combination(
            "sync.local_sync_every",
            None,
            {"transport.ranks_per_node": AtLeast(2), "sync.replicas": "rank"},
            "only a node with several replicas has a leader",
        ),
    )

    replicas: Literal["rank", "node"] = "rank"
    local_sync_every: int | None = None
    leader_step: float = 0.1
    leader_pull: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("leader_step", self.leader_step)
        check_share("leader_pull", self.leader_pull)
        if self.local_sync_every is not None:
            check_count("local_sync_every", self.local_sync_every, 1)
        if self.sync_every % self.in_node:
            raise ValueError(
                f"sync_every={self.sync_every} must be a multiple of "
                f"local_sync_every={self.in_node}"
            )

    @property
    def in_node(self) -> int:
        """The number of steps from one exchange with the node's leader to the next."""
        return self.local_sync_every or self.sync_every

    def share_of_steps(self, stage: str) -> float:
        """Return the fraction of steps that end with messages of the exchange stage `stage`."""
        return 1 / (self.in_node if stage == names.EXCHANGE_IN_NODE else self.sync_every)

    def exchange(self, copies: PlannedCopies) -> list[Message]:
        """Return the messages that send leaders' replicas and reduce running statistics."""
        teams = copies.led.items()
        led = [m for over, team in teams for m in copies.from_leader(over, team.start)]
        return led + copies.average_statistics()

    def vectors(self, copies: PlannedCopies) -> int:
        """Return the number of vectors that a rank stores: its replica, and one per leader."""
        return 1 + len(copies.led)

    def merge(self, site: Any, gradients: Any) -> Merge:
        """Return the rule by which an exchange changes the rank's replica."""
        from mpikfac.lab.local_sgd.merges import Leader

        return Leader(site, gradients)

    def described(self) -> dict[str, str]:
        """Return the method's values on the axes of `mpikfac.plan.axes`."""
        return {**super().described(), "combination": "towards the copy with the lowest loss"}
