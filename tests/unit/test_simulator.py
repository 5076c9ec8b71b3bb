from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch

import mpikfac
from mpikfac import (
    AdamGrafting,
    CommOpt,
    HybridOpt,
    LayerShape,
    MemOpt,
    Refresh,
    Strategy,
    Transport,
    make_plan,
)
from mpikfac.comm.messages.outbox import BATCH
from mpikfac.lab import LSGD, CurvatureServers, LocalSGD, ParameterServer
from mpikfac.predict import Job, Level, Machine, Network, costs, simulator
from mpikfac.predict.clients import play_clients
from mpikfac.predict.simulator import Event, play, shares
from mpikfac_apps.problems import models

LAYERS = [LayerShape("conv", 10, 4), LayerShape("fc", 8, 8), LayerShape("out", 6, 2)]
OTHERS = [("bn", (4,)), ("scale", ())]
# A factor takes n^3 nanoseconds; a rank computes for 3.1 s, with new factors for 0.5 s more.
MACHINE = Machine(
    name="made up",
    inside=Level(1e-15, 1e9),
    networks=tuple(Network(m, 32, 1.0, 1.5, 0.5, 0.3, 0.2, 0.1) for m in ("net", "resnet50")),
    decompositions={
        "inverse": ((1.0, 1e-9), (1e4, 1e3)),
        "eigen": ((1.0, 1e-9), (1e4, 1e3)),
    },
    products=((1.0, 1e12),),
)
JOB = Job("net", 32, factor_update_steps=2, inv_update_steps=4)
STRATEGIES = [
    Strategy(CommOpt()),
    Strategy(MemOpt()),
    Strategy(HybridOpt(grad_workers=3)),
    Strategy(HybridOpt(grad_workers=4, factor_reduction="reduce_scatter")),
    Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)),
    Strategy(MemOpt(factor_reduction="local")),
]


@pytest.fixture(scope="module")
def resnet50():
    with torch.device("meta"):
        return mpikfac.layers.covered_shapes(models.build("resnet50", classes=1000))


def compute(seconds):
    return Event("backward", seconds)


def message(seconds, beside=False):
    return Event("reduce statistics", seconds, "overlapped" if beside else "message")


def urgent(seconds):
    return Event("reduce gradients", seconds, "urgent")


def felt(seconds, felt):
    return Event("reduce statistics", seconds, "overlapped", slowdown=felt)


WAIT = Event("reduce gradients", 0, "wait")
WAIT_FOR_ALL = Event("decompose", 0, "wait for all")


@pytest.mark.parametrize(
    ("events", "end", "exposed"),
    [
        ([compute(3), message(2), compute(1)], 6, 2),
        ([message(2, beside=True), compute(3)], 3, 0),
        ([message(5, beside=True), compute(3)], 5, 2),
        ([message(5, beside=True), compute(3), message(1)], 6, 3),  # one after the other
        ([message(2, beside=True), message(2, beside=True), compute(3)], 4, 1),
        ([message(1, beside=True), compute(3), message(1), compute(1)], 5, 1),
        ([], 0, 0),
        ([message(4, beside=True), urgent(2), compute(1), WAIT, compute(3)], 6, 2),
        ([message(4, beside=True), urgent(2), compute(1), WAIT_FOR_ALL, compute(3)], 9, 5),
        ([compute(1), urgent(2), compute(4), WAIT, compute(1)], 6, 0),
        ([urgent(2), compute(1), WAIT, compute(3)], 5, 1),
        ([compute(1), felt(2, 0.5), compute(4)], 5.5, 0.5),
    ],
)
def test_messages_beside_computations_cost_what_does_not_fit(events, end, exposed):
    """Oracle: two lines of time by hand."""
    assert play(events) == (end, exposed)


def test_a_step_is_played_in_the_order_of_its_stages():
    """Oracle: `KFAC.step`."""
    seconds = {"forward": 1.0, "decompose": 2.0, "optimizer": 3.0}
    messages = [message(1), Event("publish gradients", 1, "message")]
    order = [event.stage for event in simulator.sequence(seconds, messages)]
    assert order == [
        *("forward", "reduce statistics", "decompose", "publish gradients", "optimizer"),
    ]


@pytest.mark.parametrize(("factors", "bases"), [(1, 1), (2, 4), (10, 100), (4, 6), (3, 2)])
def test_shares_of_kinds_of_steps(factors, bases):
    """Oracle: steps counted one by one."""
    steps = [(step % factors == 0, step % bases == 0) for step in range(factors * bases)]
    found = shares(Job("net", 1, factors, bases))
    assert found == pytest.approx({kind: steps.count(kind) / len(steps) for kind in found})


