"""Networks by name, including those from files and timm, and a small CNN for digits.

`network` is the only function that parses names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

import mpikfac
from mpikfac_apps.problems import own
from mpikfac_apps.problems.airbench import Airbench, dirac
from mpikfac_apps.problems.autoencoder import Autoencoder
from mpikfac_apps.problems.language.networks import gpt_small, lstm_small
from mpikfac_apps.problems.mobilenet import MobileNet
from mpikfac_apps.problems.resnet import BasicBlock, Bottleneck, CifarResNet, ImageNetResNet, conv
from mpikfac_apps.problems.tasks import (
    CLASSIFICATION,
    LANGUAGE,
    RECONSTRUCTION,
    SEGMENTATION,
    Task,
)
from mpikfac_apps.problems.vit import VisionTransformer
from mpikfac_apps.problems.volumes.networks import Segmenter3d


def kaiming(conv: nn.Conv2d) -> None:
    """Initialise the weights of a convolution that is followed by a ReLU."""
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")


@dataclass(frozen=True)
class NetworkEntry:
    """The registry entry for a network: how it is created, and what it takes.

    Attributes:
        make: creates the network from `classes` and `channels`, which for a language model are the
            number of different tokens and the number of tokens in a window.
        image: the default shape of an image, `(channels, height, width)`, or of a volume; for a
            language model, the default number of tokens in a window; None if unknown.
        classes: the default number of classes, or of different tokens; None if unknown.
        fixed: whether the network accepts only images of the default height and width.
        task: what the network learns.
        draw: initialises the weights of a convolution; None if the network initialises all weights.
        takes: the arguments of `make` that the network uses.
        covers: the class with which K-FAC covers each module type.
    """

    make: Callable[..., nn.Module]
    image: tuple[int, ...] | None = (3, 32, 32)
    classes: int | None = 10
    fixed: bool = False
    task: Task = CLASSIFICATION
    draw: Callable[[nn.Conv2d], None] | None = kaiming
    takes: Collection[str] = ("classes", "channels")
    covers: mpikfac.layers.Kinds = field(default_factory=lambda: mpikfac.KINDS)

    @property
    def channels(self) -> int | None:
        """The default number of channels; None if unknown."""
        return self.image[0] if self.image else None

    def tokens(self, classes: int | None = None) -> int | None:
        """Return the number of different tokens, `classes` or the default; None for images."""
        return (classes or self.classes) if self.task.inputs == "tokens" else None


def digits_cnn(classes: int, channels: int) -> nn.Module:
    """Return a network of two convolutions and two linear layers, for images of 8x8 pixels."""
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


def autoencoder(side: int, widths: Sequence[int], draw: Callable[[Tensor], Tensor]) -> NetworkEntry:
    """Return the registry entry for an autoencoder for images of `side` x `side` pixels."""

    def make(classes: int, channels: int) -> nn.Module:  # noqa: ARG001 (as all networks)
        return Autoencoder(channels * side**2, widths, draw)

    return NetworkEntry(make, (1, side, side), fixed=True, task=RECONSTRUCTION)


# The variance is 25 / (9 * inputs). With Glorot's variance, signals shrink after the short code,
# and the loss of the autoencoder with 12 layers stays on a plateau.
TANH = partial(nn.init.kaiming_normal_, nonlinearity="tanh")
SMALL_VIT = {"size": 32, "patch": 4, "width": 96, "depth": 6, "heads": 3}

MODELS: dict[str, NetworkEntry] = {
    "digits_cnn": NetworkEntry(digits_cnn, (1, 8, 8)),
    "mobilenet_small": NetworkEntry(MobileNet),
    "airbench94": NetworkEntry(Airbench, fixed=True, draw=dirac),
    "vit_small": NetworkEntry(partial(VisionTransformer, **SMALL_VIT), fixed=True),
    **{
        f"resnet{depth}": NetworkEntry(partial(CifarResNet, depth))
        for depth in (20, 32, 44, 56, 110)
    },
    **{
        f"resnet{depth}": NetworkEntry(partial(ImageNetResNet, block, stages), (3, 224, 224), 1000)
        for depth, block, stages in (
            (18, BasicBlock, [2, 2, 2, 2]),
            (34, BasicBlock, [3, 4, 6, 3]),
            (50, Bottleneck, [3, 4, 6, 3]),
            (101, Bottleneck, [3, 4, 23, 3]),
            (152, Bottleneck, [3, 8, 36, 3]),
        )
    },
    "autoencoder": autoencoder(28, (400, 200, 100, 50, 25, 6), TANH),
    "autoencoder_small": autoencoder(8, (256, 128, 64, 32, 10), nn.init.xavier_uniform_),
    "gpt_small": NetworkEntry(gpt_small, (64,), 256, task=LANGUAGE),
    "lstm_small": NetworkEntry(lstm_small, (64,), 256, task=LANGUAGE),
    "segmenter3d": NetworkEntry(
        partial(Segmenter3d, width=16, depth=2), (1, 16, 16, 16), 3, task=SEGMENTATION
    ),
}


FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels-last memory format of a weight, by its number of dimensions."""

