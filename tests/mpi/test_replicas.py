"""Copies of the model on the ranks: local K-FAC, restarts, and ranks that drift apart."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac import CommOpt, FirstOrderTrainer, MemOpt, Strategy, Synchronous, Transport
from mpikfac.lab import DASO, LSGD, LocalSGD
from mpikfac_apps.lab.reproduce.rules import STREAM
from support import inside, problem
from support.copies import DILOCO, ELASTIC, PER_NODE, kfac_of, trainer_of

pytestmark = pytest.mark.lab


def test_local_kfac_preconditions_the_ranks_own_gradient(comm):
    """Oracle: a copy of the model on the rank, whose step is preconditioned by dense solves.

    Factors are averaged over ranks at each step; gradients are not.
    """
    ranks = comm.size
    strategy = Strategy(CommOpt(), sync=LocalSGD(sync_every=2))
    settings = {"factor_update_steps": 1, "inv_update_steps": 1, "kl_clip": None}
    kfac, alone = kfac_of(comm, strategy, **settings), problem.network()
    optimizer = problem.sgd(alone)
    for step in range(4):
        for model in (kfac.model, alone):
            model.zero_grad()
            images, labels = problem.shards(step, ranks)[comm.rank]
            F.cross_entropy(model(images), labels).backward()
        kfac.step()
        for layer in inside.layers(kfac):
            module = alone.get_submodule(layer.name)
            precondition(module, *factors_of(kfac, layer), damping=problem.SETTINGS["damping"])
        optimizer.step()
        if step % 2:
            average(comm, alone)
        torch.testing.assert_close(problem.state(kfac.model), problem.state(alone))


def factors_of(kfac, layer):
    """Return both averages of a layer as matrices."""
    whole = inside.whole_factors(kfac)
    return [mpikfac.numerics.unfold_triangle(whole[f"{layer.name}.{side}"]) for side in "AG"]


def precondition(module, a, g, damping):
    """Set a module's gradient to the solution of `(G (x) A + damping I) x = gradient`."""
    bias = [module.bias.grad[:, None]] if module.bias is not None else []
    weight = module.weight.grad
    matrix = torch.cat([weight.flatten(1), *bias], 1)
    curvature = torch.kron(g, a) + damping * torch.eye(matrix.numel()).to(a)
    solved = torch.linalg.solve(curvature, matrix.flatten()).view(matrix.shape)
    count = weight[0].numel()
    weight.copy_(solved[:, :count].reshape(weight.shape))
    if bias:
        module.bias.grad.copy_(solved[:, -1])


def average(comm, model):
    """Average the parameters over ranks."""
    for parameter in model.parameters():
        every = comm.allgather(parameter.detach().cpu())
        parameter.data.copy_(torch.stack(every).mean(0))


WAYS = {
    "DiLoCo": DILOCO,
    "LSGD": LSGD(sync_every=2),
    "Parle": replace(ELASTIC, sync_every=2),
    "stream": STREAM,
    "nodes": replace(DILOCO, replicas="node"),
    "LSGD of nodes": LSGD(sync_every=2, replicas="node"),
    "Parle of nodes": replace(ELASTIC, sync_every=2, replicas="node"),
    "DASO": DASO(sync_every=3, delay=2),
}


@pytest.mark.parametrize("kind", ["first-order", "K-FAC"])
@pytest.mark.parametrize("way", WAYS)
def test_a_loaded_state_goes_on_as_the_run(comm, kind, way):
    """Oracle: the run that was not interrupted; each rank has a momentum of its own."""
    of_nodes = "nodes" in way or way == "DASO"
    transport = Transport(ranks_per_node=PER_NODE) if of_nodes else Transport()
    first = trainer_of(comm, kind, WAYS[way], transport=transport)
    problem.run(first, comm, range(5))
    first.average_replicas()
    state = copy.deepcopy(problem.whole_state(first, comm))
    second = trainer_of(comm, kind, WAYS[way], transport=transport)
    second.load_state_dict(state)
    ends = [problem.run(trainer, comm, range(5, 10)) for trainer in (first, second)]
    assert torch.equal(*ends)


