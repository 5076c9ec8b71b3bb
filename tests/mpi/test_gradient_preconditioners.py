"""Preconditioners with factors of the averaged gradient match one process and the plan's bytes."""

from __future__ import annotations

import collections
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import (
    AdamGrafting,
    AdamInEigenbases,
    BFloat16,
    CommOpt,
    Compression,
    Damping,
    HybridOpt,
    Int8,
    MemOpt,
    Strategy,
)
from mpikfac.lab import PowerSGD
from mpikfac.plan import NAMED
from support import gradients, inside, problem
from support.strategies import strategy_of

RANKS = mpikfac.world().size
ADAM, ORTHOGONAL, ROWS = problem.BY_ADAM
GRAFTINGS = {
    **{"shampoo": ADAM, "kl-shampoo": ADAM, "soap": AdamInEigenbases()},
    **{"muon": ORTHOGONAL, "normuon": ROWS},
}
PRECONDITIONERS = tuple(GRAFTINGS)
GRAFTINGS["newton-muon"] = ORTHOGONAL
WITHOUT_FACTORS = ("muon", "normuon")
KINDS = tuple(gradients.NETWORKS)
STEPS, STOP = range(8), 4
OWNERS = {"assignment": MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)}
CHOICES = {
    "comm-opt": {"assignment": CommOpt()},
    "hybrid": {"assignment": HybridOpt(grad_workers=2 if RANKS % 2 == 0 else 1)},
    "mem-opt": {"assignment": MemOpt()},
    "factors apart": {"assignment": MemOpt(colocate_factors=False)},
    "sharded-optimizer": OWNERS,
    "sharded-optimizer by Alltoall": {**OWNERS, "transport.owner_sums": "alltoall"},
    "sharded-optimizer, many workers": {
        "assignment": CommOpt(factor_reduction="reduce_scatter", shard_optimizer=True)
    },
    "layer by layer": {"assignment": MemOpt(), "transport.fusion": 1},
    "small factors everywhere": {"assignment": CommOpt(replicate_below=10)},
    "overlapped": {"assignment": CommOpt(), "transport.fusion": 1, "transport.overlap": True},
    "overlapped to owners": {**OWNERS, "transport.fusion": 1, "transport.overlap": True},
    "delayed": {"assignment": CommOpt(), "refresh.staleness": 1},
    "staggered": {"assignment": CommOpt(), "refresh.stagger": 2},
    "staggered and delayed": {**OWNERS, "refresh.staleness": 1, "refresh.stagger": 2},
    "in parts": {"assignment": MemOpt(), "transport.virtual_ranks": RANKS},
}
if RANKS == 4:  # as two nodes of two
    CHOICES |= {
        "in nodes": {"assignment": CommOpt(), "transport.ranks_per_node": 2},
        "in nodes to owners": {**OWNERS, "transport.ranks_per_node": 2},
    }
STRATEGIES = {name: strategy_of(choices) for name, choices in CHOICES.items()}
OF_FACTORS = ("delayed", "staggered", "staggered and delayed", "small factors everywhere")
PAIRS = [
    (name, preconditioner)
    for name in STRATEGIES
    for preconditioner in PRECONDITIONERS
    if preconditioner not in WITHOUT_FACTORS or name not in OF_FACTORS
]


def trainer(comm, preconditioner, strategy, kind="convolutional", momentum=0.9, skip=()):
    model = gradients.network(kind)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    grafting = replace(GRAFTINGS[preconditioner], momentum=momentum)
    settings = {"grafting": grafting, "damping": Damping(relative=0.01), "inv_update_steps": 4}
    settings |= {"preconditioner": preconditioner, "coverage": mpikfac.Coverage(skip=skip)}
    return mpikfac.KFAC(model, sgd, comm, strategy, factor_update_steps=1, **settings)


def run(kfac, comm, steps, kind="convolutional"):
    """Train on the rank's shares of the batches; return all weights."""
    for step in steps:
        inputs, labels = (part.chunk(comm.size)[comm.rank] for part in gradients.batch(kind, step))
        kfac.optimizer.zero_grad()
        F.cross_entropy(kfac.model(inputs), labels).backward()
        if kfac.plan.strategy.transport.virtual_ranks:
            kfac.accumulate()
        kfac.step()
    return nn.utils.parameters_to_vector(kfac.model.parameters()).detach().cpu().clone()


def planned(kfac, step):
    """Return the planned bytes of a step without a bound, by stage."""
    bytes_of = problem.planned(kfac, step)
    del bytes_of["clip"]
    return bytes_of


