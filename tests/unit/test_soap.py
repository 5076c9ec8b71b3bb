"""SOAP: Adam's step in the eigenbases of the averaged gradient's moments."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpikfac import (
    KFAC,
    AdamGrafting,
    AdamInEigenbases,
    Coverage,
    Damping,
    Estimator,
    MemOpt,
    Refresh,
    Strategy,
)
from mpikfac.layers import KINDS, NORMS
from support import gradients, inside
from support.gradients import in_groups

STEPS, RATE, DECAY, EVERY, DAMPING, MOMENTUM, OF_SQUARES = 20, 0.02, 0.9, 3, 1e-3, 0.9, 0.95


class ByHand:
    """SOAP's step of a matrix in numpy; eigenbases are made every `EVERY` steps."""

    def __init__(self, damping: float = DAMPING) -> None:
        self.damping, self.left, self.right, self.bases = damping, {}, {}, {}
        self.squares, self.momenta, self.counts = {}, {}, {}

    def __call__(self, name: str, g: np.ndarray) -> np.ndarray:
        t = self.counts[name] = self.counts.get(name, 0) + 1
        self.left[name] = DECAY * self.left.get(name, 0) + (1 - DECAY) * g @ g.T
        self.right[name] = DECAY * self.right.get(name, 0) + (1 - DECAY) * g.T @ g
        if t % EVERY == 1:
            self.bases[name] = [self.basis(side[name]) for side in (self.left, self.right)]
        (left, small_rows), (right, small_columns) = self.bases[name]
        squares = (left.T @ g @ right) ** 2
        squares[:, small_columns] = means(squares[:, small_columns], 1)
        squares[small_rows] = means(squares[small_rows], 0)
        squares += self.damping**2 * squares.mean()
        self.squares[name] = OF_SQUARES * self.squares.get(name, 0) + (1 - OF_SQUARES) * squares
        self.momenta[name] = MOMENTUM * self.momenta.get(name, 0) + (1 - MOMENTUM) * g
        mean = MOMENTUM * self.momenta[name] + (1 - MOMENTUM) * g
        root = np.sqrt(self.squares[name] / (1 - OF_SQUARES**t)) + 1e-8
        return left @ ((left.T @ mean @ right) / root) @ right.T

    def basis(self, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return eigenvectors, and the places of eigenvalues of at most the damping."""
        values, vectors = np.linalg.eigh(matrix)
        return vectors, values <= self.damping * np.trace(matrix) / len(matrix)


def means(squares: np.ndarray, axis: int) -> np.ndarray:
    return squares.mean(axis, keepdims=True) if squares.size else squares


def soap(model, comm, strategy=None, **choices):
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    grafting = AdamInEigenbases(momentum=MOMENTUM, max_trust_ratio=math.inf)
    usual = {"damping": Damping(relative=DAMPING), "estimator": Estimator(factor_decay=DECAY)}
    usual |= {"grafting": grafting, "inv_update_steps": EVERY}
    return KFAC(model, sgd, comm, strategy, preconditioner="soap", **usual | choices)


def vector(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("damping", [1e-3, 0.3])
@pytest.mark.parametrize("kind", gradients.FACTORED)
def test_soap_steps_as_the_formulas_do(comm, kind, damping):
    """Oracle: the formulas in numpy, with own eigenvectors and bias corrections, for 20 steps."""
    expected = gradients.by_hand(kind, STEPS, in_groups(ByHand(damping)), RATE)
    kfac = soap(gradients.network(kind), comm, damping=Damping(relative=damping))
    gradients.train(kfac, kind, range(STEPS), comm)
    torch.testing.assert_close(vector(kfac.model), vector(expected), rtol=1e-8, atol=1e-8)


def test_soap_takes_the_published_values_by_default(comm):
    """Oracle: betas of 0.95 [SOAP]; factors at every step; the damping is Shampoo's."""
    model = gradients.network("linear")
    usual = KFAC(model, torch.optim.SGD(model.parameters(), lr=RATE), comm, preconditioner="soap")
    settings = inside.settings(usual)
    assert settings.grafting == AdamInEigenbases(momentum=0.95)
    assert settings.matmul_precision == "float32"
    assert (settings.damping, settings.factor_update_steps) == (Damping(relative=1e-3), 1)


def test_steps_do_not_depend_on_the_basis_of_a_space_without_gradients(comm):
    """Oracle: the run without a rotation of the basis by chance, which a decomposition may give.

    The first R has rank 3 of 21. Gradients leave its range before the next refresh.
    """
    ends = []
    for turns in (False, True):
        kfac = soap(gradients.network("linear"), comm, inv_update_steps=6)
        gradients.train(kfac, "linear", range(1), comm)
        bases = inside.bases(kfac)
        null = bases["0.A.small"].bool()
        assert null.sum() == 21 - 3
        if turns:
            rotation = torch.linalg.qr(torch.randn(18, 18).to(bases.flat)).Q
            bases["0.A.vectors"][:, null] = bases["0.A.vectors"][:, null] @ rotation
        gradients.train(kfac, "linear", range(1, 6), comm)
        ends.append(vector(kfac.model))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-11)


