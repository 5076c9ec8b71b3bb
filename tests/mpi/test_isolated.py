"""Messages measured in isolation, in flight, and while training waits for them."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac import BFloat16, CommOpt, HybridOpt, Int8, MemOpt
from mpikfac.lab import Median, PowerSGD, TopK
from mpikfac.timeline import Recorded, collective_means
from support import inside, problem
from support.strategies import strategy_of

RANKS = mpikfac.world().size
STEPS = range(4)
OFTEN = {"factor_update_steps": 1, "inv_update_steps": 2, "kl_clip": None}
CHOICES = {
    "everywhere": {"assignment": CommOpt()},
    "owners": {"assignment": MemOpt(shard_optimizer=True)},
    "in order": {"transport.virtual_ranks": problem.EXAMPLES},
    "8 bits": {
        "assignment": MemOpt(),
        "compression.factors": Int8(),
        "compression.gradients": Int8(),
    },
    "largest": {"assignment": CommOpt(), "compression.gradients": TopK(ratio=0.1)},
    "low rank": {"assignment": CommOpt(), "compression.gradients": PowerSGD()},
    "median": {"assignment": CommOpt(), "sync.aggregation": Median()},
    "staggered": {"assignment": MemOpt(), "refresh.staleness": 1, "refresh.stagger": 2},
}
OVERLAPPED = {
    "plain": {"assignment": CommOpt(), "transport.fusion": 1},
    "8 bits": {
        "assignment": CommOpt(),
        "compression.factors": BFloat16(),
        "compression.gradients": Int8(),
    },
}
if RANKS == 4:
    CHOICES["in nodes"] = {"assignment": HybridOpt(grad_workers=2), "transport.ranks_per_node": 2}


def trained(comm, choices, alone):
    """Return K-FAC after some steps, the records, the weights, and seconds alone if asked for.

    Messages are measured alone in the midst of the training, if at all.
    """
    model = problem.network()
    trace = mpikfac.Trace(events=True)
    kfac = problem.kfac(
        model,
        problem.sgd(model),
        comm,
        strategy_of(choices),
        **problem.SETTINGS | OFTEN | {"trace": trace},
    )
    steps, isolated = {}, {}
    for step in STEPS:
        began = time.perf_counter()
        take(kfac, comm, step)
        steps[step] = began, time.perf_counter()
        if alone and step == 1:
            plan = kfac.plan.of(comm.rank)
            isolated = mpikfac.comm.isolated_seconds(inside.grid(kfac), plan, problem.DEVICE)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    kfac.close()  # after the last overlapped message
    return kfac, Recorded(steps, list(trace.events)), weights, isolated


def take(kfac, comm, step):
    """Take a step, in parts if the plan has parts."""
    images, labels = problem.shards(step, comm.size)[comm.rank]
    parts = kfac.plan.of(comm.rank).parts
    for some, theirs in zip(images.chunk(max(1, parts)), labels.chunk(max(1, parts))):
        kfac.optimizer.zero_grad()
        F.cross_entropy(kfac.model(some), theirs).backward()
        if parts:
            kfac.accumulate()
    kfac.step()


def needed(choices):
    """Skip choices that a single rank or this number of ranks does not have."""
    if RANKS == 1 and "combine" in choices:
        pytest.skip("a rule combines vectors of several ranks")


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_blocking_messages_hide_nothing_and_add_up(comm, choices):
    """Oracle: the seconds and bytes of the recorded events; every stage of the plan is alone."""
    needed(choices)
    kfac, recorded, _, isolated = trained(comm, choices, alone=True)
    records, alone = comm.allgather(recorded), comm.allgather(isolated)
    found = collective_means(records, alone)
    planned = {m.stage for m in kfac.plan.messages(comm.rank, True, True)}
    assert set(isolated) == planned
    assert bool(found) == (RANKS > 1)
    sent = [event for record in records for event in record.events if event.over]
    for stage, values in found.items():
        mine = [event for event in sent if event.name == stage]
        per_step = RANKS * len(STEPS)
        assert values["bytes"] == pytest.approx(sum(e.bytes for e in mine) / per_step)
        seconds = sum(e.end - e.start for e in mine) / per_step
        assert values["in_flight"] == values["exposed"] == pytest.approx(seconds)
        assert values["hidden"] == 0 and values["isolated"] > 0


def test_messages_of_float32_are_measured(comm):
    """Oracle: the stages of the plan."""
    model = problem.network().float()
    kfac = mpikfac.KFAC(model, problem.sgd_all(model), comm)
    seconds = mpikfac.comm.isolated_seconds(
        inside.grid(kfac), kfac.plan.of(comm.rank), problem.DEVICE
    )
    assert set(seconds) == {m.stage for m in kfac.plan.messages(comm.rank, True, True)}


@pytest.mark.parametrize("choices", OVERLAPPED.values(), ids=OVERLAPPED)
def test_overlapped_messages_have_a_hidden_share(comm, choices):
    """Oracle: all bytes of the plan in whole flights; the exposed part is no longer than these."""
    choices = choices | {"transport.overlap": True}
    kfac, recorded, _, isolated = trained(comm, choices, alone=True)
    messages = kfac.plan.messages(comm.rank, True, True)
    flights = {e.flight: 0 for e in recorded.events if e.flight}
    for event in recorded.events:
        if event.flight:
            flights[event.flight] += event.bytes
    planned = [m.bytes for m in messages if m.stage in ("reduce statistics", "reduce gradients")]
    assert sorted(flights.values()) == sorted(planned * len(STEPS))
    found = collective_means(comm.allgather(recorded), comm.allgather(isolated))
    assert set(found) == {m.stage for m in messages}
    for values in found.values():
        assert 0 <= values["exposed"] <= values["in_flight"]
        assert values["hidden"] == 1 - values["exposed"] / values["in_flight"]


@pytest.mark.parametrize(
    "choices",
    [*CHOICES.values(), *(one | {"transport.overlap": True} for one in OVERLAPPED.values())],
    ids=[*CHOICES, *(f"overlapped {name}" for name in OVERLAPPED)],
)
def test_messages_alone_leave_the_training_as_it_is(comm, choices):
    """Oracle: the weights of a training without messages alone, to the last bit."""
    needed(choices)
    torch.manual_seed(comm.rank)
    _, _, disturbed, _ = trained(comm, choices, alone=True)
    kfac, _, plain, _ = trained(comm, choices, alone=False)
    for name, value in plain.items():
        assert torch.equal(disturbed[name], value), name
    assert kfac.trace.seconds  # the stages of messages alone are in another trace
