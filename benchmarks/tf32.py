"""Measure how TF32 changes factors, inverses and directions of a ResNet-20.

    python tests/emulated/build.py
    PYTHONPATH=tests:tests/emulated OMP_NUM_THREADS=1 python benchmarks/tf32.py --preconditioner
    inverse

TF32 rounds the operands of products to mantissas of 10 bits, and accumulates in float32. The
emulated GPU runs the kernels that a GPU would run; here the operands of some kernels are rounded
first.

The network learns 8x8 digits, enlarged to 32x32, for some steps in float32. Results for one more
batch are then compared with float64: the averages of the factors, the damped inverses (or
eigenvectors converted to inverses), and the directions of the exact gradient.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mpikfac
from mpikfac.layers.convolution import autocorrelation
from mpikfac.numerics import unfold_triangle
from mpikfac_apps.problems import datasets, models
from support import inside

CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")
DAMPINGS = (1.0, 0.1, 0.01, 0.001)  # relative; 0.1 is the default
Numbers = dict[str, dict[str, Tensor]]


class Rounding(TorchDispatchMode):
    """Round the operands of some operators to TF32 inside."""

    def __init__(self, operators: tuple[str, ...]) -> None:
        super().__init__()
        self.operators = operators

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function.name().partition(".")[0] in self.operators:
            args = [rounded(one) if isinstance(one, Tensor) else one for one in args]
        return function(*args, **(kwargs or {}))


def rounded(x: Tensor) -> Tensor:
    """Return `x` with mantissas of 10 bits, rounded to the nearest, ties away from zero."""
    if x.dtype != torch.float32:
        return x
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@contextmanager
def in_statistics(operators: tuple[str, ...]) -> Iterator[None]:
    """Round the operands of operators in autocorrelations of input factors inside."""
    exact = autocorrelation._correlate

    def correlate(*args: Any, **kwargs: Any) -> Tensor:
        with Rounding(operators):
            return exact(*args, **kwargs)

    autocorrelation._correlate = correlate
    try:
        yield
    finally:
        autocorrelation._correlate = exact


WAYS: dict[str, Callable[[], Any]] = {
    "float32": nullcontext,
    "TF32 in the factors' convolutions": lambda: in_statistics(CONVOLUTIONS),
    "TF32 in all convolutions (torch's default)": lambda: Rounding(CONVOLUTIONS),
    "TF32 in convolutions and products": lambda: Rounding(CONVOLUTIONS + PRODUCTS),
}


def main() -> None:
    """Print a row for each method and damping."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preconditioner", default="inverse", choices=("inverse", "eigen"))
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    batches = list(digits(options.steps + 1, options.batch))
    model = trained(options.model, batches[:-1])
    print(
        "| way | damping | factors: median, worst | inverses: median, worst "
        "| directions: median, worst | worst cosine |\n|---|---|---|---|---|---|"
    )
    for damping in DAMPINGS:
        exact = numbers(model.double(), batches[-1], options.preconditioner, damping, None)
        gradients = exact["gradients"]
        for name, way in WAYS.items():
            with way():
                found = numbers(
                    model.float(), batches[-1], options.preconditioner, damping, gradients
                )
            cells = [shown(found[kind], exact[kind]) for kind in ("factors", "inverses")]
            cells += [shown(found["directions"], exact["directions"])]
            cells += [f"{min(cosines(found['directions'], exact['directions'])):.6f}"]
            print(f"| {name} | {damping:g} | {' | '.join(cells)} |", flush=True)


def digits(count: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of enlarged digits of three channels, and their labels."""
    data = datasets.load("digits")
    images = data.train_images.float()
    images = (images - images.mean()) / images.std()
    drawn = torch.Generator().manual_seed(0)
    for _ in range(count):
        chosen = torch.randint(len(images), (size,), generator=drawn)
        x = F.interpolate(images[chosen], size=(32, 32), mode="bilinear").expand(-1, 3, -1, -1)
        yield x.contiguous(), data.train_labels[chosen].long()


def trained(name: str, batches: list[tuple[Tensor, Tensor]]) -> nn.Module:
    """Return the network after a step of K-FAC with each batch, on the device."""
    torch.manual_seed(0)
    model = models.build(name, classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
    kfac = mpikfac.KFAC(
        model, optimizer, mpikfac.world(), factor_update_steps=5, inv_update_steps=10
    )
    for images, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        kfac.step()
    kfac.close()
    return model.to(mpikfac.device(mpikfac.world(), "cuda"))


def numbers(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    preconditioner: str,
    damping: float,
    gradients: dict[str, Tensor] | None,
) -> Numbers:
    """Return factors, inverses and directions by layer, in the model's dtype, as float64.

    Args:
        gradients: converted to directions; None for the gradients of the batch.
    """
    model = copy.deepcopy(model)
    dtype, device = next(model.parameters()).dtype, next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kfac = mpikfac.KFAC(
        model, optimizer, mpikfac.world(), damping=damping, preconditioner=preconditioner
    )
    images, labels = batch[0].to(device, dtype), batch[1].to(device)
    F.cross_entropy(model(images), labels).backward()
    kfac.step()
    of_layers = inside.held(kfac)
    own = {name: inside.gradients(kfac)[name] for name in of_layers}
    gradients = own if gradients is None else gradients
    found = {
        "factors": {n: unfold_triangle(one) for n, one in inside.factors(kfac).items()},
        "inverses": {
            f"{name}.{side}": inverse(kinds, damping)
            for name, (_, held) in of_layers.items()
            for side, kinds in (("A", held.a), ("G", held.g))
        },
        "directions": {
            name: preconditioner.direction(gradients[name].to(device, dtype), held)
            for name, (preconditioner, held) in of_layers.items()
        },
        "gradients": dict(gradients),
    }
    return {
        kind: {name: one.double().cpu() for name, one in some.items()}
        for kind, some in found.items()
    }


def inverse(kinds: Any, damping: float) -> Tensor:
    """Return a damped inverse; for eigenvectors, with the damping relative to the mean value."""
    if "inverse" in kinds:
        return kinds["inverse"][0]
    values, vectors = kinds["values"][0].double(), kinds["vectors"][0].double()
    return vectors / (values + damping**0.5 * values.mean()) @ vectors.mT


def shown(found: dict[str, Tensor], exact: dict[str, Tensor]) -> str:
    """Return the median and the worst relative error over the names."""
    errors = [((found[n] - exact[n]).norm() / exact[n].norm()).item() for n in exact]
    return f"{statistics.median(errors):.1e}, {max(errors):.1e}"


def cosines(found: dict[str, Tensor], exact: dict[str, Tensor]) -> list[float]:
    """Return the cosine of each pair of tensors."""
    pairs = ((found[n].flatten(), exact[n].flatten()) for n in exact)
    return [F.cosine_similarity(a, b, dim=0).item() for a, b in pairs]


if __name__ == "__main__":
    main()