def test_a_prediction_by_hand():
    """Oracle: 2 ranks; times of the network, n^3 of fc and out, bytes of a rank at 1 GB/s.

    Aligned elements: statistics have 320; gradients have 48 + 64 + 16 + 2 * 16; inverses have 112 +
    16 for conv and 2 * 64 + 48 + 16 for fc and out, of which the larger part counts.
    """
    plan = make_plan(LAYERS, 2, Strategy(CommOpt()), OTHERS)
    found = mpikfac.predict.simulate(plan, MACHINE, JOB)
    statistics, gradients, bases = (4e-9 * size for size in (320, 160, 192))
    steps = found.ordinary, found.factors, found.refresh
    seconds = [3.1 + gradients, 3.6 + gradients + statistics]
    seconds.append(seconds[1] + bases + 1248e-9)
    assert [step.seconds for step in steps] == pytest.approx(seconds, rel=1e-12)
    exposed = [gradients, gradients + statistics, gradients + statistics + bases]
    assert [step.exposed for step in steps] == pytest.approx(exposed, rel=1e-3)
    exposed[2] += 4e-9 * (160 - 192)  # in a ring, half of all parts
    assert [step.sent * 1e-9 for step in steps] == pytest.approx(exposed)
    for part in ("seconds", "exposed", "sent"):
        mean = sum(getattr(step, part) * share for step, share in zip(steps, (0.5, 0.25, 0.25)))
        assert getattr(found.mean, part) == pytest.approx(mean)
    assert sum(found.mean.stages.values()) == pytest.approx(found.mean.seconds)
    held = (mpikfac.predict.memory(plan, rank, JOB) for rank in (0, 1))
    assert found.memory == max(sum(kinds.values()) for kinds in held)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_few_ranks_stand_for_all(strategy, monkeypatch):
    """Oracle: the same simulation with all ranks."""
    layers = [LayerShape(f"layer{i}", 3 + 7 * i % 23, 2 + 5 * i % 17) for i in range(9)]
    plan = make_plan(layers, 12, strategy, OTHERS)
    found = mpikfac.predict.simulate(plan, MACHINE, JOB)
    monkeypatch.setattr(simulator, "representatives", lambda plan: list(range(plan.ranks)))
    everyone = mpikfac.predict.simulate(plan, MACHINE, JOB)
    assert found.mean.seconds == pytest.approx(everyone.mean.seconds, rel=1e-12)
    assert found.memory == everyone.memory


@pytest.mark.parametrize("preconditioner", ["muon", "shampoo", "kl-shampoo"])
@pytest.mark.parametrize("owners", [False, True])
def test_few_ranks_stand_for_all_that_make_factors_of_gradients(
    preconditioner, owners, monkeypatch
):
    """Oracle: the same simulation with all ranks; the rank with most work is not the first."""
    layers = [LayerShape(f"layer{order}", order, order) for order in (27, 26, 23, 22)]
    layers.append(LayerShape("last", 23, 23))
    strategy = (
        Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True))
        if owners
        else Strategy(MemOpt())
    )
    plan = make_plan(layers, 4, strategy, OTHERS, preconditioner)
    grafting = AdamGrafting(orthogonalize=preconditioner == "muon")
    machine, job = costly(MACHINE), dataclasses.replace(JOB, grafting=grafting)
    found = mpikfac.predict.simulate(plan, machine, job)
    monkeypatch.setattr(simulator, "representatives", lambda plan: list(range(plan.ranks)))
    everyone = mpikfac.predict.simulate(plan, machine, job)
    assert found.mean.seconds == pytest.approx(everyone.mean.seconds, rel=1e-12)


def costly(machine):
    """Return a machine whose products and roots take most of a step."""
    networks = tuple(dataclasses.replace(n, precondition=None) for n in machine.networks)
    roots = machine.decompositions | {"shampoo": machine.decompositions["eigen"]}
    return dataclasses.replace(
        machine, networks=networks, decompositions=roots, products=((1.0, 1e4),)
    )


