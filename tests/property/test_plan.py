from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from mpikfac import BFloat16, Compression, Int8, LayerShape, MemOpt, Strategy, Transport, make_plan
from mpikfac.lab import PowerSGD, TopK
from mpikfac.plan import ALIGNMENT, curvature_servers, divisors
from mpikfac.plan.layout import triangle_shape
from support.oracles import UNSPLIT
from support.strategies import assigned

orders = st.integers(1, 40)


@st.composite
def shapes(draw):
    """Draw orders, groups and factors of any layer, mostly of plain layers."""
    size = draw(st.tuples(orders, orders))
    if draw(st.booleans()):
        return size
    sides = draw(st.sampled_from(["AG", "A", "G"]))
    diagonal = "".join(side for side in sides if draw(st.booleans()))
    largest, rank = draw(st.sampled_from([None, 7])), draw(st.sampled_from([None, 2, 5]))
    return (*size, draw(st.sampled_from([1, 3])), sides, diagonal, largest, rank)


@st.composite
def plans(draw):
    """Draw any plan that `make_plan` accepts, for up to 12 ranks."""
    ranks = draw(st.integers(1, 12))
    sizes = draw(st.lists(shapes(), max_size=8))
    preconditioner = draw(st.sampled_from(["eigen", "ekfac", "inverse", UNSPLIT, "eva"]))
    everywhere = preconditioner == "ekfac"
    reductions = ["allreduce"] if everywhere else ["allreduce", "reduce_scatter", "local"]
    reduction = draw(st.sampled_from(reductions))
    separate = preconditioner != "inverse" or reduction == "allreduce"
    strategy = Strategy(
        assigned(
            ranks if everywhere else draw(st.sampled_from(divisors(ranks))),
            ranks,
            assignment_strategy=draw(st.sampled_from(["compute", "memory"])),
            colocate_factors=draw(st.booleans()) if separate else True,
            factor_reduction=reduction,
            shard_optimizer=not everywhere and draw(st.booleans()),
        ),
        transport=Transport(ranks_per_node=draw(st.sampled_from([None, *divisors(ranks)]))),
    )
    own = st.sampled_from([None, None, "eigen", "eva"])
    layers = [
        LayerShape(f"layer{i}", *size, preconditioner=draw(own)) for i, size in enumerate(sizes)
    ]
    layers = [
        layer if (layer.preconditioner or preconditioner) == "eigen" else replace(layer, rank=None)
        for layer in layers  # inverses and vectors keep no eigenvectors
    ]
    rest = draw(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=5))
    others = [(f"other{i}", shape) for i, shape in enumerate(rest)]
    return make_plan(layers, ranks, strategy, others, preconditioner)


def layouts(plan, rank):
    found = plan.of(rank).layouts
    return [value for name, value in vars(found).items() if name != "denominators"]


@given(plans())
@settings(max_examples=150)
def test_every_factor_has_one_owner_in_its_layers_column(plan):
    """Oracle: the definition of the grid: rank r is in column r % columns."""
    owned = [factor.name for rank in range(plan.ranks) for factor in plan.of(rank).owned]
    assert sorted(owned) == sorted(n for n, f in plan.factors.items() if not f.replicated)
    for layer in plan.layers:
        owners = [plan.owners[factor.name] for factor in layer.factors]
        assert {owner % plan.grid.columns for owner in owners} == {plan.columns_of[layer.name]}
        assert len(set(owners)) == 1 or not plan.strategy.assignment.colocate_factors
        assert plan.updaters[layer.name] in owners


def preconditioned(plan, rank):
    return [layer.name for layer in plan.of(rank).preconditioned]


