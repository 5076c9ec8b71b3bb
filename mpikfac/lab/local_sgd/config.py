"""Local SGD and similar methods: ranks train replicas of the model, which are then averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mpikfac.plan import (
    Aggregation,
    AtLeast,
    Combination,
    Mean,
    Synchronization,
    check_count,
    check_fraction,
    check_positive,
    check_share,
    make_plain,
    one_of,
)

if TYPE_CHECKING:
    from mpikfac.lab.local_sgd.merges import Merge
    from mpikfac.lab.local_sgd.messages import PlannedCopies
    from mpikfac.plan import Message, RankPlan

OF_NODES = Combination(
    "sync.replicas",
    ("node",),
    {"transport.ranks_per_node": AtLeast(1), "sync.aggregation": "mean"},
    "the ranks of a node train one replica with the mean of their gradients",
)


@dataclass(frozen=True, kw_only=True, repr=False)
class Replicas(Synchronization):
    """Base class for methods in which ranks train separate replicas between exchanges.

    Attributes:
        sync_every: the number of steps from one exchange of weights to the next; at least 2.
        warmup_steps: the number of steps at the start in which ranks average gradients instead of
            exchanging weights [post-local SGD, Lin et al. 2020].
        factor_aggregation: the rule that combines the ranks' factors.
    """

    local_steps: ClassVar[bool] = True
    needs: ClassVar[tuple[Combination, ...]] = (OF_NODES,)

    sync_every: int = 8
    warmup_steps: int = 0
    factor_aggregation: Aggregation = Mean()

    def __post_init__(self) -> None:
        make_plain(self)
        check_count("sync_every", self.sync_every, 2)
        check_count("warmup_steps", self.warmup_steps, 0)
        one_of("replicas", self.replicas, ("rank", "node"))
        self.check_aggregations()

    @property
    def replicas(self) -> Literal["rank", "node"]:
        """Whether each rank, or each node of `ranks_per_node` ranks, trains its own replica.

        With "node", a node's ranks use their mean gradient, and replicas are exchanged between
        nodes.
        """
        return "rank"

    @property
    def fragments(self) -> int:
        """The number of parts of the model that are exchanged in round-robin order."""
        return 1

    @property
    def averages_gradients(self) -> bool:
        """Whether all ranks ever average gradients, as they do in a warm-up."""
        return self.warmup_steps > 0

    # -- when ------------------------------------------------------------------------------------

    def alone(self, step: int) -> bool:
        """Return whether ranks train separate replicas of the model in `step`."""
        return step >= self.warmup_steps

    def due(self, step: int, every: int | None = None) -> bool:
        """Return whether an exchange every `every` steps (default: `sync_every`) follows `step`."""
        every = every or self.sync_every
        return self.alone(step) and (step + 1 - self.warmup_steps) % every == 0

    def turn(self, step: int) -> int | None:
        """Return how many parts were sent before the part due after `step`; None if none is due."""
        turns, later = divmod(step + 1 - self.warmup_steps, self.sync_every // self.fragments)
        return turns - 1 if self.alone(step) and not later else None

    def share_of_steps(self, stage: str) -> float:
        """Return the fraction of steps that end with messages of the exchange stage `stage`."""
        return 1 / self.sync_every

    # -- in the plan -----------------------------------------------------------------------------

    def messages(self, rank: RankPlan) -> list[Message]:
        """Return the reductions within a node, and the messages that exchange replicas."""
        from mpikfac.lab.local_sgd.messages import PlannedCopies

        copies = PlannedCopies(rank)
        return [*copies.reduce_in_node(), *copies.exchange_weights()]

    def elements(self, rank: RankPlan) -> int:
        """Return the number of values that the rank stores for exchanges."""
        from mpikfac.lab.local_sgd.messages import PlannedCopies

        copies = PlannedCopies(rank)
        return self.vectors(copies) * copies.layout.size

    def exchange(self, copies: PlannedCopies) -> list[Message]:
        """Return the messages in which replicas exchange their weights."""
        return copies.average_copies()

    def sends_changes(self, copies: PlannedCopies) -> bool:
        """Return whether replicas send their changes since the last exchange instead of weights."""
        return False

    def vectors(self, copies: PlannedCopies) -> int:
        """Return the number of model-sized vectors that a rank stores."""
        return 1

    # -- in the trainer --------------------------------------------------------------------------

    def merge(self, site: Any, gradients: Any) -> Merge:
        """Return the rule by which an exchange changes the rank's replica."""
        raise NotImplementedError

    def attach(self, site: Any, gradients: Any) -> Any:
        """Return the part of the trainer that steps and merges replicas."""
        from mpikfac.lab.local_sgd.replicas import Copies

        return Copies(site, gradients)

    def described(self) -> dict[str, str]:
        """Return the method's values on the axes of `mpikfac.plan.axes`."""
        later = f", after {self.warmup_steps} steps of gradients" if self.warmup_steps else ""
        nodes = {"architecture": "nodes"} if self.replicas == "node" else {}
        return {"synchronisation": f"weights every {self.sync_every} steps{later}", **nodes}


