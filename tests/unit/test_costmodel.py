from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import mpikfac
from mpikfac import (
    CommOpt,
    Compression,
    HybridOpt,
    LayerShape,
    MemOpt,
    Strategy,
    Transport,
    make_plan,
)
from mpikfac.lab import PowerSGD
from mpikfac.plan import stages
from mpikfac.predict import Level, Machine, Network, Sample, costs
from support import gradients, inside

LAYERS = [LayerShape("conv", 10, 4), LayerShape("fc", 8, 8), LayerShape("out", 6, 2)]
# No latency to speak of; a byte takes 1 s inside a node and, for all ranks of a node, 10 s between.
MACHINE = Machine(
    name="made up",
    inside=Level(1e-9, 1.0),
    between=Level(1e-9, 0.1),
    ranks_per_node=4,
    networks=(Network("net", 1, 1.0, 2.0, 0.5, 0.1, 0.2, 24.0),),
    decompositions={"inverse": ((1.0, 1.0), (10.0, 1000.0)), "eigen": ((1.0, 1.0), (10.0, 1000.0))},
    products=((1.0, 2.0),),
)
LATENT = dataclasses.replace(MACHINE, inside=Level(1.0, math.inf), between=Level(10.0, math.inf))


@pytest.mark.parametrize(
    ("primitive", "size", "busiest"),
    [
        ("Allreduce", 1000, 2000),  # all of it in two exchanges
        ("Allreduce", 2**14, 1.5 * 2**14),  # halves, quarters, and back
        ("Reduce_scatter", 1000, 750),
        ("Allgatherv", 1000, 750),
        ("Bcast", 1000, 2000),  # along a tree
        ("Bcast", 2**13, 3 * 2**13),  # from the root to all
        ("Iallreduce", 2**14, 4 * 2**14),  # a tree there and back
    ],
)
def test_a_collective_takes_the_bytes_of_its_busiest_link(primitive, size, busiest):
    """Oracle: by hand: bytes of the busiest of 4 ranks by the algorithms of Open MPI."""
    assert costs.collective_seconds(primitive, size, 4, MACHINE) == pytest.approx(busiest)


def test_small_messages_have_latencies_of_their_rounds():
    """Oracle: by hand: a tree over 5 ranks; 4 ranks exchange twice, a pair before and after.

    The exchanges of neighbours stay on nodes of 3 ranks.
    """
    assert costs.collective_seconds("Bcast", 1, 5, LATENT) == pytest.approx(3)
    assert costs.collective_seconds("Allreduce", 1, 5, LATENT) == pytest.approx(4)
    assert costs.collective_seconds("Allreduce", 1, 5, LATENT, 2) == pytest.approx(1 + 1 + 10 + 1)


def test_halves_of_a_node_cross_the_link_of_the_node():
    """Oracle: by hand: 8 ranks on 2 nodes: halves of 1/2 and 1/4 inside, 4 of 1/8 between.

    A byte takes 1 s inside and 10 s between. Back the same way.
    """
    found = costs.collective_seconds("Allreduce", 2**14, 8, MACHINE, 2)
    assert found == pytest.approx(2 * 2**14 * (1 / 2 + 1 / 4 + 10 * 4 / 8))


def test_one_rank_and_no_bytes_cost_nothing():
    assert costs.collective_seconds("Allreduce", 10, 1, MACHINE) == 0
    assert costs.collective_seconds("Allreduce", 0, 2, MACHINE) == 0


@pytest.mark.parametrize(
    ("ranks", "workers", "over", "placed"),
    [
        (8, 2, "world", (8, 2, 1)),
        (8, 2, "row", (4, 1, 1)),  # ranks 0 to 3
        (8, 2, "column", (2, 2, 4)),  # ranks 0 and 4; 1 and 5, 2 and 6, 3 and 7 do the same
        (8, 4, "row", (2, 1, 1)),  # ranks 0 and 1
        (8, 4, "column", (4, 2, 2)),  # ranks 0, 2 | 4, 6, and their neighbours
        (4, 2, "world", (4, 1, 1)),
        (8, 2, "world in node", (4, 1, 1)),
        (8, 2, "world between nodes", (2, 2, 4)),  # 0 and 4, and so on
        (8, 4, "column in node", (2, 1, 1)),  # ranks 0 and 2
        (8, 4, "column between nodes", (2, 2, 4)),  # ranks 0 and 4; 2 and 6 and the other column's
    ],
)
def test_where_communicators_lie(ranks, workers, over, placed):
    """Oracle: by hand, ranks on nodes of 4: members, nodes, communicators that leave a node."""
    plan = make_plan(
        LAYERS,
        ranks,
        Strategy(HybridOpt(grad_workers=workers), transport=Transport(ranks_per_node=4)),
    )
    assert costs.placed(plan.grid.team(0, over), plan, MACHINE) == placed