@given(plans())
@settings(max_examples=150)
def test_every_layer_is_preconditioned_by_its_workers(plan):
    """Oracle: `workers` ranks of a single column, or the updater alone; all hold both bases."""
    for layer in plan.layers:
        ranks = [r for r in range(plan.ranks) if layer.name in preconditioned(plan, r)]
        if plan.strategy.assignment.shard_optimizer:
            assert ranks == [plan.updaters[layer.name]]
        else:
            column = plan.columns_of[layer.name]
            assert ranks == [r for r in range(plan.ranks) if plan.grid.position(r)[1] == column]
            assert len(ranks) == plan.grid.workers
        for rank in ranks:
            held = plan.of(rank).layouts.bases.shapes
            factors = [factor.name for factor in layer.factors]
            assert all(any(n.startswith(f"{f}.") for n in held) for f in factors)
            assert layer.name in plan.of(rank).layouts.directions.shapes


@given(plans())
@settings(max_examples=150)
def test_load_stays_near_the_mean(plan):
    """Oracle: Graham's bound for list scheduling: the mean and a longest job.

    Separate owners of a hybrid are bound to a column. The bound does not hold in a column.
    """
    if plan.strategy.assignment.assignment_strategy == "memory":
        return
    if not plan.strategy.assignment.colocate_factors and plan.grid.columns > 1:
        return
    cubes = {name: factor.work() for name, factor in plan.factors.items()}
    vectors = {name for name, factor in plan.factors.items() if factor.preconditioner.vector}
    costs = {n: plan.factors[n].size if n in vectors else cube for n, cube in cubes.items()}
    jobs = list(costs.values())
    if plan.strategy.assignment.colocate_factors:
        jobs = [sum(costs[factor.name] for factor in layer.factors) for layer in plan.layers]
    loads = [plan.load(rank) for rank in range(plan.ranks)]
    assert sum(loads) == sum(cubes[name] for name in cubes.keys() - vectors)
    assert max(loads) <= sum(jobs) / plan.ranks + max(jobs, default=0)


@given(plans())
@settings(max_examples=100)
def test_blocks_are_aligned_and_disjoint_and_inside_a_segment(plan):
    """Oracle: intervals [start, end) sorted by start; intervals begin as early as possible."""
    for rank in range(plan.ranks):
        for layout in layouts(plan, rank):
            assert sum(layout.counts()) == layout.size
            end = 0
            for name in sorted(layout.offsets, key=lambda n: (layout.offsets[n], n)):
                start, elements = layout.offsets[name], math.prod(layout.shapes[name])
                assert start % ALIGNMENT == 0
                assert end <= start < end + ALIGNMENT or elements == 0
                end = max(end, start + elements)
                segment = sum(bound <= start for bound in layout.bounds[:-1]) - 1
                assert start + elements <= layout.bounds[segment + 1]
            assert end <= layout.size < end + ALIGNMENT


@given(plans(), st.booleans(), st.booleans())
@settings(max_examples=100)
def test_members_of_a_communicator_agree_on_what_travels_in_it(plan, statistics, refresh):
    """Oracle: a message of every member; gathered parts make the whole, sums are equally long."""
    teams = {}
    for rank in range(plan.ranks):
        for message in plan.messages(rank, statistics, refresh):
            team = teams.setdefault((message.over, plan.grid.team(rank, message.over)), {})
            team.setdefault(rank, []).append(message)
    for (_, team), members in teams.items():
        assert list(members) == list(team)
        rank = team[0]
        layouts = plan.of(rank).layouts
        whole = {
            # The last segment is what every worker decomposes for itself: nobody sends that.
            "publish bases": sum(layouts.bases.counts()[:-1]),
            "publish gradients": layouts.directions.size,
            "publish weights": layouts.gradients.size,
        }
        assert len(set(map(len, members.values()))) == 1
        for same in zip(*members.values()):
            assert len({(m.stage, m.primitive, m.wire) for m in same}) == 1
            if "node" in same[0].over:
                assert len({m.spans for m in same}) == 1
            elif same[0].stage in whole:
                assert sum(m.bytes for m in same) == whole[same[0].stage] * plan.itemsize
            else:
                assert len({m.bytes for m in same}) == 1


def elements(messages):
    return sum(stop - start for message in messages for start, stop in message.spans)