@dataclass(frozen=True, kw_only=True, repr=False)
class LocalSGD(Replicas):
    """Replace all replicas by their mean every few steps [Stich 2019].

    Attributes:
        replicas: "rank": each rank trains its own replica. "node": each node of `ranks_per_node`
            ranks trains one replica with the node's mean gradient, and nodes exchange replicas.
        aggregation: the rule that combines the replicas' weights.
    """

    name: ClassVar[str] = "local-sgd"

    replicas: Literal["rank", "node"] = "rank"
    aggregation: Aggregation = Mean()

    def exchange(self, copies: PlannedCopies) -> list[Message]:
        """Return the messages in which replicas exchange their weights."""
        return copies.average_copies() if self.aggregation.sums else copies.combine_copies()

    def sends_changes(self, copies: PlannedCopies) -> bool:
        """Return True with gradient compression, which loses less in changes than in weights."""
        return copies.rank.strategy.compression.gradients is not None

    def vectors(self, copies: PlannedCopies) -> int:
        """Return 2 if changes are sent (the replica, and the previous weights), otherwise 1."""
        return 1 + copies.changes

    def merge(self, site: Any, gradients: Any) -> Merge:
        """Return the rule by which an exchange changes the rank's replica."""
        from mpikfac.lab.local_sgd.merges import AverageMerge

        return AverageMerge(site, gradients)


ONE_LEVEL = tuple(
    Combination(
        f"sync.{field}",
        None,
        {"transport.ranks_per_node": None, "sync.replicas": "node"},
        "a reduction in the background has a single level: between ranks, or between nodes",
        default,
        any_of=True,
    )
    for field, default in (("fragments", 1), ("delay", 0), ("mixing", 0.0))
)
PLAIN = tuple(
    Combination(
        f"sync.{field}",
        None,
        {"sync.aggregation": "mean", "compression.gradients": None},
        "only plain reductions of parts of the model can run in the background",
        default,
    )
    for field, default in (("fragments", 1), ("delay", 0), ("mixing", 0.0))
)