def alone(strategy):
    """Return a single process's strategy with the same times."""
    return Strategy(MemOpt(), refresh=strategy.refresh)


@problem.by_one_process
def trained(own, preconditioner, strategy, kind):
    """Return the weights after each step of one process with the joined batches."""
    kfac = trainer(own, preconditioner, strategy, kind)
    return [run(kfac, own, [step], kind) for step in STEPS]


def assert_trains(comm, name, preconditioner):
    """Check weights against a process with the joined batch, and bytes against the plan.

    Every strategy and number of ranks tests another network. Returns the trainer and the bytes.
    """
    strategy = STRATEGIES[name]
    kind = KINDS[(list(STRATEGIES).index(name) + RANKS) % len(KINDS)]
    kfac = trainer(comm, preconditioner, strategy, kind)
    sent = collections.Counter()
    for step, expected in zip(STEPS, trained(preconditioner, alone(strategy), kind)):
        found = run(kfac, comm, [step], kind)
        sent += planned(kfac, step)
        if strategy.refresh.staleness == 0 and not strategy.transport.overlap:
            assert +collections.Counter(kfac.trace.sent) == sent
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    return kfac, sent


@pytest.mark.parametrize(("name", "preconditioner"), PAIRS)
def test_a_strategy_trains_as_one_process_does_and_sends_what_is_planned(
    comm, name, preconditioner
):
    """Oracle: a single process with the joined batch; the plan, which has no statistics."""
    kfac, sent = assert_trains(comm, name, preconditioner)
    assert "reduce statistics" not in kfac.trace.sent
    assert RANKS == 1 or sent["reduce gradients"]
    kfac.close()


