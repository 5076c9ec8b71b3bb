from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import ClassVar

import pytest
import torch

import mpikfac
from mpikfac import (
    BFloat16,
    CommOpt,
    Compression,
    HybridOpt,
    Int8,
    LayerShape,
    MemOpt,
    Refresh,
    Strategy,
    Transport,
    make_plan,
)
from mpikfac.lab import CurvatureServers, LocalSGD, TopK
from mpikfac.plan import IN_SHARDS, PASSED, Codec, Compressor, divisors, lay_out, stages
from mpikfac.plan.messages import in_shards, sums
from mpikfac.plan.roles import apart, diagonally, in_messages
from mpikfac_apps.problems import models
from support.problem import strategies
from support.strategies import assigned, changed, strategy_of

# n^3 of the factors: conv 1000 + 64, fc 512 + 512, out 216 + 8.  n^2: 116, 128, 40.
LAYERS = [LayerShape("conv", 10, 4), LayerShape("fc", 8, 8), LayerShape("out", 6, 2)]
OTHERS = [("bn.weight", (4,)), ("bn.bias", (4,)), ("scale", ())]


def plan(ranks, workers=1, reduction="allreduce", others=OTHERS, **options):
    strategy = Strategy(assigned(workers, ranks, factor_reduction=reduction))
    return make_plan(LAYERS, ranks, strategy, others, **options)


def test_longest_job_goes_first_to_the_least_loaded_rank():
    """Oracle: n^3 by hand; the third layer goes to 1024 rather than to 1064."""
    p = plan(2)
    assert p.owners == {"conv.A": 0, "conv.G": 0, "fc.A": 1, "fc.G": 1, "out.A": 1, "out.G": 1}
    assert [p.load(rank) for rank in (0, 1)] == [1064, 1248]


def test_memory_balance_places_by_the_square():
    """Oracle: n^2 by hand; fc is the largest job now."""
    p = make_plan(LAYERS, 2, Strategy(MemOpt(assignment_strategy="memory")))
    assert (p.owners["fc.A"], p.owners["conv.A"], p.owners["out.A"]) == (0, 1, 1)


def test_layers_without_factors_are_placed_by_the_work_of_orthogonal_directions():
    """Oracle: n m^2 products by hand; all three directions have 64 elements."""
    layers = [LayerShape("a", 32, 2), LayerShape("square", 8, 8), LayerShape("b", 32, 2)]
    p = make_plan(layers, 2, Strategy(MemOpt()), preconditioner="muon")
    assert (p.owners["square"], p.owners["a"], p.owners["b"]) == (0, 1, 1)


def test_separate_owners_share_out_the_factors():
    """Oracle: longest first over six factors by hand: 1000 | 512 + 512, then 216, 64 and 8."""
    p = make_plan(LAYERS, 2, Strategy(CommOpt(colocate_factors=False)))
    assert p.owners == {"conv.A": 0, "conv.G": 1, "fc.A": 1, "fc.G": 1, "out.A": 0, "out.G": 1}


def test_separate_owners_stay_in_the_layers_column():
    """Oracle: by hand on the grid 0 1 / 2 3; a second factor stays within the layer's column."""
    p = make_plan(LAYERS, 4, Strategy(HybridOpt(grad_workers=2, colocate_factors=False)))
    assert p.owners == {"conv.A": 0, "conv.G": 2, "fc.A": 3, "fc.G": 1, "out.A": 2, "out.G": 2}
    assert p.columns_of == {"conv": 0, "fc": 1, "out": 0}
    assert preconditioned(p, 3) == ["fc"]
    assert preconditioned(p, 2) == ["conv", "out"]


def test_the_plan_of_a_rank_is_made_once():
    """Oracle: identity; another rank has another plan."""
    p = plan(4)
    assert p.of(2) is p.of(2)
    assert [p.of(rank).rank for rank in range(4)] == [0, 1, 2, 3]


