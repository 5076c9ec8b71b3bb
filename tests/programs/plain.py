"""The training program with a network without BatchNorm: its numbers do not depend on the ranks."""

from __future__ import annotations

import sys

from torch import nn

from mpikfac_apps import models, train_cnn


def plain(classes: int, channels: int) -> nn.Module:
    return nn.Sequential(
        models.conv(channels, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, classes),
    )


if __name__ == "__main__":
    models.MODELS["plain"] = plain
    sys.exit(train_cnn.main(["--model=plain", *sys.argv[1:]]))
