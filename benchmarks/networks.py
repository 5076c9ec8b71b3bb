"""Networks for images of 32x32, in addition to those of the program, with torch's initial weights.

mpikfac train --model benchmarks/networks.py:plain --data.name cifar10 --data.path DIR
"""

from __future__ import annotations

from torch import Tensor, nn


def plain(classes: int = 10) -> nn.Module:
    """Return six convolutions with BatchNorm and pooling, dropout, and a head of 1,536 inputs."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 96)):
        for entries in (inputs, outputs):
            conv = nn.Conv2d(entries, outputs, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(1536, classes))


class Shortcut(nn.Module):
    """Modules with a shortcut."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*modules)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Mean(nn.Module):
    """The mean over positions, `[n, channels]`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def group_norm(classes: int = 10) -> nn.Module:
    """Return a pre-activation residual network with GroupNorm."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for inputs, outputs in ((32, 32), (32, 64), (64, 128)):
        if inputs != outputs:
            layers.append(nn.Conv2d(inputs, outputs, 2, 2))
        layers += [
            Shortcut(
                *(nn.GroupNorm(8, outputs), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1)),
                *(nn.GroupNorm(8, outputs), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1)),
            )
        ]
    return nn.Sequential(*layers, nn.GroupNorm(8, 128), nn.ReLU(), Mean(), nn.Linear(128, classes))


class ChannelNorm(nn.LayerNorm):
    """A LayerNorm of the channels of each position of images `[n, channels, h, w]`."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


def convnext(classes: int = 10) -> nn.Module:
    """Return depthwise 5x5 convolutions and two 1x1 convolutions with shortcuts [Liu et al.]."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 2, 2), ChannelNorm(64)]
    for inputs, outputs in ((64, 64), (64, 128)):
        if inputs != outputs:
            layers += [ChannelNorm(inputs), nn.Conv2d(inputs, outputs, 2, 2)]
        layers += [block(outputs) for _ in range(2)]
    return nn.Sequential(*layers, Mean(), nn.LayerNorm(128), nn.Linear(128, classes))


def block(width: int) -> nn.Module:
    """Return a depthwise and two 1x1 convolutions with a normalisation and a shortcut."""
    return Shortcut(
        nn.Conv2d(width, width, 5, padding=2, groups=width),
        ChannelNorm(width),
        nn.Conv2d(width, 2 * width, 1),
        nn.GELU(),
        nn.Conv2d(2 * width, width, 1),
    )