def test_the_slower_level_bounds_a_message_and_links_are_shared():
    """Oracle: 3/4 of 1000 bytes at 1 byte per second; half of 1000 bytes at 0.1, for 4 at once."""
    plan = make_plan(LAYERS, 8, Strategy(HybridOpt(grad_workers=2)))
    message = plan.messages(0, True, True)[0]
    row, column = (
        dataclasses.replace(message, primitive="Allgatherv", over=over, size=1000, spans=spans)
        for over, spans in (
            ("row", tuple((k, k + 1) for k in range(4))),
            ("column", ((0, 1), (1, 2))),
        )
    )
    assert costs.message_seconds(row, plan, 0, MACHINE) == pytest.approx(750)
    assert costs.message_seconds(column, plan, 0, MACHINE) == pytest.approx(500 * 10 * 4)


def test_a_chain_passes_pieces_on():
    """Oracle: 3 pieces over 3 hops leave the first rank at 0, 1, 2 and arrive at the last at 5."""
    size = 3 * costs.CHAINED
    seconds = costs.collective_seconds("Send", size, 4, MACHINE)
    assert seconds == pytest.approx(5 * costs.CHAINED)
    plan = make_plan(LAYERS, 4, Strategy(CommOpt(), transport=Transport(virtual_ranks=4)))
    message = plan.messages(0, False, False)[0]
    both = costs.message_seconds(message, plan, 0, MACHINE)
    parts = [costs.collective_seconds(p, message.size, 4, MACHINE) for p in ("Send", "Bcast")]
    assert message.primitive == "Send, Bcast" and both == pytest.approx(sum(parts))


MEASURED = tuple((float(size), 0.01 + size * 1e-6) for size in (10**2, 10**4, 10**6))


def measured(*samples):
    return dataclasses.replace(MACHINE, samples=samples)


def test_what_was_measured_is_what_is_predicted():
    """Oracle: the points; past the largest point, the line through the points."""
    machine = measured(Sample("Allreduce", 4, 1, 1, MEASURED))
    for size, seconds in [*MEASURED, (2e6, 2.01)]:
        found = costs.collective_seconds("Allreduce", int(size), 4, machine)
        assert found == pytest.approx(seconds)


def test_a_measurement_is_carried_over_to_other_numbers_of_ranks():
    """Oracle: twice as deep a tree; ring bytes of 3/2 and 15/8 buffers."""
    machine = measured(Sample("Allreduce", 4, 1, 1, MEASURED), Sample("Bcast", 16, 1, 1, MEASURED))
    found = costs.collective_seconds("Allreduce", 10**6, 16, machine)
    assert found == pytest.approx(0.01 * 2 + 1.0 * (15 / 8) / (3 / 2))


def test_a_measurement_of_equal_parts_is_carried_over_to_unequal_parts():
    """Oracle: by hand: in a ring of 4 the largest of 4 parts, three times; the same latency."""
    machine = measured(Sample("Reduce_scatter", 4, 1, 1, MEASURED))
    parts = [1e6 * share for share in (0.5, 0.25, 0.25, 0.0)]
    found = costs.collective_seconds("Reduce_scatter", 10**6, 4, machine, parts=parts)
    assert found == pytest.approx(0.01 + 1.0 * (3 * 0.5) / (3 * 0.25))


