"""Transforms by torchvision's names, of tensors `[channels, height, width]`."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Transform = Callable[[Tensor], Tensor]


def Compose(transforms: Sequence[Transform]) -> Transform:
    """Return all transforms, one after the other, as a single transform."""

    def composed(image: Tensor) -> Tensor:
        for transform in transforms:
            image = transform(image)
        return image

    return composed


def ToTensor() -> Transform:
    """Return the identity: the images of the stand-in are tensors."""
    return lambda image: image


def Normalize(mean: Sequence[float], std: Sequence[float]) -> Transform:
    """Return the transform to a mean of 0 and a deviation of 1 in each channel."""
    means, deviations = (torch.tensor(values)[:, None, None] for values in (mean, std))
    return lambda image: (image - means) / deviations


def RandomCrop(size: int, padding: int) -> Transform:
    """Return a random crop of a padded image."""

    def crop(image: Tensor) -> Tensor:
        top, left = torch.randint(2 * padding + 1, (2,)).tolist()
        return F.pad(image, [padding] * 4)[:, top : top + size, left : left + size]

    return crop


def RandomHorizontalFlip() -> Transform:
    """Return a flip of every second image."""
    return lambda image: image.flip(-1) if torch.rand(()) < 0.5 else image