def test_rounding_in_a_space_without_gradients_gives_no_step(comm):
    """Oracle: by hand: the change of the weight lies in the range of the only gradient."""
    model = gradients.network("linear")
    before = model[0].weight.detach().clone()
    kfac = soap(model, comm, grafting=AdamInEigenbases(momentum=0.0, max_trust_ratio=math.inf))
    inputs, labels = gradients.batch("linear", 0)
    F.cross_entropy(model(inputs[:1]), labels[:1]).backward()
    kfac.step()
    change, direction = model[0].weight.detach() - before, inputs[0] / inputs[0].norm()
    rest = change - torch.outer(change @ direction, direction)
    assert change.norm() > 0.01 and rest.norm() < 1e-10


def test_a_layer_without_a_gradient_does_not_move(comm):
    """Oracle: by hand: eigenvalues are 0, and the step of no gradient is none."""
    model = gradients.network("linear")
    before = model[0].weight.detach().clone()
    kfac = soap(model, comm)
    for _ in range(2):
        kfac.optimizer.zero_grad()
        F.cross_entropy(model[2](torch.ones(3, 3).to(before)), torch.arange(3)).backward()
        kfac.step()
    assert torch.equal(model[0].weight, before)
    assert vector(model).isfinite().all()


def test_a_layer_without_bases_does_not_move(comm):
    """Oracle: by hand: factors of the gradient overflow; the averages of squares stay finite."""
    model = gradients.network("linear")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    kfac = soap(model, comm)
    inputs, labels = gradients.batch("linear", 0)
    F.cross_entropy(model(inputs), labels).backward()
    model[0].weight.grad *= 1e200
    kfac.step()
    moved = [not torch.equal(now, then) for now, then in zip(model.parameters(), before)]
    assert moved == [False, False, True]
    assert all(torch.as_tensor(item).isfinite().all() for item in rotated_items(kfac).values())


def rotated_items(kfac) -> dict[str, torch.Tensor]:
    return {name: item for name, item in kfac.state_dict().items() if "kfac/rotated/" in name}


def test_a_gradient_that_is_not_finite_stays_out_of_the_averages(comm):
    """Oracle: the state before; the other layer's averages change."""
    model = gradients.network("linear")
    kfac = soap(model, comm)
    gradients.train(kfac, "linear", range(2), comm)
    before = copy.deepcopy(rotated_items(kfac))
    kfac.optimizer.zero_grad()
    inputs, labels = gradients.batch("linear", 2)
    F.cross_entropy(model(inputs), labels).backward()
    model[0].weight.grad[0, 0] = torch.nan
    kfac.step()
    same = {name: torch.equal(item, before[name]) for name, item in rotated_items(kfac).items()}
    of_first = {f"kfac/rotated/0{end}": True for end in ("", "#")}
    assert same == of_first | {f"kfac/rotated/2{end}": False for end in ("", "#")}


