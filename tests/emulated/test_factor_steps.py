"""Steps with new factors: kernels, numbers that are multiplied as they are, and memory."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

if "emulated" not in sys.modules:
    pytest.skip("needs the emulated device: bash jobs/test.sh --device", allow_module_level=True)
import emulated
from counting import steps_of

import mpikfac
from mpikfac.numerics import unfold_triangle
from support import inside

MOST_OF_FACTORS = 140  # kernels of a step with factors beyond those of an ordinary step
MOST = {"with factors": 501, "with decompositions": 678}
FORMATS = [torch.contiguous_format, torch.channels_last]
COMM = mpikfac.world()


@pytest.mark.parametrize("stored", FORMATS, ids=str)
@pytest.mark.parametrize("preconditioner", ["inverse", "eigen"])
def test_a_step_with_factors_starts_few_kernels(preconditioner, stored):
    """Oracle: the counts of the emulated device, by kind of step of ResNet-20."""
    steps = steps_of("resnet20", 32, preconditioner=preconditioner, stored=stored)
    found = {kind: steps[kind].kernels for kind in MOST}
    assert all(found[kind] <= most for kind, most in MOST.items()), found
    assert steps["with factors"].kernels - steps["ordinary"].kernels <= MOST_OF_FACTORS


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_factors_of_a_deeper_model_start_no_more_kernels(stored):
    """Oracle: the counts of ResNet-20; ResNet-44 has layers of the same shapes, twice as many."""
    found = [steps_of(name, 16, stored=stored) for name in ("resnet20", "resnet44")]
    of_factors = [steps["with factors"].kernels - steps["ordinary"].kernels for steps in found]
    assert of_factors[0] == of_factors[1]


# -- rounded numbers -------------------------------------------------------------------------------


def network() -> nn.Sequential:
    """Return a network with equal convolutions, a bias, groups, a stride, and linear layers."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(4, 8, 3, 2), *(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))]
    convolutions += [nn.Conv2d(8, 8, 3, groups=2, bias=False), nn.Conv2d(8, 8, 1)]
    linear = [nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)]
    parts = [part for layer in convolutions for part in (layer, nn.Tanh())]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *linear)


def trained(device: str, model: nn.Module) -> mpikfac.KFAC:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mpikfac.KFAC(model, optimizer, COMM, estimator=mpikfac.Estimator(subsample=1))


def images(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, 13, 13, generator=made), torch.arange(count) % 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_products_of_rounded_numbers_are_exact(dtype):
    """Oracle: float64 moments of the numbers that the layers multiplied, seen by hooks."""
    model = network().to("cuda")
    seen = {}

    def keep(name, module, inputs, output):
        x = inputs[0].detach().to(dtype).cpu().double()
        output.register_hook(lambda g: seen.update({name: (x, g.cpu().double())}))

    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(lambda *call, name=name: keep(name, *call))
    kfac = trained("cuda", model)
    x, y = (part.to("cuda") for part in images())
    with torch.autocast("cuda", dtype):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    kfac.precondition()
    layers = {layer.name: layer for layer in inside.layers(kfac)}
    for name, (x, g) in seen.items():
        for side, tensor in (("A", x), ("G", g)):
            total = layers[name].second_moment(side, tensor, tensor)
            scale = 1 / layers[name].positions(g) if side == "A" else len(x)
            found = unfold_triangle(inside.factors(kfac)[f"{name}.{side}"].cpu()).double()
            total *= scale
            torch.testing.assert_close(found, total, rtol=0, atol=1e-6 * total.abs().max().item())


def test_no_float32_copy_of_rounded_numbers_is_made(monkeypatch):
    """Oracle: the dtypes of all tensors whose squares are summed, under autocast."""
    dtypes = set()

    def noting(multiply):
        def noted(a, b, **choices):  # torch asks its meta device for shapes
            dtypes.update({a.dtype, b.dtype} if a.is_cuda else ())
            return multiply(a, b, **choices)

        return noted

    for name in ("mm", "bmm"):
        monkeypatch.setattr(torch, name, noting(getattr(torch, name)))
    model = network().to("cuda")
    kfac = trained("cuda", model)  # the hooks live as long as the trainer
    x, y = (part.to("cuda") for part in images())
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    assert kfac.steps == 0 and dtypes == {torch.bfloat16}


# -- memory ----------------------------------------------------------------------------------------


def run_at_once(kind: str, name: str) -> None:
    """Free the tensors of kernels so far: a kernel keeps tensors until it has run."""
    if kind == "kernel":
        torch.accelerator.synchronize()


@pytest.mark.parametrize("most", [2**18, 2**21])
def test_calls_that_wait_take_bounded_memory(most, monkeypatch):
    """Oracle: the largest sum of bytes of a backward pass without K-FAC, and the bound.

    Beside the bound are the moments of a stack, and what a stack of images needs beside patches.
    """
    peaks = []
    for recorded in (False, True):
        torch.manual_seed(0)
        parts = [part for _ in range(24) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.Tanh())]
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
        model = nn.Sequential(*parts, *head).to("cuda")
        x, y = torch.randn(16, 8, 16, 16).to("cuda"), (torch.arange(16) % 3).to("cuda")
        if recorded:
            inside.let_wait(monkeypatch, most)
            kfac = trained("cuda", model)
        loss = F.cross_entropy(model(x), y)
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        with emulated.watched(run_at_once):
            loss.backward()
        torch.accelerator.synchronize()
        peaks.append(torch.accelerator.max_memory_allocated() - before)
    assert len(inside.layers(kfac)) == 25
    assert peaks[1] - peaks[0] <= 2 * most + 2**20, peaks
