"""EKFAC's scales on several ranks match one process and the plan's bytes; restarts."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import BFloat16, CommOpt, Compression, Int8, MemOpt, Refresh, Strategy, Transport
from mpikfac.lab import CurvatureServers, TopK
from mpikfac.plan import scales
from support import inside, problem
from support.strategies import changed

RANKS = mpikfac.world().size
SETTINGS = problem.SETTINGS | {
    **{"preconditioner": "ekfac", "inv_update_steps": 6, "kl_clip": 0.1, "damping": 0.1},
    "covers": {**mpikfac.KINDS, **mpikfac.NORMS},
}
STEPS = range(14)  # statistics at every second, bases or shares at 0, 6 and 12
CHOICES = {
    "plain": {},
    "two owners of a layer": {"assignment.colocate_factors": False},
    "a message per layer": {"transport.fusion": 1},
    "messages of one and more layers": {"transport.fusion": (1, 2)},
    "squares": {"transport.packing": "square"},
    "staggered": {"refresh.stagger": 3},
    "delayed": {"refresh.staleness": 2},
    "staggered and delayed": {"refresh.staleness": 1, "refresh.stagger": 3, "transport.fusion": 1},
    "event-driven": {"refresh.tolerance": 0.3},
}
EXACT = {name: changed(Strategy(), choices) for name, choices in CHOICES.items()}
if RANKS == 4:
    EXACT["in nodes"] = Strategy(CommOpt(), transport=Transport(ranks_per_node=2))
WIRES = Compression(factors=Int8(), inverses=BFloat16(), gradients=TopK())


def plain():
    """Return two convolutions and a linear layer.

    The network has fewer inputs than examples, and no ReLU. If a factor had several eigenvalues of
    0, rounding would choose the eigenvectors, and scales would differ.
    """
    torch.manual_seed(2)
    first, second = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Conv2d(4, 3, 3, stride=2)
    layers = [first, nn.Tanh(), second, nn.Tanh(), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(3, 5)]
    return nn.Sequential(*layers).double()


class Kinds(nn.Module):
    """Layers of several kinds, with a layer that few batches use."""

    def __init__(self):
        super().__init__()
        self.grouped = nn.Conv2d(2, 4, 3, groups=2)
        self.norm = nn.GroupNorm(2, 4)
        self.transposed = nn.ConvTranspose2d(4, 3, 3, stride=2, bias=False)
        self.embedding = nn.Embedding(5, 6)
        self.rare, self.often = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, images):
        x = torch.tanh(self.norm(self.grouped(images)))
        x = self.transposed(x).flatten(1)[:, :432].unflatten(1, (72, 6))
        entries = (10 * images[:, 0, 0, :3]).long().abs() % 5
        x = torch.cat([x, self.embedding(entries)], 1)
        x = torch.tanh((self.rare if images[0, 0, 0, 0] > 0 else self.often)(x))
        return self.head(x.mean(1))


def kinds():
    torch.manual_seed(3)
    return Kinds().double()


def trainer(comm, strategy, network=plain, **settings):
    model = network()
    optimizer = problem.sgd_all(model)
    choices = SETTINGS | settings
    return problem.kfac(model, optimizer, comm, strategy, **choices)


def learn(kfac, step, shard, shards):
    """Take a step on a single shard of a batch; all shards take the branch of the first image."""
    images, labels = problem.batch(step)
    images[:, 0, 0, 0] = images[0, 0, 0, 0]
    kfac.optimizer.zero_grad()
    outputs = kfac.model(images.chunk(shards)[shard])
    F.cross_entropy(outputs, labels.chunk(shards)[shard]).backward()
    kfac.step()


@problem.by_one_process
def alone(own, network, preconditioner, refresh):
    """Return the states after each step of one process on the joined batches."""
    kfac, states = (
        trainer(own, Strategy(MemOpt(), refresh=refresh), network, preconditioner=preconditioner),
        [],
    )
    for step in STEPS:
        learn(kfac, step, 0, 1)
        states.append(problem.state(kfac.model))
    return states


@pytest.mark.parametrize("network", [plain, kinds])
@pytest.mark.parametrize("name", EXACT)
def test_ranks_train_as_one_process_does_and_send_what_is_planned(comm, name, network):
    """Oracle: a single process on the joined batches with the same refreshes; the plan.

    Without the scales, training ends elsewhere.
    """
    strategy = EXACT[name]
    kfac = trainer(comm, strategy, network)
    sent = collections.Counter()
    for step, expected in zip(STEPS, alone(network, "ekfac", strategy.refresh)):
        learn(kfac, step, comm.rank, RANKS)
        sent += problem.planned(kfac, step)
        found = problem.state(kfac.model)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
        if strategy.refresh.staleness == 0:
            assert +collections.Counter(kfac.trace.sent) == sent
    assert ("reduce scales" in sent) == (RANKS > 1)
    assert (found - alone(network, "eigen", strategy.refresh)[-1]).abs().max() > 1e-4


def test_one_message_for_all_scales(comm):
    """Oracle: 8 bytes per element of gradients of 4 x 18, 3 x 37 and 5 x 4, and a count per layer.

    All blocks are rounded up to 16 elements.
    """
    kfac = trainer(comm, Strategy(CommOpt()))
    messages = scales.reduce_scales(kfac.plan.of(comm.rank))
    assert len(messages) == (RANKS > 1)
    for message in messages:
        assert message.bytes == 8 * (80 + 112 + 32 + 3 * 16)
    assert inside.scale_sums(kfac).flat.nbytes == kfac.plan.memory(comm.rank)["scale sums"]
    assert inside.scales(kfac).flat.nbytes == kfac.plan.memory(comm.rank)["scales"]


def test_with_wires_ranks_agree(comm):
    """Oracle: the bits of all ranks; the plan's bytes, in which scales are not compressed."""
    kfac = trainer(comm, Strategy(compression=WIRES))
    for step in STEPS:
        learn(kfac, step, comm.rank, RANKS)
    ends = comm.allgather([problem.state(kfac.model), inside.scales(kfac).flat])
    for end in ends:
        assert all(map(torch.equal, end, ends[0]))
    planned = sum((problem.planned(kfac, step) for step in STEPS), collections.Counter())
    assert +collections.Counter(kfac.trace.sent) == planned


