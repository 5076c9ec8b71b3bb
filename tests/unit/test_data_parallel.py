from __future__ import annotations

import pytest
import torch
from torch import nn

import mpikfac
from support import problem


def baseline(comm, optimizer=problem.sgd):
    model = problem.network()
    return mpikfac.FirstOrderTrainer(model, optimizer(model), comm)


def adamw(model):
    groups = [{"params": model[:4].parameters()}, {"params": model[5].parameters(), "lr": 0.03}]
    return torch.optim.AdamW(groups, lr=0.01, amsgrad=True)


class Listing(torch.optim.Optimizer):
    """Steps by means of gradients, in lists; the number of steps is a number of the group."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        group["count"] = group.get("count", 0) + 1
        for parameter in group["params"]:
            zeros = [torch.zeros_like(parameter) for _ in range(parameter.dim())]
            means = self.state[parameter].setdefault("means", [*zeros, []])
            for mean in means[:-1]:
                mean.lerp_(parameter.grad, 0.1)
                parameter -= group["lr"] / group["count"] * mean
            assert len(means[-1]) == 0


@pytest.mark.parametrize("optimizer", [problem.sgd, problem.adam, adamw])
def test_one_rank_trains_as_plain_torch_does(comm, optimizer):
    """Oracle: backward and `optimizer.step`, to the last bit."""
    model = problem.network()
    plain = optimizer(model)
    for step in range(4):
        images, labels = problem.batch(step)
        plain.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        plain.step()
    found = problem.run(baseline(comm, optimizer), comm, range(4))
    assert torch.equal(found, problem.state(model))


@pytest.mark.parametrize("optimizer", [problem.sgd, problem.adam, adamw, Listing])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_an_interrupted_run_goes_on_to_the_last_bit(comm, optimizer, steps_before):
    """Oracle: the uninterrupted run, which shares no memory with the resumed run."""
    first, second = baseline(comm, optimizer), baseline(comm, optimizer)
    problem.run(first, comm, range(steps_before))
    first.optimizer.param_groups[0]["lr"] = 0.007
    second.load_state_dict(first.state_dict())
    expected = problem.run(first, comm, range(steps_before, 6))
    assert torch.equal(problem.run(second, comm, range(steps_before, 6)), expected)
    assert second.steps == 6


def test_items_of_the_state_are_named_by_parameter(comm):
    trainer = baseline(comm)
    problem.run(trainer, comm, [0])
    state = trainer.state_dict()
    assert state["trainer/steps"] == 1
    assert state["optimizer/groups/1/lr"] == 0.03
    assert state["optimizer/state/5.weight/momentum_buffer"].shape == (5, 36)
    assert state["model/1.running_mean"].shape == (9,)


def test_items_of_lists_are_missed_by_parameter(comm):
    """Oracle: the state of one parameter, which has a list of its own length."""
    trainer = baseline(comm, Listing)
    problem.run(trainer, comm, [0])
    state = trainer.state_dict()
    assert state["optimizer/groups/0/count"] == 1
    assert state["optimizer/state/5.weight/means.1"].shape == (5, 36)
    assert state["optimizer/state/5.weight/means.2"].shape == (0,)
    assert not trainer.missing(state)
    lost = {name for name in state if name.startswith("optimizer/state/5.weight/")}
    assert trainer.missing(state.keys() - lost) >= lost


def test_nothing_to_train_is_refused(comm):
    model = nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.SGD([torch.zeros(1)])
    with pytest.raises(ValueError, match="has no parameter that requires a gradient"):
        mpikfac.FirstOrderTrainer(model, optimizer, comm)


@pytest.mark.parametrize("make", [mpikfac.FirstOrderTrainer, mpikfac.KFAC])
def test_mixed_dtypes_are_refused_by_name(comm, make):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    optimizer = torch.optim.SGD(model.parameters())
    text = r"1(.weight)? is torch.float64 on cpu, but 0(.weight)? is torch.float32 on cpu; trained "
    with pytest.raises(ValueError, match=text):
        make(model, optimizer, comm)


def test_a_covered_weight_must_be_in_the_optimizer(comm):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters())
    with pytest.raises(ValueError, match="layer '1' is covered, but the optimizer lacks some"):
        mpikfac.KFAC(model, optimizer, comm)
    problem.kfac(model, optimizer, comm, skip=["1"])


def test_moments_are_loaded_into_the_parameters_dtype(comm):
    """Oracle: the saved state; a step after loading sees float64 throughout."""
    first, second = baseline(comm, problem.adam), baseline(comm, problem.adam)
    problem.run(first, comm, [0])
    second.load_state_dict(first.state_dict())
    weight = second.model[5].weight
    state = second.optimizer.state[weight]
    assert state["exp_avg"].dtype == torch.float64
    assert torch.equal(state["exp_avg"], first.optimizer.state[first.model[5].weight]["exp_avg"])
    assert state["step"] == 1


def test_numbers_of_parameter_groups_are_restored_as_they_were(comm):
    """Oracle: the saved groups, although the new optimizer's defaults are whole numbers."""
    first = baseline(
        comm, lambda model: torch.optim.SGD(model.parameters(), 0.1, 0.9, nesterov=True)
    )
    first.optimizer.param_groups[0]["weight_decay"] = 5e-4
    second = baseline(comm, lambda model: torch.optim.SGD(model.parameters(), 1, 0))
    second.load_state_dict(first.state_dict())
    for key in ("lr", "momentum", "weight_decay", "nesterov"):
        restored = second.optimizer.param_groups[0][key]
        assert restored == first.optimizer.param_groups[0][key]
        assert type(restored) is type(first.optimizer.param_groups[0][key])


def test_float16_is_refused(comm):
    model = nn.Sequential(nn.Linear(2, 2)).half()
    with pytest.raises(ValueError, match="0.weight is torch.float16; trained parameters must be"):
        mpikfac.FirstOrderTrainer(model, torch.optim.SGD(model.parameters()), comm)


def test_only_running_statistics_are_averaged(comm):
    """Oracle: buffers that are no statistics, or have a different dtype, stay unchanged."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("table", torch.ones(3, dtype=torch.float64))
    trainer = mpikfac.FirstOrderTrainer(model, torch.optim.SGD(model.parameters()), comm)
    names = [name for name, _ in trainer.plan.uncovered]
    assert names[-3:] == ["1.running_mean", "1.running_var", "(votes)"]
    assert "table" not in names


def test_sparse_gradients_are_refused(comm):
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(
        ValueError, match="layer '0' has sparse gradients; create it with sparse=False"
    ):
        mpikfac.FirstOrderTrainer(model, torch.optim.SGD(model.parameters()), comm)
