"""The training program with a network without BatchNorm: numbers do not depend on the ranks."""

from __future__ import annotations

import sys

from torch import nn

from mpikfac_apps.problems import models
from mpikfac_apps.problems.resnet import conv
from mpikfac_apps.training import train


def plain(classes: int, channels: int) -> nn.Module:
    return nn.Sequential(
        conv(channels, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, classes),
    )


if __name__ == "__main__":
    models.MODELS["plain"] = models.Network(plain)
    sys.exit(train.main(["--model=plain", *sys.argv[1:]]))
