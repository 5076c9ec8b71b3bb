"""Layers that are split over groups of ranks: results, bytes and errors."""

from __future__ import annotations

import collections
import copy
import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import (
    FirstOrderTrainer,
    MemOpt,
    Strategy,
    Synchronous,
    TensorParallelPlan,
    Trace,
    Transport,
    UserError,
)
from mpikfac.lab import LocalSGD, Median
from mpikfac.lab.tensor_parallel.forward import split_forward
from mpikfac.plan import activation_messages, divisors, places, split_layers
from support import problem

pytestmark = pytest.mark.lab


def multilayer():
    """Return three linear layers in a row."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(96, 24), nn.ReLU(inplace=True), nn.Linear(24, 36), nn.Tanh()),
        *(nn.Linear(36, 12), nn.LayerNorm(12), nn.Linear(12, 5)),
    )


def convolutions():
    """Return convolutions in a row with a linear layer, and normalisation in between."""
    return nn.Sequential(
        *(nn.Conv2d(2, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12).eval(), nn.ReLU()),
        *(nn.Conv2d(12, 24, 3, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(2, ceil_mode=True)),
        *(nn.Conv2d(24, 12, 3, padding=1, padding_mode="replicate"), nn.AvgPool2d((1, 2))),
        *(nn.Flatten(), nn.Linear(12, 5)),
    )


class Branches(nn.Module):
    """Two branches and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(96, 24), nn.Linear(96, 24)
        self.twice, self.last = nn.Linear(24, 24), nn.Linear(24, 5)

    def forward(self, x):
        x = x.flatten(1)
        left, right = self.left(x).tanh(), self.right(x).sigmoid()
        joined = self.twice(left) + self.twice(left * right).relu() + right
        return self.last(joined)


ROW = {"1": "outputs", "3": "inputs", "5": "outputs"}
AXES = {
    multilayer: [
        *({"1": "outputs"}, {"3": "inputs"}, ROW, {"1": "inputs", "3": "outputs"}),
        *({"1": "outputs", "3": "outputs", "5": "outputs"}, {"3": "inputs", "5": "inputs"}),
    ],
    convolutions: [
        *({"3": "outputs", "6": "inputs"}, {"3": "inputs", "6": "outputs", "9": "inputs"}),
        *({"0": "outputs", "9": "inputs"}, {"6": "inputs", "9": "inputs"}),
    ],
    Branches: [
        {"left": "outputs", "right": "inputs", "twice": "outputs", "last": "inputs"},
    ],
}
CASES = [(m, axes, k) for m, some in AXES.items() for axes in some for k in ("sgd", "eigen")]
CASES += [(m, some[0], k) for m, some in AXES.items() for k in ("adam", "inverse", "owners")]


def model_of(make):
    torch.manual_seed(3)
    with torch.device("cpu"):
        model = make()
    return model.to(problem.DEVICE, torch.float64)


def shard(step, comm):
    """Return the images and labels of the rank; images have 96 numbers."""
    images, labels = problem.shards(step, comm.size)[comm.rank]
    return images[:, :, :6], labels


def plans(comm, axes):
    """Yield all tp_size to form groups of several ranks."""
    for tp_size, strided in itertools.product(divisors(comm.size)[1:], (False, True)):
        yield TensorParallelPlan(tp_size, axes, strided)


def trainer_of(kind, model, comm, trace=None):
    """Return a trainer with Adam or SGD, or with K-FAC."""
    optimizer = problem.adam(model) if kind == "adam" else problem.sgd_all(model)
    if kind in ("sgd", "adam"):
        return FirstOrderTrainer(model, optimizer, comm, trace=trace)
    settings = {**problem.SETTINGS, "preconditioner": "inverse" if kind == "inverse" else "eigen"}
    strategy = None
    if kind == "owners":
        strategy = Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True))
    return problem.kfac(model, optimizer, comm, strategy, trace=trace, **settings)


def one_step(trainer, comm, step=0, **given):
    """Take a step; return the mean loss over ranks."""
    images, labels = shard(step, comm)
    trainer.optimizer.zero_grad()
    loss = F.cross_entropy(trainer.model(images), labels)
    loss.backward()
    trainer.step(**given)
    return sum(comm.allgather(loss.item())) / comm.size


