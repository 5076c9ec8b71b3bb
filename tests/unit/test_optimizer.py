"""What the trainer in the form of a torch optimizer rejects and passes on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn

import mpikfac
from mpikfac import (
    KFAC,
    DistributedNorMuon,
    DistributedSOAP,
    FirstOrderTrainer,
    KFACOptimizer,
    Optimizer,
    world,
)


def made() -> Optimizer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return Optimizer(KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), world()))


def backward(optimizer: Optimizer, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(optimizer.trainer.model(torch.ones(8, 5)), torch.arange(8) % 3)
    (scale * loss).backward()


def test_it_is_a_torch_optimizer_over_the_same_groups():
    """Oracle: the inner optimizer's objects, also after the inner optimizer has loaded a state."""
    optimizer = made()
    inner = optimizer.trainer.optimizer
    inner.load_state_dict(inner.state_dict())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert "lr: 0.1" in repr(optimizer)


@pytest.mark.parametrize("trainer", [torch.optim.SGD, nn.Linear])
def test_another_trainer_is_refused(trainer):
    """Oracle: the line."""
    wrong = trainer.__new__(trainer)
    with pytest.raises(
        ValueError, match=f"trainer={trainer.__name__} must be a KFAC or a FirstOrd"
    ):
        Optimizer(wrong)


def test_gradients_without_their_scale_are_refused_and_change_no_weight():
    """Oracle: the line; the weights before; the count of steps without the scaler."""
    optimizer, scaler = made(), torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [p.detach().clone() for p in optimizer.trainer.model.parameters()]
    backward(optimizer, scaler.scale(torch.ones(())).item())
    scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match=r"but not K-FAC's statistics; leave it out, and clip"):
        scaler.step(optimizer)
    for parameter, old in zip(optimizer.trainer.model.parameters(), before):
        assert torch.equal(parameter, old)
    backward(optimizer)
    optimizer.step()  # as in a notebook, whose cell is corrected and runs again
    assert optimizer.trainer.steps == 1


def test_a_disabled_scaler_steps():
    """Oracle: the count of steps."""
    optimizer, scaler = made(), torch.amp.GradScaler("cpu", enabled=False)
    backward(optimizer)
    scaler.step(optimizer)
    assert optimizer.trainer.steps == 1


@pytest.mark.parametrize("moment", ["construction", "step"])
def test_processes_without_mpi_are_refused(monkeypatch, moment):
    """Oracle: the line; torchrun starts processes that MPI's communicator does not join."""
    comm = world()
    optimizer = made() if moment == "step" else None
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 4)
    with pytest.raises(ValueError, match=r"connects 4 processes, but MPI connects 1: pass comm="):
        optimizer.step() if optimizer else KFACOptimizer(nn.Linear(2, 2), comm=comm)


def test_a_new_group_is_trained():
    """Oracle: the group of the inner optimizer; the new layer's weights move."""
    optimizer = made()
    model, new = optimizer.trainer.model, nn.Linear(3, 3)
    backward(optimizer)
    optimizer.step()
    model.append(new)
    optimizer.add_param_group({"params": list(new.parameters()), "lr": 0.2})
    before = new.weight.detach().clone()
    for _ in range(2):
        backward(optimizer)
        optimizer.step()
    assert optimizer.trainer.optimizer.param_groups[1]["lr"] == 0.2
    assert len(optimizer.trainer.plan.layers) == 3
    assert not torch.equal(new.weight, before)


def test_schedulers_find_the_momentum():
    """Oracle: OneCycleLR's own formula at the first step: the largest momentum, the least rate."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = Optimizer(KFAC(model, inner, world()))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    assert inner.param_groups[0]["momentum"] == 0.95
    assert inner.param_groups[0]["lr"] == pytest.approx(0.5 / 25)


def test_numbers_of_a_group_come_back_in_one_order():
    """Oracle: the alphabet, as the order of a set differs between processes."""
    first, second = made(), made()
    added = [f"number {index}" for index in range(8)]
    first.param_groups[0].update(dict.fromkeys(reversed(added), 1.0))
    second.load_state_dict(first.state_dict())
    assert list(second.param_groups[0])[-len(added) :] == added


OPTIMIZERS = {
    "first-order": lambda model, lr: Optimizer(
        FirstOrderTrainer(model, torch.optim.AdamW(model.parameters(), lr=lr))
    ),
    **{kind.__name__: kind for kind in (KFACOptimizer, *KFACOptimizer.__subclasses__())},
    **{kind.__name__: kind for kind in (DistributedNorMuon, DistributedSOAP)},
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_state_has_groups_as_those_of_torch(make):
    """Oracle: the form of torch's own state, and rates of an optimizer that was never saved."""
    model, again = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(2))
    optimizer = make(model, lr=0.01)
    state = optimizer.state_dict()
    like = torch.optim.SGD(model.parameters(), lr=0.01).state_dict()["param_groups"]
    (group,) = state["param_groups"]
    assert group["params"] == like[0]["params"] and group["lr"] == like[0]["lr"]
    loaded = make(again, lr=0.3)
    loaded.load_state_dict(state)
    assert loaded.param_groups[0]["lr"] == 0.01
    group["lr"] = 0.02
    told = r"0\.02 in param_groups.*set optimizer\.param_groups"
    with pytest.raises(mpikfac.UserError, match=told):
        loaded.load_state_dict(state)


def test_groups_in_a_state_are_a_copy_and_are_left_out_of_checkpoints(tmp_path, comm):
    """Oracle: a rate that is changed after the state was taken; torch's and the library's files."""
    model = nn.Linear(3, 2)
    optimizer = mpikfac.KFACOptimizer(model, lr=np.float64(0.01))
    state = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.5
    torch.save(state, tmp_path / "state.pt")
    read = torch.load(tmp_path / "state.pt", weights_only=True)
    path = mpikfac.save_checkpoint(comm, tmp_path / "run", state, 0)
    for stored in (read, mpikfac.load_checkpoint(comm, path)):
        optimizer.load_state_dict(stored)
        assert optimizer.param_groups[0]["lr"] == 0.01
        optimizer.param_groups[0]["lr"] = 0.5
