"""The training program with networks for tests.

The numbers of "plain" do not depend on the ranks: "plain" has no BatchNorm. "dropped" draws random
numbers before BatchNorm.
"""

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


def dropped(classes: int, channels: int) -> nn.Module:
    last = nn.Dropout(0.5), nn.BatchNorm1d(classes)
    return nn.Sequential(*plain(classes, channels), *last)


NETWORKS = {name.__name__: models.NetworkEntry(name) for name in (plain, dropped)}

if __name__ == "__main__":
    models.MODELS.update(NETWORKS)
    sys.exit(train.main(["--model=plain", *sys.argv[1:]]))
