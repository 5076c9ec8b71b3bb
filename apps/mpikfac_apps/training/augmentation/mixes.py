"""Mix the images of a batch in pairs: mixup [Zhang et al. 2018] and cutmix [Yun et al. 2019].

A pair consists of the images at positions 2k and 2k + 1 of a batch. The order of images is random,
so the pairs are random, too. Each rank has an even number of images, so no pair is divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from mpikfac_apps.options.options import DataOptions

UNIT = 2**16  # mixup weights are multiples of 1/UNIT, so means of bytes are exact in float32
DRAW = 1  # separates these random draws from those for order, shifts and dropout

Box = tuple[int, int, int, int]
Mix = Callable[[Tensor, float, np.random.Generator], tuple[Tensor, float]]


@dataclass(frozen=True)
class Mixes:
    """Mix the images of every step in pairs, by mixup or cutmix.

    All random draws of a step depend only on (seed, epoch, index), and are equal on all ranks, so
    mixed batches are the same for every number of ranks.

    Args:
        mixup: the alpha of mixup, whose weights are drawn from Beta(alpha, alpha); None for no
            mixup.
        cutmix: the alpha of cutmix, whose areas are drawn from Beta(alpha, alpha); None for no
            cutmix. With both, each step uses one of them, chosen at random.
        classes: the number of classes.
    """

    mixup: float | None
    cutmix: float | None
    classes: int
    seed: int

    @classmethod
    def of(cls, data: DataOptions, classes: int, seed: int) -> Mixes | None:
        """Return the mixes that the options select, or None if they select none."""
        if data.mixup is None and data.cutmix is None:
            return None
        return cls(data.mixup, data.cutmix, classes, seed)

    def __call__(
        self, epoch: int, index: int, images: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the mixed images, and the weights of the classes in each image.

        Args:
            epoch, index: the epoch, and the index of the batch within the epoch.
            images: bytes `[n, channels, h, w]` of an even number of images.
            labels: int64 `[n]`.

        Returns:
            Bytes or float32, in the shape of `images`, and float32 `[n, classes]`.
        """
        generator = np.random.default_rng((self.seed, epoch, index, DRAW))
        kinds: dict[Mix, float | None] = {mixed_up: self.mixup, cut_and_mixed: self.cutmix}
        mixes = [(mix, alpha) for mix, alpha in kinds.items() if alpha is not None]
        mix, alpha = mixes[generator.integers(len(mixes))]
        images, share = mix(images, generator.beta(alpha, alpha), generator)
        return images, shares(labels, self.classes, share)


def mixed_up(images: Tensor, share: float, _: np.random.Generator) -> tuple[Tensor, float]:
    """Return the weighted means of images and their partners, in float32, and the images' weight.

    The means are exact, because the weighted sum of two bytes has at most 24 bits.

    Args:
        share: the weight of an image before rounding; its partner has weight `1 - share`.
    """
    weight = round(share * UNIT)
    means = weight * images.int() + (UNIT - weight) * partners(images).int()
    return means.float() / UNIT, weight / UNIT


def cut_and_mixed(
    images: Tensor, share: float, generator: np.random.Generator
) -> tuple[Tensor, float]:
    """Return images with a box copied from their partners, and the fraction of pixels kept.

    Args:
        share: the fraction of pixels kept if the box lies entirely within the image.
    """
    height, width = images.shape[-2:]
    left, top, right, bottom = drawn_box(width, height, share, generator)
    mixed = images.clone()
    mixed[..., top:bottom, left:right] = partners(images)[..., top:bottom, left:right]
    return mixed, 1 - (right - left) * (bottom - top) / (width * height)


def drawn_box(width: int, height: int, share: float, generator: np.random.Generator) -> Box:
    """Return the left, top, right and bottom of a box with a fraction `1 - share` of the area.

    The centre of the box is a random pixel; parts outside the image are cut off.
    """
    side = math.sqrt(1 - share)
    middle = int(generator.integers(width)), int(generator.integers(height))
    halves = int(width * side) // 2, int(height * side) // 2
    left, top = (max(0, m - half) for m, half in zip(middle, halves))
    right, bottom = (min(n, m + half) for n, m, half in zip((width, height), middle, halves))
    return left, top, right, bottom


def shares(labels: Tensor, classes: int, share: float) -> Tensor:
    """Return the weights of all classes in each mixed image, `[n, classes]`; rows sum to 1.

    The cross entropy with such a row is the weighted mean of the losses for both labels.

    Args:
        share: the weight of an image; its partner has weight `1 - share`.
    """
    one_hot = F.one_hot(labels, classes).float()
    return share * one_hot + (1 - share) * partners(one_hot)


def partners(values: Tensor) -> Tensor:
    """Return the values of an even number of images, with the two values of each pair swapped."""
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
