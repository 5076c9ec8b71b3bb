"""Batches in parts, summed in order: the same bits on every number of ranks that fits the parts."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import MemOpt, Strategy, Transport
from mpikfac.comm import Grid
from mpikfac.comm.messages import collectives as primitives
from support import inside, problem
from support.strategies import assigned

PARTS = 12  # every tested number of ranks divides 12
SETTINGS = problem.SETTINGS | {"preconditioner": "inverse", "factor_update_steps": 1}


def network(momentum=0.1):
    """Return a network with BatchNorm in training; BatchNorm normalises every part separately."""
    torch.manual_seed(1)
    norm = nn.BatchNorm2d(9, momentum=momentum)
    return nn.Sequential(
        nn.Conv2d(2, 9, 3, padding=1), norm, nn.ReLU(), nn.Flatten(), nn.Linear(576, 5)
    )


def trainer(comm, optimizer, momentum=0.1, workers=1):
    model = network(momentum)
    transport = Transport(virtual_ranks=PARTS)
    if optimizer == "sgd":
        strategy = Strategy(transport=transport)
        return mpikfac.FirstOrderTrainer(model, problem.sgd_all(model), comm, strategy)
    strategy = Strategy(assigned(workers, comm.size), transport=transport)
    return problem.kfac(model, problem.sgd_all(model), comm, strategy, **SETTINGS)


def run(trainer, comm, steps):
    mine = range(PARTS // comm.size * comm.rank, PARTS // comm.size * (comm.rank + 1))
    for step in steps:
        images, labels = (tensor.repeat_interleave(2, 0) for tensor in problem.batch(step))
        for part in mine:
            trainer.optimizer.zero_grad()
            chosen = slice(2 * part, 2 * part + 2)
            F.cross_entropy(trainer.model(images[chosen].float()), labels[chosen]).backward()
            trainer.accumulate()
        trainer.step()
    return torch.cat([value.flatten() for value in trainer.model.state_dict().values()])


@pytest.mark.parametrize("workers", mpikfac.plan.divisors(mpikfac.world().size))
def test_kfac_is_the_same_to_the_last_bit_on_any_number_of_ranks(comm, workers):
    """Oracle: a single rank with all parts; the plan's bytes."""
    kfac = trainer(comm, "kfac", workers=workers)
    found = run(kfac, comm, range(3))
    alone = comm.Split(comm.rank)
    assert torch.equal(found, run(trainer(alone, "kfac"), alone, range(3)))
    assert kfac.model[1].running_mean.abs().sum() > 0
    planned, sent = collections.Counter(), kfac.trace.sent
    for message in kfac.plan.messages(comm.rank, True, False):
        planned[message.stage] += 3 * message.bytes
    assert sent["reduce gradients"] == planned["reduce gradients"]
    assert sent["reduce statistics"] == planned["reduce statistics"]
    assert inside.memory(kfac)["parts"] == kfac.plan.memory(comm.rank)["parts"]


def test_sgd_is_the_same_to_the_last_bit_on_any_number_of_ranks(comm):
    """Oracle: a single rank with all parts."""
    alone = comm.Split(comm.rank)
    expected = run(trainer(alone, "sgd"), alone, range(3))
    assert torch.equal(run(trainer(comm, "sgd"), comm, range(3)), expected)


@pytest.mark.parametrize("optimizer", ["sgd", "kfac"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_counts_once_in_any_number_of_parts(comm, optimizer, momentum):
    """Oracle: the number of steps; the mean or the moving average of the parts' means, by hand."""
    chosen = trainer(comm, optimizer, momentum)
    convolution, norm = chosen.model[:2]
    means, expected = [], torch.zeros(9)
    convolution.register_forward_hook(lambda *found: means.append(found[-1].mean((0, 2, 3))))
    for step in range(3):
        run(chosen, comm, [step])
        assert norm.num_batches_tracked == step + 1
        mean = sum(sum(found) for found in comm.allgather(means)) / PARTS
        expected = expected.lerp(mean.detach(), momentum or 1 / (step + 1))
        torch.testing.assert_close(norm.running_mean, expected)
        chosen.model(torch.ones(2, 2, 8, 8))  # a batch without a step
        chosen.clear_statistics()
        assert norm.num_batches_tracked == step + 1
        means.clear()
    assert set(comm.allgather(norm.num_batches_tracked.item())) == {3}


def test_long_sums_in_order_pass_in_pieces(comm, monkeypatch):
    """Oracle: the sum in one process, element by element in order."""
    monkeypatch.setattr(primitives, "PIECE", 7)
    grid = Grid(comm, 1, mpikfac.Trace())
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(3 * comm.size, 40, generator=generator, device="cpu").to(problem.DEVICE)
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    flat = torch.empty(40)
    grid.sum_in_order(parts[3 * comm.rank : 3 * comm.rank + 3], flat, "x")
    assert torch.equal(flat, expected)


def test_parts_are_those_of_the_joined_batch(comm):
    """Oracle: the run with as many ranks as parts and without an order, to rounding."""
    model, plain = problem.network(), problem.network()
    strategy = Strategy(MemOpt(), transport=Transport(virtual_ranks=comm.size))
    kfac = problem.kfac(model, problem.sgd(model), comm, strategy, **problem.SETTINGS)
    other = problem.kfac(plain, problem.sgd(plain), comm, Strategy(MemOpt()), **problem.SETTINGS)
    for step in range(problem.STEPS):
        images, labels = problem.shards(step, comm.size)[comm.rank]
        kfac.optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        kfac.accumulate()
        kfac.step()
    expected = problem.run(other, comm)
    torch.testing.assert_close(problem.state(model), expected, rtol=0, atol=1e-10)


def test_a_wrong_number_of_parts_is_refused(comm):
    """Oracle: the right numbers."""
    if comm.size == PARTS:
        pytest.skip("every rank has one part")
    text = f"virtual_ranks={comm.size + 1} must be a multiple of the number of ranks"
    if comm.size > 1:
        with pytest.raises(ValueError, match=text):
            mpikfac.make_plan(
                [], comm.size, Strategy(MemOpt(), transport=Transport(virtual_ranks=comm.size + 1))
            )
    with pytest.raises(ValueError, match="virtual_ranks=4 needs assignment.factor_reduction="):
        Strategy(MemOpt(factor_reduction="reduce_scatter"), transport=Transport(virtual_ranks=4))
    sgd = trainer(comm, "sgd")
    count = PARTS // comm.size
    with pytest.raises(ValueError, match=rf"step\(\) needs {count} parts, but has 0"):
        sgd.step()
    for _ in range(count):
        sgd.accumulate()
    with pytest.raises(ValueError, match=f"more than {count} times"):
        sgd.accumulate()
