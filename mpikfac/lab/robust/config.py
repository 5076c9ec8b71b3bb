"""Rules that combine the vectors of all ranks even if some of the ranks are faulty."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mpikfac.plan import (
    Aggregation,
    FactorAggregation,
    check_count,
    check_positive,
    check_size,
    make_plain,
    one_of,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, repr=False)
class Robust(Aggregation):
    """Base class for rules that combine vectors of which a few may be faulty."""

    def attach(self, site: Any) -> Iterable[Any]:
        """Return the trainer's part that stores the rule's memory in checkpoints."""
        from mpikfac.lab.robust.memory import RuleMemory
        from mpikfac.plan import robust

        return [RuleMemory(site)] if robust.dealt(site.plan) else ()


@dataclass(frozen=True, kw_only=True, repr=False)
class Median(Robust):
    """Take the coordinate-wise median [Yin et al. 2018]."""

    name: ClassVar[str] = "median"

    def combine(self, vectors: Tensor) -> Tensor:
        """Return the coordinate-wise median, `[n]`."""
        from mpikfac.lab.robust.rules import median

        return median(vectors)


@dataclass(frozen=True, kw_only=True, repr=False)
class GeometricMedian(Robust):
    """Take the point with the smallest sum of distances to all vectors [Chen et al. 2017]."""

    name: ClassVar[str] = "geometric-median"

    def products(self, ranks: int) -> int:
        """Return the number of inner products that the rule needs."""
        return ranks**2

    def weights(self, products: Tensor) -> Tensor:
        """Return the weights of the vectors, `[ranks]`."""
        from mpikfac.lab.robust.rules import geometric_median

        return geometric_median(products)


@dataclass(frozen=True, kw_only=True, repr=False)
class _OfSome(Robust):
    """Base class for rules that assume a maximum number of faulty ranks.

    Attributes:
        num_byzantine: the maximum number of faulty ranks.
    """

    num_byzantine: int = 1

    def __post_init__(self) -> None:
        make_plain(self)
        check_count("num_byzantine", self.num_byzantine, 0)

    def _check(self, ranks: int, least: int) -> None:
        if ranks < least:
            raise ValueError(
                f"sync.aggregation={self.name!r} with num_byzantine={self.num_byzantine} needs at "
                f"least {least} ranks, not {ranks}"
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class TrimmedMean(_OfSome):
    """Take the coordinate-wise mean, excluding the smallest and largest values [Yin et al. 2018].

    Attributes:
        num_byzantine: the number of values excluded at either end.
    """

    name: ClassVar[str] = "trimmed-mean"

    def check_ranks(self, ranks: int) -> None:
        """Check that there are enough ranks to tolerate `num_byzantine` faulty ones."""
        self._check(ranks, 2 * self.num_byzantine + 1)

    def combine(self, vectors: Tensor) -> Tensor:
        """Return the coordinate-wise trimmed mean, `[n]`."""
        from mpikfac.lab.robust.rules import trimmed_mean

        return trimmed_mean(vectors, self.num_byzantine)


@dataclass(frozen=True, kw_only=True, repr=False)
class Krum(_OfSome):
    """Take the vector that is closest to its nearest neighbours [Blanchard et al. 2017].

    Attributes:
        num_byzantine: the maximum number of faulty ranks.
    """

    name: ClassVar[str] = "krum"

    def check_ranks(self, ranks: int) -> None:
        """Check that there are enough ranks to tolerate `num_byzantine` faulty ones."""
        self._check(ranks, 2 * self.num_byzantine + 3)

    def products(self, ranks: int) -> int:
        """Return the number of inner products that the rule needs."""
        return ranks**2

    def weights(self, products: Tensor) -> Tensor:
        """Return the weights of the vectors, `[ranks]`."""
        from mpikfac.lab.robust.rules import krum

        return krum(products, self.num_byzantine)


@dataclass(frozen=True, kw_only=True, repr=False)
class CenteredClipping(Robust):
    """Add the mean clipped difference of all vectors to the last result [Karimireddy et al. 2021].

    Attributes:
        radius: the length to which a vector's difference from the last result is clipped.
    """

    name: ClassVar[str] = "centered-clipping"

    radius: float = 1.0

    def __post_init__(self) -> None:
        make_plain(self)
        check_positive("radius", self.radius)

    def products(self, ranks: int) -> int:
        """Return the number of inner products of all vectors and the centre, the last result."""
        return (ranks + 1) ** 2

    def remembered(self, ranks: int) -> int:
        """Return the number of vectors that the rule stores between steps."""
        return 1

    def weights(self, products: Tensor) -> Tensor:
        """Return the weights of the centre and the vectors, `[1 + ranks]`."""
        from mpikfac.lab.robust.rules import centered_clipping

        return centered_clipping(products, self.radius)

    def combiner(self, ranks: int, like: Tensor, first: int) -> Any:
        """Return an object that combines shards and remembers the centre."""
        from mpikfac.lab.robust.shards import Centred

        return Centred(self, ranks, like, first)


@dataclass(frozen=True, kw_only=True, repr=False)
class Safeguard(Robust):
    """Average the ranks whose vectors, summed over two windows, are close to those of most ranks.

    These ranks are called good [Allen-Zhu et al. 2021].

    Attributes:
        long_window, short_window: the number of steps in each window.
        threshold: the maximum distance of a good rank from the median rank, relative to the
            distance within which most ranks lie.
        floor: a distance that is always accepted, relative to the distance by which the sums of
            correct ranks drift apart in a random walk (the typical distance between two ranks'
            vectors, times the square root of the window).
        mean_of: "before": average the ranks that were good before the step's vectors were checked,
            as in the paper. "after": average the ranks that are good after the check.
        reset_interval: the number of steps after which both windows restart and excluded ranks are
            included again; 0 to exclude ranks permanently.
        noise_std: the standard deviation of noise that is added to the result.
    """

    name: ClassVar[str] = "safeguard"

    long_window: int = 300
    short_window: int = 50
    threshold: float = 2.0
    floor: float = 3.0
    mean_of: Literal["before", "after"] = "after"
    reset_interval: int = 0
    noise_std: float = 0.0

    def __post_init__(self) -> None:
        make_plain(self)
        check_count("short_window", self.short_window, 1)
        check_count("long_window", self.long_window, self.short_window)
        _check_threshold(self.threshold)
        check_size("floor", self.floor)
        one_of("mean_of", self.mean_of, ("before", "after"))
        check_count("reset_interval", self.reset_interval, 0)
        check_size("noise_std", self.noise_std)

    @property
    def windows(self) -> tuple[int, int]:
        """The numbers of steps in the long and the short window."""
        return self.long_window, self.short_window

    def products(self, ranks: int) -> int:
        """Return the number of inner products that the rule needs for a step and two windows."""
        return 3 * ranks**2

    def remembered(self, ranks: int) -> int:
        """Return the number of vectors that the rule stores between steps."""
        return 2 * ranks

    def combiner(self, ranks: int, like: Tensor, first: int) -> Any:
        """Return an object that combines shards and remembers both windows."""
        from mpikfac.lab.robust.shards import Windows

        return Windows(self, ranks, like, first)


@dataclass(frozen=True)
class NearMost(FactorAggregation):
    """Sum each block of factors over the ranks whose blocks are close to most ranks' blocks.

    Attributes:
        factor: the maximum distance of an included block from the median rank's block, as a
            multiple of the distance within which most ranks lie.
    """

    factor: float

    def products(self, ranks: int) -> int:
        """Return the number of inner products of blocks and counts that the rule needs."""
        return 2 * len(self.blocks) * ranks**2

    def combiner(self, first: int) -> Any:
        """Return an object that combines the shards that start at element `first`."""
        from mpikfac.lab.robust.shards import Near

        return Near(self, first)


@dataclass(frozen=True, kw_only=True, repr=False)
class NearestMajority(Aggregation):
    """Average a factor over the examples of ranks whose factors are close to most ranks' factors.

    Attributes:
        threshold: the maximum distance of an included factor from the median rank's factor,
            relative to the distance within which most ranks lie.
    """

    name: ClassVar[str] = "nearest-majority"
    of: ClassVar[tuple[str, ...]] = ("factors",)

    threshold: float = 2.0

    def __post_init__(self) -> None:
        make_plain(self)
        _check_threshold(self.threshold)

    def of_factors(self, blocks: tuple[tuple[int, int, int], ...]) -> NearMost:
        """Return the rule for messages that contain factors."""
        return NearMost(blocks, self.threshold)


def _check_threshold(threshold: float) -> None:
    check_positive("threshold", threshold)
    if threshold < 1:
        raise ValueError(f"threshold={threshold!r} must be at least 1")
