"""The configuration of reductions of the largest gradient elements [DGC, Lin et al. 2018]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from mpikfac.lab.top_k.codec import TopKCodec
from mpikfac.plan import (
    Combination,
    Compressor,
    check_count,
    check_fraction,
    check_positive,
    make_plain,
)

if TYPE_CHECKING:
    from mpikfac.plan import Layout, RankPlan

_OF_GRADIENTS = {"sync.local_steps": False, "sync.waits_for_all": True}


@dataclass(frozen=True, kw_only=True, repr=False)
class TopK(Compressor):
    """Send only each rank's largest values; all other values accumulate until they are sent.

    Attributes:
        ratio: the fraction of values that are sent.
        momentum: the momentum with which unsent gradients accumulate; it replaces the optimizer's.
        warmup_steps: the number of steps of a four-stage warm-up, in which more gradients are sent:
            the fractions are `ratio` to the power of 1/5, 2/5, 3/5 and 4/5.
        clip_norm: the bound on the gradient's norm; None for no bound. With N ranks, each rank
            bounds its contribution to the mean by `clip_norm / sqrt(N)`.
    """

    name: ClassVar[str] = "top-k"
    gradients_only: ClassVar[bool] = True
    needs: ClassVar[tuple[Combination, ...]] = (
        Combination(
            "compression.gradients.momentum",
            None,
            _OF_GRADIENTS,
            "the momentum applies to gradients that wait to be sent",
            default=0.0,
        ),
        *(
            Combination(
                f"compression.gradients.{field}",
                None,
                {
                    **_OF_GRADIENTS,
                    **{"assignment.shard_optimizer": False, "transport.overlap": False},
                },
                "a reduction of the largest gradients begins when a rank has all its gradients",
                default,
            )
            for field, default in (("warmup_steps", 0), ("clip_norm", None))
        ),
    )

    ratio: float = 0.01
    momentum: float = 0.0
    warmup_steps: int = 0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        check_positive("ratio", self.ratio)
        if self.ratio > 1:
            raise ValueError(f"ratio={self.ratio} must be in (0, 1]")
        check_fraction("momentum", self.momentum)
        check_count("warmup_steps", self.warmup_steps, 0)
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)

    def codec(self, layout: Layout, feedback: bool) -> TopKCodec:
        """Return the encoding for an arena."""
        return TopKCodec(feedback=feedback, ratio=self.ratio, padding=layout.padding())

    def codec_of_gradients(self, rank: RankPlan, layout: Layout) -> TopKCodec:
        """Return the encoding for reductions of gradients."""
        return replace(self.codec(layout, True), momentum=self.momentum)

    def attach(self, site: Any, gradients: Any) -> Any:
        """Return the trainer's part that handles the warm-up and bounds gradients, if needed."""
        from mpikfac.lab.top_k.warmup import GentleStart

        gentle = self.warmup_steps > 0 or self.clip_norm is not None
        return GentleStart(site, gradients) if gentle else None

    def described(self) -> str:
        """Return a description of the encoding."""
        return f"the largest {100 * self.ratio:g} %"
