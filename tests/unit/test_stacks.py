"""Layers of equal shape that are preconditioned together, as on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpikfac import KFAC
from mpikfac.preconditioners import PRECONDITIONERS
from support import inside

STEPS = 6
OF_GRADIENT = [
    name for name, preconditioner in PRECONDITIONERS.items() if preconditioner.form.of == "gradient"
]


def network() -> nn.Module:
    """Return three equal linear layers, and two equal convolutions with groups."""
    torch.manual_seed(1)
    convolutions = [nn.Conv2d(4, 4, 3, padding=1, groups=2) for _ in range(2)]
    linear = [nn.Linear(36, 36) for _ in range(3)]
    return nn.Sequential(
        *convolutions, nn.Tanh(), nn.Flatten(), *linear, nn.Tanh(), nn.Linear(36, 3)
    ).double()


def trained(comm, preconditioner: str) -> tuple[torch.Tensor, list[int]]:
    """Return the weights after steps, and the number of layers in each stack."""
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    kfac = KFAC(model, sgd, comm, preconditioner=preconditioner, inv_update_steps=2)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(8, 4, 3, 3, generator=generator, dtype=torch.float64)
        model.zero_grad()
        F.cross_entropy(model(images), torch.arange(8) % 3).backward()
        if step == 3:  # the averages of one layer of a stack miss a batch
            model[4].weight.grad[0, 0] = torch.nan
        kfac.step()
    sizes = [len(stack.names) for stack in kfac.grafting.stacks]
    return nn.utils.parameters_to_vector(model.parameters()).detach(), sizes


@pytest.mark.parametrize("preconditioner", [*OF_GRADIENT, "newton-muon"])
def test_stacks_step_as_single_layers_do(comm, monkeypatch, preconditioner):
    """Oracle: the run without stacks; products of several matrices may round otherwise."""
    expected, alone = trained(comm, preconditioner)
    inside.stack(monkeypatch)
    found, together = trained(comm, preconditioner)
    assert (set(alone), together) == ({1}, [2, 3, 1])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
