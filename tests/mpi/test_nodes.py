"""Two levels give exactly the results of one level, and reject misplaced ranks."""

from __future__ import annotations

import pytest
import torch

import mpikfac
from mpikfac import LayerShape, Strategy, Transport, UserError, make_plan
from mpikfac.comm import Grid
from mpikfac.comm import job as startup
from mpikfac.comm.messages import collectives as primitives
from mpikfac.plan import stages
from support.strategies import assigned, changed

RANKS = mpikfac.world().size
OWNERS = {"assignment.factor_reduction": "reduce_scatter", "assignment.shard_optimizer": True}
LAYERS = [LayerShape("conv", 19, 7), LayerShape("fc", 11, 5), LayerShape("out", 6, 3)]
OTHERS = [("votes", (16,)), ("scale", ())]


def stages_of(plan, rank):
    """Return the messages of every stage with the stage's layout."""
    own = plan.of(rank)
    yield stages.reduce_statistics(own), own.layouts.statistics
    yield stages.publish_bases(own), own.layouts.bases
    yield stages.reduce_gradients(own), own.layouts.gradients
    yield stages.publish_directions(own), own.layouts.directions
    yield stages.publish_weights(own), own.layouts.gradients


def defined(plan, stage, layout, rank):
    """Return the part of an arena that a rank may read after a stage.

    The part is the rank's own segment if owners get sums.
    """
    to_owners = {
        0: plan.strategy.assignment.factor_reduction == "reduce_scatter",
        2: plan.strategy.assignment.shard_optimizer,
    }
    if to_owners.get(stage):
        return slice(*layout.segments()[rank])
    return slice(0, layout.size)


@pytest.mark.parametrize("piece", [None, 50], ids=["whole", "in pieces"])
@pytest.mark.parametrize("per_node", mpikfac.plan.divisors(RANKS))
@pytest.mark.parametrize("workers", mpikfac.plan.divisors(RANKS))
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"transport.fusion": 1},
        OWNERS,
        OWNERS | {"transport.fusion": 1},
        OWNERS | {"transport.owner_sums": "alltoall"},
    ],
    ids=str,
)
def test_every_stage_gives_the_numbers_of_one_level(
    comm, monkeypatch, choices, workers, per_node, piece
):
    """Oracle: a single level, with exact sums of whole numbers; sent bytes equal planned bytes."""
    if piece:
        monkeypatch.setattr(primitives, "PIECE", piece)
    found = []
    for ranks_per_node in (None, per_node):
        transport = Transport(ranks_per_node=ranks_per_node)
        strategy = changed(Strategy(assigned(workers, RANKS), transport=transport), choices)
        plan = make_plan(LAYERS, RANKS, strategy, OTHERS, "eigen", 8)
        grid = Grid(comm, workers, mpikfac.Trace(), ranks_per_node)
        for stage, (messages, layout) in enumerate(stages_of(plan, comm.rank)):
            flat = torch.arange(layout.size).double() * (comm.rank + 1) + comm.rank
            grid.trace.clear()
            grid.exchange(messages, flat)
            assert sum(grid.trace.sent.values()) == sum(message.bytes for message in messages)
            found.append(flat[defined(plan, stage, layout, comm.rank)])
        levels = {m.over for messages, _ in stages_of(plan, comm.rank) for m in messages}
        split = ranks_per_node is not None and 1 < ranks_per_node < RANKS
        assert ("world between nodes" in levels) == split
    one, two = found[: len(found) // 2], found[len(found) // 2 :]
    for expected, numbers in zip(one, two):
        assert torch.equal(numbers, expected)


@pytest.mark.skipif(RANKS == 1, reason="one rank sits on its own node")
def test_ranks_of_several_nodes_are_no_node(comm, monkeypatch):
    """Oracle: by hand, on every rank: ranks dealt out to two nodes in turn."""
    monkeypatch.setattr(startup, "lowest_in_node", lambda comm: comm.rank % 2)
    with pytest.raises(UserError) as refused:
        Grid(comm, 1, mpikfac.Trace(), RANKS)
    (text,) = set(comm.allgather(str(refused.value)))
    assert text.startswith(f"ranks_per_node={RANKS}: ranks 0 and 1 are on different nodes; start")
    Grid(comm, 1, mpikfac.Trace(), 1)


@pytest.mark.skipif(RANKS != 4, reason="two nodes of two ranks")
def test_a_node_may_be_a_part_of_one(comm, monkeypatch):
    """Oracle: by hand: ranks 0 and 1 share a node, and 2 and 3 too, on one node or on two."""
    for nodes in ([0, 0, 2, 2], [0, 0, 0, 0]):
        monkeypatch.setattr(startup, "lowest_in_node", lambda comm, at=nodes: at[comm.rank])
        Grid(comm, 1, mpikfac.Trace(), 2)
    monkeypatch.setattr(startup, "lowest_in_node", lambda comm: [0, 1, 1, 3][comm.rank])
    with pytest.raises(UserError, match="ranks 0 and 1 are on different nodes"):
        Grid(comm, 1, mpikfac.Trace(), 2)


def test_the_lowest_rank_of_this_host(comm):
    """Oracle: all ranks of a test share a host."""
    assert startup.lowest_in_node(comm) == 0