def test_factors_of_gradients_are_made_behind_the_sum_of_gradients():
    """Oracle: by hand: only the reading of gradients, or nothing, is beside the message.

    A gradient of 8 x 8 numbers takes 2.56 s there and 2.56 s back, and the agreement of 1 byte 0.02
    s; its two factors take 8^3 multiplications each.
    """
    plan = make_plan(
        [LayerShape("only", 8, 8)],
        2,
        Strategy(CommOpt(), transport=Transport(overlap=True)),
        (),
        "shampoo",
    )
    machine = dataclasses.replace(costly(MACHINE), inside=Level(1e-15, 1e2))
    machine = dataclasses.replace(machine, decompositions={"shampoo": ((8.0, 1.0),)})
    for kind, beside in {(True, False): 0.3, (True, True): 0.0, (False, True): 0.0}.items():
        step = simulator._step(plan, machine, JOB, [0, 1], kind, None, ())
        assert step.stages["reduce gradients"] == pytest.approx(2 * 2.56)
        made = step.stages.get("moments of gradients", 0.0)
        assert made == pytest.approx(2 * 2 * 8**3 * 1e-4 * kind[0])
        assert step.seconds == pytest.approx(sum(step.stages.values()) + 0.02 - beside)


def test_without_layers_it_is_data_parallelism():
    """Oracle: the network's times without K-FAC's, and the gradients of 5 elements, aligned."""
    plan = make_plan([], 2, Strategy(MemOpt()), OTHERS)
    found = mpikfac.predict.simulate(plan, MACHINE, JOB)
    assert found.mean.seconds == pytest.approx(3.0 + 4 * 32 * 1e-9, rel=1e-12)
    assert found.refresh == found.ordinary


def test_what_the_next_step_may_wait_for_is_hidden_in_it():
    """Oracle: by hand: three of four seconds of a message fit into the next step's two."""
    events = [compute(1), message(4, beside=True)]
    assert play(events) == (5, 4)
    assert play(events, slack=3) == (2, 1)


def test_an_overlapped_backward_pass_sends_the_last_layers_first():
    """Oracle: by hand: two slices, gradients and factors of the last layer after the first."""
    sums = [Event("reduce gradients", n, "urgent", 1.5 - n / 2) for n in (1, 2)]
    sums += [Event("reduce statistics", n, "overlapped", 2.5 - n / 2) for n in (3, 4)]
    seconds = {"forward": 1.0, "backward": 2.0, "statistics": 4.0, "optimizer": 1.0}
    found = simulator.sequence(seconds, [*sums, WAIT], overlap=True)
    slices = [("backward", 1.0), ("statistics", 2.0)]
    order = [("forward", 1.0), *slices, ("reduce gradients", 2), ("reduce statistics", 4)]
    order += [*slices, ("reduce gradients", 1), ("reduce statistics", 3)]
    order += [("reduce gradients", 0), ("optimizer", 1.0)]
    assert [(event.stage, event.seconds) for event in found] == order


def test_where_no_core_is_free_what_is_hidden_is_felt():
    """Oracle: a step with new factors by hand; overlapped messages cost the same, or double."""
    strategies = (
        Strategy(transport=Transport(fusion=1, overlap=True)),
        Strategy(transport=Transport(fusion=1)),
    )
    beside, plain = (make_plan(LAYERS, 2, strategy, OTHERS) for strategy in strategies)
    step = mpikfac.predict.simulate(plain, MACHINE, JOB).factors
    computed = step.seconds - step.exposed
    for hidden, times in ((0.0, 1), (-1.0, 2)):
        machine = dataclasses.replace(MACHINE, hidden=hidden)
        found = mpikfac.predict.simulate(beside, machine, JOB).factors
        assert found.seconds == pytest.approx(computed + times * found.overlapped, rel=1e-8)


def test_overlapped_sums_are_sent_in_pieces_by_the_algorithms_that_do_not_block():
    """Oracle: latencies by hand, of 8 ranks: 3 halvings and 3 doublings of each of 3 pieces.

    A sum to an owner has the 3 rounds of a tree, an agreement a tree there and back.
    """
    machine = dataclasses.replace(MACHINE, inside=Level(1.0, 1e30))
    plan = make_plan(LAYERS, 8, Strategy(CommOpt(), transport=Transport(overlap=True)), OTHERS)
    message, count = plan.messages(0, True, False)[0], 3 * BATCH
    whole = dataclasses.replace(message, primitive="Allreduce", spans=((0, count),), size=4 * count)
    assert costs.overlapped_seconds(whole, plan, 0, machine) == pytest.approx(3 * 6)
    owned = dataclasses.replace(whole, primitive="Reduce", root=0)
    assert costs.overlapped_seconds(owned, plan, 0, machine) == pytest.approx(3 * 3)
    assert costs.agreement_seconds(plan, machine) == pytest.approx(6)