def test_a_step_is_at_most_a_share_of_the_weights(comm):
    """Oracle: the norms by hand; a small trust bounds every layer."""
    model = gradients.network("convolutional")
    norms = [gradients.stacked(p, groups) for _, p, groups in gradients.weights(model)]
    before = [np.linalg.norm(matrix) for matrix in norms]
    kfac = soap(model, comm, grafting=AdamInEigenbases(momentum=MOMENTUM, max_trust_ratio=0.01))
    gradients.train(kfac, "convolutional", range(1), comm)
    moves = [
        np.linalg.norm(gradients.stacked(p, groups) - matrix)
        for (_, p, groups), matrix in zip(gradients.weights(model), norms)
    ]
    np.testing.assert_allclose(moves, [RATE * 0.01 * norm for norm in before], rtol=1e-10)


def test_uncovered_parameters_take_adams_step(comm):
    """Oracle: torch's Adam with a beta of 0.95, for the scale of a normalisation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double()
    kfac = soap(model, comm, grafting=AdamInEigenbases(momentum=0.0))
    other = copy.deepcopy(model)
    adam = torch.optim.Adam(other[1].parameters(), lr=RATE, betas=(0.0, 0.95))
    for _ in range(4):
        inputs, labels = torch.randn(6, 4).double(), torch.arange(6) % 3
        other[0].load_state_dict(model[0].state_dict())
        for one in (model, other):
            one.zero_grad()
            F.cross_entropy(one(inputs), labels).backward()
        kfac.step()
        adam.step()
        torch.testing.assert_close(model[1].state_dict(), other[1].state_dict())


def test_embeddings_and_norms_have_diagonals(comm):
    """Oracle: the loss falls, and numbers stay finite; shapes are those of K-FAC's factors."""
    model = gradients.of_words()
    kfac = soap(model, comm, coverage=Coverage(covers={**KINDS, **NORMS}))
    losses = gradients.losses_of_words(kfac, 40)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("choices", "needs"),
    [
        (
            {"grafting": AdamGrafting(orthogonalize=False)},
            "preconditioner='soap' needs grafting='adam-in-eigenbases', not 'adam'",
        ),
        ({"damping": 0.1}, "preconditioner='soap' needs relative=True, not False"),
        (
            {"estimator": Estimator(fisher_type="mc")},
            "preconditioner='soap' needs fisher_type='empirical'",
        ),
        (
            {"strategy": Strategy(MemOpt(), refresh=Refresh(tolerance=0.1))},
            "preconditioner='soap' needs refresh.tolerance=0",
        ),
        (
            {"preconditioner": "eigen"},
            "grafting='adam-in-eigenbases' needs preconditioner='soap', not 'eigen'",
        ),
        (
            {"preconditioner": "normuon"},
            "preconditioner='normuon' needs grafting.normalize_rows=True, not False",
        ),
    ],
)
def test_choices_without_sense_are_refused(comm, choices, needs):
    """Oracle: the text of the error names the need."""
    usual = {"preconditioner": "soap", "grafting": AdamInEigenbases(momentum=0.0)} | choices
    model = gradients.network("linear")
    with pytest.raises(ValueError, match=needs) as refusal:
        KFAC(model, torch.optim.SGD(model.parameters(), lr=RATE), comm, **usual)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("first", "second"), [("shampoo", "soap"), ("soap", "shampoo")])
def test_another_preconditioner_takes_momenta_and_begins_averages_anew(comm, first, second):
    """Oracle: the items; a normalisation is uncovered, so both lengths have averages of Adam."""
    torch.manual_seed(0)
    before, after = (
        KFAC(
            *(model, torch.optim.SGD(model.parameters(), lr=RATE), comm),
            preconditioner=preconditioner,
            grafting={
                "soap": AdamInEigenbases(momentum=MOMENTUM),
                "shampoo": AdamGrafting(orthogonalize=False, momentum=MOMENTUM),
            }[preconditioner],
        )
        for preconditioner in (first, second)
        for model in [nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double()]
    )
    for _ in range(2):
        F.cross_entropy(before.model(torch.randn(6, 4).double()), torch.arange(6) % 3).backward()
        before.step()
    state = copy.deepcopy(before.state_dict())
    after.load_state_dict(state)
    for name, item in after.state_dict().items():
        kind = name.split("/")[1]
        assert kind != "momentum" or torch.equal(item, state[name])
        assert kind not in ("graft", "rotated") or not item.any()
