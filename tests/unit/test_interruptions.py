"""Passes and steps that an exception interrupts, as in a notebook, and that are run again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import KFAC, FirstOrderTrainer
from mpikfac.numerics import fisher

COMM = mpikfac.world()
OF_PASSES, OF_STEPS = "backward pass before this step was interrupted", "started before and did not"


class Stop(nn.Module):
    """Raise in the forward or backward pass, once, if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.reach("forward")
        if x.requires_grad:
            x.register_hook(lambda _: self.reach("backward"))
        return x

    def reach(self, where: str) -> None:
        if self.where == where:
            self.where = ""
            raise KeyboardInterrupt


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), Stop(), nn.Tanh(), nn.Linear(6, 3)).double()


def learn(trainer, record: bool = False) -> None:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(8, 4, generator=made, dtype=torch.float64)
    trainer.optimizer.zero_grad()
    outputs = trainer.model(x)
    if record:
        trainer.record(outputs)
    F.cross_entropy(outputs, torch.randint(3, (8,), generator=made)).backward()


def kfac_of(model: nn.Module, **settings) -> KFAC:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return KFAC(model, optimizer, COMM, factor_update_steps=1, inv_update_steps=1, **settings)


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("discards", [False, True])
@pytest.mark.parametrize("by_parts", [False, True])
def test_an_interrupted_pass_is_told_or_discarded(where, discards, by_parts, caplog):
    """Oracle: an undisturbed run, and the log; an interruption before backward does no harm."""
    kfac, expected = kfac_of(network()), kfac_of(network())
    if by_parts:
        kfac.model = nn.Sequential(kfac.model)
    for step in range(3):
        for trainer in (kfac, expected):
            if trainer is kfac and step == 1:
                (kfac.model[0] if by_parts else kfac.model)[1].where = where
                with pytest.raises(KeyboardInterrupt):
                    learn(kfac)
                kfac.clear_statistics() if discards else None
            learn(trainer)
            trainer.step()
    harmed = where == "backward" and not discards
    assert caplog.text.count(OF_PASSES) == harmed
    assert torch.allclose(weights(kfac), weights(expected), rtol=1e-12) != harmed


@pytest.mark.parametrize(("kind", "name"), [("type-2", "exact"), ("mc", "sampled")])
def test_labels_of_the_model_that_were_interrupted_are_told(kind, name, monkeypatch, caplog):
    """Oracle: the log; the interruption comes between two passes of a record."""
    kfac = kfac_of(network(), estimator=mpikfac.Estimator(fisher_type=kind, mc_samples=3))
    right = getattr(fisher, name)
    learn(kfac, record=True)
    kfac.step()
    calls = []

    def stopped(*given):
        calls.append(given)
        if kind == "mc":
            if len(calls) == 2:
                raise KeyboardInterrupt
            return right(*given)
        return broken(right(*given)) if len(calls) == 1 else right(*given)

    def broken(gradients):
        yield next(gradients)
        raise KeyboardInterrupt

    monkeypatch.setattr(mpikfac.numerics, name, stopped)
    with pytest.raises(KeyboardInterrupt):
        learn(kfac, record=True)
    kfac.step()
    assert caplog.text.count(OF_PASSES) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_passes_that_end_are_not_told(reentrant, caplog):
    """Oracle: the log; recomputed parts, micro-batches, passes of inputs and paused passes."""
    kfac = kfac_of(network())
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        torch.autograd.grad(kfac.model(x).sum(), [x])
        with kfac.no_recording():
            kfac.model(x).sum().backward()
        for part in x.chunk(2):
            half = torch.utils.checkpoint.checkpoint(kfac.model[:2], part, use_reentrant=reentrant)
            kfac.model[2:](half).square().mean().backward()
        kfac.step()
    assert "interrupted" not in caplog.text and OF_STEPS not in caplog.text


@pytest.mark.parametrize("make", [KFAC, FirstOrderTrainer])
@pytest.mark.parametrize("place", ["before", "inside"])
def test_a_step_that_did_not_end_is_told_when_it_is_taken_again(make, place, monkeypatch, caplog):
    """Oracle: an undisturbed run, and the log; before its communication, a step changes nothing."""
    found = []
    for stops in (False, True):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        trainer = make(model, optimizer, COMM)
        for step in range(3):
            learn(trainer)
            if stops and step == 1:
                with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, ValueError)):
                    if place == "inside":
                        patch.setattr(torch.optim.SGD, "step", interrupted)
                    trainer.step(max_norm=-1.0 if place == "before" else None)
                learn(trainer) if place == "inside" else None
            trainer.step()
        found.append(weights(trainer))
    harmed = place == "inside"
    assert caplog.text.count(OF_STEPS) == harmed
    assert harmed or torch.equal(*found)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt
