"""Reductions of the largest gradients [DGC, Lin et al. 2018]."""

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
    """Send only each rank's largest values; the others wait and are added to later ones.

    Attributes:
        ratio: the fraction of the values that are sent.
        momentum: the momentum of gradients that wait to be sent, which replaces the optimizer's.
        warmup_steps: the length of a warm-up of four stages, in which reductions of gradients send
            more values: `ratio` to the power of 1/5, 2/5, 3/5 and 4/5.
        clip_norm: the bound on the gradient's norm. With N ranks, each rank bounds its part of the
            mean by `clip_norm / sqrt(N)`. None for no bound.
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
            raise ValueError(f"ratio={self.ratio} must be above 0 and at most 1")
        check_fraction("momentum", self.momentum)
        check_count("warmup_steps", self.warmup_steps, 0)
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)

    def codec(self, layout: Layout, feedback: bool) -> TopKCodec:
        """Return the encoding of an arena."""
        return TopKCodec(feedback=feedback, ratio=self.ratio, padding=layout.padding())

    def codec_of_gradients(self, rank: RankPlan, layout: Layout) -> TopKCodec:
        """Return the encoding for reductions of gradients."""
        return replace(self.codec(layout, True), momentum=self.momentum)

    def attach(self, site: Any, gradients: Any) -> Any:
        """Return the part that sends more values in the first steps, and bounds gradients."""
        from mpikfac.lab.top_k.warmup import GentleStart

        gentle = self.warmup_steps > 0 or self.clip_norm is not None
        return GentleStart(site, gradients) if gentle else None

    def described(self) -> str:
        """Return a description of the encoding."""
        return f"the largest {100 * self.ratio:g} %"