def test_shards_of_unequal_size_weigh_by_their_examples(comm):
    """Oracle: scales of all examples at once, with gradients of the shards' mean losses."""
    sizes = [2 * rank + 1 for rank in range(RANKS)]
    start, total = sum(sizes[: comm.rank]), sum(sizes)
    mine, found = slice(start, start + sizes[comm.rank]), []
    for ranks, some in ((comm, mine), (comm.Split(comm.rank), slice(total))):
        kfac = trainer(ranks, None, factor_update_steps=1, factor_decay=0.0)
        for step in range(2):
            images, labels = (torch.cat([part] * 2) for part in problem.batch(step))
            taken = some if step else slice(None)  # first the same: the bases are equal
            kfac.optimizer.zero_grad()
            F.cross_entropy(kfac.model(images[taken]), labels[taken]).backward()
            kfac.precondition()
        assert inside.scale_weights(kfac)["0"] == total
        found.append(inside.scales(kfac).flat)
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-10)


def whole_state(comm, kfac):
    """Return all ranks' shares as one state; items of several ranks must be equal."""
    whole = {}
    for part in comm.allgather(kfac.state_dict()):
        for name, value in part.items():
            held = whole.setdefault(name, value)
            equal = torch.equal(held, value) if torch.is_tensor(value) else held == value
            assert equal, name
    return whole


@pytest.mark.parametrize("stop", [3, 7])
@pytest.mark.parametrize("name", EXACT)
def test_a_run_goes_on_to_the_last_bit(comm, name, stop):
    """Oracle: the run that wrote the state, also with pending bases."""
    first, second = (trainer(comm, EXACT[name]) for _ in range(2))
    for step in range(stop):
        learn(first, step, comm.rank, RANKS)
    state = whole_state(comm, first)
    assert {name for name in state if name.startswith("kfac/scale")} == {
        f"kfac/{kind}/{layer}" for kind in ("scales", "scale-weights") for layer in "026"
    }
    state = {
        key: value.clone() if torch.is_tensor(value) else value for key, value in state.items()
    }
    second.load_state_dict(state)
    for step in range(stop, len(STEPS)):
        learn(first, step, comm.rank, RANKS)
        learn(second, step, comm.rank, RANKS)
        assert torch.equal(problem.state(first.model), problem.state(second.model)), step
    assert torch.equal(inside.scales(first).flat, inside.scales(second).flat)


@pytest.mark.skipif(RANKS == 1, reason="one rank has none to spare for curvature")
def test_curvature_servers_change_no_bit(comm):
    """Oracle: training ranks that decompose in their own background."""
    team = mpikfac.split_comm(comm, 1)
    if team.comm is None:
        mpikfac.lab.run_curvature_server(team)
        return
    training = team.comm
    ends = []
    for ranks in (team, training):
        refresh = (CurvatureServers if ranks is team else Refresh)(staleness=2)
        strategy = Strategy(CommOpt(), refresh=refresh)
        kfac = trainer(ranks, strategy)
        for step in STEPS:
            images, labels = problem.shards(step, training.size)[training.rank]
            kfac.optimizer.zero_grad()
            F.cross_entropy(kfac.model(images), labels).backward()
            kfac.step()
        kfac.close()
        ends.append(torch.cat([problem.state(kfac.model), inside.scales(kfac).flat.cpu()]))
    assert torch.equal(*ends)
