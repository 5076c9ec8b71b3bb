"""Networks by name, and a small CNN for digits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

import mpikfac
from mpikfac_apps.problems.mobilenet import MobileNet
from mpikfac_apps.problems.resnet import BasicBlock, Bottleneck, CifarResNet, ImageNetResNet, conv
from mpikfac_apps.problems.vit import VisionTransformer


def build(name: str, classes: int, channels: int = 3) -> nn.Module:
    """Return a new network from images `[batch, channels, h, w]` to `[batch, classes]`.

    Raises:
        ValueError: no network has the name; the text lists the known names.
    """
    if name not in MODELS:
        raise ValueError(f"model={name!r} is unknown; try one of {', '.join(MODELS)}")
    model: nn.Module = MODELS[name](classes=classes, channels=channels)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


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


SMALL_VIT = {"size": 32, "patch": 4, "width": 96, "depth": 6, "heads": 3}

MODELS = {
    "digits_cnn": digits_cnn,
    "mobilenet_small": MobileNet,
    "vit_small": partial(VisionTransformer, **SMALL_VIT),
    **{f"resnet{depth}": partial(CifarResNet, depth) for depth in (20, 32, 44, 56, 110)},
    "resnet18": partial(ImageNetResNet, BasicBlock, [2, 2, 2, 2]),
    "resnet34": partial(ImageNetResNet, BasicBlock, [3, 4, 6, 3]),
    "resnet50": partial(ImageNetResNet, Bottleneck, [3, 4, 6, 3]),
    "resnet101": partial(ImageNetResNet, Bottleneck, [3, 4, 23, 3]),
    "resnet152": partial(ImageNetResNet, Bottleneck, [3, 8, 36, 3]),
}
IMAGENET = {"resnet18", "resnet34", "resnet50", "resnet101", "resnet152"}


def shapes_of(
    name: str, classes: int | None = None, skip: Sequence[str] = (), norms: bool = False
) -> tuple[list[mpikfac.LayerShape], list[tuple[str, tuple[int, ...]]]]:
    """Return a network's layers, and names and shapes of all further tensors that travel.

    Args:
        norms: cover normalisation layers too.

    Raises:
        ValueError: no network has the name, or `skip` names no layer of the network.
    """
    classes = classes or (1000 if name in IMAGENET else 10)
    channels = 1 if name == "digits_cnn" else 3
    with torch.device("meta"):  # shapes without numbers
        model = build(name, classes, channels)
    covers = {**mpikfac.KINDS, **(mpikfac.NORMS if norms else {})}
    return mpikfac.layers.covered_shapes(model, mpikfac.Coverage(skip, covers))
