"""SOAP: Adam's step in the eigenbases of the averaged gradient's moments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from mpikfac import KFAC, Damping, Estimator, Length
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
    length = Length("rotated", momentum=MOMENTUM, trust=math.inf)
    usual = {"damping": Damping(relative=DAMPING), "estimator": Estimator(decay=DECAY)}
    usual |= {"length": length, "basis_every": EVERY}
    return KFAC(model, sgd, comm, strategy, solver="soap", **usual | choices)


def vector(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("damping", [1e-3, 0.3])
@pytest.mark.parametrize("kind", gradients.NETWORKS)
def test_soap_steps_as_the_formulas_do(comm, kind, damping):
    """Oracle: the formulas in numpy, with own eigenvectors and bias corrections, for 20 steps."""
    expected = gradients.by_hand(kind, STEPS, in_groups(ByHand(damping)), RATE)
    kfac = soap(gradients.network(kind), comm, damping=Damping(relative=damping))
    gradients.train(kfac, kind, range(STEPS), comm)
    torch.testing.assert_close(vector(kfac.model), vector(expected), rtol=1e-8, atol=1e-8)


def test_soap_takes_the_published_values_by_default(comm):
    """Oracle: betas of 0.95 [Vyas et al. 2024]; factors at every step; the damping is Shampoo's."""
    model = gradients.network("linear")
    usual = KFAC(model, torch.optim.SGD(model.parameters(), lr=RATE), comm, solver="soap")
    settings = inside.settings(usual)
    assert settings.length == Length("rotated", momentum=0.95, precision="float32")
    assert (settings.damping, settings.factor_every) == (Damping(relative=1e-3), 1)
