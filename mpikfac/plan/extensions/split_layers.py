"""The gradients of split layers; each rank of a group computes a slice of them."""

from __future__ import annotations

from mpikfac.plan import names
from mpikfac.plan.choices import Split
from mpikfac.plan.layout import Layout
from mpikfac.plan.messages import Message, gathers, message
from mpikfac.plan.of_rank import RankPlan, Stage
from mpikfac.plan.stages import sum_gradients


def in_slices(rank: RankPlan) -> Split:
    """Return the split layers whose gradients are sent in slices; none if all are sent whole."""
    transport = rank.strategy.transport
    in_full = rank.owner_updates or transport.overlap or rank.strategy.sync.local_steps
    in_full |= rank.strategy.compression.gradients is not None
    in_full |= (transport.virtual_ranks, transport.ranks_per_node) != (None, None)
    return Split() if in_full or rank.grid.count == 1 else rank.split


def layout(rank: RankPlan) -> Layout:
    """Return the layout of the gradients that are sent in slices, slice by slice."""
    return in_slices(rank).layout()


def member(rank: RankPlan) -> int:
    """Return the position of the rank in its group of split layers."""
    return rank.grid.team(rank.rank, "group").index(rank.rank)


def replaced(rank: RankPlan) -> dict[str, Stage]:
    """Return the stage that leaves out the gradients sent in slices, if there are any."""
    return {names.REDUCE_GRADIENTS: reduce_unsplit} if in_slices(rank).parameters else {}


def reduce_unsplit(rank: RankPlan, _turn: int | None = None) -> list[Message]:
    """Return the reductions of all gradients that are not sent in slices."""
    return sum_gradients(rank, in_slices(rank).blocks)


def reduce_slices(rank: RankPlan) -> list[Message]:
    """Return the reductions of slices over peers, and the gathers of all slices in a group.

    A member of a group computes the gradient of a slice from all examples of the group.
    """
    slices, size = layout(rank), rank.itemsizes.numbers
    peers, group = (len(rank.grid.team(rank.rank, over)) for over in ("peers", "group"))
    if slices.size == 0:
        return []
    stage, at = names.REDUCE_GRADIENTS, member(rank)
    of_rank = slices.segments()[at : at + 1]
    summed = [message(stage, "Allreduce", "peers", of_rank, peers, size)] if peers > 1 else []
    return summed + gathers(stage, "group", slices, lambda _: 0, at, group, size)
