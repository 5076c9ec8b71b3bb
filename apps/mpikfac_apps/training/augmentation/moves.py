"""Shift and mirror training images that are held in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mpikfac_apps.options.options import DataOptions


@dataclass(frozen=True)
class Augmentation:
    """Describe how training images change from epoch to epoch.

    Attributes:
        shift: the maximum number of pixels by which an image is shifted up, down, left or right.
        alternating: whether each image is mirrored in every second epoch, instead of in randomly
            chosen epochs.
    """

    shift: int = 4
    alternating: bool = False

    @classmethod
    def of(cls, options: DataOptions) -> Augmentation | None:
        """Return the augmentation that the options select, or None if they select none."""
        if not options.augment:
            return None
        shift = cls.shift if options.shift is None else options.shift
        return cls(shift, options.mirror == "alternating")


def augmented(images: Tensor, shift: int, top: Tensor, left: Tensor, mirror: Tensor) -> Tensor:
    """Shift images, fill their borders with black, and mirror those for which `mirror` is true.

    Each result is a window into the image with black borders of `shift` pixels; `top` and `left`
    are the position of the window, between 0 and `2 shift`.
    """
    n, _, height, width = images.shape
    padded = F.pad(images, (shift,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # [n, c, ., ., h, w], not copied
    cropped = windows[torch.arange(n, device=images.device), :, top, left]
    return torch.where(mirror[:, None, None, None], cropped.flip(3), cropped)
