"""Trainers adopt changes of the model, and all ranks notice ranks that disagree."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import FirstOrderTrainer, MemOpt, Strategy, UserError
from mpikfac.lab import LocalSGD
from support import problem
from support.strategies import changed

RANKS = mpikfac.world().size
STRATEGIES = {
    "everyone": {},
    "owners": {"assignment": MemOpt(factor_reduction="reduce_scatter")},
    "owner steps": {"assignment": MemOpt(shard_optimizer=True)},
    "late": {"transport.reduce_factors_at": "inverses"},
    "overlapped": {"transport.overlap": True},
}


def network() -> nn.Sequential:
    """Return a small network in float64, alike on all ranks."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def batch(step: int, comm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rank's share of 12 examples."""
    made = torch.Generator().manual_seed(step)
    x = torch.randn(12, 6, generator=made, dtype=torch.float64, device="cpu")
    y = torch.randint(3, (12,), generator=made, device="cpu")
    share = slice(12 // comm.size * comm.rank, 12 // comm.size * (comm.rank + 1))
    return x[share].to(problem.DEVICE), y[share].to(problem.DEVICE)


def unfreeze(model: nn.Sequential, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model[0].requires_grad_(True)


def freeze(model: nn.Sequential, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model[2].requires_grad_(False)


def replaced(model: nn.Sequential, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model[4] = nn.Linear(8, 3).double()
    optimizer.param_groups[0]["params"] = list(model.parameters())


CHANGES = {
    "unfreeze": (unfreeze, lambda model: model[0].requires_grad_(False)),
    "freeze": (freeze, lambda model: None),
    "replace": (replaced, lambda model: None),
}


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


class CountingSgd(torch.optim.Optimizer):
    """SGD with momentum, whose state has a number and a list, as optimizers of others have."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state.update(steps=0, means=[torch.zeros_like(parameter)])
            state["steps"] += 1
            (mean,) = state["means"]
            mean.mul_(0.9).add_(parameter.grad, alpha=0.1)
            parameter.sub_(mean / (1 - 0.9 ** state["steps"]), alpha=self.param_groups[0]["lr"])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def trained(
    comm, make, change: str, seed: int = 0, optimized=sgd
) -> tuple[list[torch.Tensor], nn.Module]:
    """Return the weights after each of 6 steps; the model changes before step 3."""
    model, (act, prepare) = network(), CHANGES[change]
    prepare(model)
    optimizer = optimized(model)
    trainer, found = make(model, optimizer, comm), []
    for step in range(6):
        if step == 3:
            act(model, optimizer, seed)
        x, y = batch(step, comm)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        trainer.step()
        found.append(weights(model))
    return found, model


def kfac_with(choices: dict, every: int = 1) -> object:
    def make(model, optimizer, comm):
        strategy = changed(Strategy(), choices)
        intervals = {"factor_update_steps": every, "inv_update_steps": 2 * every}
        return mpikfac.KFAC(model, optimizer, comm, strategy, damping=0.01, **intervals)

    return make


def owners_step(model, optimizer, comm) -> FirstOrderTrainer:
    return FirstOrderTrainer(model, optimizer, comm, Strategy(MemOpt(shard_optimizer=True)))


TAKEN_UP = {
    **{name: (kfac_with(chosen), kfac_with({})) for name, chosen in STRATEGIES.items()},
    "owners, every 4th step": (kfac_with(STRATEGIES["owners"], 4), kfac_with({}, 4)),
    "first-order": (FirstOrderTrainer, FirstOrderTrainer),
    "first-order, owner steps": (owners_step, FirstOrderTrainer),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("strategy", TAKEN_UP)
def test_a_changed_model_is_taken_up_on_all_ranks(comm, strategy, change):
    """Oracle: one process on the joined batches."""
    make, serial = TAKEN_UP[strategy]
    own = comm.Split(comm.rank)
    found, _ = trained(comm, make, change)
    expected, _ = trained(own, serial, change)
    expected = comm.bcast(expected)
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)
    own.Free()


@pytest.mark.parametrize("make", [owners_step, kfac_with(STRATEGIES["owner steps"])])
def test_numbers_and_lists_of_the_optimizer_move_to_new_owners(comm, make):
    """Oracle: one process on the joined batches."""
    own = comm.Split(comm.rank)
    with_counts = partial(CountingSgd, lr=0.1)
    serial = FirstOrderTrainer if make is owners_step else kfac_with({})
    chosen = {"optimized": lambda model: with_counts(model.parameters())}
    found, _ = trained(comm, make, "unfreeze", **chosen)
    expected, _ = trained(own, serial, "unfreeze", **chosen)
    for mine, theirs in zip(found, comm.bcast(expected)):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)
    own.Free()


def test_precondition_refuses_a_changed_model(comm):
    """Oracle: the line; no message of the step can tell the other ranks of a change."""
    model = network()
    model[0].requires_grad_(False)
    kfac = kfac_with({})(model, sgd(model), comm)
    model[0].requires_grad_(True)
    x, y = batch(0, comm)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match="precondition\\(\\) cannot adopt the change"):
        kfac.precondition()


@pytest.mark.parametrize("make", [FirstOrderTrainer, mpikfac.KFAC])
def test_a_change_that_cannot_be_taken_up_is_named(comm, make):
    """Oracle: the line, at the end of the step; the communicators are in use still."""
    model = network()
    model[0].requires_grad_(False)
    trainer = make(model, sgd(model), comm)
    model[0].requires_grad_(True)
    model[0].float()
    x, y = batch(0, comm)
    F.cross_entropy(model[1:](model[0](x.float()).double()), y).backward()
    with pytest.raises(UserError, match="changed, and the change cannot be adopted: 2"):
        trainer.step()
    trainer.close()


def test_a_layer_that_was_frozen_at_the_checkpoint_is_named(comm):
    """Oracle: the line with the remedy, and the load after the remedy."""
    model = network()
    freeze(model, None, 0)
    state = problem.whole_state(trained_once(model, comm), comm)
    with pytest.raises(UserError, match="factors/2.A' is missing; its layer was frozen"):
        trained_once(network(), comm).load_state_dict(state)
    other = network()
    freeze(other, None, 0)
    trained_once(other, comm).load_state_dict(state)


def trained_once(model, comm):
    """Return K-FAC after a step."""
    kfac = mpikfac.KFAC(model, sgd(model), comm)
    x, y = batch(0, comm)
    F.cross_entropy(model(x), y).backward()
    kfac.step()
    return kfac


def test_labels_of_the_model_leave_frozen_layers_alone(comm):
    """Oracle: the weights of the layer that was frozen between two steps."""
    model = network()
    drawn = mpikfac.Estimator(fisher_type="mc")
    kfac = mpikfac.KFAC(model, sgd(model), comm, damping=0.01, estimator=drawn)
    for step in range(3):
        if step == 1:
            freeze(model, kfac.optimizer, 0)
            before = weights(model[2])
        x, y = batch(step, comm)
        kfac.optimizer.zero_grad()
        outputs = model(x)
        kfac.record(outputs)
        F.cross_entropy(outputs, y).backward()
        kfac.step()
    assert torch.equal(weights(model[2]), before)


def test_a_new_layer_becomes_that_of_rank_0(comm):
    """Oracle: the weights of all ranks, which made the layer with different seeds."""
    for make in (FirstOrderTrainer, kfac_with({})):
        found, _ = trained(comm, make, "replace", seed=comm.rank)
        mine = found[-1].tolist()
        assert comm.allgather(mine) == [comm.bcast(mine)] * comm.size


def test_a_frozen_layer_stays(comm):
    """Oracle: the weights at the change; momentum and decay would move them."""
    for make in (FirstOrderTrainer, kfac_with({})):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        trainer = make(model, optimizer, comm)
        for step in range(4):
            if step == 2:
                model[2].requires_grad_(False)
                before = weights(model[2])
            x, y = batch(step, comm)
            optimizer.zero_grad(set_to_none=False)
            F.cross_entropy(model(x), y).backward()
            trainer.step()
        assert torch.equal(weights(model[2]), before)


def test_a_new_layer_is_trained_from_the_next_step_on(comm):
    """Oracle: the weights of the unfrozen layer before and after the steps."""
    found, model = trained(comm, kfac_with({}), "unfreeze")
    size = model[0].weight.numel() + model[0].bias.numel()
    first = [one[:size] for one in found]
    assert torch.equal(first[2], first[3])
    assert not torch.equal(first[3], first[4])


@pytest.mark.skipif(RANKS == 1, reason="one rank agrees with itself")
def test_models_that_differ_between_ranks_are_refused_by_a_tensors_name(comm):
    """Oracle: the same text on all ranks, with the first tensor that differs."""
    model = network()
    if comm.rank == 1:
        model[2] = nn.Linear(8, 8, bias=False).double()
    with pytest.raises(mpikfac.RanksDifferError, match="disagree on tensor '2.bias': ") as caught:
        FirstOrderTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)
    assert len(set(comm.allgather(str(caught.value)))) == 1


@pytest.mark.skipif(RANKS == 1, reason="one rank agrees with itself")
@pytest.mark.parametrize("parts", [False, True])
def test_a_bound_that_differs_between_ranks_is_refused(comm, parts):
    """Oracle: the same text on all ranks, in the first step whose bounds differ."""
    model, last = network(), comm.rank == comm.size - 1
    choices = {"transport.virtual_ranks": comm.size} if parts else {}
    trainer = kfac_with(choices)(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)
    for step in range(2):
        x, y = batch(step, comm)
        trainer.optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if parts:
            trainer.accumulate()
        if step == 0:
            trainer.step(max_norm=8 if last else 8.0)
            continue
        with pytest.raises(mpikfac.RanksDifferError, match="ranks disagree on max_norm") as caught:
            trainer.step(max_norm=0.1 if last else None)
    assert len(set(comm.allgather(str(caught.value)))) == 1


@pytest.mark.skipif(RANKS == 1, reason="one rank agrees with itself")
@pytest.mark.parametrize(
    "make", [FirstOrderTrainer, kfac_with({}), kfac_with(STRATEGIES["owners"])]
)
@pytest.mark.parametrize("difference", ["lr", "kind", "frozen", "damping", "factor_update_steps"])
def test_ranks_that_drift_apart_stop_together(comm, make, difference):
    """Oracle: the same text on all ranks, at the step of the difference."""
    of_kfac = difference in ("damping", "factor_update_steps")
    if of_kfac and make is FirstOrderTrainer:
        return
    model, last = network(), comm.rank == comm.size - 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make(model, optimizer, comm)
    if of_kfac:  # the interval of step 2 is heard in step 1
        values, begins = {"damping": ((0.01, 0.02), 1), "factor_update_steps": ((1, 2), 2)}[
            difference
        ]
        schedule = lambda step: values[last and step >= begins]  # noqa: E731
        trainer = mpikfac.KFAC(model, optimizer, comm, **{difference: schedule})
    for step in range(2):
        if difference == "kind":  # a scheduler of numpy
            optimizer.param_groups[0]["lr"] = np.float32(0.1 + 0.1 * step * last)
        if step == 1 and last and difference == "lr":
            optimizer.param_groups[0]["lr"] = 0.05
        if step == 1 and last and difference == "frozen":
            model[0].requires_grad_(False)
        x, y = batch(step, comm)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if step == 0:
            trainer.step()
            continue
        with pytest.raises(UserError, match="ranks disagree on") as caught:
            trainer.step()
    assert len(set(comm.allgather(str(caught.value)))) == 1


class Resizing(nn.Module):
    """A layer with a buffer that grows in each pass, as observers of a quantisation do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.resize_(len(self.seen) + 1).fill_(1.0)
        return self.layer(x)


@pytest.mark.parametrize("strategy", ["everyone", "owner steps", "first-order"])
def test_tensors_of_the_model_may_change_their_size(comm, strategy, tmp_path):
    """Oracle: torch, which resizes tensors without a trainer, on one rank and on several."""
    torch.manual_seed(comm.rank)
    make = kfac_with(STRATEGIES[strategy]) if strategy in STRATEGIES else FirstOrderTrainer
    model, root = Resizing(), Path(comm.bcast(str(tmp_path)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = make(model, optimizer, comm)
    for step in range(3):
        x, y = batch(step, comm)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        trainer.step()
        mpikfac.save_checkpoint(comm, root, trainer.state_dict(), step)
        trainer.load_state_dict(trainer.state_dict())
    assert model.seen.shape == (5,)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.resize_(2, *tensor.shape)


def clip_in_place(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def put_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = 1e-3 * parameter.grad


def drop(model: nn.Module) -> None:
    model[0].weight.grad = None


@pytest.mark.parametrize("change", [clip_in_place, put_in_place, drop])
def test_overlap_refuses_a_gradient_that_changes_after_backward(comm, change):
    """Oracle: the line; alone, where nothing was sent, the weights without overlap."""
    found = []
    for strategy in ({}, STRATEGIES["overlapped"]):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = kfac_with(strategy)(model, optimizer, comm)
        x, y = batch(0, comm)
        F.cross_entropy(model(x), y).backward()
        change(model)
        if strategy and comm.size > 1:
            with pytest.raises(ValueError, match="was changed after the backward pass"):
                trainer.step()
            return
        trainer.step()
        found.append(weights(model))
    assert torch.equal(*found)


@pytest.mark.parametrize("refusal", ["clip", "scaler"])
@pytest.mark.parametrize("make", [kfac_with(STRATEGIES["overlapped"])])
def test_overlap_goes_on_after_a_refused_step(comm, make, refusal):
    """Oracle: a run without the refused batch, to the last bit; the call is the message's."""
    if comm.size == 1:  # nothing is sent before the step
        return

    def run(refused):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = make(model, optimizer, comm)

        def passes(step):
            x, y = batch(step, comm)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()

        for step in range(3):
            if step == 2 and refused:
                passes(7)
                clip_in_place(model)
                with pytest.raises(ValueError, match="overlap=True"):
                    trainer.step(torch.amp.GradScaler("cpu") if refusal == "scaler" else None)
                with pytest.raises(RuntimeError, match=r"trainer.load_state_dict\(trainer.state_d"):
                    passes(8)
                trainer.load_state_dict(trainer.state_dict())
            passes(step)
            trainer.step()
        return weights(model)

    assert torch.equal(run(refused=True), run(refused=False))


def test_copies_refuse_a_scaler(comm):
    """Oracle: the line: a rank that skips a step alone would miss the sums of factors."""
    model = network()
    copies = {"sync": LocalSGD(sync_every=2)}
    kfac = kfac_with(copies)(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)
    scaler = torch.amp.GradScaler("cpu")
    x, y = batch(0, comm)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(ValueError, match="needs sync='synchronous'"):
        kfac.step(scaler)


@pytest.mark.parametrize("make", [FirstOrderTrainer, kfac_with({})])
def test_a_clipped_gradient_is_the_mean_of_all_ranks(comm, make):
    """Oracle: torch's `clip_grad_norm_` in one process on the joined batch."""

    def steps(on):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = make(model, optimizer, on)
        for step in range(3):
            x, y = batch(step, on)
            optimizer.zero_grad()
            (20 * F.cross_entropy(model(x), y)).backward()
            if on.size == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                trainer.step()
            else:
                trainer.step(max_norm=0.5)
        return weights(model)

    own = comm.Split(comm.rank)
    torch.testing.assert_close(steps(comm), steps(own), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "make", [FirstOrderTrainer, kfac_with({}), kfac_with(STRATEGIES["owner steps"])]
)
def test_uneven_shards_are_weighed_by_their_examples(comm, make):
    """Oracle: one process on the joined batch; a rank without examples counts for nothing."""
    if comm.size == 1:
        return
    counts = [12 - (comm.size - 2), *[1] * (comm.size - 2), 0]
    starts = [sum(counts[:rank]) for rank in range(comm.size + 1)]
    own = comm.Split(comm.rank)

    def steps(on):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = make(model, optimizer, on)
        for step in range(3):
            x, y = batch(step, own)
            # Half of the second batch is left out, so that its statistics weigh half as much.
            first, end = 6 * (step == 1), len(x)
            if on.size > 1:
                first, end = max(first, starts[on.rank]), starts[on.rank + 1]
            x, y = x[first:end], y[first:end]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, reduction="sum").div(max(1, len(x))).backward()
            trainer.step(examples=len(x) if on.size > 1 else None)
        return weights(model)

    torch.testing.assert_close(steps(comm), steps(own), rtol=1e-7, atol=1e-9)


PRECONDITIONERS = {
    **{
        preconditioner: {"preconditioner": preconditioner}
        for preconditioner in ("inverse", "ekfac", "eva")
    },
    "mc": {"estimator": mpikfac.Estimator(fisher_type="type-2", subsample=1)},
}
PASSES = ["ignored labels", "no pass", "discard", "not finite", "twice as much"]


@pytest.mark.skipif(RANKS == 1, reason="needs a rank beside the last")
@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
@pytest.mark.parametrize("last", PASSES)
def test_a_rank_has_one_weight_in_all_that_is_averaged(comm, last, preconditioner):
    """Oracle: one process, without the last rank's rows, or with the rows twice."""
    if last == "twice as much" and preconditioner == "mc":  # `record` counts the rows of a pass
        return
    own, shared = comm.Split(comm.rank), 12 // comm.size
    estimator = mpikfac.Estimator(subsample=1, factor_decay=0.5)
    settings = {
        "damping": 0.03,
        "inv_update_steps": 1,
        "factor_update_steps": 1,
        "estimator": estimator,
    }

    def steps(on):
        torch.manual_seed(1)
        alone = RANKS == 2 and last != "twice as much"  # a normalisation sees the rank's rows
        norm = nn.BatchNorm1d(6, affine=False) if alone else nn.Identity()
        model = nn.Sequential(norm, nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        grafting = mpikfac.NoGrafting()
        trainer = mpikfac.KFAC(
            model, optimizer, on, grafting=grafting, **settings | PRECONDITIONERS[preconditioner]
        )
        for step in range(3):
            x, y = batch(step, own)
            begins = range(0, 12 - shared * (last != "twice as much"), shared)
            shares = [slice(begin, begin + shared) for begin in begins]
            silent = on.size > 1 and on.rank == on.size - 1 and last != "twice as much"
            if on.size > 1:
                mine = slice(shared * on.rank, shared * (on.rank + 1))
                x, y = x[mine], y[mine]
            elif last == "twice as much":
                again = shares[-1]
                x, y = torch.cat([x, x[again]]), torch.cat([y, y[again]])
            else:
                x, y = x[: shares[-1].stop], y[: shares[-1].stop]
            optimizer.zero_grad()
            if not (silent and last == "no pass"):
                outputs = model(x * torch.nan if silent and last == "not finite" else x)
                if preconditioner == "mc":
                    trainer.record(outputs)
                labels = torch.full_like(y, -100) if silent else y
                F.cross_entropy(outputs, labels, reduction="sum").div(len(x)).backward()
            if silent and last == "discard":
                trainer.clear_statistics()
            twice = on.size > 1 and on.rank == on.size - 1 and last == "twice as much"
            trainer.step(examples=0 if silent else len(x) * (1 + twice))
        return weights(model)

    torch.testing.assert_close(steps(comm), steps(own), rtol=1e-7, atol=1e-9)