def test_several_nodes_are_not_predicted_from_one():
    """Oracle: the level, as without any measurement; and the sharing of a link."""
    inside = Sample("Allgatherv", 2, 1, 1, MEASURED)
    machine = measured(inside)
    plain = costs.collective_seconds("Allgatherv", 1000, 2, MACHINE, 2)
    assert costs.collective_seconds("Allgatherv", 1000, 2, machine, 2) == plain
    machine = measured(inside, Sample("Allgatherv", 2, 2, 2, MEASURED))
    found = costs.collective_seconds("Allgatherv", 10**6, 2, machine, 2, sharing=1)
    assert found == pytest.approx(0.01 + 0.5)


def test_a_level_gives_back_the_measurement_it_is_taken_from():
    """Oracle: the points, by the formula for unmeasured messages."""
    level = costs.level_of(Sample("Allgatherv", 8, 2, 4, MEASURED))
    machine = dataclasses.replace(MACHINE, inside=Level(1.0, 1e99), between=level)
    for size, seconds in MEASURED:
        found = costs.collective_seconds("Allgatherv", int(size), 8, machine, 2, sharing=4)
        assert found == pytest.approx(seconds)


def test_decompositions_are_those_of_owned_factors():
    """Oracle: n^3 seconds by hand; rank 0 owns conv, rank 1 the rest (see test_plan)."""
    plan = make_plan(LAYERS, 2, Strategy(MemOpt()))
    seconds = [costs.decompose_seconds(plan, rank, MACHINE) for rank in (0, 1)]
    assert seconds == pytest.approx([1064, 1248])


def test_preconditioning_is_a_share_of_what_was_measured_or_products():
    """Oracle: by hand: products with factors, double in eigenbases, and for orthogonal directions.

    The products with factors are 560, 1024 and 96; the products for orthogonal directions, 2 s^2 l
    + 13 s^3 with the smaller order s and the larger order l, are 1152, 7680 and 152.
    """
    plan = make_plan(LAYERS, 2, Strategy(MemOpt()))
    network = MACHINE.networks[0]
    found = [costs.precondition_seconds(plan, rank, MACHINE, network) for rank in (0, 1)]
    assert found == pytest.approx([24 * 1712 / 10664, 24 * 8952 / 10664])
    found = costs.precondition_seconds(plan, 0, MACHINE, network, orthogonal=False)
    assert found == pytest.approx(24 * 560 / 10664)
    network = dataclasses.replace(network, precondition=None)
    eigen = make_plan(LAYERS, 2, Strategy(MemOpt()), preconditioner="eigen")
    assert costs.precondition_seconds(plan, 0, MACHINE, network) == pytest.approx(560 + 1152)
    assert costs.precondition_seconds(eigen, 0, MACHINE, network) == pytest.approx(2 * 560 + 1152)


def test_low_rank_costs_less_by_its_work():
    """Oracle: by hand: 2 n^2 r instead of n^3 seconds.

    Thin products take the measured time of square products, by the number of operations. Of the
    factors of orders 64 and 32 four eigenvectors are kept.
    """
    whole = LayerShape("l", 64, 32)
    thin = dataclasses.replace(whole, rank=4)
    plan, of_whole = (
        make_plan([layer], 1, Strategy(MemOpt()), preconditioner="eigen") for layer in (thin, whole)
    )
    n = {name: factor.order for name, factor in plan.factors.items()}
    seconds = [MACHINE.decomposition("eigen", order) * 8 / order for order in n.values()]
    assert costs.decompose_seconds(plan, 0, MACHINE) == pytest.approx(sum(seconds))
    orthogonal = 2 * 32**2 * 64 + 13 * 32**3
    low, high = 36 * 64 * 4 + 64 * 32 * 4, 64 * 32 * (64 + 32)
    for network in (
        MACHINE.networks[0],
        dataclasses.replace(MACHINE.networks[0], precondition=None),
    ):
        found, expected = (
            costs.precondition_seconds(one, 0, MACHINE, network) for one in (plan, of_whole)
        )
        expected_ratio = (2 * low + orthogonal) / (2 * high + orthogonal)
        assert found / expected == pytest.approx(expected_ratio)


