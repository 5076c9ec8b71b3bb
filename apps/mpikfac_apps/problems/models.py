"""Networks for 32x32 and for ImageNet-sized images, and a small CNN for digits.

The ResNets of depth 6n+2 are those of the paper's CIFAR-10 section with parameter-free shortcuts
(option A) [He et al., CVPR 2016]; the others are its ImageNet networks with the stride in the 3x3
convolution ("v1.5"), whose parameters are named as in torchvision. The depthwise network is a small
MobileNetV2 [Sandler et al., CVPR 2018].
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from mpikfac_apps.problems.vit import VisionTransformer


def build(name: str, classes: int, channels: int = 3) -> nn.Module:
    """A freshly initialised network from images `[batch, channels, h, w]` to `[batch, classes]`.

    Raises:
        ValueError: no network has that name; the text lists those that exist.
    """
    if name not in MODELS:
        raise ValueError(f"model={name!r} is unknown; try one of {', '.join(MODELS)}")
    model: nn.Module = MODELS[name](classes=classes, channels=channels)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the image size (before its stride), without bias."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class PadShortcut(nn.Module):
    """Option A: every `stride`-th pixel, with zeros for the channels that are new."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new))


def projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Option B: a 1x1 convolution."""
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

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
    """1x1, 3x3 (strided) and 1x1 convolutions beside a shortcut."""

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


Block = type[BasicBlock] | type[Bottleneck]


def stage(block: Block, inputs: int, width: int, blocks: int, stride: int, shortcut) -> nn.Module:
    """Blocks at one image size; the first strides and has a shortcut where shapes change."""
    outputs = width * block.expansion
    first = shortcut(inputs, outputs, stride) if stride > 1 or inputs != outputs else None
    rest = [block(outputs, width, 1, None) for _ in range(blocks - 1)]
    return nn.Sequential(block(inputs, width, stride, first), *rest)


class CifarResNet(nn.Module):
    """Depth 6n+2: three stages of n basic blocks, 16, 32 and 64 channels wide."""

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
    """A 7x7 stem and four stages; made for 224x224 pixels, and at home from 32x32."""

    def __init__(self, block: Block, blocks: list[int], classes: int, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(channels, 64, 7, 2), nn.BatchNorm2d(64)
        inputs = 64
        for i, count in enumerate(blocks):
            width = 64 * 2**i
            stride = 1 if i == 0 else 2
            setattr(self, f"layer{i + 1}", stage(block, inputs, width, count, stride, projection))
            inputs = width * block.expansion
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


class InvertedResidual(nn.Module):
    """1x1 to more channels, depthwise 3x3 (strided), 1x1 back; a shortcut where shapes stay."""

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
        found, inputs = [], 16
        for width, stride in ((16, 1), (32, 2), (64, 2)):
            for index in range(blocks):
                found.append(InvertedResidual(inputs, width, 1 if index else stride))
                inputs = width
        self.blocks, self.fc = nn.Sequential(*found), nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.bn1(self.conv1(x)), inplace=True)
        return self.fc(self.blocks(x).mean((2, 3)))


def digits_cnn(classes: int, channels: int) -> nn.Module:
    """Two convolutions and two linear layers, for 8x8 pixels."""
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
