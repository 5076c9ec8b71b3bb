"""Factors contain exactly those passes whose gradients are in `.grad`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpikfac
from mpikfac import KFAC, Estimator
from support import inside

COMM = mpikfac.world()
STEPS = 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 5, generator=made, dtype=torch.float64)
    return x, torch.randint(3, (8,), generator=made)


def trainer(model: nn.Module, **settings) -> KFAC:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return KFAC(model, optimizer, COMM, damping=0.03, inv_update_steps=1, **settings)


def passes(kfac: KFAC, x: torch.Tensor, y: torch.Tensor) -> None:
    """Run forward and backward pass of a batch."""
    outputs = kfac.model(x)
    kfac.record(outputs)
    F.cross_entropy(outputs, y).backward()


def adversarial(kfac: KFAC, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return examples to train on, by a backward pass whose gradients of weights go away."""
    moved = x.clone().requires_grad_()
    passes(kfac, moved, y)
    return (x + 0.1 * moved.grad.sign()).detach()


def by_autograd(kfac: KFAC, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the same examples without a gradient of weights."""
    moved = x.clone().requires_grad_()
    with kfac.no_recording():
        (gradient,) = torch.autograd.grad(F.cross_entropy(kfac.model(moved), y), moved)
    return (x + 0.1 * gradient.sign()).detach()


def zero(kfac: KFAC) -> None:
    kfac.optimizer.zero_grad()


def keep_zeros(kfac: KFAC) -> None:
    kfac.optimizer.zero_grad(set_to_none=False)


def of_model(kfac: KFAC) -> None:
    kfac.model.zero_grad()


def by_hand(kfac: KFAC) -> None:
    for parameter in kfac.model.parameters():
        parameter.grad = torch.zeros_like(parameter)


SETTINGS = {
    "usual": {},
    "ekfac": {"preconditioner": "ekfac"},
    "mc": {"estimator": Estimator(fisher_type="mc")},
}


def results(kfac: KFAC) -> list[torch.Tensor]:
    weights = [parameter.detach().clone() for parameter in kfac.model.parameters()]
    return weights + [average.clone() for average in inside.factors(kfac).values()]


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("choice", SETTINGS)
@pytest.mark.parametrize("throw", [zero, keep_zeros, of_model, by_hand])
def test_a_pass_that_is_thrown_away_does_not_count(throw, choice, caplog):
    """Oracle: a loop whose attacks compute no gradient of weights; the log tells once."""
    found = []
    for attack in (adversarial, by_autograd):
        torch.manual_seed(1)
        kfac = trainer(network(), **SETTINGS[choice])
        for step in range(STEPS):
            throw(kfac)
            x, y = batch(step)
            generator = torch.get_rng_state()
            x = attack(kfac, x, y)
            torch.set_rng_state(generator)  # labels of "mc"
            throw(kfac)
            for part, labels in zip(x.split(4), y.split(4)):  # two micro-batches, which count
                passes(kfac, part, labels)
            kfac.step()
        found.append(results(kfac))
    close(*found)
    told = [r.getMessage() for r in caplog.records if "were set to None or 0" in r.getMessage()]
    assert len(told) == 1 and "factors do not include the pass either" in told[0]


@pytest.mark.parametrize("throw", [zero, keep_zeros])
@pytest.mark.parametrize("kept", [False, True])
def test_gradients_that_autograd_returns_count_if_they_are_kept(kept, throw):
    """Oracle: a loop without the passes that are thrown away, or with plain micro-batches."""
    found = []
    for returned in (True, False):
        kfac = trainer(network())
        for step in range(STEPS):
            throw(kfac)
            x, y = batch(step)
            parameters = list(kfac.model.parameters())
            for part, labels in zip(x.split(4), y.split(4)):
                loss = F.cross_entropy(kfac.model(part), labels)
                if not returned:
                    if kept:
                        loss.backward()
                    continue
                for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
                    if kept:
                        before = 0.0 if parameter.grad is None else parameter.grad
                        parameter.grad = before + gradient
            if not kept:
                passes(kfac, x, y)
            kfac.step()
        found.append(results(kfac))
    close(*found)


@pytest.mark.parametrize("first", ["generator", "discriminator"])
def test_a_generators_pass_does_not_count_for_the_discriminator(first):
    """Oracle: the generator's pass in `no_recording`."""
    found = []
    for recorded in (True, False):
        kfac = trainer(network())
        judge, generate = kfac.model, nn.Linear(5, 5).double()
        torch.nn.init.eye_(generate.weight)
        torch.nn.init.zeros_(generate.bias)
        of_generator = torch.optim.SGD(generate.parameters(), lr=0.01)

        def generators(
            step,
            recorded=recorded,
            kfac=kfac,
            of_generator=of_generator,
            generate=generate,
            judge=judge,
        ):
            x, _ = batch(100 + step)
            of_generator.zero_grad()
            if recorded:
                F.cross_entropy(judge(generate(x)), torch.ones(8).long()).backward()
            else:
                with kfac.no_recording():
                    F.cross_entropy(judge(generate(x)), torch.ones(8).long()).backward()
            of_generator.step()

        for step in range(STEPS):
            if first == "generator":
                generators(step)
            x, _ = batch(step)
            kfac.optimizer.zero_grad()
            with torch.no_grad():
                fake = generate(x)
            for examples, label in ((x, 0), (fake, 1)):
                F.cross_entropy(judge(examples), torch.full((8,), label)).backward()
            kfac.step()
            if first == "discriminator":
                generators(step)
        found.append(results(kfac))
    close(*found)


def test_a_critic_keeps_its_passes_and_forgets_the_actors():
    """Oracle: the actor's pass in `no_recording`; only the head of the critic is zeroed."""
    found = []
    for recorded in (True, False):
        kfac = trainer(network())
        trunk, head = kfac.model[0], kfac.model[2]
        for step in range(STEPS):
            x, y = batch(step)
            kfac.optimizer.zero_grad()
            hidden = trunk(x).tanh().detach()
            if recorded:
                (-head(hidden).mean()).backward()
            else:
                with kfac.no_recording():
                    (-head(hidden).mean()).backward()
            head.zero_grad()
            F.cross_entropy(kfac.model(x), y).backward()
            kfac.step()
        found.append(results(kfac))
    close(*found)


def test_a_backward_pass_alone_can_be_left_out():
    """Oracle: a trainer without the pass; forward passes are outside of `no_recording`."""
    found = []
    for extra in (True, False):
        kfac = trainer(network())
        for step in range(STEPS):
            x, y = batch(step)
            kfac.optimizer.zero_grad()
            if extra:
                loss = F.cross_entropy(kfac.model(2 * x), y)
                with kfac.no_recording():
                    loss.backward()
                kfac.optimizer.zero_grad()
            passes(kfac, x, y)
            kfac.step()
        found.append(results(kfac))
    close(*found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_passes_that_accumulate_count(reentrant):
    """Oracle: one pass over the joined batch; passes are checkpointed, and one gradient is 0."""
    found = []
    for parts in (1, 4):
        kfac = trainer(network())
        with torch.no_grad():
            kfac.model[2].weight.zero_()  # so that the gradient of the first layer is 0
        for step in range(STEPS):
            x, y = batch(step)
            kfac.optimizer.zero_grad(set_to_none=False)
            for part, labels in zip(x.chunk(parts), y.chunk(parts)):
                part = part.requires_grad_()
                hidden = checkpoint(kfac.model[:2], part, use_reentrant=reentrant)
                (F.cross_entropy(kfac.model[2](hidden), labels) / parts).backward()
                for parameter in kfac.model.parameters():  # as clipping does
                    parameter.grad.mul_(1.0)
            kfac.step()
        found.append(results(kfac))
    close(*found)


def test_zeroing_after_record_is_told(caplog):
    """Oracle: the log."""
    kfac = trainer(network(), estimator=Estimator(fisher_type="mc"))
    x, y = batch(0)
    passes(kfac, x, y)
    outputs: Callable[..., torch.Tensor] = kfac.model(x)
    kfac.record(outputs)
    kfac.optimizer.zero_grad()
    F.cross_entropy(outputs, y).backward()
    kfac.step()
    assert "call zero_grad() before record()" in caplog.text