def test_shares_of_a_rank():
    """Oracle: n^2 of the factors 116, 128 and 40; elements of the gradients 48 of 48 + 64 + 16.

    Factors A alone have 100, 64 and 36 of all elements.
    """

    def statistics(plan):
        return costs.statistics_seconds(plan, 0, MACHINE, MACHINE.networks[0])

    alone = make_plan(LAYERS, 2, Strategy(MemOpt(factor_reduction="local", shard_optimizer=True)))
    assert statistics(alone) == pytest.approx(0.5 * 116 / 284)
    assert costs.stepped_share(alone, 0) == pytest.approx(48 / 128)
    shared = make_plan(LAYERS, 2, Strategy(MemOpt()))
    assert (statistics(shared), costs.stepped_share(shared, 0)) == (0.5, 1)
    of_inputs = make_plan(
        [mpikfac.plan.forward_only(layer) for layer in LAYERS], 2, Strategy(MemOpt())
    )
    assert statistics(of_inputs) == pytest.approx(0.5 * 200 / 284)


def test_vectors_have_times_of_their_own():
    """Oracle: nothing to decompose; orders 16 of 38 on one rank; a refusal without known times."""
    plan = make_plan(LAYERS, 2, Strategy(MemOpt()), preconditioner="eva")
    network = dataclasses.replace(
        MACHINE.networks[0], vector_statistics=2.0, vector_precondition=38.0
    )
    assert costs.decompose_seconds(plan, 0, MACHINE) == 0
    assert costs.statistics_seconds(plan, 0, MACHINE, network) == 2
    found = [costs.precondition_seconds(plan, rank, MACHINE, network) for rank in (0, 1)]
    assert sorted(found) == pytest.approx([16, 22])
    for part in (costs.statistics_seconds, costs.precondition_seconds):
        with pytest.raises(ValueError, match="has no times for preconditioner='eva'"):
            part(plan, 0, MACHINE, MACHINE.networks[0])


def test_layers_have_the_times_of_their_preconditioners():
    """Oracle: by hand: fc has vectors, 16 of 38 elements; conv has eigenbases, out has inverses.

    A decomposition takes n^3 seconds, for the orders 10, 4, 6 and 2. Products are as above.
    Statistics take n^2 of the factors: 116 and 40 of 284.
    """
    conv, fc, out = LAYERS
    layers = [
        dataclasses.replace(conv, preconditioner="eigen"),
        dataclasses.replace(fc, preconditioner="eva"),
        out,
    ]
    plan = make_plan(layers, 1, Strategy(MemOpt()), preconditioner="inverse")
    network = dataclasses.replace(
        MACHINE.networks[0], vector_statistics=2.0, vector_precondition=38.0
    )
    seconds = costs.decompose_seconds(plan, 0, MACHINE)
    assert seconds == pytest.approx(1000 + 64 + 216 + 8)
    seconds = costs.precondition_seconds(plan, 0, MACHINE, network)
    assert seconds == pytest.approx(16 + 24 * (2 * 560 + 1152 + 96 + 152) / 10664)
    seconds = costs.statistics_seconds(plan, 0, MACHINE, network)
    assert seconds == pytest.approx(2 * 16 / 38 + 0.5 * (116 + 40) / 284)
    for part in (costs.statistics_seconds, costs.precondition_seconds):
        with pytest.raises(ValueError, match="has no times for preconditioner='eva'"):
            part(plan, 0, MACHINE, MACHINE.networks[0])


@pytest.mark.parametrize("primitive", ["Reduce_scatter", "Allgatherv"])
def test_the_largest_part_bounds_sums_and_gathers_in_a_ring(primitive):
    """Oracle: by hand: one of two members has 12 of 16 bytes, which pass a link once."""
    plan = make_plan(LAYERS, 2, Strategy(MemOpt()))
    message = mpikfac.plan.Message("s", primitive, "world", ((0, 1), (1, 4)), -1, 16, 16, 8)
    assert costs.message_seconds(message, plan, 0, MACHINE) == pytest.approx(12)


