"""The values that a rank keeps from step to step for encoded messages."""

from __future__ import annotations

from mpikfac.plan.choices import Compression
from mpikfac.plan.of_rank import RankPlan
from mpikfac.plan.stages import (
    publish_directions,
    publish_weights,
    publishes_changes,
    reduce_gradients,
    reduce_statistics,
)


def encodes(rank: RankPlan) -> bool:
    """Return whether any stage has encoded messages."""
    return rank.strategy.compression != Compression()


def elements(rank: RankPlan) -> int:
    """Return the number of elements kept for encoding errors, and for weights sent as changes."""
    layouts, sync = rank.layouts, rank.strategy.sync
    total = layouts.gradients.size if publishes_changes(rank) else 0
    for messages, layout in (
        (reduce_statistics(rank), rank.sums),
        (reduce_gradients(rank) if sync.averages_gradients else [], layouts.gradients),
        (publish_directions(rank), layouts.directions),
        (publish_weights(rank), layouts.gradients),
        (sync.messages(rank), layouts.gradients),
    ):
        # A rank that sends no encoded values, such as one that is not the root of any Bcast, has no
        # errors to keep.
        codecs = [m.codec for m in messages if m.codec and m.bytes]
        total += layout.size * max((codec.arenas for codec in codecs), default=0)
        total += sum(codec.reductions[-1] for codec in codecs if codec.reductions)
    return total