def test_a_further_copy_goes_on_with_the_momentum_of_rank_0(comm):
    """Oracle: rank 0's; in the run before, each copy's outer step had a momentum of its own."""
    sync = replace(ELASTIC, sync_every=2)
    first, second = (trainer_of(comm, "first-order", sync) for _ in range(2))
    problem.run(first, comm, range(4))
    first.average_replicas()
    state = copy.deepcopy(problem.whole_state(first, comm))
    second.load_state_dict({n: v for n, v in state.items() if not n.startswith("copies/")})
    kept = {n: v for n, v in second.state_dict().items() if "exchange/own momentum" in n}
    assert kept and any(value.any() for value in kept.values())
    for name, value in kept.items():
        assert torch.equal(value, state["exchange" + name.partition("exchange")[2]]), name


@pytest.mark.parametrize("grafting", problem.BY_ADAM[::2], ids=problem.label)
def test_each_copy_goes_on_with_its_own_lengths(comm, grafting):
    """Oracle: the run that was not interrupted; averages of a copy are of the copy's directions."""
    strategy = Strategy(CommOpt(), sync=LocalSGD(sync_every=2))
    first, second = (kfac_of(comm, strategy, grafting=grafting, kl_clip=None) for _ in range(2))
    problem.run(first, comm, range(5))
    first.average_replicas()
    second.load_state_dict(copy.deepcopy(problem.whole_state(first, comm)))
    ends = [problem.run(trainer, comm, range(5, 10)) for trainer in (first, second)]
    assert torch.equal(*ends)


@pytest.mark.parametrize("kind", ["K-FAC", "baseline"])
@pytest.mark.parametrize("later", [Synchronous(), LocalSGD(warmup_steps=100)])
def test_ranks_that_average_gradients_take_a_single_copy(comm, kind, later):
    """Oracle: all ranks stay alike, though every rank's copy had a momentum of its own."""
    first = trainer_of(comm, kind, LocalSGD(sync_every=2))
    problem.run(first, comm, range(4))
    second = trainer_of(comm, kind, later)
    second.load_state_dict(copy.deepcopy(problem.whole_state(first, comm)))
    ends = comm.allgather(problem.run(second, comm, range(4, 6)))
    assert all(torch.equal(end, ends[0]) for end in ends)


@pytest.mark.parametrize("kind", ["K-FAC", "baseline"])
def test_a_trainer_loads_its_own_state(comm, kind):
    """Oracle: the state before; momenta of exchanges are views of what the load forgets."""
    trainer = trainer_of(comm, kind, DILOCO)
    problem.run(trainer, comm, range(4))
    before = copy.deepcopy(trainer.state_dict())
    assert any(value.any() for name, value in before.items() if name.startswith("exchange/mom"))
    trainer.load_state_dict(trainer.state_dict())
    for name, value in trainer.state_dict().items():
        same = torch.equal(value, before[name]) if torch.is_tensor(value) else value == before[name]
        assert same, name


@pytest.mark.skipif(mpikfac.world().size == 1, reason="one rank cannot differ from itself")
def test_ranks_that_drift_apart_stop_together_at_the_exchange(comm):
    """Oracle: the message on all ranks."""
    model = problem.network()
    strategy = Strategy(MemOpt(), sync=LocalSGD(sync_every=3))
    trainer = FirstOrderTrainer(model, problem.sgd(model), comm, strategy)
    trainer.optimizer.param_groups[0]["lr"] += 0.1 * comm.rank
    problem.run(trainer, comm, [0, 1])
    with pytest.raises(mpikfac.UserError, match="ranks disagree on"):
        problem.run(trainer, comm, [2])


def test_gradients_of_the_caller_and_copies_of_the_ranks_exclude_each_other(comm):
    strategy = Strategy(CommOpt(), sync=LocalSGD(sync_every=2))
    kfac = kfac_of(comm, strategy)
    with pytest.raises(ValueError, match="call step"):
        kfac.precondition()


def test_copies_are_no_state_of_the_run(comm):
    strategy = Strategy(MemOpt(), sync=LocalSGD(sync_every=4))
    model = problem.network()
    trainer = FirstOrderTrainer(model, problem.sgd(model), comm, strategy)
    problem.run(trainer, comm, [0])
    with pytest.raises(ValueError, match="call average_replicas"):
        trainer.state_dict()
    trainer.average_replicas()
    states = comm.allgather(problem.state(model).cpu())
    assert trainer.state_dict() and all(torch.equal(states[0], other) for other in states)
