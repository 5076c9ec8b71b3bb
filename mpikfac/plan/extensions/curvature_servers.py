"""The messages between a rank and the curvature server that decomposes for it."""

from __future__ import annotations

from mpikfac.plan import layouts, names
from mpikfac.plan.layout import Layout
from mpikfac.plan.messages import Message, across
from mpikfac.plan.of_rank import RankPlan


def request(rank: RankPlan, turn: int | None = None) -> Layout:
    """Return the layout of the factors sent to a curvature server."""
    return layouts.of_requests(rank.decomposed(turn))


def reply(rank: RankPlan, turn: int | None = None) -> Layout:
    """Return the layout of the reply to a `request`: decompositions, with NaN for failed ones."""
    return layouts.of_blocks([rank.decomposed(turn)])


def send_factors(rank: RankPlan, turn: int | None = None) -> list[Message]:
    """Return the messages that send factors to the curvature server."""
    return _across(rank, names.SEND_FACTORS, "Send", request(rank, turn))


def receive_bases(rank: RankPlan, turn: int | None = None) -> list[Message]:
    """Return the messages that receive decompositions from the curvature server."""
    return _across(rank, names.RECEIVE_BASES, "Recv", reply(rank, turn))


def _across(rank: RankPlan, stage: str, primitive: str, layout: Layout) -> list[Message]:
    if not rank.strategy.refresh.servers:
        return []
    peer = rank.grid.curvature_server(rank.rank)
    return across(stage, primitive, layout, peer, rank.itemsizes.numbers)