def test_ranks_agree_on_a_message_while_another_one_is_under_way():
    """Oracle: by hand: the first and the last of three messages find an idle line."""
    sent = Event("reduce gradients", 2, "urgent", agreement=1)
    events = [compute(1), sent, compute(1), sent, WAIT, compute(1), sent, WAIT]
    assert play(events) == (10, 7)


def test_an_overlapped_message_waits_for_the_first_of_its_layers():
    """Oracle: 3 layers take a third of the backward pass each; the rest is ready at the end."""
    plan = make_plan(
        LAYERS, 2, Strategy(CommOpt(), transport=Transport(fusion=(1, 2), overlap=True)), OTHERS
    )
    events = simulator._timed(plan.messages(0, True, False), plan, 0, MACHINE)
    found = {(event.stage, event.kind): [] for event in events}
    for event in events:
        found[event.stage, event.kind].append(event.ready)
    assert found["reduce statistics", "overlapped"] == pytest.approx([1, 2 / 3])
    assert sorted(found["reduce gradients", "urgent"]) == pytest.approx([2 / 3, 1, 1])


def test_gradients_are_awaited_before_they_are_preconditioned():
    """Oracle: `KFAC.step`; a slow network, and a single worker, which sends directions."""
    machine = dataclasses.replace(MACHINE, inside=Level(1e-15, 1.0))
    plan = make_plan(
        LAYERS, 2, Strategy(MemOpt(), transport=Transport(fusion=1, overlap=True)), OTHERS
    )
    step = mpikfac.predict.simulate(plan, machine, JOB).ordinary
    sums, directions = (step.stages[name] for name in ("reduce gradients", "publish gradients"))
    assert step.seconds == pytest.approx(
        1.0 + 0.5 + sums + directions + 0.3 + 0.2 + step.stages["precondition"], rel=0.01
    )


def test_bases_of_curvature_servers_are_awaited_if_they_take_longer_than_their_delay():
    """Oracle: n^3 of all layers (2312) by hand, times a second; a step computes for 3.6 s."""
    slow = dataclasses.replace(MACHINE, decompositions={"inverse": ((1.0, 1.0), (100.0, 1e6))})
    for machine, waits in ((MACHINE, 0), (slow, 2312 - 2 * 3.6)):
        strategy = Strategy(refresh=CurvatureServers(staleness=2))
        found = mpikfac.predict.simulate(make_plan(LAYERS, 2, strategy, OTHERS), machine, JOB)
        assert found.refresh.stages.get("decompose", 0) == pytest.approx(waits, rel=0.01)


def test_overlapped_messages_are_hidden():
    """Oracle: the same plan without overlap; overlapped messages take no extra time."""
    alike = (
        Strategy(transport=Transport(fusion=1)),
        Strategy(transport=Transport(fusion=1, overlap=True)),
    )
    plain, beside = (
        mpikfac.predict.simulate(make_plan(LAYERS, 2, strategy, OTHERS), MACHINE, JOB)
        for strategy in alike
    )
    assert beside.factors.exposed < 0.5 * plain.factors.exposed
    assert beside.factors.seconds < plain.factors.seconds
    assert beside.mean.sent == plain.mean.sent
    sums = sum(beside.factors.stages[f"reduce {what}"] for what in ("statistics", "gradients"))
    assert beside.factors.overlapped == pytest.approx(sums)
    assert plain.mean.overlapped == 0


def test_gradients_without_layers_are_sent_parameter_by_parameter():
    """Oracle: by hand: two parameters take half of the backward pass each, the last one first."""
    others = [("first", (16,)), ("last", (16,))]
    plan = make_plan([], 2, Strategy(MemOpt(), transport=Transport(fusion=1, overlap=True)), others)
    events = simulator._timed(plan.messages(0, False, False), plan, 0, MACHINE)
    assert sorted(event.ready for event in events) == [0.5, 1.0]
    found = mpikfac.predict.simulate(plan, MACHINE, JOB).mean
    assert found.overlapped == found.stages["reduce gradients"] > 0