def train(comm, make, kind, tp_plan=None):
    """Return losses, the last gradients, weights and factors of a run."""
    model = model_of(make)
    split = tp_plan and mpikfac.lab.split_layers(model, comm, tp_plan)
    trainer = trainer_of(kind, model, comm)
    losses = [one_step(trainer, comm, step) for step in range(problem.STEPS)]
    found = {"losses": torch.tensor(losses), "weights": problem.state(model)}
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if kind != "owners":
        found["gradients"] = torch.cat([g.flatten() for g in grads]).cpu()
    state = problem.whole_state(trainer, comm)
    for name in sorted(state):
        if name.startswith("kfac/factors"):
            found[name] = state[name].flatten()
    if kind not in ("sgd", "adam"):
        trainer.close()
        assert any(name.startswith("kfac/factors") for name in found)
    trainer.detach()
    if split:
        split.detach()
    return found


serial = problem.by_one_process(lambda comm, make, kind: train(comm, make, kind))


@pytest.mark.parametrize("make, axes, kind", CASES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_numbers_are_those_of_one_process(comm, make, axes, kind):
    """Oracle: a run of the ordinary model in one process; all groups of ranks."""
    expected = serial(make, kind)
    for tp_plan in plans(comm, axes):
        found = train(comm, make, kind, tp_plan)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=name)


def first_order(comm, strategy=None, tp_plan=None, steps=3, make=multilayer, **given):
    """Return the weights after a few steps of SGD."""
    model = model_of(make)
    if tp_plan:
        mpikfac.lab.split_layers(model, comm, tp_plan)
    trainer = FirstOrderTrainer(model, problem.sgd_all(model), comm, strategy)
    for step in range(steps):
        one_step(trainer, comm, step, **given)
    return problem.state(model)