def test_layers_and_factors_of_a_rank_are_those_of_owner_and_column():
    """Oracle: a look at every layer and factor, on 2 x 3 ranks, with replicated factors."""
    for strategy in (
        Strategy(HybridOpt(grad_workers=2)),
        Strategy(HybridOpt(grad_workers=2, colocate_factors=False, replicate_below=7)),
    ):
        p = make_plan(LAYERS, 6, strategy, OTHERS)
        for rank in range(6):
            of_rank, column = p.of(rank), rank % 3
            everything = [f for layer in p.covered for f in layer.factors]
            owned = [f.name for f in everything if f.owner == rank and not f.replicated]
            assert [f.name for f in of_rank.owned] == owned
            own_layers = [name for name, at in p.columns_of.items() if at == column]
            assert preconditioned(p, rank) == own_layers
            rows = [[f for f in everything if f.owner == r] for r in (column, column + 3)]
            segments = [*([f for f in row if not f.replicated] for row in rows)]
            segments.append([f for f in everything if f.replicated and f.column == column])
            sizes = [sum(f.size for f in segment) > 0 for segment in segments]
            found = [count > 0 for count in of_rank.layouts.bases.counts()]
            assert found == sizes


def test_a_rank_without_layers_has_an_empty_segment():
    """Oracle: the updaters; three owners step three layers and the further tensors."""
    p = make_plan(
        LAYERS, 6, Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)), OTHERS
    )
    steps = [rank in p.updaters.values() for rank in range(6)]
    assert [count > 0 for count in p.of(0).layouts.gradients.counts()] == steps
    assert sum(steps) == 3


def preconditioned(plan, rank):
    return [layer.name for layer in plan.of(rank).preconditioned]


def test_uncovered_parameters_go_to_the_rank_with_the_fewest_elements():
    """Oracle: 5 | 4, then 3 joins 4, then 2 joins 5, by hand."""
    p = make_plan([], 2, Strategy(MemOpt()), [("a", (2,)), ("b", (4,)), ("c", (3,)), ("d", (5,))])
    assert p.updaters == {"d": 0, "b": 1, "c": 1, "a": 0}


def test_uncovered_parameters_go_to_ranks_that_step_layers():
    """Oracle: by hand; ranks without a layer take nothing, and elements of layers count.

    fc has 100 elements on one rank, and conv with out 154 and the first 54 of others on the other.
    """
    p = plan(5, others=[("a", (54,)), ("b", (60,)), ("c", (8,))])
    stepped = {name: p.updaters[name] for name in ("conv", "fc", "out")}
    assert len(set(stepped.values())) == 3
    assert {p.updaters[name] for name in "abc"} <= set(stepped.values())
    elements = {name: math.prod(layer.gradient) for name, layer in zip(stepped, LAYERS)}
    assert p.updaters["b"] == stepped[min(elements, key=elements.__getitem__)]