@given(
    plans(),
    st.sampled_from([BFloat16(), Int8(), TopK(), PowerSGD()]),
    st.sampled_from([None, 1, 2]),
)
@settings(max_examples=100)
def test_members_agree_on_what_travels_encoded(plan, wire, fusion):
    """Oracle: the messages of the same plan without compression, with equally many elements."""
    other = wire if isinstance(wire, BFloat16) else Int8()
    wires = Compression(factors=other, inverses=other, gradients=wire)
    strategy = replace(plan.strategy, transport=Transport(fusion=fusion))
    exact = replace(plan, strategy=strategy)
    encoded = replace(plan, strategy=replace(strategy, compression=wires))
    sent = [encoded.messages(rank, True, True) for rank in range(plan.ranks)]
    for over in ("world", "column", "row"):
        team = [[m for m in sent[rank] if m.over == over] for rank in plan.grid.team(0, over)]
        for same in zip(*team, strict=True):
            assert (
                len({(m.stage, m.primitive, m.spans, m.root, m.wire, m.codec) for m in same}) == 1
            )
    for rank, messages in enumerate(sent):
        assert elements(messages) == elements(exact.messages(rank, True, True))
        not_encoded = {message.stage for message in messages if not message.codec}
        as_they_are = {"reduce scales", "reduce statistics", "clip", "reduce gradients"}
        gathered = {"publish weights"} | (
            {"publish gradients"} if isinstance(wire, PowerSGD) else set()
        )
        assert not_encoded <= as_they_are | gathered


@given(plans())
@settings(max_examples=100)
def test_a_rank_changes_what_is_decomposed_alone(plan):
    """Oracle: the plan without a kept rank: fewer eigenvectors of n, and no further change."""
    layers = [replace(layer, rank=None) for layer in plan.layers]
    unsplit = plan.preconditioner == "inverse" and not plan.forms[0].both
    preconditioner = UNSPLIT if unsplit else plan.preconditioner
    whole = make_plan(layers, plan.ranks, plan.strategy, plan.uncovered, preconditioner)
    same = replace(whole, owners=plan.owners, columns_of=plan.columns_of, updaters=plan.updaters)
    for rank in range(plan.ranks):
        own, other = plan.of(rank), same.of(rank)
        for kind in ("statistics", "averages", "directions"):
            assert getattr(own.layouts, kind) == getattr(other.layouts, kind)
        assert curvature_servers.request(own) == curvature_servers.request(other)
        expected = same.of(rank).layouts.bases.shapes
        assert plan.of(rank).layouts.bases.shapes.keys() == expected.keys()
        for name, shape in plan.of(rank).layouts.bases.shapes.items():
            kept = plan.factors[name.rpartition(".")[0]].rank
            if kept is None:
                assert shape == expected[name]
            elif name.endswith(".vectors"):
                assert shape == (*expected[name][:-1], kept)
            else:
                assert shape == (*expected[name][:-1], kept + 1)
                assert kept < expected[name][-1]
        assert plan.of(rank).layouts.bases.size <= same.of(rank).layouts.bases.size
        assert plan.of(rank).layouts.denominators.size <= same.of(rank).layouts.denominators.size


def test_one_rank_sends_nothing():
    layers = [LayerShape("layer", 3, 2)]
    strategy = Strategy(MemOpt(shard_optimizer=True))
    assert make_plan(layers, 1, strategy).messages(0, True, True) == []


@given(st.integers(1, 200))
def test_a_folded_triangle_wastes_nothing(order):
    """Oracle: n (n + 1) / 2 elements."""
    assert math.prod(triangle_shape(order)) == order * (order + 1) // 2


@given(shapes())
def test_the_factors_of_a_side_make_it_up(shape):
    """Oracle: orders add up to the side's order; even blocks stay within the given maximum."""
    layer = LayerShape("layer", *shape)
    for side, order in (("A", layer.inputs), ("G", layer.outputs)):
        factors = layer.side(side)
        if side not in layer.sides:
            assert factors == ()
            continue
        assert sum(factor.size for factor in factors) == layer.groups * order
        sizes = [factor.order for factor in factors]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= (layer.largest or order)
        assert side not in layer.diagonal or sizes == [1]
