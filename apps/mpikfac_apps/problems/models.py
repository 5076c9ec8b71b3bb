"""Networks by name, and a small CNN for digits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import mpikfac
from mpikfac_apps.problems import own
from mpikfac_apps.problems.airbench import Airbench, dirac
from mpikfac_apps.problems.autoencoder import Autoencoder
from mpikfac_apps.problems.mobilenet import MobileNet
from mpikfac_apps.problems.resnet import BasicBlock, Bottleneck, CifarResNet, ImageNetResNet, conv
from mpikfac_apps.problems.tasks import CLASSIFICATION, RECONSTRUCTION, Task
from mpikfac_apps.problems.vit import VisionTransformer


def kaiming(conv: nn.Conv2d) -> None:
    """Draw the weights of a convolution in front of ReLUs."""
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")


@dataclass(frozen=True)
class Network:
    """A network by name.

    Attributes:
        make: makes the network from the numbers of `classes` and `channels`.
        image: the usual shape of an image, `(channels, height, width)`.
        classes: the usual number of classes.
        fixed: True if the network takes images of the usual height and width only.
        task: what the network learns.
        draw: sets the first weights of a convolution.
    """

    make: Callable[..., nn.Module]
    image: tuple[int, int, int] = (3, 32, 32)
    classes: int = 10
    fixed: bool = False
    task: Task = CLASSIFICATION
    draw: Callable[[nn.Conv2d], None] = kaiming


def digits_cnn(classes: int, channels: int) -> nn.Module:
    """Return a network of two convolutions and two linear layers, for 8x8 pixels."""
    return nn.Sequential(
        conv(channels, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        conv(16, 32, 3, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(inplace=True),
        nn.Linear(64, classes),
    )


def autoencoder(side: int, widths: Sequence[int], draw: Callable[[Tensor], Tensor]) -> Network:
    """Return the entry of an autoencoder for images of `side` x `side` pixels."""

    def make(classes: int, channels: int) -> nn.Module:  # noqa: ARG001 (as all networks)
        return Autoencoder(channels * side**2, widths, draw)

    return Network(make, (1, side, side), fixed=True, task=RECONSTRUCTION)


# The variance is 25 / (9 inputs). With Glorot's, signals shrink behind the short code, and the
# autoencoder of 12 layers stays on a plateau.
TANH = partial(nn.init.kaiming_normal_, nonlinearity="tanh")
SMALL_VIT = {"size": 32, "patch": 4, "width": 96, "depth": 6, "heads": 3}

MODELS: dict[str, Network] = {
    "digits_cnn": Network(digits_cnn, (1, 8, 8)),
    "mobilenet_small": Network(MobileNet),
    "airbench94": Network(Airbench, fixed=True, draw=dirac),
    "vit_small": Network(partial(VisionTransformer, **SMALL_VIT), fixed=True),
    **{f"resnet{depth}": Network(partial(CifarResNet, depth)) for depth in (20, 32, 44, 56, 110)},
    **{
        f"resnet{depth}": Network(partial(ImageNetResNet, block, stages), (3, 224, 224), 1000)
        for depth, block, stages in (
            (18, BasicBlock, [2, 2, 2, 2]),
            (34, BasicBlock, [3, 4, 6, 3]),
            (50, Bottleneck, [3, 4, 6, 3]),
            (101, Bottleneck, [3, 4, 23, 3]),
            (152, Bottleneck, [3, 8, 36, 3]),
        )
    },
    "autoencoder": autoencoder(28, (400, 200, 100, 50, 25, 6), TANH),
    "autoencoder_small": autoencoder(8, (256, 128, 64, 32, 10), nn.init.xavier_uniform_),
}


def network(name: str) -> Network:
    """Return the entry of a network.

    Raises:
        ValueError: no network has that name; the text lists all names.
    """
    if name.endswith(".py"):
        raise ValueError(f"model={name} names no function; try {name}:FUNCTION")
    if name not in MODELS:
        raise ValueError(f"model={name} is unknown; try one of {', '.join(MODELS)}")
    return MODELS[name]


def build(name: str, classes: int, channels: int = 3) -> nn.Module:
    """Return a freshly initialised network from images `[n, channels, h, w]` to `[n, outputs]`.

    A classifier has an output for each class, an autoencoder for each pixel.

    Raises:
        ValueError: no network has that name.
    """
    entry = network(name)
    model = entry.make(classes=classes, channels=channels)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            entry.draw(module)
    return model


def channels_last(model: nn.Module) -> nn.Module:
    """Return the model with weights of convolutions in the memory format channels last."""
    to: Callable[..., nn.Module] = model.to  # the stub of torch lacks this argument
    return to(memory_format=torch.channels_last)


def shapes_of(
    name: str, classes: int | None = None, coverage: mpikfac.Coverage | None = None
) -> tuple[list[mpikfac.LayerShape], list[tuple[str, tuple[int, ...]]]]:
    """Return a network's covered layers, and names and shapes of all other tensors that travel.

    The name may be FILE.py:FUNCTION; COVERS of the file then takes the place of `KINDS`.

    Raises:
        ValueError: no network has that name, the coverage names no layer of the network, or the
            library refuses a module of the network.
    """
    coverage = coverage or mpikfac.Coverage()
    if own.is_own(name):
        if classes is not None:
            raise ValueError(f"classes={classes} needs a network by name, not {name}")
        model, covers = own.made(name)
        norms = {kind: by for kind, by in coverage.covers.items() if kind not in mpikfac.KINDS}
        coverage = dataclasses.replace(coverage, covers={**covers, **norms})
        return mpikfac.layers.covered_shapes(model, coverage)
    usual = network(name)
    with torch.device("meta"):  # shapes without numbers
        model = build(name, classes or usual.classes, usual.image[0])
    return mpikfac.layers.covered_shapes(model, coverage)
