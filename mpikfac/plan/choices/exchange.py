"""What ranks exchange to train one model together, when, and how numbers of ranks are combined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from mpikfac.plan.choices.checks import (
    check_count,
    check_fraction,
    check_positive,
    check_share,
    check_size,
    make_plain,
    one_of,
)


@dataclass(frozen=True)
class Outer:
    """The step that ranks take when copies of the model are combined [DiLoCo].

    The mean of the copies' changes since the last exchange takes the place of a gradient in SGD
    with Nesterov's momentum. With merge="elastic", each copy steps by a gradient of its own.

    Attributes:
        outer_lr: the learning rate of the step. 1, without a momentum: the copies become the mean
            of the copies [local SGD].
        outer_momentum: Nesterov's momentum.
    """

    outer_lr: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        make_plain(self)
        check_positive("outer_lr", self.outer_lr)
        check_fraction("outer_momentum", self.outer_momentum)


@dataclass(frozen=True)
class MergeRule:
    """How an exchange changes the copies of the model.

    Attributes:
        merge: "mean": all copies become the same, by the step `Outer`. "leader": each copy moves
            towards the copy with the least mean loss since the last exchange, and stays a copy of
            its own [LSGD]. With `ranks_per_node`, also towards the best copy of the node.
            "elastic": each copy moves towards the running average of its own steps and towards the
            mean of all such averages, and stays a copy of its own [Parle].
        node_every: the number of steps from one exchange with the leader of the node to the next;
            divides `sync_every`. None: the node's leader and the leader of all ranks change at
            the same steps.
        leader_step: the share of the way to a leader that an exchange goes.
        leader_pull: the share of the way that the steps from one exchange to the next go together.
        anchor_pull: with "elastic", the weight of the way from the last exchange's weights, which a
            step adds to the gradient.
        mean_pull: the weight of the way to the mean, beside the way to the own average.
        pull_growth: the relative growth of both weights per exchange; in [Parle] 1 / (2 B) for B
            batches an epoch.
        anchor_most, mean_most: the largest `anchor_pull` and `mean_pull` after growth.
        average_decay: the weight of the older steps in the running average of a copy's steps.
    """

    merge: Literal["mean", "leader", "elastic"] = "mean"
    node_every: int | None = None
    leader_step: float = 0.1
    leader_pull: float = 0.1
    anchor_pull: float = 0.01
    mean_pull: float = 0.1
    pull_growth: float = 0.0
    anchor_most: float = 1.0
    mean_most: float = 10.0
    average_decay: float = 0.75

    def __post_init__(self) -> None:
        make_plain(self)
        one_of("merge", self.merge, ("mean", "leader", "elastic"))
        if self.node_every is not None:
            check_count("node_every", self.node_every, 1)
        for name in ("anchor_pull", "mean_pull", "pull_growth", "anchor_most", "mean_most"):
            check_size(name, getattr(self, name))
        for pull, most in (("anchor_pull", "anchor_most"), ("mean_pull", "mean_most")):
            if getattr(self, pull) > getattr(self, most):
                raise ValueError(
                    f"{pull}={getattr(self, pull)} must be at most {most}={getattr(self, most)}"
                )
        for name in ("leader_step", "leader_pull", "average_decay"):
            check_share(name, getattr(self, name))


@dataclass(frozen=True)
class Stream:
    """How an exchange of weights is spread over steps [Streaming DiLoCo].

    Attributes:
        fragments: parts of the model, exchanged by turns: each part every `sync_every` steps.
        lateness: the number of steps from the sending of a part to the use of the mean. The sum
            runs beside the steps in between.
        local_share: the share of the rank's own weights when a mean comes into use. None: with n
            copies, `2 lateness / (2 lateness + n)` [DASO].
    """

    fragments: int = 1
    lateness: int = 0
    local_share: float | None = 0.0

    def __post_init__(self) -> None:
        make_plain(self)
        check_count("fragments", self.fragments, 1)
        check_count("lateness", self.lateness, 0)
        if self.local_share is not None:
            check_share("local_share", self.local_share)


Rule = Literal[
    "mean", "median", "trimmed-mean", "krum", "geometric-median", "centered-clipping", "safeguard"
]
RULES: tuple[Rule, ...] = get_args(Rule)


@dataclass(frozen=True)
class Robust:
    """How the numbers of ranks become common numbers, although some ranks may be wrong.

    Attributes:
        combine: "mean": the mean of all ranks. "median": of each coordinate. "trimmed-mean": of
            each coordinate, without the `num_byzantine` smallest and largest numbers [Yin et al.
            2018]. "krum": the vector nearest to its neighbours [Blanchard et al. 2017].
            "geometric-median": the point with the least sum of distances. "centered-clipping": the
            result of the step before, and the mean of the ranks' differences from the result, with
            no difference longer than `clip_radius` [Karimireddy et al. 2021]. "safeguard": the mean
            of good ranks, whose vectors, summed over two windows of time, are near the sums of most
            ranks [Allen-Zhu et al. 2021].
        combine_factors: how ranks combine factors of K-FAC. "mean": the mean over the examples of
            all ranks. "near": of each factor, the mean over the examples of the ranks whose means
            are near most ranks' means.
        num_byzantine: the number of ranks that may be wrong, for "trimmed-mean" and "krum".
        clip_radius: the longest difference, for "centered-clipping".
        long_window, short_window: the steps of both windows, for "safeguard".
        safe_factor: the farthest distance of a good rank, in distances that hold most ranks; for
            "safeguard" and "near".
        safe_floor: the distance that is near in any case, in lengths of a walk of right ranks: the
            usual distance of two ranks' vectors, times the root of the window; for "safeguard".
        safe_of: the ranks of the mean of "safeguard": good "before" the step's vectors were looked
            at, as published, or "after".
        readmit_every: the steps after which both windows of "safeguard" begin anew and dropped
            ranks count again. 0: a rank is dropped for ever.
        safe_noise: the standard deviation of noise on the result of "safeguard".
    """

    combine: Rule = "mean"
    combine_factors: Literal["mean", "near"] = "mean"
    num_byzantine: int = 0
    clip_radius: float = 1.0
    long_window: int = 300
    short_window: int = 50
    safe_factor: float = 2.0
    safe_floor: float = 3.0
    safe_of: Literal["before", "after"] = "after"
    readmit_every: int = 0
    safe_noise: float = 0.0

    def __post_init__(self) -> None:
        make_plain(self)
        one_of("combine", self.combine, RULES)
        one_of("combine_factors", self.combine_factors, ("mean", "near"))
        check_count("num_byzantine", self.num_byzantine, 0)
        check_positive("clip_radius", self.clip_radius)
        check_count("short_window", self.short_window, 1)
        check_count("long_window", self.long_window, self.short_window)
        check_positive("safe_factor", self.safe_factor)
        if self.safe_factor < 1:
            raise ValueError(f"safe_factor={self.safe_factor!r} must be at least 1")
        check_size("safe_floor", self.safe_floor)
        one_of("safe_of", self.safe_of, ("before", "after"))
        check_count("readmit_every", self.readmit_every, 0)
        check_size("safe_noise", self.safe_noise)

    @property
    def windows(self) -> tuple[int, int]:
        """The steps of the long and of the short window."""
        return self.long_window, self.short_window

    def products(self, ranks: int) -> int:
        """Return the number of inner products that the rule takes; 0 for rules by coordinate."""
        with_centre = (ranks + 1) ** 2
        return {
            **{"krum": ranks**2, "geometric-median": ranks**2},
            **{"centered-clipping": with_centre, "safeguard": 3 * ranks**2},
        }.get(self.combine, 0)

    def remembered(self, ranks: int) -> int:
        """Return the number of vectors that the rule keeps from step to step."""
        return {"centered-clipping": 1, "safeguard": 2 * ranks}.get(self.combine, 0)

    def check_ranks(self, ranks: int) -> None:
        """Return if the right ranks are enough to tell the wrong ranks.

        Raises:
            ValueError: there are too few ranks.
        """
        least = {"trimmed-mean": 2 * self.num_byzantine + 1, "krum": 2 * self.num_byzantine + 3}
        if ranks < least.get(self.combine, 1):
            raise ValueError(
                f"combine={self.combine!r} with num_byzantine={self.num_byzantine} needs at least "
                f"{least[self.combine]} ranks, not {ranks}"
            )


@dataclass(frozen=True)
class Asynchrony:
    """How clients train with servers that hold the weights [Dean et al. 2012, Paine et al. 2013].

    Attributes:
        servers: the number of ranks that do not train: each holds a share of the weights, and steps
            the share in order of arrival.
        push_every: the batches of an update. Between two updates, a client takes plain steps of SGD
            on a copy of the weights, and adds up the gradients.
        fetch_every: the batches from one fetch of weights to the next. Without a number, weights
            come with each update.
        warm_updates: the number of updates at the start that come from a single client.
        client_ranks: the number of ranks of a client; the ranks average gradients.
    """

    servers: int = 1
    push_every: int = 1
    fetch_every: int | None = None
    warm_updates: int = 0
    client_ranks: int = 1

    def __post_init__(self) -> None:
        make_plain(self)
        check_count("servers", self.servers, 1)
        check_count("push_every", self.push_every, 1)
        check_count("fetch_every", self.fetches, 1)
        check_count("warm_updates", self.warm_updates, 0)
        check_count("client_ranks", self.client_ranks, 1)

    @property
    def fetches(self) -> int:
        """The batches from one fetch of weights to the next."""
        return self.push_every if self.fetch_every is None else self.fetch_every


@dataclass(frozen=True)
class Exchange:
    """What ranks exchange to train one model, and when.

    Attributes:
        exchanged: "gradients": ranks average gradients, and all ranks take the same step.
            "weights": each rank steps a copy of the model by the gradient of the rank alone, and
            ranks combine the copies every few steps [local SGD, Lin et al. 2020]. "updates":
            clients send updates to servers, and nobody waits for a second client.
        sync_every: the number of steps from one exchange of weights to the next. With 1, ranks
            average gradients: the result is the same but for rounding.
        exchange_from: the number of steps at the start in which ranks average gradients, in the
            place of weights [post-local SGD, Lin et al. 2020].
        copies_of: "rank": each rank steps a copy of its own. "node": each node of `ranks_per_node`
            ranks steps a copy by the mean gradient of the node at every step; exchanges are between
            nodes. With `lateness`, a single rank of each node sends, by turns [DASO].
        merging: how an exchange changes the copies of the model.
        stream: how an exchange is spread over steps.
        outer: the step that combines copies of the model.
        robust: how numbers of ranks become common numbers.
        asynchrony: how clients train with servers.
    """

    exchanged: Literal["gradients", "weights", "updates"] = "gradients"
    sync_every: int = 1
    exchange_from: int = 0
    copies_of: Literal["rank", "node"] = "rank"
    merging: MergeRule = field(default_factory=MergeRule)
    stream: Stream = field(default_factory=Stream)
    outer: Outer = field(default_factory=Outer)
    robust: Robust = field(default_factory=Robust)
    asynchrony: Asynchrony = field(default_factory=Asynchrony)

    def __post_init__(self) -> None:
        make_plain(self)
        one_of("exchanged", self.exchanged, ("gradients", "weights", "updates"))
        check_count("sync_every", self.sync_every, 1)
        check_count("exchange_from", self.exchange_from, 0)
        one_of("copies_of", self.copies_of, ("rank", "node"))
        if self.sync_every % self.stream.fragments:
            raise ValueError(
                f"sync_every={self.sync_every} must be a multiple of "
                f"fragments={self.stream.fragments}"
            )
        if self.sync_every % self.in_node:
            raise ValueError(
                f"sync_every={self.sync_every} must be a multiple of node_every={self.in_node}"
            )
        if self.stream.lateness >= self.sync_every > 1:
            raise ValueError(
                f"lateness={self.stream.lateness} must be below sync_every={self.sync_every}"
            )

    @property
    def asynchronous(self) -> bool:
        """Whether clients send updates to servers."""
        return self.exchanged == "updates"

    @property
    def of_copies(self) -> bool:
        """Whether ranks ever step copies of their own."""
        return self.exchanged == "weights" and self.sync_every > 1

    @property
    def in_node(self) -> int:
        """The number of steps from one exchange with the leader of a node to the next."""
        return self.merging.node_every or self.sync_every

    @property
    def of_vectors(self) -> bool:
        """Whether a rule or an exchange takes the trained numbers as a vector, without means."""
        return self.of_copies or self.robust.combine != "mean"

    @property
    def streams(self) -> bool:
        """Whether exchanges are spread over steps, or keep a share of the rank's own weights."""
        return self.of_copies and self.stream != Stream()

    def turn(self, step: int) -> int | None:
        """Return how many parts were sent before the part sent right after `step`, if one is."""
        turns, later = divmod(
            step + 1 - self.exchange_from, self.sync_every // self.stream.fragments
        )
        return turns - 1 if self.alone(step) and not later else None

    def alone(self, step: int) -> bool:
        """Return whether each rank steps a copy of the model at `step`."""
        return self.of_copies and step >= self.exchange_from

    def due(self, step: int, every: int | None = None) -> bool:
        """Return whether copies are combined right after `step`, `every` so many steps."""
        every = every or self.sync_every
        return self.alone(step) and (step + 1 - self.exchange_from) % every == 0
