"""A residual network for volumes, in the style of flood-filling networks [Januszewski et al. 2018].

The network keeps the size of a volume, and returns a score for each class and voxel.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def conv3d(inputs: int, outputs: int) -> nn.Conv3d:
    """Return a 3x3x3 convolution that keeps the size of a volume."""
    return nn.Conv3d(inputs, outputs, 3, padding=1)


class ResidualBlock3d(nn.Module):
    """Two convolutions, each after a ReLU, with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv3d(width, width), conv3d(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class Segmenter3d(nn.Sequential):
    """A network that maps volumes `[n, channels, d, h, w]` to scores `[n, classes, d, h, w]`.

    Args:
        width: the number of channels of the residual blocks.
        depth: the number of residual blocks.
    """

    def __init__(self, classes: int, channels: int, width: int, depth: int) -> None:
        blocks = [ResidualBlock3d(width) for _ in range(depth)]
        head = nn.Conv3d(width, classes, 1)
        super().__init__(conv3d(channels, width), *blocks, nn.ReLU(), head)
        for module in self.modules():
            if isinstance(module, nn.Conv3d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
