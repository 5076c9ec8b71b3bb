"""Compiled models keep their graph, because hooks exist only in steps with new factors."""

from __future__ import annotations

import copy
import gc
from functools import cache, partial

import pytest
import torch
from mpi4py import MPI
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import mpikfac
from mpikfac_apps.problems import models
from support.compiled import EVERY, ORDINARY, STEPS, Problem, check, fresh, weights

pytestmark = pytest.mark.gate

IMAGES = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 10


@pytest.fixture(autouse=True)
def _no_graphs():
    gc.collect()  # trainers of other tests end
    fresh()
    yield
    assert stance() == "default"  # a test leaves the process as before
    fresh()


def stance():
    """Return the stance of torch's compiler."""
    return torch._dynamo.eval_frame._stance.stance


class Body(nn.Module):
    """Two convolutions and a normalisation."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, 2)

    def forward(self, x):
        return self.second(self.norm(self.first(x)).relu()).relu()


class Small(nn.Module):
    """A body and a head."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Body(), nn.Linear(294, 10)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


class Encoder(nn.Module):
    """A transformer's layer over rows of pixels, and a head."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(96, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(96, 10)

    def forward(self, x):
        return self.head(self.layer(x.transpose(1, 2).flatten(2)).mean(1))


def gated():
    """Return a network with a cell, which takes the place of an inner product."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 12), nn.GRUCell(12, 8), nn.Linear(8, 10))


NETWORKS = {
    "resnet20": lambda: models.build("resnet20"),
    "vit_small": lambda: models.build("vit_small"),
    "encoder": Encoder,
    "gated": gated,
}
SMALL = Problem(Small, IMAGES, LABELS)


@cache
def uncompiled():
    """Return the small network's weights after training without compilation."""
    network = SMALL.made()
    optimizer = SMALL.kfac(network)
    SMALL.descend(optimizer, network)
    optimizer.trainer.close()
    return weights(network)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_compiled_model_has_the_graphs_that_it_has_without_kfac(name):
    """Oracle: graphs, operations and breaks with SGD; gradients of a copy of the model."""
    check(Problem(NETWORKS[name], IMAGES, LABELS), "eager")


def test_ordinary_steps_have_the_numbers_of_compiled_code():
    """Oracle: as above, by a backend whose numbers differ from those without compilation."""
    assert not torch.equal(check(SMALL, "aot_eager_decomp_partition"), uncompiled())


# -- ways to compile -----------------------------------------------------------------------------


def in_place(network, **options):
    network.compile(**options)
    return network


def a_part(network, **options):
    network.body.compile(**options)
    return network


def under_ddp(network, **options):
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    return torch.compile(DistributedDataParallel(network), **options)


WAYS = {
    "fullgraph": partial(torch.compile, fullgraph=True),
    "dynamic": partial(torch.compile, dynamic=True),
    "in place": in_place,
    "a part": a_part,
    "a function": lambda network, **options: torch.compile(lambda x: network(x), **options),
    "DistributedDataParallel": under_ddp,
}


@pytest.fixture
def ended_processes():
    """Leave the group of processes that a test has joined."""
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_to_compile(way, ended_processes):
    """Oracle: the counts with SGD; the weights without compilation."""
    counter, network = fresh(), SMALL.made()
    compiled = WAYS[way](network, backend=counter)
    SMALL.descend(torch.optim.SGD(network.parameters(), 0.01), compiled)
    expected = counter.counts
    counter, network = fresh(), SMALL.made()
    optimizer = SMALL.kfac(network)
    SMALL.descend(optimizer, WAYS[way](network, backend=counter))
    optimizer.trainer.close()
    assert torch.equal(weights(network), uncompiled())
    assert counter.counts == expected and counter.runs > 0


@pytest.mark.parametrize("way", [way for way in WAYS if way != "DistributedDataParallel"])
def test_a_model_may_be_compiled_and_called_before_the_optimizer_is_made(way):
    """Oracle: the weights without compilation."""
    counter, network = fresh(), SMALL.made()
    compiled = WAYS[way](network, backend=counter)
    with torch.no_grad():
        compiled(IMAGES)
    network.load_state_dict(SMALL.made().state_dict())
    optimizer = SMALL.kfac(network)
    SMALL.descend(optimizer, compiled)
    optimizer.trainer.close()
    assert torch.equal(weights(network), uncompiled())
    assert counter.runs > 1