STRATEGIES = {
    "overlap": Strategy(transport=Transport(overlap=True, fusion=2)),
    "two levels": Strategy(transport=Transport(ranks_per_node=1)),
    "owner": Strategy(MemOpt(shard_optimizer=True)),
    "clip": None,
    "examples": None,
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_of_first_order_training(comm, name):
    """Oracle: the same strategy with the ordinary model. Only some strategies send slices."""
    strategy = STRATEGIES[name]
    given = {"clip": {"max_norm": 0.1}, "examples": {"examples": 12 // comm.size}}.get(name, {})
    expected = first_order(comm, strategy, **given)
    for tp_plan in plans(comm, ROW):
        found = first_order(comm, strategy, tp_plan, **given)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert all(torch.equal(found, other) for other in comm.allgather(found))


@pytest.mark.parametrize("kind", ["sgd", "eigen"])
@pytest.mark.parametrize("make", AXES)
def test_the_bytes_are_the_plan(comm, make, kind):
    """Oracle: the bytes handed to MPI, counted at the calls."""
    for tp_plan in plans(comm, AXES[make][0]):
        model, trace = model_of(make), Trace()
        calls = mpikfac.lab.layer_calls(model, shard(0, comm)[0])
        mpikfac.lab.split_layers(model, comm, tp_plan, trace)
        trainer = trainer_of(kind, model, comm, trace)
        at, tp_size = places(calls, tp_plan.layers), tp_plan.tp_size
        for step in range(3):
            trace.clear()
            one_step(trainer, comm, step)
            statistics = kind == "eigen" and step % 2 == 0
            expected = collections.Counter()
            for call in calls:
                for one in activation_messages(call, at[call.name], tp_size, 8, statistics):
                    expected[one.stage] += one.bytes
            refresh = (statistics, step == 0) if kind == "eigen" else (False, False)
            for one in trainer.plan.messages(comm.rank, *refresh):
                expected[one.stage] += one.bytes
            assert +collections.Counter(trace.sent) == +expected
        trainer.detach()


def test_slices_save_bytes_of_gradients(comm):
    """Oracle: the formula of the page, 4 N (r-1)/r + 8 N/r (P/r - 1)/(P/r), against 8 N (P-1)/P."""
    for tp_plan in plans(comm, {"1": "outputs"}):
        model, ranks, tp_size = model_of(multilayer), comm.size, tp_plan.tp_size
        numbers = sum(p.numel() for p in model[1].parameters())
        mpikfac.lab.split_layers(model, comm, tp_plan)
        plan = FirstOrderTrainer(model, problem.sgd_all(model), comm).plan
        of_rank = plan.of(comm.rank)
        wire = sum(one.wire for one in split_layers.reduce_slices(of_rank)) / 8
        peers = ranks // tp_size
        saved = numbers * (tp_size - 1) / tp_size + 2 * numbers / tp_size * (peers - 1) / peers
        assert abs(wire - saved) <= 16 * tp_size * 4  # padding
        assert wire < 2 * numbers * (ranks - 1) / ranks
        slices = 8 * split_layers.layout(of_rank).size
        assert plan.memory(comm.rank)["slices"] == slices >= 8 * numbers


def test_without_gradients_a_rank_is_alone(comm):
    """Oracle: the ordinary model; only rank 0 calls the model, so a message would hang."""
    for tp_plan in plans(comm, ROW):
        model, ordinary = model_of(multilayer), model_of(multilayer)
        split = mpikfac.lab.split_layers(model, comm, tp_plan)
        images, _ = shard(0, comm)
        if comm.rank == 0:
            with torch.no_grad():
                assert torch.equal(model(images), ordinary(images))
            copied, buffer = copy.deepcopy(model), io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            for other in (copied, torch.load(buffer, weights_only=False)):
                assert not any(map(split_forward, other.modules()))
                assert torch.equal(other(images), ordinary(images))
                assert other[1].weight is not model[1].weight
        split.detach()
        assert torch.equal(model(images), ordinary(images))


def test_accumulated_and_scaled_steps(comm):
    """Oracle: the ordinary model. Several passes, a scaled loss, a skipped step."""

    def trained(tp_plan=None):
        model = model_of(multilayer)
        if tp_plan:
            mpikfac.lab.split_layers(model, comm, tp_plan)
        trainer = trainer_of("eigen", model, comm)
        scaler = torch.amp.GradScaler(problem.DEVICE.type, init_scale=8.0)
        for step in range(3):
            trainer.optimizer.zero_grad()
            for images, labels in zip(*(part.chunk(3) for part in shard(step, comm))):
                loss = F.cross_entropy(model(images), labels) / 3
                bad = step == 1 and comm.rank == 0
                scaler.scale(loss * (torch.inf if bad else 1.0)).backward()
            trainer.step(scaler)
        return problem.state(model)

    expected = trained()
    for tp_plan in plans(comm, ROW):
        torch.testing.assert_close(trained(tp_plan), expected, rtol=1e-10, atol=1e-10)


def test_gradients_of_gradients(comm):
    """Oracle: the ordinary model, with a penalty on the gradient of the inputs."""

    def trained(tp_plan=None):
        model = model_of(convolutions)
        if tp_plan:
            mpikfac.lab.split_layers(model, comm, tp_plan)
        trainer = FirstOrderTrainer(model, problem.sgd_all(model), comm)
        images, labels = shard(0, comm)
        loss = F.cross_entropy(model(images.requires_grad_()), labels)
        (slope,) = torch.autograd.grad(loss, images, create_graph=True)
        (loss + slope.square().sum()).backward()
        trainer.step()
        return problem.state(model)

    expected = trained()
    for tp_plan in plans(comm, AXES[convolutions][1]):
        torch.testing.assert_close(trained(tp_plan), expected, rtol=1e-10, atol=1e-10)


def test_autocast(comm):
    """Oracle: the ordinary model under autocast, to the digits of bfloat16; on the host."""

    def trained(tp_plan=None):
        model = model_of(multilayer).float().cpu()
        if tp_plan:
            mpikfac.lab.split_layers(model, comm, tp_plan)
        trainer = FirstOrderTrainer(model, problem.sgd_all(model), comm)
        images, labels = shard(0, comm)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(images.float().cpu()), labels.cpu())
        loss.backward()
        trainer.step()
        return problem.state(model)

    expected = trained()
    for tp_plan in plans(comm, ROW):
        torch.testing.assert_close(trained(tp_plan), expected, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("fisher_type", ["type-2", "forward-only"])
def test_further_estimators(comm, fisher_type):
    """Oracle: the ordinary model."""

    def trained(tp_plan=None):
        model = model_of(multilayer)
        if tp_plan:
            mpikfac.lab.split_layers(model, comm, tp_plan)
        settings = {**problem.SETTINGS, "fisher_type": fisher_type}
        trainer = problem.kfac(model, problem.sgd_all(model), comm, None, **settings)
        for step in range(2):
            images, labels = shard(step, comm)
            trainer.optimizer.zero_grad()
            outputs = model(images)
            trainer.record(outputs)
            F.cross_entropy(outputs, labels).backward()
            trainer.step()
        return problem.state(model)

    expected = trained()
    for tp_plan in plans(comm, ROW):
        torch.testing.assert_close(trained(tp_plan), expected, rtol=1e-9, atol=1e-9)


# -- refusals --------------------------------------------------------------------------------------


def refused(comm, model, axes, text, error=ValueError):
    with pytest.raises(error, match=text):
        mpikfac.lab.split_layers(model, comm, TensorParallelPlan(comm.size, axes))


def test_refusals_of_layers(comm):
    """Oracle: the names and values in the texts."""
    if comm.size == 1:
        with pytest.raises(ValueError, match="tp_size=1 splits no layer"):
            TensorParallelPlan(1, {"1": "outputs"})
        return
    model = model_of(multilayer)
    refused(comm, model, {"9": "outputs"}, "layer '9': the model has no module with this name")
    refused(comm, model, {"6": "outputs"}, "layer '6': LayerNorm cannot be split; only Linear")
    refused(comm, model, {"7": "outputs"}, "layer '7' has 5 outputs, which tp_size=")
    narrow = nn.Sequential(nn.Linear(12, 25), nn.ReLU(), nn.Linear(25, 12))
    # Inputs of the first layer and outputs of the second layer divide; slices in between do not.
    text = f"layer '0' passes 25 outputs on to a split layer, which tp_size={comm.size} does not"
    refused(comm, narrow, {"0": "inputs", "2": "outputs"}, text)
    grouped = nn.Sequential(nn.Conv2d(12, 12, 3, groups=2))
    refused(comm, grouped, {"0": "inputs"}, "layer '0': a convolution with groups=2 cannot be")
    tied = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    tied[1].weight = tied[0].weight
    refused(comm, tied, {"0": "inputs"}, "the parameters are shared: 0, 1")
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(12, 12)))
    refused(comm, normed, {"0": "inputs"}, "layer '0': ")
    refused(comm, torch.compile(model), ROW, "the model is compiled")
    with pytest.raises(
        ValueError, match=f"tp_size={comm.size + 1} must divide the {comm.size} ranks"
    ):
        mpikfac.lab.split_layers(model, comm, TensorParallelPlan(comm.size + 1, ROW))
    with pytest.raises(ValueError, match="layer '1': channels='rows' must be"):
        TensorParallelPlan(2, {"1": "rows"})
    trainer = FirstOrderTrainer(model, problem.sgd_all(model), comm)
    refused(comm, model, ROW, "the model already has a FirstOrderTrainer")
    del trainer
    axes = {"1": "outputs" if comm.rank else "inputs"}
    refused(comm, model_of(multilayer), axes, "ranks disagree on tp_plan", UserError)
    other = model_of(multilayer)
    mpikfac.lab.split_layers(other, comm, TensorParallelPlan(comm.size, ROW))
    refused(comm, other, ROW, "the model already has split layers")


def test_refusals_of_strategies(comm):
    """Oracle: the rows of the table of refusals."""
    if comm.size == 1:
        return
    model = model_of(multilayer)
    mpikfac.lab.split_layers(model, comm, TensorParallelPlan(comm.size, ROW))
    optimizer = problem.sgd_all(model)
    for sync in (LocalSGD(sync_every=2), Synchronous(aggregation=Median())):
        with pytest.raises(ValueError, match=f"tp_size={comm.size} needs "):
            FirstOrderTrainer(model, optimizer, comm, Strategy(sync=sync))
    with pytest.raises(ValueError, match=f"over {comm.size} ranks, but 1 ranks average"):
        FirstOrderTrainer(model, optimizer, comm.Split(comm.rank))
    with pytest.raises(ValueError, match="handed_on=True needs assignment.factor_reduction="):
        mpikfac.KFAC(model, optimizer, comm, Strategy(MemOpt(factor_reduction="local")))


def test_refusals_of_batches(comm):
    """Oracle: shapes, layers and numbers of examples in the texts, on all ranks."""
    if comm.size == 1:
        return
    model = model_of(Branches)
    mpikfac.lab.split_layers(model, comm, TensorParallelPlan(comm.size, AXES[Branches][0]))
    images, _ = shard(0, comm)
    with pytest.raises(
        UserError, match=r"layer 'left' gets \[\d+, 96\] .* on member 0, layer 'left'"
    ):
        model(images[: comm.rank + 1])
    with pytest.raises(UserError, match="'left' gets .* on member 0, layer 'right' gets"):
        (model.right if comm.rank else model.left)(images.flatten(1))
    with pytest.raises(ValueError, match="'left' needs batches of 96 channels"):
        model.left(images[0].flatten())
    trainer = FirstOrderTrainer(model, problem.sgd_all(model), comm)
    F.cross_entropy(model(images), shard(0, comm)[1]).backward()
    with pytest.raises(ValueError, match="examples=2 on rank 1 and 1 on rank 0"):
        trainer.step(examples=1 + comm.rank)
