"""Shampoo, a preconditioner whose factors come from the averaged gradient."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import (
    KFAC,
    AdamGrafting,
    Compression,
    Coverage,
    Damping,
    Estimator,
    Int8,
    MemOpt,
    NoGrafting,
    Refresh,
    Strategy,
    Transport,
)
from mpikfac.lab import LocalSGD
from mpikfac.layers import KINDS, NORMS
from mpikfac.preconditioners import Shampoo
from support import gradients, inside
from support.gradients import in_groups

STEPS, RATE, DECAY, EVERY, DAMPING = 20, 0.05, 0.9, 3, 1e-3


class ByHand:
    """Shampoo's direction of a matrix in numpy; roots are made every `EVERY` steps.

    Args:
        relative: the damping is a share of the mean eigenvalue.
    """

    def __init__(self, exponent: float, relative: bool = False) -> None:
        self.exponent, self.relative = exponent, relative
        self.left, self.right, self.roots, self.counts = {}, {}, {}, {}

    def __call__(self, name: str, g: np.ndarray) -> np.ndarray:
        t = self.counts[name] = self.counts.get(name, 0) + 1
        self.left[name] = DECAY * self.left.get(name, 0) + (1 - DECAY) * g @ g.T
        self.right[name] = DECAY * self.right.get(name, 0) + (1 - DECAY) * g.T @ g
        if t % EVERY == 1:
            corrected = [side[name] / (1 - DECAY**t) for side in (self.left, self.right)]
            self.roots[name] = [self.root(matrix) for matrix in corrected]
        left, right = self.roots[name]
        return left @ g @ right

    def root(self, matrix: np.ndarray) -> np.ndarray:
        unit = np.trace(matrix) / len(matrix) if self.relative else 1.0
        values, vectors = np.linalg.eigh(matrix + DAMPING * unit * np.eye(len(matrix)))
        return vectors @ np.diag(values**-self.exponent) @ vectors.T


class KLByHand(ByHand):
    """KL-Shampoo's direction of a matrix in numpy."""

    def __call__(self, name: str, g: np.ndarray) -> np.ndarray:
        t = self.counts[name] = self.counts.get(name, 0) + 1
        outputs, inputs = g.shape
        left, right = self.roots.get(name, (np.eye(outputs), np.eye(inputs)))
        moment_left = g @ right @ right @ g.T / inputs
        moment_right = g.T @ left @ left @ g / outputs
        self.left[name] = DECAY * self.left.get(name, 0) + (1 - DECAY) * moment_left
        self.right[name] = DECAY * self.right.get(name, 0) + (1 - DECAY) * moment_right
        if t % EVERY == 1:
            corrected = [side[name] / (1 - DECAY**t) for side in (self.left, self.right)]
            self.roots[name] = [self.root(matrix) for matrix in corrected]
        left, right = self.roots[name]
        return left @ g @ right


def shampoo(
    model, comm, *, preconditioner="shampoo", strategy=None, relative=False, rate=RATE, **choices
):
    sgd = torch.optim.SGD(model.parameters(), lr=rate)
    damping = Damping(**{"relative" if relative else "value": DAMPING})
    usual = {
        "grafting": NoGrafting(),
        "estimator": Estimator(factor_decay=DECAY),
        "inv_update_steps": EVERY,
    }
    return KFAC(
        model,
        sgd,
        comm,
        strategy,
        preconditioner=preconditioner,
        damping=damping,
        **usual | choices,
    )