def test_large_sums_in_parts_are_several_sums_of_all_parts():
    """Oracle: as `comm.Grid` makes the sums, past the limit of elements: latencies by hand."""
    plan = make_plan(LAYERS, 2, Strategy(MemOpt()))
    count = costs.PIECE
    spans = ((0, count), (count, 2 * count + 1))
    message = mpikfac.plan.Message("s", "Reduce_scatter", "world", spans, -1, 8 * count + 4, 0, 0)
    assert costs.message_seconds(message, plan, 0, LATENT) == pytest.approx(3)
    found = costs.message_seconds(message, plan, 0, MACHINE)
    assert found == pytest.approx(4 * count + 4)


def test_rows_take_the_busiest_member_and_node():
    """Oracle: by hand: 8 ranks on 2 nodes send all at once; ranks 0 to 3 take in what 7 sends."""
    counts = [[0] * 8 for _ in range(8)]
    counts[0][1], counts[7][:4] = 90, [5, 10, 15, 20]
    plan = make_plan(LAYERS, ranks=8, strategy=Strategy(CommOpt()))
    for rank in (0, 7):
        (message,) = mpikfac.plan.rows("stage", counts, 2, rank)
        seconds = costs.message_seconds(message, plan, rank, MACHINE)
        assert seconds == pytest.approx(max(2 * 100, 10 * 2 * 50))
    sample = Sample("Alltoall", 8, 2, 1, ((80.0, 3.0), (800.0, 30.0)))
    measured = dataclasses.replace(MACHINE, samples=(sample,))
    (even,) = mpikfac.plan.rows("stage", [[5] * 8] * 8, 2, 0)
    assert costs.message_seconds(even, plan, 0, measured) == pytest.approx(3.0)


def test_parts_that_are_passed_on_take_the_busiest_member_and_node():
    """Oracle: by hand: rank 0 hands on 3 of 4 shards of 100 elements, 2 to the other node.

    Nodes have 2 ranks; a byte takes 1 s inside a node and 10 s between.
    """
    plan = make_plan(LAYERS, 4, Strategy(MemOpt()))
    machine = dataclasses.replace(MACHINE, ranks_per_node=2)
    owned = ((0, 400), (400, 400), (400, 400), (400, 400))
    shards = tuple((100 * k, 100 * (k + 1)) for k in range(4))
    message = mpikfac.plan.Message("s", "Isend, Irecv", "world", owned, -1, 1200, 0, 0, to=shards)
    assert costs.message_seconds(message, plan, 0, machine) == pytest.approx(4 * 200 * 10)
    inside = dataclasses.replace(machine, ranks_per_node=4)
    assert costs.message_seconds(message, plan, 0, inside) == pytest.approx(4 * 300)
    latent = dataclasses.replace(LATENT, ranks_per_node=2)
    assert costs.message_seconds(message, plan, 0, latent) == pytest.approx(10)


def test_what_encodes_is_part_of_what_was_measured():
    """Oracle: the codec's own points; without own points, the points of plain numbers."""
    plain, slow = Sample("Allreduce", 2, 1, 1, MEASURED), ((1.0, 7.0), (1e6, 7.0))
    machine = measured(plain, Sample("Allreduce", 2, 1, 1, slow, "bfloat16"))

    def seconds(codec):
        return costs.collective_seconds("Allreduce", 100, 2, machine, codec=codec)

    assert seconds("bfloat16") == pytest.approx(7)
    assert seconds("int8") == seconds(None) == pytest.approx(MEASURED[0][1])


def test_power_sgd_has_two_sums_in_turn():
    """Oracle: the sum of all P, then of all Q; 2 columns, but a single column of a single row."""
    layers = [LayerShape("conv", 10, 4), LayerShape("row", 8, 1)]
    plan = make_plan(layers, 2, Strategy(CommOpt(), compression=Compression(gradients=PowerSGD())))
    (message,) = stages.reduce_gradients(plan.of(0))
    seconds = (
        costs.collective_seconds("Allreduce", 4 * numbers, 2, MACHINE)
        for numbers in (2 * 4 + 1, 2 * 10 + 8)
    )
    assert costs.message_seconds(message, plan, 0, MACHINE) == sum(seconds)


def test_the_slowest_of_two():
    """Oracle: `2 Phi(spread / sqrt(2))`, the expected maximum of two times in closed form."""
    exact = 1 + math.erf(0.3 / 2)
    assert costs.expected_slowest(0.3, 2) == pytest.approx(exact, rel=1e-3)
    assert costs.expected_slowest(0.3, 1) == pytest.approx(1, rel=1e-3)
    assert costs.expected_slowest(0.0, 1000) == 1


