"""The messages of a step on a rank, stage by stage, in order.

A stage is a function of a rank's plan. The table `RankPlan.replaced` contains the functions of
extensions that replace a stage.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from mpikfac.plan import names
from mpikfac.plan.choices import Compressor
from mpikfac.plan.codec import Codec
from mpikfac.plan.layout import Layout
from mpikfac.plan.messages import (
    Message,
    gathers,
    in_order,
    in_shards,
    in_two_levels,
    message,
    sums,
)
from mpikfac.plan.of_rank import RankPlan

Kinds = Mapping[str, Hashable]
"""For each block, by name, the message of a stage that contains it; other blocks are left out."""


def messages(
    rank: RankPlan, statistics: bool, refresh: bool, clipped: bool = True, turn: int | None = None
) -> list[Message]:
    """Return the messages of a step in order, excluding those of extensions; see `Plan.messages`.

    Replicas of the model step with their own gradients, which are not reduced.
    """
    sent = []
    if refresh if rank.late else statistics:
        sent += reduce_statistics(rank, turn if rank.late else None)
    if refresh:
        sent += publish_bases(rank, turn)
    if not rank.strategy.sync.local_steps:
        sent += reduce_gradients(rank)
    sent += publish_directions(rank)
    return sent + (clip(rank) if clipped else []) + publish_weights(rank)


def reduce_statistics(rank: RankPlan, turn: int | None = None) -> list[Message]:
    """Return the reductions of factors, for all layers or for the layers in slot `turn`."""
    if rank.strategy.assignment.factor_reduction == "local":
        return []
    if extension := rank.replaced.get(names.REDUCE_STATISTICS):
        return extension(rank, turn)
    stage, fused = names.REDUCE_STATISTICS, _fused(rank, turn)
    factors = {factor.name: fused.get(factor.name) for factor in rank.factors}
    counts = {factor.counted: fused.get(factor.name) for factor in rank.factors}
    # With error feedback, encoding errors cancel out in the running averages if the factors of
    # batches are sent, but not if the averages themselves are sent.
    codec = _codec(rank.strategy.compression.factors, rank.sums, not rank.late)
    if codec is None:
        return summed(rank, stage, rank.sums, factors | counts)
    # Counts are sent unencoded, in one message.
    plain: dict[str, Hashable] = {f.counted: turn in (None, f.turn) for f in rank.factors}
    encoded = summed(rank, stage, rank.sums, factors, codec)
    return encoded + summed(rank, stage, rank.sums, plain)


def publish_bases(rank: RankPlan, turn: int | None = None) -> list[Message]:
    """Return the messages that send decompositions to workers, for all layers or slot `turn`."""
    if not rank.publishes_bases:
        return []
    fused = _fused(rank, turn)
    kinds = {b.name: fused.get(f.name) for f in rank.factors for b in f.blocks}
    layout, size = rank.layouts.bases, rank.itemsizes.bases
    codec = _codec(rank.strategy.compression.inverses, layout, feedback=False)
    return gathered(rank, names.PUBLISH_BASES, "column", layout, kinds, size, codec)


def reduce_gradients(rank: RankPlan) -> list[Message]:
    """Return the reductions of all gradients, except those that an extension sends."""
    if extension := rank.replaced.get(names.REDUCE_GRADIENTS):
        return extension(rank, None)
    return sum_gradients(rank)


def sum_gradients(rank: RankPlan, without: Collection[str] = ()) -> list[Message]:
    """Return the reductions of all gradients, except those of the blocks in `without`.

    Raises:
        ValueError: the compressor of gradients has a momentum that its codec does not apply.
    """
    layout, compressor = rank.layouts.gradients, rank.strategy.compression.gradients
    apart = rank.strategy.transport.overlap
    kinds = {name: number if apart else -1 for name, number in rank.messages_of.items()}
    codec = None if compressor is None else compressor.codec_of_gradients(rank, layout)
    if compressor is not None and compressor.momentum and not (codec and codec.delays):
        raise ValueError(
            f"{compressor!r} has momentum={compressor.momentum:g}, but its codec delays no values "
            f"and applies no momentum; codec_of_gradients must return a codec that applies it"
        )
    return [
        message
        for codec, kinds in with_uncovered(rank, codec, kinds, -1)
        for message in summed(
            rank, names.REDUCE_GRADIENTS, layout, {**kinds, **dict.fromkeys(without)}, codec
        )
    ]


def publish_directions(rank: RankPlan) -> list[Message]:
    """Return the messages that send preconditioned gradients to ranks that did not compute them."""
    if rank.owner_updates:
        return []
    kinds = {layer.name: layer.fused for layer in rank.layers}
    layout, size = rank.layouts.directions, rank.itemsizes.numbers
    codec = _codec_of_values(rank, layout)
    return gathered(rank, names.PUBLISH_DIRECTIONS, "row", layout, kinds, size, codec)


def clip(rank: RankPlan) -> list[Message]:
    """Return the reduction that a clip needs if no rank has all directions."""
    ranks = rank.grid.count
    if not rank.layers or ranks == 1 or not rank.owner_updates:
        return []
    return [message(names.CLIP, "Allreduce", "world", [(0, 1)], ranks, rank.itemsizes.numbers)]


def publish_weights(rank: RankPlan) -> list[Message]:
    """Return the messages that send new weights to ranks that did not compute them."""
    if not rank.owner_updates:
        return []
    if extension := rank.replaced.get(names.PUBLISH_WEIGHTS):
        return extension(rank, None)
    layout, size = rank.layouts.gradients, rank.itemsizes.numbers
    kinds = dict.fromkeys(rank.messages_of, 0)
    return [
        message
        for codec, kinds in with_uncovered(rank, _codec_of_values(rank, layout), kinds, 0)
        for message in gathered(rank, names.PUBLISH_WEIGHTS, "world", layout, kinds, size, codec)
    ]


def publishes_changes(rank: RankPlan) -> bool:
    """Return whether weight changes, which tolerate rounding, are sent instead of weights."""
    owner = rank.owner_updates and rank.grid.count > 1
    return owner and _codec_of_values(rank, rank.layouts.gradients) is not None


# -- the rank's view of reductions and gathers ----------------------------------------------------


def summed(
    rank: RankPlan, stage: str, layout: Layout, kinds: Kinds, codec: Codec | None = None
) -> list[Message]:
    """Return messages that sum an arena over the world; see `messages.sums`."""
    ranks, itemsize = rank.grid.count, rank.itemsizes.numbers
    if rank.parts:
        return in_order(stage, layout, ranks, itemsize)
    by_owners = rank.strategy.transport.owner_sums == "alltoall" or (codec and not codec.summable)
    primitive: str | None = "Alltoall" if by_owners else "Reduce_scatter"
    if rank.strategy.transport.overlap:  # an overlapped message is sent in pieces
        primitive = None
    of_one_level = sums(stage, layout, kinds.get, ranks, itemsize, primitive, codec)
    return in_levels(rank, of_one_level, rank.grid.team(rank.rank, "world"), itemsize)


def gathered(
    rank: RankPlan,
    stage: str,
    over: str,
    layout: Layout,
    kinds: Kinds,
    itemsize: int,
    codec: Codec | None,
) -> list[Message]:
    """Return messages that send all segments to all ranks of a team; see `messages.gathers`."""
    team = rank.grid.team(rank.rank, over)
    member = team.index(rank.rank)
    of_one_level = gathers(stage, over, layout, kinds.get, member, len(team), itemsize, codec)
    return in_levels(rank, of_one_level, team, itemsize)


def in_levels(
    rank: RankPlan, of_one_level: list[Message], team: range, itemsize: int
) -> list[Message]:
    """Convert a team's one-level messages to the levels and shards that the strategy chooses."""
    seat = rank.grid.seat(team, rank.rank)
    if (shards := rank.strategy.transport.balanced_shards) is not False:
        member, always = team.index(rank.rank), shards is True
        return in_shards(of_one_level, len(team), member, seat, itemsize, always)
    return in_two_levels(of_one_level, seat, itemsize) if seat else of_one_level


