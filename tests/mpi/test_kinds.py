"""Every kind of layer, factor and Fisher matches one process with every placement."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import AdamGrafting, CommOpt, MemOpt, NoGrafting, Refresh, Strategy, Transport
from support import inside, problem

RANKS = mpikfac.world().size
COVERS = {**mpikfac.KINDS, **mpikfac.NORMS}
SETTINGS = problem.SETTINGS | {"covers": COVERS, "damping": 0.1}
PRECONDITIONERS = "eigen", "inverse", problem.UNSPLIT, "eva"
STRATEGIES = [
    *problem.strategies(RANKS, ["allreduce", "reduce_scatter"]),
    Strategy(CommOpt(), transport=Transport(packing="square", fusion=1)),
    Strategy(
        MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True),
        transport=Transport(reduce_factors_at="inverses"),
    ),
    Strategy(
        CommOpt(),
        refresh=Refresh(staleness=1, stagger=3),
        transport=Transport(reduce_factors_at="inverses"),
    ),
    Strategy(CommOpt(replicate_below=5), transport=Transport(fusion=2, overlap=True)),
]


class AllKinds(nn.Module):
    """Every kind of layer once, a layer that few batches use, and a layer with a frozen weight."""

    def __init__(self):
        super().__init__()
        self.depthwise = nn.Conv2d(2, 4, 3, groups=2)
        self.group_norm = nn.GroupNorm(2, 4)
        self.transposed = nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2, bias=False)
        self.tokens = nn.Conv1d(4, 6, 3, stride=3)
        self.embedding = nn.Embedding(5, 6)
        self.layer_norm = nn.LayerNorm(6)
        self.rare, self.often = nn.Linear(6, 6), nn.Linear(6, 6)
        self.often.weight.requires_grad_(False)
        self.head = nn.Linear(6, 5)

    def forward(self, images):
        x = F.relu(self.group_norm(self.depthwise(images)))
        x = self.tokens(self.transposed(x).flatten(2)).transpose(1, 2)
        entries = (10 * images[:, 0, 0, :3]).long().abs() % 5
        x = self.layer_norm(torch.cat([x, self.embedding(entries)], 1))
        x = torch.tanh((self.rare if images[0, 0, 0, 0] > 0 else self.often)(x))
        return self.head(x.mean(1))


def network():
    torch.manual_seed(3)
    return AllKinds().double()


def forms(layer):
    """Return a different form of factors for some layers."""
    chosen = {
        "transposed": {"diagonal": "A"},
        "tokens": {"largest": 5},
        "layer_norm": {"diagonal": "A"},
        "rare": {"kfac_approx": "reduce", "largest": 4},
        "head": {"sides": "A"},
    }
    return replace(mpikfac.default_rule(layer), **chosen.get(layer.name, {}))


def joined(shards):
    """Give all shards of a batch a single branch, chosen by the batch's first image."""
    images, labels = shards
    images[:, 0, 0, 0] = images[0, 0, 0, 0]
    return images, labels


def train(comm, strategy, ranks, **settings):
    """Train on the rank's shards of `ranks` shards; return the whole state."""
    model = network()
    before = settings.get("grafting", NoGrafting()).momentum
    optimizer = (problem.plain_sgd if before else problem.sgd_all)(model)
    kfac = problem.kfac(model, optimizer, comm, strategy, **{**SETTINGS, **settings})
    batches = (joined(problem.batch(step)) for step in range(2 * problem.STEPS))
    problem.train_on_shards(kfac, comm, ranks, batches)
    return problem.state(model)


@problem.by_one_process
def alone(own, delay, stagger, **settings):
    """Return the state of a single process on the joined batches."""
    return train(
        own, Strategy(MemOpt(), refresh=Refresh(staleness=delay, stagger=stagger)), 1, **settings
    )


