"""The scales of EKFAC: eigenvalues estimated from per-example gradients."""

from __future__ import annotations

from mpikfac.plan import layouts, names
from mpikfac.plan.layout import Layout, lay_out
from mpikfac.plan.messages import Message
from mpikfac.plan.of_rank import RankPlan
from mpikfac.plan.shapes import count_of
from mpikfac.plan.stages import summed


def layout(rank: RankPlan) -> Layout:
    """Return the layout of running averages of scales."""
    return lay_out([layouts.of_gradients(layouts.by_kind(rank.rescaled))])


def layout_of_sums(rank: RankPlan) -> Layout:
    """Return the layout of a batch's scales, each a sum next to the number of examples."""
    return lay_out([layouts.counted(layouts.of_gradients(rank.rescaled))])


def reduce_scales(rank: RankPlan) -> list[Message]:
    """Return the reductions of scales, without encoding."""
    fused = {layer.name: layer.fused for layer in rank.rescaled}
    kinds = fused | {count_of(name): number for name, number in fused.items()}
    return summed(rank, names.REDUCE_SCALES, layout_of_sums(rank), kinds)
