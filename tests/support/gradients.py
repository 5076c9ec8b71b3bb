"""Networks for preconditioners with factors of the averaged gradient, and their steps in numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpikfac import KFAC
from mpikfac.numerics import orthogonal
from support import problem

Matrix = np.ndarray


class Attending(nn.Module):
    """An attention layer over 5 positions of width 4, and a linear layer."""

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


def narrow() -> nn.Module:
    """Return a depthwise convolution, and layers with one row and with one column."""
    return nn.Sequential(
        *(nn.Conv2d(2, 2, 3, stride=2, groups=2), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(18, 1), nn.Linear(1, 3, bias=False)),
    )


INPUTS = {"linear": (20,), "narrow": (2, 7, 7), "convolutional": (2, 7, 7), "attention": (5, 4)}
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "convolutional": convolutional,
    "attention": Attending,
}
FACTORED = NETWORKS | {"narrow": narrow}
"""`NETWORKS`, and a network with layers that have factors but no polar factor."""


def network(kind: str) -> nn.Module:
    """Return a network in float64, the same in every call."""
    torch.manual_seed(3)
    with torch.device("cpu"):  # the same values on any device
        return FACTORED[kind]().double().to(problem.DEVICE)


def batch(kind: str, step: int) -> tuple[Tensor, Tensor]:
    """Return 12 inputs and labels; at step 3, all labels are equal, so gradients have low rank."""
    generator = torch.Generator().manual_seed(step)
    with torch.device("cpu"):
        inputs = torch.randn(12, *INPUTS[kind], generator=generator).double().to(problem.DEVICE)
        labels = torch.randint(0, 3, (12,), generator=generator).to(problem.DEVICE)
    return (inputs, labels) if step != 3 else (inputs[:1].expand_as(inputs), labels[:1].expand(12))


def weights(model: nn.Module) -> Iterator[tuple[str, list[nn.Parameter], int]]:
    """Yield each layer's name, its weight and bias, and its number of groups, set by hand."""
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
    """Return a function from a layer's gradient to its direction, from one for named matrices."""

    def of_layer(name: str, gradient: Matrix) -> Matrix:
        return np.stack([direction(f"{name} {n}", matrix) for n, matrix in enumerate(gradient)])

    return of_layer


class Momenta:
    """Nesterov momenta of matrices, by name: `(1 - mu) g + mu M` with means M that start at 0."""

    def __init__(self, momentum: float) -> None:
        self.momentum, self.means = momentum, {}

    def __call__(self, name: str, g: Matrix) -> Matrix:
        mu = self.momentum
        self.means[name] = mu * self.means.get(name, 0) + (1 - mu) * g
        return mu * self.means[name] + (1 - mu) * g


def polar(matrix: Matrix) -> Matrix:
    """Return `U f(S) V'` from the singular values, where f are `orthogonalised`'s polynomials."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / (values**8).sum() ** (1 / 8) / orthogonal.MARGIN**0.5
    for first, third, fifth in orthogonal.STEPS:
        values = first * values + third * values**3 + fifth * values**5
    return left @ np.diag(values) @ right


class OfAdamsLength:
    """Compute directions of layers with the length of Adam's step for the gradient.

    The groups of a layer are separate matrices, but share a single length, that of the layer.

    Args:
        direction: returns the direction of a matrix, from its name and gradient.
    """

    def __init__(self, direction: Callable[[str, Matrix], Matrix]) -> None:
        self.direction, self.squares, self.counts = in_groups(direction), {}, {}

    def __call__(self, name: str, gradient: Matrix) -> Matrix:
        t = self.counts[name] = self.counts.get(name, 0) + 1
        self.squares[name] = 0.999 * self.squares.get(name, 0) + 0.001 * gradient**2
        step = gradient / (np.sqrt(self.squares[name] / (1 - 0.999**t)) + 1e-8)
        found = self.direction(name, gradient)
        return found * np.linalg.norm(step) / np.linalg.norm(found)


def by_hand(
    kind: str,
    steps: int,
    direction: Callable[[str, Matrix], Matrix],
    lr: float,
    see: Callable[[nn.Module, Tensor], None] = lambda model, inputs: None,
) -> nn.Module:
    """Return a network after steps of SGD along directions of each layer's and group's gradient.

    Args:
        direction: returns the direction of a layer `[groups, outputs, inputs]`, from the layer's
            name and gradient.
        see: called with the network and the inputs before each step.
    """
    model = network(kind)
    for step in range(steps):
        inputs, labels = batch(kind, step)
        see(model, inputs)
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


@torch.no_grad()
def rows(model: nn.Module, x: Tensor) -> dict[str, Matrix]:
    """Return the inputs of every layer, `[groups, vectors, inputs]`, with a 1 for the bias."""
    found = {}
    if isinstance(model, Attending):
        attention = model.attention
        q, k, v = F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (2, 2)).transpose(1, 2) for each in (q, k, v))  # of 2 heads
        heads = ((q @ k.mT / 2**0.5).softmax(-1) @ v).transpose(1, 2).flatten(-2)
        found["attention.in_proj"] = x.flatten(0, 1).expand(3, -1, -1)
        found["attention.out_proj"] = heads.flatten(0, 1)[None]
        found["last"] = attention.out_proj(heads).flatten(1)[None]
    else:
        for name, module in model.named_children():
            if isinstance(module, nn.Conv2d):
                patches = F.unfold(x, module.kernel_size, stride=module.stride)
                columns = patches.unflatten(1, (module.groups, -1)).permute(1, 0, 3, 2)
                found[name] = columns.flatten(1, 2)
            elif isinstance(module, nn.Linear):
                found[name] = x[None]
            x = module(x)
    biased = {name for name, parameters, _ in weights(model) if len(parameters) == 2}
    one = {n: F.pad(each, (0, 1), value=1.0) if n in biased else each for n, each in found.items()}
    return {name: each.numpy() for name, each in one.items()}


def train(kfac: KFAC, kind: str, steps: range, comm) -> None:
    """Train on the rank's shards of the batches."""
    for step in steps:
        inputs, labels = (part.chunk(comm.size)[comm.rank] for part in batch(kind, step))
        kfac.optimizer.zero_grad()
        F.cross_entropy(kfac.model(inputs), labels).backward()
        kfac.step()


def of_words() -> nn.Module:
    """Return a network with an embedding and a normalisation."""
    torch.manual_seed(0)
    layers = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(12, 3)
    return nn.Sequential(*layers).double()


def losses_of_words(kfac: KFAC, steps: int) -> list[float]:
    """Train the network from `of_words` on a batch; return the losses."""
    words, labels = torch.randint(7, (12, 3)), torch.randint(3, (12,))
    losses = []
    for _ in range(steps):
        kfac.optimizer.zero_grad()
        loss = F.cross_entropy(kfac.model(words), labels)
        loss.backward()
        losses.append(loss.item())
        kfac.step()
    return losses
