"""Choose the images of a rank: the share of each batch, the order and the augmentation.

Order and augmentation follow from (seed, epoch, position in the epoch) alone. The global batches
are the same for every number of ranks, and each rank takes a contiguous share of every batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

MARGIN = 4  # black pixels around an image before cropping


def mixed(*numbers: int) -> int:
    """Return a seed that depends on all `numbers` (each >= 0)."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


class Normalise:
    """Turn bytes into floats of mean 0 and variance 1 per channel over the given images."""

    def __init__(self, images: Tensor, device: torch.device) -> None:
        levels = torch.arange(256, dtype=torch.float64)
        counts = torch.stack(
            [torch.bincount(images[:, c].flatten(), minlength=256) for c in range(images.shape[1])]
        ).double()
        weights = counts / counts.sum(1, keepdim=True)
        mean = weights @ levels
        variance = weights @ levels**2 - mean**2
        scale = variance.clamp(min=1e-12).rsqrt()
        self.mean, self.scale = (
            value.float().view(1, -1, 1, 1).to(device) for value in (mean, scale)
        )

    def __call__(self, images: Tensor) -> Tensor:
        return images.float().sub_(self.mean).mul_(self.scale)


def unit(images: Tensor, white: int) -> Tensor:
    """Return bytes as floats between 0 and 1; 1 is `white`."""
    return images.float().div_(white)


class Batches:
    """The rank's share of every global batch of an epoch; the last, partial batch is dropped.

    Args:
        images: all training images, bytes `[n, channels, h, w]`.
        labels: int64 `[n]`.
        batch: images of all ranks together in one step; a multiple of `ranks`.
        augment: pad by 4 black pixels, crop anywhere, and mirror half of the images.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        batch: int,
        *,
        seed: int,
        augment: bool,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.images, self.labels = images, labels
        self.batch, self.seed, self.augment = batch, seed, augment
        self.per_rank = batch // ranks
        self.start = rank * self.per_rank
        self._epoch = -1

    def __len__(self) -> int:
        """Return the steps per epoch."""
        return len(self.images) // self.batch

    def get(self, epoch: int, index: int) -> tuple[Tensor, Tensor]:
        """Return images (bytes) and labels of the rank's share of batch `index` of `epoch`."""
        if epoch != self._epoch:
            self._draw(epoch)
        first = index * self.batch + self.start
        positions = slice(first, first + self.per_rank)
        chosen = self.order[positions]
        images = self.images[chosen]
        if self.augment:
            images = augmented(
                images, self.top[positions], self.left[positions], self.mirror[positions]
            )
        return images, self.labels[chosen]

    def _draw(self, epoch: int) -> None:
        generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
        n, device = len(self.images), self.images.device
        self.order = torch.randperm(n, generator=generator).to(device)
        self.top, self.left = (
            torch.randint(2 * MARGIN + 1, (2, n), generator=generator).to(device).unbind()
        )
        self.mirror = torch.randint(2, (n,), generator=generator).bool().to(device)
        self._epoch = epoch


def augmented(images: Tensor, top: Tensor, left: Tensor, mirror: Tensor) -> Tensor:
    """Move each image by (`top`, `left`) - 4 pixels, fill with black, and mirror if `mirror`."""
    n, _, height, width = images.shape
    padded = F.pad(images, (MARGIN,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # [n, c, 9, 9, h, w], not copied
    cropped = windows[torch.arange(n, device=images.device), :, top, left]
    return torch.where(mirror[:, None, None, None], cropped.flip(3), cropped)


def share(images: Tensor, labels: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return a rank's contiguous part for evaluation; the parts together hold every image once."""
    first, last = (len(images) * r // ranks for r in (rank, rank + 1))
    return images[first:last], labels[first:last]


def parts(images: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return `size` images at a time; the last part may be smaller."""
    return zip(images.split(size), labels.split(size))