def vector(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("exponent", [0.25, 0.5])
@pytest.mark.parametrize("kind", gradients.FACTORED)
def test_shampoo_steps_as_the_formulas_do(comm, kind, exponent, relative):
    """Oracle: the formulas in numpy, with own eigenvalues and bias corrections, for 20 steps."""
    rate = RATE if exponent == 0.25 else RATE / 50  # directions grow as gradients shrink
    expected = gradients.by_hand(kind, STEPS, in_groups(ByHand(exponent, relative)), rate)
    preconditioner = Shampoo(exponent=exponent)
    kfac = shampoo(
        gradients.network(kind), comm, preconditioner=preconditioner, relative=relative, rate=rate
    )
    gradients.train(kfac, kind, range(STEPS), comm)
    torch.testing.assert_close(vector(kfac.model), vector(expected), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("kind", gradients.FACTORED)
def test_kl_shampoo_steps_as_the_formulas_do(comm, kind, relative):
    """Oracle: the formulas in numpy, with moments whitened by the roots before, for 20 steps."""
    expected = gradients.by_hand(kind, STEPS, in_groups(KLByHand(0.5, relative)), RATE / 50)
    network, settings = gradients.network(kind), {"relative": relative, "rate": RATE / 50}
    kfac = shampoo(network, comm, preconditioner="kl-shampoo", **settings)
    gradients.train(kfac, kind, range(STEPS), comm)
    torch.testing.assert_close(vector(kfac.model), vector(expected), rtol=1e-8, atol=1e-9)


def test_shampoo_takes_the_momentum_and_the_length_of_adams_step_by_default(comm):
    """Oracle: by hand: the direction of Nesterov's mean, as long as Adam's step of the gradient."""
    momentum, trust = 0.9, 8.0
    hand, means, squares = ByHand(0.25, True), {}, {}

    def direction(name, g):
        hand(name, g)
        t, (left, right) = hand.counts[name], hand.roots[name]
        means[name] = momentum * means.get(name, 0) + (1 - momentum) * g
        mean = momentum * means[name] + (1 - momentum) * g
        squares[name] = 0.999 * squares.get(name, 0) + 0.001 * g**2
        step = g / (np.sqrt(squares[name] / (1 - 0.999**t)) + 1e-8)
        found = left @ mean @ right
        return found * np.linalg.norm(step) / np.linalg.norm(found)

    expected = gradients.by_hand("linear", STEPS, in_groups(direction), RATE)
    grafting = AdamGrafting(orthogonalize=False, momentum=momentum, max_trust_ratio=1e9)
    kfac = shampoo(gradients.network("linear"), comm, relative=True, grafting=grafting)
    gradients.train(kfac, "linear", range(STEPS), comm)
    torch.testing.assert_close(vector(kfac.model), vector(expected), rtol=1e-8, atol=1e-9)
    model = gradients.network("linear")
    usual = KFAC(
        model, torch.optim.SGD(model.parameters(), lr=RATE), comm, preconditioner="shampoo"
    )
    assert inside.settings(usual).grafting == AdamGrafting(
        orthogonalize=False, max_trust_ratio=trust
    )
    assert inside.settings(usual).damping == Damping(relative=1e-3)
    assert inside.settings(usual).factor_update_steps == 1


def test_no_hook_and_no_statistics(comm):
    """Oracle: the hooks of the model, and the plan's memory and messages."""
    model = gradients.network("convolutional")
    kfac = shampoo(model, comm)
    gradients.train(kfac, "convolutional", range(2), comm)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    memory = kfac.plan.memory(0)
    assert memory["statistics"] == 0 and memory["averages"] > 0
    plan = mpikfac.make_plan(kfac.plan.layers, 4, Strategy(MemOpt()), preconditioner="shampoo")
    stages = {m.stage for rank in range(4) for m in plan.messages(rank, True, True)}
    assert stages == {"reduce gradients", "publish gradients"}


def test_blocks_and_diagonals_are_of_the_gradients_rows_and_columns(comm):
    """Oracle: the formulas in numpy on blocks of columns, and on sums of squares of the rows."""

    def rule(layer):
        return replace(layer, largest=11, diagonal="G")

    hands = [ByHand(0.25) for _ in range(2)]
    rows: dict[str, list[np.ndarray]] = {}

    def direction(name, g):
        blocks = [g] if g.shape[1] < 11 else [g[:, :10], g[:, 10:]]  # of 21 columns
        for hand, block in zip(hands, blocks):
            hand(name, block)
        t = hands[0].counts[name]
        if t % EVERY == 1:
            squares = sum(np.diagonal(hand.left[name]) for hand in hands[: len(blocks)])
            rows[name] = (squares / (1 - DECAY**t) + DAMPING) ** -0.25
        found = [block @ hand.roots[name][1] for hand, block in zip(hands, blocks)]
        return rows[name][:, None] * np.concatenate(found, 1)

    expected = gradients.by_hand("linear", STEPS, in_groups(direction), RATE)
    kfac = shampoo(gradients.network("linear"), comm, coverage=Coverage(rule=rule))
    gradients.train(kfac, "linear", range(STEPS), comm)
    torch.testing.assert_close(vector(kfac.model), vector(expected), rtol=1e-8, atol=1e-9)


def test_a_layer_without_a_gradient_does_not_move(comm):
    """Oracle: by hand: a factor of zeros has a root, and the direction of no gradient is none."""
    model = gradients.network("linear")
    before = copy.deepcopy(model[0].weight.data)
    kfac = shampoo(model, comm, relative=True)
    for _ in range(2):
        kfac.optimizer.zero_grad()
        F.cross_entropy(model[2](torch.ones(3, 3).double()), torch.arange(3)).backward()
        kfac.step()
    assert torch.equal(model[0].weight, before)
    assert vector(model).isfinite().all()


def test_a_gradient_that_is_not_finite_stays_out_of_the_factors(comm):
    """Oracle: the state before; the other layer's factors change."""
    model = gradients.network("linear")
    kfac = shampoo(model, comm)
    gradients.train(kfac, "linear", range(2), comm)
    before = {name: copy.deepcopy(value) for name, value in kfac.state_dict().items()}
    kfac.optimizer.zero_grad()
    inputs, labels = gradients.batch("linear", 2)
    F.cross_entropy(model(inputs), labels).backward()
    model[0].weight.grad[0, 0] = torch.nan
    kfac.step()
    now = kfac.state_dict()
    kind = "kfac/gradient-factors/"
    assert torch.equal(now[f"{kind}0.A"], before[f"{kind}0.A"])
    assert not torch.equal(now[f"{kind}2.A"], before[f"{kind}2.A"])


def test_a_scaled_loss_gives_the_same_steps(comm):
    """Oracle: the run without a scale; a scale of 2 ** 10 is exact."""
    plain, scaled = (shampoo(gradients.network("linear"), comm) for _ in range(2))
    gradients.train(plain, "linear", range(4), comm)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        inputs, labels = gradients.batch("linear", step)
        scaled.optimizer.zero_grad()
        scaler.scale(F.cross_entropy(scaled.model(inputs), labels)).backward()
        scaled.step(scaler)
    assert torch.equal(vector(plain.model), vector(scaled.model))


def test_embeddings_and_norms_have_diagonals(comm):
    """Oracle: the loss falls, and numbers stay finite; shapes are those of K-FAC's factors."""
    model = gradients.of_words()
    kfac = shampoo(model, comm, coverage=Coverage(covers={**KINDS, **NORMS}), relative=True)
    losses = gradients.losses_of_words(kfac, 20)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("choices", "needs"),
    [
        ({"estimator": Estimator(fisher_type="mc")}, "fisher_type='empirical'"),
        ({"estimator": Estimator(initial_factor="identity")}, "initial_factor='first'"),
        ({"grafting": AdamGrafting()}, "grafting.orthogonalize=False"),
        (
            {"strategy": Strategy(MemOpt(), transport=Transport(reduce_factors_at="inverses"))},
            "transport.reduce_factors_at='factors'",
        ),
        (
            {"strategy": Strategy(MemOpt(), transport=Transport(packing="square"))},
            "packing='triangle'",
        ),
        (
            {"strategy": Strategy(MemOpt(factor_reduction="local"))},
            "assignment.factor_reduction='allreduce' or 'reduce_scatter'",
        ),
        (
            {"strategy": Strategy(MemOpt(), compression=Compression(factors=Int8()))},
            "compression.factors=None",
        ),
        ({"strategy": Strategy(MemOpt(), refresh=Refresh(tolerance=0.1))}, "tolerance=0"),
        ({"strategy": Strategy(MemOpt(), sync=LocalSGD())}, "sync.local_steps=False"),
        (
            {"strategy": Strategy(MemOpt(colocate_factors=False, shard_optimizer=True))},
            "colocate_factors=True",
        ),
    ],
)
def test_choices_without_sense_are_refused(comm, choices, needs):
    """Oracle: the text of the error names the need."""
    with pytest.raises(ValueError, match="preconditioner='shampoo' needs .*") as refusal:
        shampoo(gradients.network("linear"), comm, **choices)
    assert needs in str(refusal.value) and "\n" not in str(refusal.value)


def test_factors_of_a_run_are_of_one_kind(comm):
    """Oracle: the text of the error."""

    def rule(layer):
        return replace(layer, preconditioner="shampoo")

    with pytest.raises(ValueError, match="layer '0': preconditioner='shampoo' needs a run"):
        shampoo(
            gradients.network("linear"), comm, preconditioner="eigen", coverage=Coverage(rule=rule)
        )


def test_an_exponent_is_positive():
    """Oracle: the text of the error."""
    with pytest.raises(ValueError, match="exponent=0"):
        Shampoo(exponent=0)


def test_the_optimizer_of_a_script_takes_the_preconditioners_usual_values(comm):
    """Oracle: the values of the preconditioner; the momentum is that of the optimizer."""
    kfac = mpikfac.KFACOptimizer(
        gradients.network("linear"), comm=comm, preconditioner="shampoo"
    ).trainer
    assert not inside.settings(kfac).grafting.orthogonalize
    assert inside.settings(kfac).at(0).momentum == 0.9