def test_a_staggered_refresh_is_spread():
    """Oracle: n^3 by hand: conv and then fc | out, instead of conv | fc and out at once."""
    job = dataclasses.replace(JOB, inv_update_steps=8)
    once, spread = (
        mpikfac.predict.simulate(
            make_plan(LAYERS, 2, Strategy(CommOpt(), refresh=Refresh(stagger=n)), OTHERS),
            MACHINE,
            job,
        )
        for n in (1, 2)
    )
    work = [found.mean.stages["decompose"] for found in (once, spread)]
    assert work == pytest.approx([1248e-9 / 8, (1064e-9 + 1024e-9) / 8])
    assert spread.refresh.stages["decompose"] < once.refresh.stages["decompose"]
    with pytest.raises(ValueError, match="inv_update_steps=4 must be a multiple of stagger=3"):
        mpikfac.predict.simulate(
            make_plan(LAYERS, 2, Strategy(CommOpt(), refresh=Refresh(stagger=3))), MACHINE, JOB
        )


def test_copies_of_the_model_travel_at_every_fourth_step():
    """Oracle: by hand: a quarter of the bytes and of the seconds of averaged gradients."""
    gradients, weights = Strategy(MemOpt()), Strategy(MemOpt(), sync=LocalSGD(sync_every=4))
    plans = (make_plan([], 4, strategy, OTHERS) for strategy in (gradients, weights))
    often, seldom = (mpikfac.predict.simulate(plan, MACHINE, JOB).mean for plan in plans)
    assert seldom.sent == pytest.approx(often.sent / 4) and seldom.sent > 0
    assert seldom.exposed == pytest.approx(often.exposed / 4)
    assert seldom.stages["exchange weights"] == pytest.approx(often.stages["reduce gradients"] / 4)


def test_leaders_of_nodes_send_copies_more_often():
    """Oracle: by hand: a node's leader sends in six of twelve steps, and the other one in one."""
    nodes = Transport(ranks_per_node=2)
    found, rare = (
        mpikfac.predict.simulate(
            make_plan([], 4, Strategy(MemOpt(), sync=sync, transport=nodes), OTHERS), MACHINE, JOB
        ).mean.stages
        for sync in (LSGD(sync_every=12, local_sync_every=2), LSGD(sync_every=12))
    )
    assert found["exchange weights in node"] > 0
    assert found["exchange weights in node"] == pytest.approx(6 * rare["exchange weights in node"])
    assert found["exchange weights"] == pytest.approx(rare["exchange weights"])


def test_ranks_that_meet_seldom_wait_less_for_slow_steps():
    """Oracle: the mean of four independent steps has half of their spread."""
    job = dataclasses.replace(JOB, stragglers=0.1)
    strategy = Strategy(MemOpt(), sync=LocalSGD(sync_every=4))
    mean = mpikfac.predict.simulate(make_plan([], 4, strategy, OTHERS), MACHINE, job).mean
    slowest = costs.expected_slowest(0.05, 4)
    assert mean.waiting == pytest.approx((mean.seconds - mean.exposed) * (1 - 1 / slowest))


def test_stragglers_stretch_what_is_computed():
    """Oracle: the expected slowest rank's time."""
    plan = make_plan(LAYERS, 4, Strategy(CommOpt()), OTHERS)
    even = mpikfac.predict.simulate(plan, MACHINE, JOB).mean
    uneven = mpikfac.predict.simulate(plan, MACHINE, dataclasses.replace(JOB, stragglers=0.1)).mean
    slowest = costs.expected_slowest(0.1, 4)
    assert uneven.seconds == pytest.approx((even.seconds - even.exposed) * slowest + even.exposed)
    assert uneven.waiting == pytest.approx((even.seconds - even.exposed) * (slowest - 1))
    assert uneven.exposed == pytest.approx(even.exposed)
    assert even.waiting == 0


def test_the_cheapest_plan_is_the_fastest_that_fits():
    """Oracle: mean step times and memory of each plan, on a slow network."""
    machine = dataclasses.replace(MACHINE, inside=Level(1e-9, 1e3))
    plans = {str(strategy): make_plan(LAYERS, 12, strategy, OTHERS) for strategy in STRATEGIES}
    found = {name: mpikfac.predict.simulate(plan, machine, JOB) for name, plan in plans.items()}
    assert len({(p.mean.seconds, p.memory) for p in found.values()}) == len(found)
    for limit in sorted(prediction.memory for prediction in found.values()):
        best = mpikfac.predict.cheapest(plans, machine, JOB, memory=limit)
        fitting = {n: p.mean.seconds for n, p in found.items() if p.memory <= limit}
        assert best == min(fitting, key=fitting.__getitem__)
    assert best == mpikfac.predict.cheapest(plans, machine, JOB)
    with pytest.raises(ValueError, match="memory=1 bytes is too little for any plan; use at least"):
        mpikfac.predict.cheapest(plans, machine, JOB, memory=1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"batch": 0}, "batch=0 must be a whole number >= 1"),
        ({"factor_update_steps": 0}, "factor_update_steps=0 must be a whole number >= 1"),
        ({"stragglers": 1.5}, "stragglers=1.5 must be between 0 and 1"),
        ({"stragglers": math.nan}, "stragglers=nan must be between 0 and 1"),
        ({"model": "other"}, "has no times for model='other'"),
    ],
)
def test_a_job_that_cannot_be_is_refused(change, told):
    plan = make_plan(LAYERS, 2, Strategy(MemOpt()))
    with pytest.raises(ValueError, match=re.escape(told)):
        mpikfac.predict.simulate(plan, MACHINE, dataclasses.replace(JOB, **change))


