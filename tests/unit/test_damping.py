"""Damping relative to the spectrum of a layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpikfac.numerics import triangles
from support import inside, problem

INVERSES = ("inverse", problem.UNSPLIT)
FORMS = {
    "0": {"diagonal": "A"},
    "2": {"largest": 3},
    "3": {"sides": "A"},
    "4": {"sides": "G", "largest": 2},
}


def forms(layer):
    return dataclasses.replace(layer, **FORMS.get(layer.name, {}))


def network():
    """Return layers with groups, a diagonal, blocks, a single side, and whole factors."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(4, 4, 2, groups=2),
        nn.Conv1d(4, 6, 2, groups=2),
        nn.Linear(6, 5),
        nn.Linear(5, 6, bias=False),
        nn.Linear(6, 3),
        nn.Linear(3, 4),
    ).double()


def side(kfac, layer, name, group):
    """Return a group's A or G as a matrix, and for every eigenvalue the block's mean eigenvalue."""
    blocks, means = [], []
    for shape in layer.side(name):
        factor = triangles.unfold_triangle(inside.factors(kfac)[shape.name])
        if name in layer.diagonal:
            factor = factor.view(layer.groups, -1).diag_embed()
        block = factor if factor.dim() == 2 else factor[group]
        blocks.append(block)
        means += [block.trace() / len(block)] * len(block)
    if not blocks:
        order = layer.inputs if name == "A" else layer.outputs
        return torch.eye(order).double(), torch.ones(order).double()
    return torch.block_diag(*blocks), torch.stack(means)


def solved(gradient, sides, preconditioner, damping, both):
    """Return the direction by dense solves."""
    (a, a_means), (g, g_means) = sides
    if preconditioner == "eigen":
        damped = torch.kron(g, a) + damping * torch.kron(g_means, a_means).diag()
        return torch.linalg.solve(damped, gradient.reshape(-1)).view_as(gradient)
    share = damping**0.5 if preconditioner == "inverse" and both else damping
    a, g = (m + share * means.diag() for m, means in sides)
    return torch.linalg.solve(g, gradient) @ torch.linalg.inv(a)


@pytest.mark.parametrize("preconditioner", ["eigen", *INVERSES])
def test_damping_is_relative_to_mean_eigenvalues(comm, preconditioner):
    """Oracle: dense solves group by group, every block damped by the block's own mean."""
    model = network()
    damping = {"damping": 0.1, "relative_damping": True, "kl_clip": None}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = problem.kfac(
        model, optimizer, comm, preconditioner=preconditioner, rule=forms, **damping
    )
    loss = model[1](model[0](torch.randn(7, 4, 6).double())).transpose(1, 2)
    F.cross_entropy(model[2:](loss).mean(1), torch.arange(7) % 4).backward()
    kfac.precondition()
    for name, layer in ((layer.name, layer) for layer in kfac.plan.layers):
        groups = (-1, layer.outputs, layer.inputs)
        found = inside.directions(kfac)[name].view(groups)
        for group, gradient in enumerate(inside.gradients(kfac)[name].view(groups)):
            sides = [side(kfac, layer, which, group) for which in "AG"]
            if preconditioner != "eigen":  # the identity is not damped
                for which, (_, means) in zip("AG", sides):
                    means *= which in layer.sides
            expected = solved(gradient, sides, preconditioner, 0.1, layer.sides == "AG")
            torch.testing.assert_close(found[group], expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("preconditioner", ["eigen", *INVERSES])
def test_a_smaller_loss_gives_the_same_direction_but_for_its_length(comm, preconditioner):
    """Oracle: by hand: at 1/100 of the loss, G is 1/10,000 and the gradient 1/100."""

    def direction(weight):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4)).double()
        settings = {
            "damping": 0.1,
            "relative_damping": True,
            "kl_clip": None,
            "preconditioner": preconditioner,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = problem.kfac(model, optimizer, comm, **settings)
        (weight * model(torch.randn(10, 6).double()).square().mean()).backward()
        kfac.precondition()
        return inside.directions(kfac)["0"]

    torch.testing.assert_close(direction(0.01), 100 * direction(1), rtol=1e-9, atol=0)


@pytest.mark.parametrize("preconditioner", ["eigen", *INVERSES])
def test_a_factor_of_zeros_is_damped_by_the_damping_itself(comm, preconditioner):
    """Oracle: by hand: G is 0 behind weights of zeros, and the gradient is 0 too."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).double()
    nn.init.zeros_(model[1].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"damping": 0.1, "relative_damping": True, "preconditioner": preconditioner}
    kfac = problem.kfac(model, optimizer, comm, **settings)
    F.cross_entropy(model(torch.randn(8, 6).double()), torch.arange(8) % 4).backward()
    kfac.step()
    assert not inside.factors(kfac)["0.G"].any()
    assert not inside.directions(kfac)["0"].any()
    assert inside.directions(kfac)["1"].isfinite().all()
    assert not kfac.nonfinite.counts
    if preconditioner != "eigen":
        share = 0.1**0.5 if preconditioner == "inverse" else 0.1
        expected = torch.eye(5).double() / share
        torch.testing.assert_close(inside.bases(kfac)["0.G.inverse"], expected)


def test_relative_damping_needs_matrices(comm):
    model = problem.network()
    choices = {"damping": 0.1, "relative_damping": True, "preconditioner": "eva"}
    with pytest.raises(ValueError, match="preconditioner='eva' needs relative=False, not True"):
        problem.kfac(model, problem.sgd(model), comm, **choices)