OTHERS = "FILE.py:FUNCTION", "timm:NAME"
"""The formats in which third-party networks are named."""


def network(name: str) -> NetworkEntry:
    """Return the entry for a network: from the registry `MODELS`, or for one from a file or timm.

    Raises:
        ValueError: no network has that name, the file raises an error, or timm is not installed;
            the message is one line.
    """
    if name in MODELS:
        return MODELS[name]
    if name.endswith(".py"):
        raise ValueError(f"model={name} does not name a function; try {name}:FUNCTION")
    source, _, inside = name.rpartition(":")
    if source == "timm":
        image, classes, fixed = own.usual_of_timm(inside)
        return NetworkEntry(partial(own.of_timm, inside), image, classes, fixed, draw=None)
    if source:
        make, takes, covers = partial(own.built, name), own.takes(name), own.covers(name)
        return NetworkEntry(make, None, None, draw=None, takes=takes, covers=covers)
    raise ValueError(
        f"model={name} is unknown; try one of {', '.join(MODELS)}, {' or '.join(OTHERS)}"
    )


def build(name: str, classes: int | None = None, channels: int | None = None) -> nn.Module:
    """Return a network with initial weights that maps images `[n, channels, h, w]` to outputs.

    A classifier has one output per class, an autoencoder one per pixel, `[n, outputs]`. A language
    model takes windows of up to `channels` tokens, and has, at each position, an output for each of
    `classes` tokens. A segmenter takes volumes, and has one output per class and voxel.

    Args:
        classes: the number of classes; None for the default.
        channels: the number of channels; None for the default.

    Raises:
        ValueError: no network has that name, or a file or timm fails to create the network.
    """
    return _made(network(name), classes, channels)


def skeleton(name: str, classes: int | None = None, channels: int | None = None) -> nn.Module:
    """Return a network of which only the shapes are needed, on the meta device if possible.

    Raises:
        ValueError: see `build`.
    """
    # Outside of the meta device, because tensors that a file creates at import must be real.
    entry = network(name)
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            return _made(entry, classes, channels)
    except ValueError:  # the function reads values, or would fail anyway
        return _made(entry, classes, channels)


def _made(entry: NetworkEntry, classes: int | None, channels: int | None) -> nn.Module:
    """Return the network that a registry entry describes; see `build`."""
    model = entry.make(classes=classes or entry.classes, channels=channels or entry.channels)
    if entry.draw:
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                entry.draw(module)
    return model


def check(name: str, model: nn.Module, images: Tensor, classes: int) -> str:
    """Check that a third-party network accepts the images, and has one output per class.

    Args:
        images: a few inputs of the network.

    Returns:
        A warning if the outputs are probabilities or log-probabilities; "" otherwise.

    Raises:
        ValueError: the network raises an error, or has a different number of outputs.
    """
    if name in MODELS:
        return ""
    outputs = own.outputs_of(model, images)
    if outputs.shape[1:] != (classes,):
        raise ValueError(
            f"model={name} returns {list(outputs.shape[1:])} for an image, but the data has "
            f"{classes} classes; give the function a parameter `classes`"
        )
    if made := own.named_probabilities(outputs):
        return (
            f"model={name} returns {made}, but cross entropy applies softmax itself; remove the "
            f"final softmax"
        )
    return ""


def channels_last(model: nn.Module) -> nn.Module:
    """Return the model with convolution weights in channels-last memory format."""
    for weight in model.parameters():
        if weight.dim() in FORMATS:
            weight.data = weight.data.contiguous(memory_format=FORMATS[weight.dim()])
    return model


def shapes_of(
    name: str, classes: int | None = None, coverage: mpikfac.Coverage | None = None
) -> tuple[list[mpikfac.LayerShape], list[tuple[str, tuple[int, ...]]]]:
    """Return a network's covered layers, and the names and shapes of other tensors that are sent.

    Args:
        coverage: None for the network's default coverage.

    Raises:
        ValueError: no network has that name, the network does not take `classes`, the coverage
            selects none of its layers, or the library rejects a module.
    """
    entry = network(name)
    if classes is not None and "classes" not in entry.takes:
        raise ValueError(
            f"classes={classes} needs a network with a parameter named classes, unlike {name}"
        )
    model = skeleton(name, classes)
    return mpikfac.layers.covered_shapes(model, coverage or mpikfac.Coverage(covers=entry.covers))