def test_the_optimizer_takes_a_compiled_model():
    """Oracle: the weights without compilation."""
    counter, network = fresh(), SMALL.made()
    compiled = torch.compile(network, backend=counter)
    optimizer = SMALL.kfac(compiled)
    SMALL.descend(optimizer, compiled)
    optimizer.trainer.close()
    assert torch.equal(weights(network), uncompiled())
    assert (counter.graphs, counter.runs) == (1, ORDINARY)


@pytest.mark.gate
def test_a_step_may_be_compiled_as_a_whole():
    """Oracle: the weights without compilation; K-FAC's own lines are many graphs then."""
    network = SMALL.made()
    optimizer = SMALL.kfac(network)
    descend = torch.compile(SMALL.descend, backend="eager")
    for _ in range(STEPS):
        descend(optimizer, network, 1)
    optimizer.trainer.close()
    assert torch.equal(weights(network), uncompiled())


# -- ways to train -------------------------------------------------------------------------------


def evaluate(network, call):
    """Evaluate the network between steps."""
    optimizer = SMALL.kfac(network)
    for _ in range(STEPS):
        network.eval()
        with torch.no_grad():
            call(IMAGES)
        network.train()
        SMALL.descend(optimizer, call, 1)
    return optimizer


def accumulate(network, call):
    """Take a batch as two parts."""
    optimizer = SMALL.kfac(network)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in (slice(0, 4), slice(4, 8)):
            (SMALL.loss(call, part) / 2).backward()
        optimizer.step()
    return optimizer


def attack(network, call):
    """Take passes that are not the batch's."""
    optimizer = SMALL.kfac(network)
    for _ in range(STEPS):
        with optimizer.trainer.no_recording():
            SMALL.loss(call).backward()
        SMALL.descend(optimizer, call, 1)
    return optimizer


def reschedule(network, call):
    """Change the intervals."""
    optimizer = SMALL.kfac(network, factor_update_steps=lambda step: 1 if step < 3 else 4)
    SMALL.descend(optimizer, call, 10)
    return optimizer


def resize(network, call):
    """Take batches of several sizes."""
    optimizer = SMALL.kfac(network)
    for examples in (8, 6, 7, 8, 8, 5, 6):
        optimizer.zero_grad()
        SMALL.loss(call, slice(examples)).backward()
        optimizer.step()
    return optimizer


def freeze(network, call):
    """Freeze a layer, and thaw the layer."""
    optimizer = SMALL.kfac(network)
    for thawed in (True, False, True):
        network.body.first.requires_grad_(thawed)
        SMALL.descend(optimizer, call, 3)
    return optimizer


def sample(network, call):
    """Estimate the Fisher by sampled labels."""
    optimizer = SMALL.kfac(network, estimator=mpikfac.Estimator(fisher_type="mc"))
    for _ in range(STEPS):
        optimizer.zero_grad()
        outputs = call(IMAGES)
        optimizer.trainer.record(outputs)
        nn.functional.cross_entropy(outputs, LABELS).backward()
        optimizer.step()
    return optimizer


def resume(network, call):
    """Load the state between two steps with new factors, and go on."""
    optimizer = SMALL.kfac(network)
    SMALL.descend(optimizer, call, EVERY + 1)
    model, state = copy.deepcopy(network.state_dict()), copy.deepcopy(optimizer.state_dict())
    SMALL.descend(optimizer, call, 3)
    optimizer.trainer.close()
    optimizer = SMALL.kfac(network)
    network.load_state_dict(model)
    optimizer.load_state_dict(state)
    SMALL.descend(optimizer, call, 3)
    return optimizer


TRAINED = [evaluate, accumulate, attack, reschedule, resize, freeze, sample, resume]


@pytest.mark.parametrize("train", TRAINED, ids=lambda train: train.__name__)
def test_all_ways_to_train(train):
    """Oracle: the weights without compilation; by hand, the graphs of the passes."""
    graphs = {evaluate: 2, resize: 2, freeze: 2}.get(train, 1)
    counter, trained = fresh(), []
    for compiled in (False, True):
        network = SMALL.made()
        call = torch.compile(network, backend=counter) if compiled else network
        optimizer = train(network, call)
        optimizer.trainer.close()
        trained.append(weights(network))
    assert torch.equal(*trained)
    assert counter.graphs == graphs < counter.runs


