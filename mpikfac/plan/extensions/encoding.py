"""The numbers that a rank keeps from step to step for encoded messages."""

from __future__ import annotations

from mpikfac.plan.extensions.copies import PlannedCopies
from mpikfac.plan.of_rank import RankPlan
from mpikfac.plan.stages import (
    publish_directions,
    publish_weights,
    publishes_changes,
    reduce_gradients,
    reduce_statistics,
)


def encodes(rank: RankPlan) -> bool:
    """Return whether a stage has encoded messages."""
    wires = rank.strategy.transport.wires
    return (wires.factor_wire, wires.basis_wire, wires.gradient_wire) != (None, None, None)


def elements(rank: RankPlan) -> int:
    """Return the elements kept of encoding's losses, and of weights sent as changes."""
    layouts, copies = rank.layouts, PlannedCopies(rank)
    total = layouts.gradients.size if publishes_changes(rank) else 0
    for messages, layout in (
        (reduce_statistics(rank), rank.sums),
        ([] if copies.always else reduce_gradients(rank), layouts.gradients),
        (publish_directions(rank), layouts.directions),
        (publish_weights(rank), layouts.gradients),
        (copies.exchange_weights(), copies.layout),
    ):
        # A rank that sends nothing encoded, such as no root of any Bcast, loses nothing.
        codecs = [m.codec for m in messages if m.codec and m.bytes]
        total += layout.size * max((codec.arenas for codec in codecs), default=0)
        total += sum(codec.sides()[1] for codec in codecs)
    return total
