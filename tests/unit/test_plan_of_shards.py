"""The plan of a model of which each rank holds a shard; tests/mpi/test_sharded.py sends it."""

from __future__ import annotations

import pytest

import mpikfac
from mpikfac import LayerShape, MemOpt, Strategy
from mpikfac.plan import ShardedParameter, Sharding, plan_for
from mpikfac.preconditioners import named_preconditioner
from mpikfac.predict import Job, Level, Machine, Network

OWNERS = Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True))
LAYERS = [LayerShape("wide", 6, 5), LayerShape("narrow", 3, 2)]
MACHINE = Machine(
    name="made up",
    inside=Level(1e-6, 1e9),
    networks=(Network("net", 32, 1.0, 1.5, 0.5, 0.3, 0.2, 0.1),),
    decompositions={"inverse": ((1.0, 1e-9), (1e4, 1e3))},
    products=((1.0, 1e12),),
)


def planned(replicas, wide, narrow):
    """Return the plan of two layers without biases, and a scale, in float64."""
    return plan_for(
        LAYERS,
        len(wide) * replicas,
        OWNERS,
        [("scale", (2,)), ("mean", (3,))],
        [named_preconditioner("inverse").form],
        itemsize=8,
        means=["mean"],
        sharding=Sharding(
            tuple(
                ShardedParameter(name, elements * replicas)
                for name, elements in (("wide", wide), ("narrow", narrow), ("scale", (1, 1)))
            ),
            len(wide),
        ),
    )


def sizes(plan, rank):
    """Return the bytes of the two exchanges, from every rank to every rank."""
    found = {m.stage: m.sizes for m in plan.messages(rank, True, True) if m.sizes}
    return found["gather gradients"], found["scatter directions"]


def test_owners_get_rows_and_a_number_of_every_shard():
    """Oracle: by hand: rank 0 owns the wide layer, and rank 1 the narrow one and the scale."""
    plan = planned(1, (18, 12), (3, 3))
    assert plan.updaters == {"wide": 0, "narrow": 1, "scale": 1, "mean": plan.updaters["mean"]}
    for rank in range(2):
        gathered, scattered = sizes(plan, rank)
        assert gathered == ((8 * 19, 8 * 6), (8 * 13, 8 * 6))
        assert scattered == ((8 * 19, 8 * 13), (8 * 6, 8 * 6))
        stages = [message.stage for message in plan.messages(rank, True, True)]
        assert stages == [
            *("reduce statistics", "reduce gradients", "gather gradients"),
            *("clip", "scatter directions"),
        ]
    arenas = [set(plan.of(rank).layouts.gradients.shapes) for rank in range(2)]
    assert arenas == [{"mean", "wide"}, {"mean", "narrow", "scale"}]


def test_an_owner_gathers_from_its_replica_and_scatters_to_all():
    """Oracle: by hand, with two replicas of two shards."""
    plan = planned(2, (18, 12), (3, 3))
    owner = plan.updaters["wide"]
    gathered, scattered = sizes(plan, 0)
    to_owner = [row[owner] > 0 for row in gathered]
    assert to_owner == [rank // 2 == owner // 2 for rank in range(4)]
    others = sum(plan.updaters[name] == owner for name in ("narrow", "scale"))
    assert not others
    assert scattered[owner] == tuple(8 * n for n in (19, 13, 19, 13))


def test_the_digest_has_the_shards():
    """Oracle: other rows."""
    first, same, other = (planned(1, rows, (3, 3)) for rows in [(18, 12), (18, 12), (12, 18)])
    assert first.digest() == same.digest() != other.digest()


def test_a_prediction_has_both_exchanges():
    """Oracle: the stages of the plan; the time of a message of more bytes."""
    small, large = (planned(1, rows, (3, 3)) for rows in [(18, 12), (18, 12000000)])
    job = Job("net", 32, factor_update_steps=2, inv_update_steps=4)
    times = [
        mpikfac.predict.simulate(plan, MACHINE, job).ordinary.stages for plan in (small, large)
    ]
    for stage in ("gather gradients", "scatter directions"):
        assert 0 < times[0][stage] < times[1][stage]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rank_steps_its_rows(replicas):
    """Oracle: by hand: 18 + 3 + 1 and 12 + 3 + 1 of 38 numbers, in every replica."""
    plan = planned(replicas, (18, 12), (3, 3))
    found = [mpikfac.predict.costs.stepped_share(plan, rank) for rank in range(2 * replicas)]
    assert found == [22 / 38, 16 / 38] * replicas


def test_shards_need_owners():
    """Oracle: the choice that the message names."""
    sharding = Sharding((ShardedParameter("wide", (18, 12)),), 2)
    forms = [named_preconditioner("inverse").form]
    with pytest.raises(ValueError, match="fully_shard=True needs assignment.shard_optimizer=True"):
        plan_for(LAYERS, 2, Strategy(), forms=forms, sharding=sharding)