# -- the stance of the process -------------------------------------------------------------------


def hooked(network):
    """Return whether a module has hooks."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())


def test_steps_without_new_factors_have_no_hooks():
    """Oracle: the model's own hooks, and the interval."""
    network = SMALL.made()
    optimizer = SMALL.kfac(network)
    for step in range(STEPS):
        due = step % EVERY == 0
        assert (hooked(network), stance()) == (due, "force_eager" if due else "default")
        SMALL.descend(optimizer, network, 1)
    optimizer.trainer.close()
    assert not hooked(network)


def test_two_trainers_share_the_stance():
    """Oracle: the weights without compilation."""
    trained = []
    for compiled in (False, True):
        pairs = []
        for every in (2, 3):
            network = SMALL.made()
            call = torch.compile(network, backend="eager") if compiled else network
            pairs.append((network, call, SMALL.kfac(network, factor_update_steps=every)))
        for _ in range(STEPS):
            for _, call, optimizer in pairs:
                SMALL.descend(optimizer, call, 1)
        trained.append(torch.cat([weights(network) for network, _, _ in pairs]))
        for _, _, optimizer in pairs:
            optimizer.trainer.close()
    assert torch.equal(*trained)


def test_trainers_share_the_stance_until_the_last_has_ended():
    """Oracle: by hand; a trainer that is dropped counts as ended, and leaves no hooks."""
    nets = [SMALL.made() for _ in range(3)]
    trainers = [
        mpikfac.KFAC(net, torch.optim.SGD(net.parameters(), 0.01), MPI.COMM_SELF) for net in nets
    ]
    trainers[1].close()
    trainers[0].detach()
    assert stance() == "force_eager"
    del trainers
    gc.collect()
    assert stance() == "default"
    assert not any(map(hooked, nets))


def fail(*_):
    raise KeyError("as planned")


def forward(network, optimizer):
    return network.register_forward_pre_hook(fail)


def backward(network, optimizer):
    def on_output(module, inputs, output):
        output.register_hook(fail)

    return network.register_forward_hook(on_output)


def update(network, optimizer):
    return optimizer.trainer.optimizer.register_step_pre_hook(fail)


@pytest.mark.parametrize("part", [forward, backward, update], ids=lambda part: part.__name__)
def test_a_failed_step_can_be_repeated_and_the_stance_ends(part):
    """Oracle: the same failure without compilation; by hand, the end of the stance."""
    trained = []
    for compiled in (False, True):
        network = SMALL.made()
        call = torch.compile(network, backend="eager") if compiled else network
        optimizer = SMALL.kfac(network)
        SMALL.descend(optimizer, call, EVERY)
        handle = part(network, optimizer)
        with pytest.raises(KeyError, match="as planned"):
            SMALL.descend(optimizer, call, 1)
        handle.remove()
        optimizer.trainer.clear_statistics()
        assert stance() == "force_eager"  # the step may be taken again
        SMALL.descend(optimizer, call, 1)
        assert stance() == "default"
        trained.append(weights(network))
        optimizer.trainer.close()
    assert torch.equal(*trained)


def test_a_program_that_goes_on_without_kfac_after_a_failure_is_compiled():
    """Oracle: the runs of the graph by hand."""
    counter, network = fresh(), SMALL.made()
    call = torch.compile(network, backend=counter)
    optimizer = SMALL.kfac(network)
    handle = forward(network, optimizer)
    with pytest.raises(KeyError):
        SMALL.descend(optimizer, call, 1)
    handle.remove()
    del optimizer
    gc.collect()
    SMALL.descend(torch.optim.SGD(network.parameters(), 0.01), call, 3)
    assert counter.runs == 3


@pytest.mark.parametrize("step", range(EVERY + 1))
def test_a_stance_of_the_program_stays(step):
    """Oracle: by hand; the stance is taken before a step of either kind."""
    network = SMALL.made()
    optimizer = SMALL.kfac(network)
    try:
        SMALL.descend(optimizer, network, step)
        torch.compiler.set_stance("eager_on_recompile")
        SMALL.descend(optimizer, network, STEPS)
        optimizer.trainer.close()
        assert stance() == "eager_on_recompile"
    finally:
        torch.compiler.set_stance("default")