@pytest.mark.parametrize(("workers", "nodes"), [(1, 3), (2, 2), (4, 3), (16, 3)])
def test_owners_are_far_from_each_other(workers, nodes):
    """Oracle: by hand on a grid of 16 ranks, 4 of a node; three owners share no column."""
    p = plan(16, workers)
    owners = set(p.owners.values())
    assert len(owners) == 3
    assert len({owner // 4 for owner in owners}) == nodes
    assert len(set(p.columns_of.values())) == min(3, 16 // workers)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_an_order_of_a_grid_has_all_ranks(rows):
    """Oracle: all ranks once; the first ones are of different columns."""
    order = diagonally(rows, 6)
    assert sorted(order) == list(range(6 * rows))
    assert sorted(rank % 6 for rank in order[:6]) == list(range(6))


@pytest.mark.parametrize("ranks", range(1, 20))
def test_an_order_of_ranks_far_apart(ranks):
    """Oracle: all ranks once; k ranks of a power of two leave gaps of at most twice the mean."""
    order = apart(ranks)
    assert sorted(order) == list(range(ranks))
    if ranks in (2, 4, 8, 16):
        for count in range(1, ranks + 1):
            first = sorted(order[:count])
            gaps = [b - a for a, b in zip(first, [*first[1:], first[0] + ranks])]
            assert max(gaps) <= 2 * ranks / count


@pytest.mark.parametrize("ranks", range(1, 13))
def test_every_divisor_makes_a_grid(ranks):
    """Oracle: rank r sits at row r // columns and column r % columns."""
    for workers in divisors(ranks):
        p = plan(ranks, workers)
        assert p.grid.workers * p.grid.columns == ranks
        assert [p.grid.position(r) for r in range(ranks)] == [
            (row, column) for row in range(workers) for column in range(ranks // workers)
        ]
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_statistics_are_aligned_triangles():
    """Oracle: n (n + 1) / 2 elements rounded up to 16, by hand: 55, 10, 36, 36, 21, 3.

    The number of examples follows every triangle, in 16 elements.
    """
    offsets = {"conv.A": 0, "conv.G": 80, "fc.A": 112, "fc.G": 176, "out.A": 240, "out.G": 288}
    layout = plan(2).of(0).layouts.statistics
    assert {n: offset for n, offset in layout.offsets.items() if n in offsets} == offsets
    assert (layout.offsets["conv.A#"], layout.shapes["conv.A#"]) == (64, (1,))
    assert (len(layout.offsets), layout.bounds) == (12, (0, 320))
    by_owner = plan(2, 1, "reduce_scatter").of(0).layouts.statistics
    assert by_owner.bounds == (0, 112, 320)
    assert by_owner.counts() == (112, 208)
    assert list(plan(2, 1, "local").of(0).layouts.statistics.shapes) == [
        "conv.A",
        "conv.A#",
        "conv.G",
        "conv.G#",
    ]
    assert list(plan(2, 1, "reduce_scatter").of(1).layouts.averages.shapes) == [
        "fc.A",
        "fc.G",
        "out.A",
        "out.G",
    ]
    apart = (
        make_plan(LAYERS, 2, Strategy(CommOpt(), compression=Compression(factors=Int8())))
        .of(0)
        .layouts.statistics
    )
    assert list(apart.offsets)[6:] == [f"{name}#" for name in offsets]


@pytest.mark.parametrize("preconditioner", ["inverse", "eigen"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equal_layers_lie_at_even_distances(ranks, preconditioner):
    """Oracle: distances between first elements, in every layout that a direction reads or writes.

    Layers of four shapes alternate, as in a network of blocks.
    """
    orders = [(9, 4), (4, 9), (9, 4), (30, 4)] * 4
    layers = [LayerShape(f"{number}", *order) for number, order in enumerate(orders)]
    choices = {
        "assignment.replicate_below": (0, 5),
        "refresh.stagger": (1, 2),
        "transport.fusion": (None, 100),
    }
    checked = 0
    for strategy, *values in itertools.product(strategies(ranks), *choices.values()):
        try:
            strategy = changed(strategy, dict(zip(choices, values)))
            p = make_plan(layers, ranks, strategy, OTHERS, preconditioner=preconditioner)
        except ValueError:  # two choices that need each other
            continue
        for rank in range(ranks):
            checked += check_stacks(p.of(rank))
    assert checked > 20 * ranks


def check_stacks(rank):
    """Check the layouts of a rank, and return the number of stacks of several layers."""
    kinds = {}
    for layer in rank.preconditioned:
        kinds.setdefault(layer.kind, []).append(layer)
    for layers in kinds.values():
        named = [layer.name for layer in layers]
        blocks = [[block.name for f in layer.factors for block in f.blocks] for layer in layers]
        for layout, names in [
            *((rank.layouts.bases, list(of_kind)) for of_kind in zip(*blocks)),
            *((layout, named) for layout in (rank.layouts.denominators, rank.layouts.directions)),
        ]:
            starts = [layout.offsets[name] for name in names if name in layout.offsets]
            distances = {stop - start for start, stop in itertools.pairwise(starts)}
            assert len(distances) <= 1 and all(distance > 0 for distance in distances)
    return sum(len(layers) > 1 for layers in kinds.values())


def test_gradients_and_bases_by_hand():
    """Oracle: element counts by hand, rounded up to 16."""
    p = plan(2, 2, preconditioner="eigen")
    assert p.of(0).layouts.gradients.shapes["conv"] == (4, 10)
    assert p.of(0).layouts.gradients.size == 48 + 64 + 16 + 3 * 16
    bases = p.of(0).layouts.bases
    assert bases.counts() == (112 + 16 + 16 + 16, 2 * (64 + 16) + 48 + 16 + 16 + 16, 0)
    inverse = make_plan(LAYERS, 2, Strategy(CommOpt()), preconditioner="inverse")
    assert inverse.of(0).layouts.bases.shapes["out.A.inverse"] == (6, 6)
    assert p.memory(0)["bases"] == 4 * p.of(0).layouts.bases.size


def test_vectors_by_hand():
    """Oracle: vectors of 10, 4, 8, 8, 6 and 2 elements, in pieces of 16, in bytes of 4."""
    everywhere = plan(2, 2, preconditioner="eva")
    assert everywhere.of(0).layouts.statistics.size == 2 * 6 * 16  # with the counts
    for layout in (everywhere.of(0).layouts.averages, everywhere.of(0).layouts.bases):
        assert layout.size == 6 * 16
    assert everywhere.of(0).layouts.bases.shapes["conv.A.vector"] == (10,)
    sizes = [(m.stage, m.bytes) for m in everywhere.messages(0, True, True)]
    assert sizes == [("reduce statistics", 4 * 192), ("reduce gradients", 4 * 176)]
    to_owners = plan(2, 2, "reduce_scatter", preconditioner="eva")
    (bases,) = stages.publish_bases(to_owners.of(1))
    assert (bases.primitive, bases.bytes) == ("Allgatherv", 4 * 4 * 16)
    assert [p.load(0) for p in (everywhere, to_owners)] == [0, 0]


EVERYWHERE = ("reduce statistics", "Allreduce", "world")


@pytest.mark.parametrize(
    ("blocks", "through_shards"),
    [((9, 1, 1, 1), True), ((1, 11, 0, 0), True), ((3, 3, 3, 3), False), ((5, 3, 2, 2), False)],
)
@pytest.mark.parametrize("unit", [2**18, 16])
def test_unequal_parts_pass_through_shards_if_numbers_are_many(blocks, through_shards, unit):
    """Oracle: by hand: the largest part is above twice the mean, and all have 2**18 elements."""
    layout = lay_out([(f"of {owner}", (unit * n,))] for owner, n in enumerate(blocks))
    whole = sums("stage", layout, lambda name: 0, 4, 4)
    found = in_shards(whole, 4, 0, None, 4, always=False)
    counts = [[stop - start for start, stop in message.spans] for message in found]
    if through_shards and unit > 16:
        assert [message.primitive for message in found] == ["Reduce_scatter", PASSED]
        assert counts[0] == [3 * unit] * 4 and found[1].to == whole[0].spans
    else:
        assert found == whole


def test_parts_with_numbers_between_them_do_not_pass_through_shards():
    """Oracle: by hand: a shard would have numbers that nobody asked for, as of other turns."""
    layout = lay_out([[("now", (64,)), ("later", (64,))], [("now, too", (16,))]])
    whole = sums("stage", layout, lambda name: None if name == "later" else 0, 2, 4)
    assert [message.spans for message in whole] == [((0, 64), (128, 144))]
    assert in_shards(whole, 2, 0, None, 4) == whole


TO_OWNERS = ("reduce statistics", "Reduce_scatter", "world")
BASES = ("publish bases", "Allgatherv", "column")
GRADIENTS = ("reduce gradients", "Allreduce", "world")
TO_UPDATERS = ("reduce gradients", "Reduce_scatter", "world")
DIRECTIONS = ("publish gradients", "Allgatherv", "row")
CLIP = ("clip", "Allreduce", "world")
WEIGHTS = ("publish weights", "Allgatherv", "world")


@pytest.mark.parametrize(
    ("strategy", "full", "ordinary"),
    [
        (Strategy(CommOpt()), [EVERYWHERE, BASES, GRADIENTS], [GRADIENTS]),
        (Strategy(MemOpt()), [EVERYWHERE, GRADIENTS, DIRECTIONS], [GRADIENTS, DIRECTIONS]),
        (
            Strategy(HybridOpt(grad_workers=2)),
            [EVERYWHERE, BASES, GRADIENTS, DIRECTIONS],
            [GRADIENTS, DIRECTIONS],
        ),
        (
            Strategy(CommOpt(factor_reduction="reduce_scatter")),
            [TO_OWNERS, BASES, GRADIENTS],
            [GRADIENTS],
        ),
        (
            Strategy(MemOpt(factor_reduction="local")),
            [GRADIENTS, DIRECTIONS],
            [GRADIENTS, DIRECTIONS],
        ),
        (
            Strategy(CommOpt(factor_reduction="reduce_scatter", shard_optimizer=True)),
            [TO_OWNERS, TO_UPDATERS, CLIP, WEIGHTS],
            [TO_UPDATERS, CLIP, WEIGHTS],
        ),
        (
            Strategy(
                HybridOpt(grad_workers=2, colocate_factors=False, shard_optimizer=True),
            ),
            [EVERYWHERE, BASES, TO_UPDATERS, CLIP, WEIGHTS],
            [TO_UPDATERS, CLIP, WEIGHTS],
        ),
    ],
)
def test_what_travels(strategy, full, ordinary):
    """Oracle: the strategies' definitions [Pauloski et al. SC20, TPDS22; Zhang et al. 2022]."""

    def seen(p, statistics, refresh, **clip):
        messages = p.messages(0, statistics, refresh, **clip)
        return [(m.stage, m.primitive, m.over) for m in messages]

    p = make_plan(LAYERS, 4, strategy, OTHERS)
    assert seen(p, True, True) == full
    assert seen(p, False, False) == ordinary
    assert seen(p, False, False, clip=False) == [m for m in ordinary if m != CLIP]
    assert (
        make_plan(LAYERS, 1, dataclasses.replace(strategy, assignment=CommOpt())).messages(0, 1, 1)
        == []
    )


@pytest.mark.parametrize(
    ("choices", "extended"),
    [
        ({}, []),
        ({"assignment.factor_reduction": "reduce_scatter", "assignment.shard_optimizer": True}, []),
        ({"compression.gradients": Int8(), "transport.fusion": 1}, []),
        ({"refresh": CurvatureServers()}, ["send factors", "receive bases"]),
        ({"sync": LocalSGD(sync_every=2)}, ["exchange weights"]),
    ],
)
def test_a_default_step_has_no_messages_of_extensions(choices, extended):
    """Oracle: the list of extensions; what extensions add stands in the place of the stage."""
    p = make_plan(LAYERS, 4, strategy_of(choices), OTHERS, "eigen")
    default, together = stages.messages(p.of(0), True, True), p.messages(0, True, True)
    assert [m for m in together if m.stage not in extended] == default
    assert [m.stage for m in together if m not in default] == extended


def test_one_rank_sends_nothing_for_virtual_ranks():
    """Oracle: a single rank has no other to send to."""
    strategy = Strategy(CommOpt(), transport=Transport(virtual_ranks=4))
    assert make_plan(LAYERS, 1, strategy, OTHERS).messages(0, True, True) == []
    assert make_plan(LAYERS, 2, strategy, OTHERS).messages(0, True, True) != []


def test_sizes_of_messages():
    """Oracle: 2 ranks, conv on 0 and the rest on 1; elements by hand, in bytes of 4."""
    p = plan(2, 2, "reduce_scatter", preconditioner="eigen")
    statistics, bases, gradients = p.messages(1, True, True)
    assert (statistics.bytes, statistics.wire) == (4 * 320, 4 * 320 // 2)
    assert (bases.bytes, bases.wire) == (4 * 256, 4 * (160 + 256) // 2)
    assert (gradients.bytes, gradients.wire) == (4 * 176, 4 * 176)
    row = plan(2, 1).messages(0, False, False)[1]
    assert (row.bytes, row.wire) == (4 * 48, 4 * (48 + 80) // 2)
    assert plan(2, 1, itemsize=8).messages(0, False, False)[1].bytes == 8 * 48


def test_sizes_of_encoded_messages():
    """Oracle: 2 ranks; 224 elements of factors and 96 of counts, 176 of gradients, 128 of layers.

    In int8 16 elements take 17 bytes, in bfloat16 an element takes 2, of a quarter's places 4 more.
    Layers have 40, 64 and 12 numbers of their own; padding has no quarter.
    """
    wires = Compression(factors=Int8(), inverses=BFloat16(), gradients=TopK(ratio=0.25))
    p = make_plan(LAYERS, 2, Strategy(CommOpt(), compression=wires), OTHERS, preconditioner="eigen")
    statistics, counts, bases, covered, others = p.messages(1, True, True)
    assert statistics.primitive == "Alltoall, Allgather"
    assert (statistics.bytes, statistics.wire) == (3 * 119, 2 * 119)  # shards of 112 elements
    assert (counts.primitive, counts.bytes, counts.codec) == ("Allreduce", 4 * 96, None)
    assert (bases.bytes, bases.wire) == (2 * 256, 2 * (160 + 256) // 2)
    assert (covered.primitive, covered.bytes, covered.wire) == ("Allgather", 29 * 8, 29 * 8)
    assert (others.primitive, others.bytes, others.wire) == ("Allreduce", 4 * 48, 4 * 48)
    assert p.memory(0)["wires"] == 4 * (320 + 176)
    owner = MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)
    p = make_plan(LAYERS, 2, Strategy(owner, compression=wires), OTHERS)
    statistics, counts, covered, others, _, weights, exact = p.messages(1, True, True)
    assert (statistics.primitive, statistics.bytes) == ("Alltoall", 224 * 17 // 16)
    assert (covered.primitive, covered.bytes) == ("Alltoall", 29 * 8)
    assert (weights.primitive, weights.bytes) == ("Allgatherv", 19 * 8)  # of 76 on rank 1
    assert [m.primitive for m in (counts, others, exact)] == 2 * ["Reduce_scatter"] + ["Allgatherv"]
    assert p.memory(0)["wires"] == 4 * (320 + 3 * 176)


def test_what_wires_keep_of_sums_is_what_makes_up_for_them():
    """Oracle: factors of batches are added up over time, averages and bases are not."""

    def kept(when="factors", **compressors):
        strategy = Strategy(
            CommOpt(),
            compression=Compression(**compressors),
            transport=Transport(reduce_factors_at=when),
        )
        p = make_plan(LAYERS, 2, strategy, OTHERS)
        return [bool(m.codec and m.codec.feedback) for m in p.messages(0, True, True)]

    assert kept(factors=Int8(), inverses=Int8(), gradients=Int8()) == [1, 0, 0, 1, 0]
    assert kept("inverses", factors=Int8()) == [0, 0, 0, 0]
    assert kept(factors=BFloat16(), gradients=BFloat16()) == [0, 0, 0, 0, 0]


def test_the_digest_tells_any_two_plans_apart():
    """Oracle: plans that differ in a single argument."""
    first, *rest = LAYERS
    layers = [LAYERS, LAYERS[::-1], rest]
    layers += [[dataclasses.replace(first, **c), *rest] for c in ({"name": "x"}, {"inputs": 11})]
    choices = {
        "layers": [*layers, [dataclasses.replace(first, outputs=5), *rest]],
        "ranks": [2, 4],
        "strategy": [
            Strategy(MemOpt()),
            Strategy(HybridOpt(grad_workers=2)),
            Strategy(MemOpt(factor_reduction="reduce_scatter")),
            Strategy(MemOpt(shard_optimizer=True)),
            Strategy(MemOpt(assignment_strategy="memory")),
            Strategy(MemOpt(colocate_factors=False)),
            Strategy(MemOpt(), refresh=Refresh(tolerance=0.1)),
        ],
        "others": [[], OTHERS, OTHERS[:2]],
        "preconditioner": ["eigen", "inverse", "eva"],
        "itemsize": [4, 8],
    }
    base = {name: values[0] for name, values in choices.items()}
    given = [base | {name: value} for name, values in choices.items() for value in values[1:]]
    digests = [make_plan(**arguments).digest() for arguments in [base, *given]]
    assert len(set(digests)) == len(digests)
    assert make_plan(**base).digest() == digests[0]


def test_published_sizes_of_resnet50():
    """Oracle: 586.9 MiB of factors, 293.6 of triangles, 97.3 of weights; a bound of 4.6x."""
    with torch.device("meta"):
        layers, others = mpikfac.layers.covered_shapes(models.build("resnet50", classes=1000))
    orders = [factor.order for layer in layers for factor in layer.factors]
    assert mib(sum(n * n for n in orders)) == 586.9
    assert mib(sum(n * (n + 1) // 2 for n in orders)) == 293.6
    assert mib(sum(layer.inputs * layer.outputs for layer in layers)) == 97.3

    p = make_plan(layers, 512, Strategy(CommOpt(colocate_factors=False)), others)
    assert mib(p.of(0).layouts.statistics.size) == 293.6
    loads = [p.load(rank) for rank in range(512)]
    assert round(sum(loads) / max(loads), 1) == 4.6

    p = make_plan(
        layers,
        1024,
        Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)),
        others,
    )
    assert len(set(p.updaters.values())) == 54  # layers, of 161 tensors


def mib(elements):
    return round(4 * elements / 2**20, 1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: plan(6, 4),
            "grad_workers=4 must divide the number of ranks (6); try one of [1, 2, 3, 6]",
        ),
        (lambda: plan(0), "ranks=0 must be at least 1"),
        (
            lambda: plan(2, preconditioner="svd"),
            "preconditioner='svd' must be one of 'eigen', 'ekfac', 'inverse'",
        ),
        (
            lambda: make_plan(
                LAYERS,
                2,
                Strategy(CommOpt(colocate_factors=False, factor_reduction="reduce_scatter")),
                preconditioner="inverse",
            ),
            "needs assignment.colocate_factors=True or assignment.factor_reduction='allreduce', "
            "not False and 'reduce_scatter'",
        ),
        (
            lambda: make_plan(
                LAYERS, 2, Strategy(transport=Transport(packing="square")), preconditioner="eva"
            ),
            "needs transport.packing='triangle', not 'square'",
        ),
        (
            lambda: make_plan(
                LAYERS, 2, Strategy(refresh=Refresh(tolerance=0.1)), preconditioner="eva"
            ),
            "needs refresh.tolerance=0, not 0.1",
        ),
        *(
            (lambda bad=bad: Refresh(tolerance=bad), f"tolerance={bad!r} must be a finite number")
            for bad in (-0.1, float("nan"), float("inf"), True, "0.1")
        ),
        (lambda: HybridOpt(grad_workers=0), "grad_workers=0 must be a whole number"),
        (lambda: Refresh(stagger=0), "stagger=0 must be a whole number >= 1"),
        *(
            (lambda fusion=fusion: Transport(fusion=fusion), f"fusion={shown} must be a whole")
            for fusion, shown in ((0, 0), ((), ()), ((2, 0), 0), ("3", "'3'"))
        ),
        (
            lambda: Strategy(transport=Transport(virtual_ranks=4, packing="square")),
            "transport.virtual_ranks=4 needs transport.packing='triangle', not 'square'",
        ),
        (
            lambda: Transport(ranks_per_node=0),
            "ranks_per_node=0 must be a whole number >=",
        ),
        (
            lambda: make_plan(LAYERS, 6, Strategy(transport=Transport(ranks_per_node=4))),
            "ranks_per_node=4 must divide the number of ranks (6); try one of [1, 2, 3, 6]",
        ),
        (
            lambda: Strategy(transport=Transport(ranks_per_node=2, overlap=True)),
            "transport.ranks_per_node=2 needs transport.overlap=False, not True",
        ),
        (
            lambda: Strategy(
                MemOpt(shard_optimizer=True), transport=Transport(fusion=2, owner_sums="alltoall")
            ),
            "transport.owner_sums='alltoall' needs transport.fusion=None, not 2",
        ),
        (
            lambda: Transport(owner_sums="ring"),
            "owner_sums='ring' must be one of 'reduce', 'alltoall'",
        ),
        (
            lambda: CommOpt(factor_reduction="all"),
            "factor_reduction='all' must be one of 'allreduce', 'reduce_scatter', 'local'",
        ),
        (
            lambda: CommOpt(shard_optimizer="all"),
            "shard_optimizer='all' must be one of True, False",
        ),
        (lambda: TopK(ratio=0), "ratio=0 must be a number above 0"),
        (
            lambda: Compression(factors=TopK()),
            "compression.factors=TopK() must be BFloat16(), Int8() or None",
        ),
        (
            lambda: Compression(gradients="int8"),
            "compression.gradients='int8' must be a Compressor, such as BFloat16(), or None",
        ),
        (
            lambda: Strategy(
                compression=Compression(inverses=Int8()), transport=Transport(virtual_ranks=4)
            ),
            "compression.inverses='int8' needs transport.virtual_ranks=None, not 4",
        ),
        (
            lambda: Strategy(
                MemOpt(shard_optimizer=True),
                compression=Compression(gradients=Int8()),
                transport=Transport(owner_sums="alltoall"),
            ),
            "needs transport.owner_sums='reduce', not 'alltoall'",
        ),
        (
            lambda: MemOpt(assignment_strategy="n"),
            "assignment_strategy='n' must be one of 'compute', 'memory'",
        ),
        (
            lambda: HybridOpt(grad_workers=2, grad_worker_fraction=0.5),
            "grad_workers=2 and grad_worker_fraction=0.5 exclude each other; leave one of them out",
        ),
        (
            lambda: HybridOpt(grad_worker_fraction=1.5),
            "grad_worker_fraction=1.5 must be above 0 and at most 1",
        ),
        *(
            (
                lambda share=share: HybridOpt(grad_worker_fraction=share).workers(4),
                f"grad_worker_fraction={share} of 4 ranks is not a whole number of workers; try "
                "one of [0.25, 0.5, 1.0]",
            )
            for share in (0.3, 0.75)
        ),
        (
            lambda: HybridOpt(grad_workers=3).workers(4),
            "grad_workers=3 must divide the number of ranks (4); try one of [1, 2, 4]",
        ),
        (lambda: Strategy("comm-opt"), "assignment='comm-opt' must be of the type Assignment"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(make, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


def test_assignments_by_name():
    """Oracle: COMM-OPT has all ranks as workers, MEM-OPT one, HYBRID-OPT the given number."""
    halves = HybridOpt(grad_workers=3), HybridOpt(grad_worker_fraction=0.5), HybridOpt()
    assert [kind.workers(6) for kind in (CommOpt(), MemOpt(), *halves)] == [6, 1, 3, 3, 3]
    assert HybridOpt(grad_worker_fraction=0.01).workers(6) == 1
    assert Strategy() == Strategy(CommOpt()) != Strategy(MemOpt())
    assert len({Strategy(kind) for kind in (*halves, halves[0], HybridOpt(grad_workers=2))}) == 4


def resnet50():
    """Return the layers of ResNet-50."""
    layers, inputs = [LayerShape("stem", 3 * 49, 64)], 64
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for block in range(blocks):
            name, outputs = f"{stage}.{block}", 4 * width
            layers += [
                LayerShape(f"{name}.1", inputs, width),
                LayerShape(f"{name}.2", 9 * width, width),
                LayerShape(f"{name}.3", width, outputs),
            ]
            if block == 0:
                layers.append(LayerShape(f"{name}.shortcut", inputs, outputs))
            inputs = outputs
    return [*layers, LayerShape("head", inputs + 1, 1000)]


@pytest.mark.parametrize("stagger", [1, 2, 3, 4, 5, 10, 25])
def test_turns_share_resnet50_evenly_as_far_as_layers_allow(stagger):
    """Oracle: no turn can be less than the mean turn or the largest layer; cubes of orders."""
    work = {x.name: x.inputs**3 + x.outputs**3 for x in resnet50()}
    plan = make_plan(resnet50(), 1, Strategy(MemOpt(), refresh=Refresh(stagger=stagger)))
    turns = [0] * stagger
    for layer in plan.of(0).layers:
        turns[layer.turn] += work[layer.name]
    total = sum(work.values())
    assert max(turns) <= 1.001 * max(total / stagger, *work.values())
    assert max(work.values()) / total == pytest.approx(0.216, abs=1e-3)


@pytest.mark.parametrize(
    ("sizes", "messages"),
    [
        ([], []),
        ([1], [0]),
        ([9, 9, 9], [0, 0, 0]),  # none is full
        ([9, 9, 2**18], [0, 0, 1]),  # the first bucket, of the last layer, is full
        ([9, 2**18 - 9, 9, 2**18 - 9], [0, 0, 1, 1]),
        ([9, 25 * 2**18, 2**18, 9], [0, 1, 2, 2]),  # the second one takes more
        ([2**30, 2**30], [0, 1]),
    ],
)
def test_overlapped_messages_are_buckets(sizes, messages):
    """Oracle: by hand: a bucket is full from 1 MiB on, all others from 25 MiB on."""
    assert in_messages(sizes, Transport(overlap=True)) == messages
    assert in_messages(sizes, Transport()) == [0] * len(sizes)
    assert in_messages(sizes, Transport(overlap=True, fusion=1)) == [*range(len(sizes))]


def test_gradients_without_kfac_are_buckets():
    """Oracle: by hand: parameters of 2 MiB, the last of which is ready first."""
    trained = [(f"{n}.weight", (512, 1024)) for n in range(3)]
    for overlap, count in ((True, 2), (False, 1)):
        strategy = Strategy(MemOpt(), transport=Transport(overlap=overlap))
        plan = make_plan([], 4, strategy, trained)
        sent = [m for m in plan.messages(0, False, False, True) if m.stage == "reduce gradients"]
        assert len(sent) == count
        assert sum(message.size for message in sent) == 3 * 2**21


class HeaderCodec(Codec):
    """A codec with a header of 4 bytes per message."""

    name: ClassVar[str] = "header"
    everywhere: ClassVar[str] = IN_SHARDS

    def size(self, elements, itemsize):
        return 4 + elements


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Header(Compressor):
    """Send a header and bytes."""

    def codec(self, layout, feedback):
        return HeaderCodec()


def test_a_codec_with_a_header_is_not_cut_into_shards():
    """Oracle: the sizes of 16 and 32 values by hand."""
    encoded = make_plan(LAYERS, 2, Strategy(compression=Compression(gradients=Header())), OTHERS)
    with pytest.raises(ValueError, match=r"codec 'header': size\(32\)=36 must be .*=40"):
        encoded.messages(0, False, False, True)
