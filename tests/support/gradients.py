"""Networks and steps of solvers whose factors come from the averaged gradient, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpikfac import KFAC
from support import problem

Matrix = np.ndarray


class Attending(nn.Module):
    """An attention over 5 positions of 4 numbers, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs `[batch, 3]` for inputs `[batch, 5, 4]`."""
        return self.last(self.attention(x, x, x)[0].flatten(1))


def linear() -> nn.Module:
    """Return two linear layers; the first has many more inputs than outputs."""
    return nn.Sequential(nn.Linear(20, 3), nn.Tanh(), nn.Linear(3, 3, bias=False))


def convolutional() -> nn.Module:
    """Return a convolution with groups and stride, one without, and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, stride=2, groups=2), nn.Tanh(), nn.Conv2d(4, 3, 1)),
        *(nn.Flatten(), nn.Linear(27, 3)),
    )


INPUTS = {"linear": (20,), "convolutional": (2, 7, 7), "attention": (5, 4)}
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "convolutional": convolutional,
    "attention": Attending,
}


def network(kind: str) -> nn.Module:
    """Return a network in float64, the same at every call."""
    torch.manual_seed(3)
    with torch.device("cpu"):  # the same numbers on any device
        return NETWORKS[kind]().double().to(problem.DEVICE)


def batch(kind: str, step: int) -> tuple[Tensor, Tensor]:
    """Return 12 inputs and labels; equal labels at step 3, so that gradients are of low rank."""
    generator = torch.Generator().manual_seed(step)
    with torch.device("cpu"):
        inputs = torch.randn(12, *INPUTS[kind], generator=generator).double().to(problem.DEVICE)
        labels = torch.randint(0, 3, (12,), generator=generator).to(problem.DEVICE)
    return (inputs, labels) if step != 3 else (inputs[:1].expand_as(inputs), labels[:1].expand(12))


def weights(model: nn.Module) -> Iterator[tuple[str, list[nn.Parameter], int]]:
    """Yield name, weight and bias, and the number of groups of every layer, by hand."""
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            yield f"{name}.in_proj", [module.in_proj_weight, module.in_proj_bias], 3
        elif isinstance(module, (nn.Linear, nn.Conv2d)):
            groups = getattr(module, "groups", 1)
            yield name, [p for p in (module.weight, module.bias) if p is not None], groups


def stacked(parameters: list[Tensor], groups: int) -> Matrix:
    """Return weight and bias as `[groups, outputs, inputs]`, with the bias as the last column."""
    columns = [p.detach().reshape(len(p), -1).numpy() for p in parameters]
    matrix = np.concatenate(columns, 1)
    return matrix.reshape(groups, -1, matrix.shape[1])


def in_groups(direction: Callable[[str, Matrix], Matrix]) -> Callable[[str, Matrix], Matrix]:
    """Return a direction of layers, group by group, from a direction of matrices by name."""

    def of_layer(name: str, gradient: Matrix) -> Matrix:
        return np.stack([direction(f"{name} {n}", matrix) for n, matrix in enumerate(gradient)])

    return of_layer


def by_hand(
    kind: str, steps: int, direction: Callable[[str, Matrix], Matrix], lr: float
) -> nn.Module:
    """Return a network after steps of SGD by directions of each layer's and group's gradient.

    Args:
        direction: returns the direction of a layer `[groups, outputs, inputs]`, from the layer's
            name and gradient.
    """
    model = network(kind)
    for step in range(steps):
        inputs, labels = batch(kind, step)
        model.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        for name, parameters, groups in weights(model):
            found = direction(name, stacked([p.grad for p in parameters], groups))
            matrix = torch.from_numpy(np.concatenate(list(found)))
            with torch.no_grad():
                for p in parameters:
                    width = p[0].numel()
                    p -= lr * matrix[:, :width].reshape(p.shape)
                    matrix = matrix[:, width:]
    return model


def train(kfac: KFAC, kind: str, steps: range, comm) -> None:
    """Train on the rank's shares of the batches."""
    for step in steps:
        inputs, labels = (part.chunk(comm.size)[comm.rank] for part in batch(kind, step))
        kfac.optimizer.zero_grad()
        F.cross_entropy(kfac.model(inputs), labels).backward()
        kfac.step()
