"""ResNets for 32x32 pixels and for ImageNet.

ResNets of depth 6n+2 are the CIFAR-10 networks of [He et al., CVPR 2016], with parameter-free
shortcuts (option A). The other ResNets are the ImageNet networks of the same paper, but with the
stride in the 3x3 convolution ("v1.5") and with torchvision's parameter names.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias, padded so that only the stride changes the image size."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class PadShortcut(nn.Module):
    """An option A shortcut: every `stride`-th pixel, with zeros for the new channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.added = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))


def projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return an option B shortcut: a 1x1 convolution and a normalisation."""
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)), inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3 (strided) and 1x1 convolutions with a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, shortcut: nn.Module | None) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)), inplace=True)


ResidualBlock = type[BasicBlock] | type[Bottleneck]
Shortcut = Callable[[int, int, int], nn.Module]  # takes inputs, outputs and stride


def stage(
    block: ResidualBlock, inputs: int, width: int, blocks: int, stride: int, shortcut: Shortcut
) -> nn.Module:
    """Return the blocks of a stage; the first one has the stride and, if needed, a shortcut module.

    The shortcut module adapts the input if the stage changes the size or the number of channels.
    """
    outputs = width * block.expansion
    first = shortcut(inputs, outputs, stride) if stride > 1 or inputs != outputs else None
    tail = [block(outputs, width, 1, None) for _ in range(blocks - 1)]
    return nn.Sequential(block(inputs, width, stride, first), *tail)


class CifarResNet(nn.Module):
    """A ResNet of depth 6n+2: three stages of n basic blocks, 16, 32 and 64 channels wide."""

    def __init__(self, depth: int, classes: int, channels: int) -> None:
        super().__init__()
        n = (depth - 2) // 6
        self.conv1, self.bn1 = conv(channels, 16, 3), nn.BatchNorm2d(16)
        self.layer1 = stage(BasicBlock, 16, 16, n, 1, PadShortcut)
        self.layer2 = stage(BasicBlock, 16, 32, n, 2, PadShortcut)
        self.layer3 = stage(BasicBlock, 32, 64, n, 2, PadShortcut)
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))


class ImageNetResNet(nn.Module):
    """A 7x7 stem and four stages, designed for 224x224 pixels but usable from 32x32 pixels on."""

    def __init__(
        self, block: ResidualBlock, blocks: list[int], classes: int, channels: int
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(channels, 64, 7, 2), nn.BatchNorm2d(64)
        inputs, stages = 64, []
        for i, count in enumerate(blocks):
            width = 64 * 2**i
            stride = 1 if i == 0 else 2
            stages.append(stage(block, inputs, width, count, stride, projection))
            inputs = width * block.expansion
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))