def test_the_slowest_of_many():
    """Oracle: the mean over seeded draws."""
    draws = np.random.default_rng(0).standard_normal((2000, 1024))
    times = np.exp(0.05 * draws - 0.05**2 / 2).max(axis=1)
    assert costs.expected_slowest(0.05, 1024) == pytest.approx(times.mean(), rel=3e-3)


def test_factors_of_the_gradient_take_products_and_no_statistics():
    """Oracle: by hand: 2 x 3 x 3 x 4 and 2 x 3 x 4 x 4 operations at 2 a second; Muon makes none.

    A factor in two blocks multiplies half of the rows with themselves, twice. KL-Shampoo multiplies
    the gradient by both sides before.

    Muon's share of K-FAC's 24 seconds is that of the orthogonal products.
    """
    layer, network = LayerShape("fc", 4, 3), MACHINE.networks[0]

    def seconds(layer, preconditioner):
        plan = make_plan([layer], 1, Strategy(MemOpt()), preconditioner=preconditioner)
        assert costs.statistics_seconds(plan, 0, MACHINE, network) == 0
        return costs.moment_seconds(plan, 0, MACHINE)

    of_a, of_g = 3 * 4 * 4, 3 * 3 * 4
    assert seconds(layer, "shampoo") == pytest.approx(of_a + of_g)
    blocks = dataclasses.replace(layer, largest=3)
    assert seconds(blocks, "shampoo") == pytest.approx(of_a / 2 + of_g)
    assert seconds(layer, "kl-shampoo") == pytest.approx(2 * (of_a + of_g))
    assert seconds(layer, "muon") == 0
    plan = make_plan([layer], 1, Strategy(MemOpt()), preconditioner="shampoo")
    without = dataclasses.replace(MACHINE, products=(), decompositions={})
    with pytest.raises(ValueError, match="no rates for products"):
        costs.moment_seconds(plan, 0, without)
    with pytest.raises(ValueError, match="no times for preconditioner="):
        costs.decompose_seconds(plan, 0, without)
    plan = make_plan([layer], 1, Strategy(MemOpt()), preconditioner="muon")
    orthogonal, kfac = sum(layer.orthogonalising()), sum(layer.products())
    found = costs.precondition_seconds(plan, 0, MACHINE, network)
    assert found == pytest.approx(24 * orthogonal / (orthogonal + kfac))


COUNTED = (
    *("inverse", "eigen", "shampoo", "kl-shampoo", "soap", "muon", "normuon", "newton-muon"),
)


@pytest.mark.parametrize("kind", gradients.NETWORKS)
@pytest.mark.parametrize("preconditioner", COUNTED)
def test_products_of_a_step_are_those_that_run(comm, preconditioner, kind):
    """Oracle: torch's counter of operations, in a step with new factors, without a refresh."""
    model = gradients.network(kind)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    kfac = mpikfac.KFAC(
        model, sgd, comm, preconditioner=preconditioner, factor_update_steps=1, inv_update_steps=100
    )
    gradients.train(kfac, kind, range(1), comm)
    inputs, labels = gradients.batch(kind, 1)
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    with FlopCounterMode(display=False) as counter:
        kfac.step()
    job = mpikfac.predict.Job("net", 12, grafting=inside.settings(kfac).grafting)
    products = [
        *costs.moments(kfac.plan, 0),
        *costs.directions(kfac.plan, 0, job.grafting.orthogonalize),
    ]
    assert counter.get_total_flops() == 2 * sum(products)


def test_a_machine_without_rates_of_products_makes_no_factors_of_gradients():
    """Oracle: the text of the error, of a machine as older calibrations wrote it."""
    plan = make_plan(LAYERS, 1, Strategy(MemOpt()), preconditioner="shampoo")
    older = dataclasses.replace(MACHINE, products=())
    with pytest.raises(ValueError, match="'made up' has no rates for products; measure them with"):
        costs.moment_seconds(plan, 0, older)
