"""A small MobileNetV2 [Sandler et al., CVPR 2018], a network with depthwise convolutions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mpikfac_apps.problems.resnet import conv


class InvertedResidual(nn.Module):
    """1x1, depthwise 3x3 (strided) and 1x1 convolutions, with a shortcut if the shape is kept."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int = 4) -> None:
        super().__init__()
        width = expansion * inputs
        self.conv1, self.bn1 = conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, groups=width, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.stays = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu6(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return x + y if self.stays else y


class MobileNet(nn.Module):
    """Three stages of inverted residuals, 16, 32 and 64 channels wide."""

    def __init__(self, classes: int, channels: int, blocks: int = 3) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(channels, 16, 3), nn.BatchNorm2d(16)
        layers, inputs = [], 16
        for width, stride in ((16, 1), (32, 2), (64, 2)):
            for index in range(blocks):
                layers.append(InvertedResidual(inputs, width, 1 if index else stride))
                inputs = width
        self.blocks, self.fc = nn.Sequential(*layers), nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.bn1(self.conv1(x)), inplace=True)
        return self.fc(self.blocks(x).mean((2, 3)))
