"""Factors, preconditioned gradients and the KL clip match stored values of kfac-pytorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpikfac.numerics import triangles
from support import inside, problem

STORED = Path(__file__).parents[1] / "golden" / "kfac_pytorch.npz"
CASES = [
    (world, scaling, preconditioner, clip)
    for world in (1, 2)
    for scaling in ("main", "sc20")
    for preconditioner in ("eigen", "inverse")
    for clip in ("0.001", "none")
    if world == 1 or clip != "none"
]


class Net(nn.Module):
    """The net of the stored numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 3, (3, 2), stride=(2, 1), padding=(1, 0))
        self.fc = nn.Linear(36, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return self.fc(F.relu(self.conv2(x), inplace=True).flatten(1))


def close(found: torch.Tensor, stored: np.ndarray) -> None:
    torch.testing.assert_close(
        found.cpu(), torch.from_numpy(np.array(stored)), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(("world", "scaling", "preconditioner", "clip"), CASES)
def test_equals_kfac_pytorch(
    comm, world: int, scaling: str, preconditioner: str, clip: str
) -> None:
    """Oracle: three stored steps of kfac-pytorch at 1 and 2 ranks, to 1e-9."""
    if comm.size < world:
        pytest.skip(f"needs {world} ranks")
    sub = comm.Split(0 if comm.rank < world else 1, comm.rank)
    if comm.rank >= world:
        return
    stored = np.load(STORED)
    inputs = f"inputs/world{world}"
    net = Net().double()
    for name, parameter in net.named_parameters():
        parameter.data = torch.from_numpy(stored[f"{inputs}/weights/{name}"]).to(problem.DEVICE)
    kfac = problem.kfac(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        sub,
        damping=0.001,
        inv_update_steps=1,
        kl_clip=None if clip == "none" else float(clip),
        preconditioner="eigen" if preconditioner == "eigen" else problem.UNSPLIT,
        normalization="kfac-pytorch" if scaling == "main" else "sc20",
        initial_factor="identity",
    )
    x, y = (
        torch.from_numpy(stored[f"{inputs}/{name}"][:, sub.rank]).to(problem.DEVICE)
        for name in "xy"
    )
    for step in range(3):
        net.zero_grad()
        F.cross_entropy(net(x[step]), y[step]).backward()
        kfac.step()
        at = f"world{world}/{scaling}/decay0.95/{preconditioner}/klclip_{clip}/step{step + 1}"
        for layer in ("conv1", "conv2", "fc"):
            for factor in "AG":
                found = triangles.unfold_triangle(inside.factors(kfac)[f"{layer}.{factor}"])
                close(found, stored[f"{at}/{factor}/{layer}"])
        for name, parameter in net.named_parameters():
            close(parameter.grad, stored[f"{at}/pgrad/{name}"])
        if clip != "none":
            close(kfac.kl_scale[0], stored[f"{at}/kl_scale"])