@dataclass(frozen=True, kw_only=True, repr=False)
class DiLoCo(LocalSGD):
    """Local SGD in which an outer step uses the replicas' mean change as its gradient.

    The outer step is an SGD step with Nesterov momentum [DiLoCo, Douillard et al. 2023]. With
    `fragments`, `delay` or `mixing`, exchanges are spread over steps [Streaming DiLoCo, Douillard
    et al. 2025].

    Attributes:
        outer_lr: the learning rate of the outer step; 1 without momentum gives local SGD.
        outer_momentum: the Nesterov momentum of the outer step.
        fragments: the number of parts of the model; each is exchanged every `sync_every` steps.
        delay: the number of steps between sending a part and using its mean, during which the
            reduction runs in the background.
        mixing: the coefficient of the rank's own weights when a mean is used; None for
            `2 delay / (2 delay + n)` with n replicas [DASO].
    """

    name: ClassVar[str] = "diloco"
    needs: ClassVar[tuple[Combination, ...]] = (OF_NODES, *ONE_LEVEL, *PLAIN)

    sync_every: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mixing: float | None = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("outer_lr", self.outer_lr)
        check_fraction("outer_momentum", self.outer_momentum)
        check_count("fragments", self.fragments, 1)
        check_count("delay", self.delay, 0)
        if self.mixing is not None:
            check_share("mixing", self.mixing)
        if self.sync_every % self.fragments:
            raise ValueError(
                f"sync_every={self.sync_every} must be a multiple of fragments={self.fragments}"
            )
        if self.delay >= self.sync_every:
            raise ValueError(f"delay={self.delay} must be below sync_every={self.sync_every}")

    @property
    def streams(self) -> bool:
        """Whether exchanges are spread over steps, or mix the mean with the rank's own weights."""
        return (self.fragments, self.delay, self.mixing) != (1, 0, 0.0)

    def exchange(self, copies: PlannedCopies) -> list[Message]:
        """Return the messages in which replicas exchange their weights."""
        return copies.streams() if self.streams else super().exchange(copies)

    def sends_changes(self, copies: PlannedCopies) -> bool:
        """Return whether changes are sent, which outer steps and spread exchanges require."""
        outer = (self.outer_lr, self.outer_momentum) != (1.0, 0.0)
        return outer or self.streams or super().sends_changes(copies)

    def vectors(self, copies: PlannedCopies) -> int:
        """Return the number of vectors: those of local SGD and, if used, the outer momentum."""
        return super().vectors(copies) + (self.outer_momentum > 0)

    def merge(self, site: Any, gradients: Any) -> Merge:
        """Return the rule by which an exchange changes the rank's replica."""
        from mpikfac.lab.local_sgd.merges import OuterStep, Streamed

        return Streamed(site, gradients) if self.streams else OuterStep(site, gradients)

    def described(self) -> dict[str, str]:
        """Return the method's values on the axes of `mpikfac.plan.axes`."""
        later = f", after {self.warmup_steps} steps of gradients" if self.warmup_steps else ""
        outer = " by an outer step" if self.outer_momentum else ""
        if self.fragments > 1:
            outer += f", in {self.fragments} parts one after another"
        when = f"weights every {self.sync_every} steps{outer}{later}"
        beside = {"overlap": "steps after an exchange"} if self.delay else {}
        return {**super().described(), "synchronisation": when, **beside}


@dataclass(frozen=True, kw_only=True, repr=False)
class DASO(Replicas):
    """Average gradients within each node in every step, and weights between nodes less often.

    The ranks of a node send weights in round-robin order, and the mean is mixed in a few steps
    later [DASO, Coquelin et al. 2022].

    Attributes:
        delay: the number of steps between sending weights and using their mean.
        mixing: the coefficient of the rank's own weights when a mean is used; None for
            `2 delay / (2 delay + n)` with n replicas.
    """

    name: ClassVar[str] = "daso"
    needs: ClassVar[tuple[Combination, ...]] = (
        OF_NODES,
        Combination(
            "sync",
            ("daso",),
            {"compression.gradients": None},
            "only plain reductions of the model can run in the background",
        ),
    )
    outer_lr: ClassVar[float] = 1.0
    outer_momentum: ClassVar[float] = 0.0

    sync_every: int = 4
    delay: int = 1
    mixing: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("delay", self.delay, 0)
        if self.mixing is not None:
            check_share("mixing", self.mixing)
        if self.delay >= self.sync_every:
            raise ValueError(f"delay={self.delay} must be below sync_every={self.sync_every}")

    @property
    def replicas(self) -> Literal["rank", "node"]:
        """Return "node": each node trains its own replica."""
        return "node"

    def exchange(self, copies: PlannedCopies) -> list[Message]:
        """Return the messages in which replicas exchange their weights."""
        return copies.streams()

    def sends_changes(self, copies: PlannedCopies) -> bool:
        """Return True: replicas always send their changes since the last exchange."""
        return True

    def vectors(self, copies: PlannedCopies) -> int:
        """Return 2: the replica, and the weights after the last exchange."""
        return 2

    def merge(self, site: Any, gradients: Any) -> Merge:
        """Return the rule by which an exchange changes the rank's replica."""
        from mpikfac.lab.local_sgd.merges import Streamed

        return Streamed(site, gradients)

    def described(self) -> dict[str, str]:
        """Return the method's values on the axes of `mpikfac.plan.axes`."""
        beside = {"overlap": "steps after an exchange"} if self.delay else {}
        return {**super().described(), **beside}