# -- bounds and orderings, to which nothing was fitted ---------------------------------------------


def test_the_largest_factor_bounds_what_spreading_gains(resnet50):
    """Oracle: 4.6x for ResNet-50: the largest factor is 21.6 % of all n^3, at any rank count."""
    layers, others = resnet50
    seconds = [
        mpikfac.predict.simulate(
            make_plan(layers, ranks, Strategy(CommOpt(colocate_factors=False)), others),
            MACHINE,
            Job("resnet50", 32),
        ).refresh.stages["decompose"]
        for ranks in (1, 16, 512)
    ]
    assert [seconds[0] / other for other in seconds[1:]] == pytest.approx([4.63, 4.63], abs=0.02)


@pytest.mark.parametrize(("interval", "best"), [(2, "mem"), (5, "mem"), (7, "comm"), (50, "comm")])
@pytest.mark.parametrize("name", ["rtx2080ti-ib100", "v100-edr"])
def test_when_bases_are_cheaper_to_send_than_directions(name, interval, best, resnet50):
    """Oracle: COMM-OPT communicates less than MEM-OPT past 6 steps: 551 against 91 MiB."""
    layers, others = resnet50
    machine = mpikfac.predict.load_machine(name)
    as_published = Transport(balanced_shards=False)
    ways = {"comm": CommOpt(), "mem": MemOpt()}
    plans = {name: Strategy(way, transport=as_published) for name, way in ways.items()}
    sent = {
        key: mpikfac.predict.simulate(
            make_plan(layers, 16, strategy, others),
            machine,
            Job("resnet50", 32, inv_update_steps=interval),
        ).mean.sent
        for key, strategy in plans.items()
    }
    assert min(sent, key=sent.__getitem__) == best


# -- clients and servers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "service", "seconds", "waiting"),
    [
        (1, 0.5, 2.5, 0.0),  # computing, then the server
        (4, 0.5, 2.5, 0.0),  # the server is free in time: 4 x 0.5 < 2.5
        (4, 1.0, 4.0, 1.0),  # the server is never free
    ],
)
def test_equal_clients_take_turns(clients, service, seconds, waiting):
    """Oracle: a schedule by hand. All other clients push between two pushes of a client."""
    found = play_clients(clients, computing=2.0, service=service)
    assert found == pytest.approx((seconds, waiting, clients - 1))


def test_a_spread_of_computing_times_costs_an_idle_server_nothing():
    """Oracle: the mean of the log-normal distribution; synchronous steps would take the longest."""
    found = play_clients(8, computing=2.0, service=1e-9, spread=0.3)
    assert found.seconds == pytest.approx(2.0, rel=0.05)
    assert found.staleness == pytest.approx(7, rel=0.02)
    assert found.waiting < 1e-8


def test_a_prediction_of_clients_by_hand():
    """Oracle: bytes of the gradients at 1 GB/s, halved by two servers; two batches to a push."""
    strategy = Strategy(sync=ParameterServer(servers=2, push_interval=2)).first_order()
    plan = make_plan([], 3, strategy, OTHERS)
    found = mpikfac.predict.simulate(plan, MACHINE, JOB)
    network = MACHINE.network(JOB.model, JOB.batch)
    computing = network.forward + network.backward + network.gradients
    size = 4 * plan.of(0).layouts.gradients.size
    service = 2 * (size / 2) * 1e-9 + network.optimizer / 2
    assert found.mean.seconds == pytest.approx(computing + service / 2)
    assert found.clients.number == 3
    assert found.clients.updates == pytest.approx(3 / (2 * computing + service))
    assert found.clients.busy == pytest.approx(3 * service / (2 * computing + service))