@pytest.mark.parametrize(
    ("name", "preconditioner"),
    [
        pair
        for pair in PAIRS
        if pair[0] in ("comm-opt", "mem-opt", "sharded-optimizer", OF_FACTORS[2])
    ],
)
def test_a_run_goes_on_to_the_last_bit(comm, name, preconditioner):
    """Oracle: the uninterrupted run."""
    first, second = (trainer(comm, preconditioner, STRATEGIES[name]) for _ in range(2))
    run(first, comm, range(STOP + 1))
    state = problem.whole_state(first, comm)
    assert not first.missing(state)
    expected = run(first, comm, range(STOP + 1, STEPS.stop))
    second.load_state_dict(state)
    assert torch.equal(run(second, comm, range(STOP + 1, STEPS.stop)), expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("name", "preconditioner"),
    [pair for pair in PAIRS if pair[0] in ("comm-opt", "hybrid", "mem-opt", "sharded-optimizer")],
)
def test_memory_is_the_plans(comm, name, preconditioner, momentum):
    """Oracle: the bytes of all buffers on the rank; a layer takes Adam's step."""
    kfac = trainer(comm, preconditioner, STRATEGIES[name], momentum=momentum, skip=["2"])
    run(kfac, comm, range(2))
    found, planned = inside.memory(kfac), kfac.plan.memory(comm.rank)
    plan, grafting = kfac.plan.of(comm.rank), inside.settings(kfac).grafting
    of_lengths = mpikfac.plan.memory_of_grafting(plan, grafting)
    found = {kind: found.get(kind, 0) for kind in planned} | inside.memory_of_grafting(kfac)
    assert {*comm.allgather(found == planned | of_lengths)} == {True}


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_a_run_goes_on_with_other_ranks_and_another_strategy(comm, preconditioner):
    """Oracle: the uninterrupted run of one process; from 1 rank to all, and from all to 1."""
    expected = trained(preconditioner, Strategy(MemOpt()), "convolutional")[-1]
    own, owners = comm.Split(comm.rank), STRATEGIES["sharded-optimizer"]
    serial, many = (
        trainer(own, preconditioner, Strategy(MemOpt())),
        trainer(comm, preconditioner, owners),
    )
    run(serial, own, range(STOP + 1))
    many.load_state_dict(serial.state_dict())
    found = run(many, comm, range(STOP + 1, STEPS.stop))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    many = trainer(comm, preconditioner, STRATEGIES["mem-opt"])
    run(many, comm, range(STOP + 1))
    serial = trainer(own, preconditioner, Strategy(MemOpt()))
    serial.load_state_dict(problem.whole_state(many, comm))
    found = run(serial, own, range(STOP + 1, STEPS.stop))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_another_preconditioner_takes_weights_and_lengths_alone(comm, preconditioner):
    """Oracle: the items: factors of K-FAC are no factors of the gradient, nor the reverse."""
    gradient = trainer(comm, preconditioner, STRATEGIES["mem-opt"])
    run(gradient, comm, range(2))
    model = gradients.network("convolutional")
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    kfac = mpikfac.KFAC(model, sgd, comm, grafting=AdamGrafting(orthogonalize=False, momentum=0.9))
    run(kfac, comm, range(2))
    states = [problem.whole_state(one, comm) for one in (gradient, kfac)]
    for one, other in ((kfac, states[0]), (gradient, states[1])):
        of_factors = {name for name in problem.whole_state(one, comm) if "factors/" in name}
        assert of_factors.isdisjoint(other) and bool(of_factors) == bool(one.plan.factors)
        before = one.missing(other)
        assert of_factors.isdisjoint(before)  # nothing to wait for: they start anew
        one.load_state_dict(other)
    for one in (kfac, gradient):
        assert run(one, comm, range(2, 4)).isfinite().all()


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
@pytest.mark.parametrize("wire", [BFloat16(), Int8(), PowerSGD()], ids=str)
def test_wires_of_gradients_and_directions_send_what_is_planned(comm, wire, preconditioner):
    """Oracle: the plan's bytes, and a finite end; all ranks hold the same weights."""
    kfac = trainer(
        comm, preconditioner, Strategy(MemOpt(), compression=Compression(gradients=wire))
    )
    sent = collections.Counter()
    for step in range(5):
        found = run(kfac, comm, [step])
        sent += planned(kfac, step)
    assert +collections.Counter(kfac.trace.sent) == sent
    assert all(torch.equal(found, other) for other in comm.allgather(found))


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_uneven_shares_weigh_by_their_examples(comm, preconditioner):
    """Oracle: a single process with the joined batch; rank 0 has 12 - 2 (ranks - 1) examples."""
    kfac = trainer(comm, preconditioner, STRATEGIES["mem-opt"], "linear")
    counts = [12 - 2 * (comm.size - 1), *[2] * (comm.size - 1)]
    for step, expected in zip(range(3), trained(preconditioner, Strategy(MemOpt()), "linear")):
        inputs, labels = (part.split(counts)[comm.rank] for part in gradients.batch("linear", step))
        kfac.optimizer.zero_grad()
        F.cross_entropy(kfac.model(inputs), labels).backward()
        kfac.step(examples=len(inputs))
        found = nn.utils.parameters_to_vector(kfac.model.parameters()).detach().cpu()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_a_layer_that_is_frozen_and_trained_again_starts_anew(comm, preconditioner):
    """Oracle: finite weights, alike on all ranks; the other layers' factors stay."""
    kfac = trainer(comm, preconditioner, STRATEGIES["sharded-optimizer"], "linear")
    run(kfac, comm, range(2), "linear")
    for trains in (False, True):
        kfac.model[0].requires_grad_(trains)
        found = run(kfac, comm, range(2, 5), "linear")
        assert found.isfinite().all()
        assert all(torch.equal(found, other) for other in comm.allgather(found))


@pytest.mark.parametrize("name", [*CHOICES])
def test_newton_muon_trains_as_one_process_does_and_sends_what_is_planned(comm, name):
    """Oracle: a single process with the joined batch; the plan, which has A alone."""
    kfac, _ = assert_trains(comm, name, "newton-muon")
    kfac.close()


def test_named_strategies_run_or_are_refused_in_a_line(comm):
    """Oracle: by hand, the strategies whose choices make no sense without statistics."""
    refused = set()
    for name, named in NAMED.items():
        if name != "eva":  # a preconditioner of its own
            try:
                kfac = trainer(comm, "shampoo", named.strategy)
            except ValueError as refusal:
                assert "\n" not in str(refusal)
                refused |= (
                    {name} if str(refusal).startswith("preconditioner='shampoo' needs") else set()
                )
            else:
                assert run(kfac, comm, range(1)).isfinite().all()
                kfac.close()
    late, rounded = {"deferred-allreduce", "deferred-sharded"}, {"comm-opt-bf16", "comm-opt-int8"}
    assert refused >= late | rounded | {"dp-kfac", "event-driven", "curvature-servers", "local-sgd"}
    assert not refused & {
        "comm-opt",
        "mem-opt",
        "hybrid",
        "sharded-optimizer",
        "stale-inverse",
        "power-sgd",
    }