def assert_as_one_process(comm, strategy, **settings):
    """Compare training on all ranks with training in one process on the joined batches."""
    expected = alone(strategy.refresh.staleness, strategy.refresh.stagger, **settings)
    found = train(comm, strategy, RANKS, **settings)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert (expected - problem.state(network())).abs().max() > 0.01


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_all_kinds_of_layers_under_each_placement(comm, strategy, preconditioner):
    """Oracle: one process on the joined batches.

    Each strategy takes whole factors for two preconditioners and other forms for the other two.
    """
    rules = mpikfac.default_rule, forms
    rule = rules[(STRATEGIES.index(strategy) + PRECONDITIONERS.index(preconditioner)) % 2]
    apart = (
        not strategy.assignment.colocate_factors
        and strategy.assignment.factor_reduction != "allreduce"
    )
    if (preconditioner == "inverse" and apart) or (
        preconditioner == "eva" and strategy.transport.packing == "square"
    ):
        return  # refused: test_plan.py
    assert_as_one_process(comm, strategy, preconditioner=preconditioner, rule=rule)


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse", problem.UNSPLIT])
@pytest.mark.parametrize("strategy", STRATEGIES[::3], ids=repr)
def test_relative_damping_under_each_placement(comm, strategy, preconditioner):
    """Oracle: a single process on the joined batches; factors in blocks may have several owners."""
    if (
        preconditioner != "inverse"
        or strategy.assignment.colocate_factors
        or strategy.assignment.factor_reduction == "allreduce"
    ):
        choices = {"preconditioner": preconditioner, "rule": forms, "relative_damping": True}
        assert_as_one_process(comm, strategy, **choices)


@pytest.mark.parametrize("grafting", problem.BY_ADAM, ids=problem.label)
@pytest.mark.parametrize("strategy", STRATEGIES[::3], ids=repr)
def test_lengths_of_adam_under_each_placement(comm, strategy, grafting):
    """Oracle: a single process on the joined batches."""
    assert_as_one_process(comm, strategy, preconditioner="eigen", grafting=grafting, kl_clip=None)


@pytest.mark.parametrize("strategy", STRATEGIES[::3], ids=repr)
def test_momenta_under_each_placement(comm, strategy):
    """Oracle: a single process on the joined batches."""
    choices = {"grafting": AdamGrafting(momentum=0.8), "kl_clip": None}
    assert_as_one_process(comm, strategy, preconditioner="eigen", **choices)


def low_rank(layer):
    """Return the same forms with two kept eigenvectors."""
    return replace(forms(layer), rank=2)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_low_rank_under_each_placement(comm, strategy, relative):
    """Oracle: a single process on the joined batches."""
    choices = {"preconditioner": "eigen", "rule": low_rank, "relative_damping": relative}
    assert_as_one_process(comm, strategy, **choices)


@pytest.mark.parametrize("chosen", ["type-2", "forward-only"])
@pytest.mark.parametrize("strategy", STRATEGIES[::3], ids=repr)
def test_each_fisher_under_each_placement(comm, strategy, chosen):
    """Oracle: a single process on the joined batches."""
    assert_as_one_process(comm, strategy, preconditioner="eigen", fisher_type=chosen)


def averages(comm, images, labels):
    """Return factors after a batch."""
    model = network()
    kfac = problem.kfac(model, problem.sgd_all(model), comm, **SETTINGS)
    F.cross_entropy(model(images), labels).backward()
    kfac.precondition()
    return inside.factors(kfac)


@pytest.mark.skipif(RANKS == 1, reason="needs two ranks that take other branches")
def test_a_layer_may_take_part_on_some_ranks_only(comm):
    """Oracle: the factors of the branch's ranks alone."""
    images, labels = problem.shards(0, RANKS)[comm.rank]
    images[:, 0, 0, 0] = 1.0 if comm.rank == 0 else -1.0
    ranks_of_a_branch = comm.Split(min(comm.rank, 1))
    found, expected = (averages(ranks, images, labels) for ranks in (comm, ranks_of_a_branch))
    name = "rare.A" if comm.rank == 0 else "often.G"
    torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-10)


def test_shards_of_unequal_size_weigh_by_their_examples(comm):
    """Oracle: factors of all examples at once, with gradients of the shards' mean losses."""
    sizes = [2 * rank + 2 for rank in range(RANKS)]
    images, labels = (torch.cat([part] * 3) for part in problem.batch(0))
    start = sum(sizes[: comm.rank])
    mine = slice(start, start + sizes[comm.rank])
    model = problem.network()
    kfac = problem.kfac(model, problem.sgd(model), comm, **problem.SETTINGS)
    F.cross_entropy(model(images[mine]), labels[mine]).backward()
    kfac.precondition()
    whole = problem.network()
    one = problem.kfac(whole, problem.sgd(whole), comm.Split(comm.rank), **problem.SETTINGS)
    total = slice(0, sum(sizes))
    F.cross_entropy(whole(images[total]), labels[total]).backward()
    one.precondition()
    for name, average in inside.factors(kfac).items():
        torch.testing.assert_close(average, inside.factors(one)[name], rtol=1e-10, atol=1e-10)