def _fused(rank: RankPlan, turn: int | None) -> dict[str, int]:
    """Return the index in a stage of each factor's message, for slot `turn` or for all factors."""
    return {factor.name: factor.fused for factor in rank.factors if turn in (None, factor.turn)}


# -- encodings ------------------------------------------------------------------------------------


def codec_of_sums(rank: RankPlan, layout: Layout) -> Codec | None:
    """Return the codec for sums of gradients or of weight changes, which share a layout."""
    compressor = rank.strategy.compression.gradients
    return None if compressor is None else compressor.codec_of_sums(rank, layout)


def with_uncovered(
    rank: RankPlan, codec: Codec | None, kinds: Kinds, uncovered: Hashable
) -> list[tuple[Codec | None, Kinds]]:
    """Return the codecs for the arena of gradients, each with the kinds of the blocks it is for.

    Args:
        kinds: the kinds of the blocks that `codec` encodes.
        uncovered: the kind of all blocks that are never encoded.
    """
    plain = {name: uncovered for name, _ in rank.uncovered if name not in kinds}
    return [(None, {**kinds, **plain})] if codec is None else [(codec, kinds), (None, plain)]


def _codec(compressor: Compressor | None, layout: Layout, feedback: bool) -> Codec | None:
    return None if compressor is None else compressor.codec(layout, feedback)


def _codec_of_values(rank: RankPlan, layout: Layout) -> Codec | None:
    """Return the codec for values that a rank sends unreduced."""
    compressor = rank.strategy.compression.gradients
    return _codec(compressor if compressor and compressor.of_values else None, layout, True)
