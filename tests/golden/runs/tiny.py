"""The network of the stored checkpoints."""

from torch import nn


def build():
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, 10))
