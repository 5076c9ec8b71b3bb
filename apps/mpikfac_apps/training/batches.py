"""Choose the images of a rank: the share of each batch, the order and the augmentation.

Order and augmentation follow from (seed, epoch, position in the epoch) alone. The global batches
are the same for every number of ranks, and each rank takes a contiguous share of every batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mpikfac_apps.options.by_epoch import ByEpoch
from mpikfac_apps.options.calendar import Calendar
from mpikfac_apps.options.options import DataOptions


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


@dataclass(frozen=True)
class Augmentation:
    """How training images change from epoch to epoch.

    Attributes:
        shift: pixels by which an image moves at most, in both directions.
        alternating: images are mirrored in every second epoch each, and not at random.
    """

    shift: int = 4
    alternating: bool = False

    @classmethod
    def of(cls, options: DataOptions) -> Augmentation | None:
        """Return the augmentation that the options ask for; None for none."""
        if not options.augment:
            return None
        shift = cls.shift if options.shift is None else options.shift
        return cls(shift, options.mirror == "alternating")


class Batches:
    """The rank's share of every global batch of an epoch; the last, partial batch is dropped.

    Args:
        images: all training images, bytes `[n, channels, h, w]`.
        labels: int64 `[n]`.
        batch: images of all ranks together in one step, or numbers by epoch; multiples of `ranks`.
        augment: move images over black pixels, and mirror half of the images; None for neither.

    Attributes:
        calendar: the steps of every epoch.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        batch: int | ByEpoch,
        *,
        seed: int,
        augment: Augmentation | None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.images, self.labels = images, labels
        self.seed, self.augment = seed, augment
        self.rank, self.ranks = rank, ranks
        self.calendar = Calendar(len(images), batch)
        self._epoch = -1

    def per_rank(self, epoch: int) -> int:
        """Return the images of a rank's share of a batch."""
        return self.calendar.at(epoch).batch // self.ranks

    def get(self, epoch: int, index: int) -> tuple[Tensor, Tensor]:
        """Return images (bytes) and labels of the rank's share of batch `index` of `epoch`."""
        if epoch != self._epoch:
            self._draw(epoch)
        mine = self.per_rank(epoch)
        first = index * self.calendar.at(epoch).batch + self.rank * mine
        positions = slice(first, first + mine)
        chosen = self.order[positions]
        images = self.images[chosen]
        if self.augment:
            top, left, mirror = (drawn[positions] for drawn in (self.top, self.left, self.mirror))
            images = augmented(images, self.augment.shift, top, left, mirror)
        return images, self.labels[chosen]

    def sample(self, images: int, size: int) -> Iterator[Tensor]:
        """Yield `size` images (bytes) at a time of up to `images` images drawn at random.

        The images are the same on all ranks and at every call, and are not augmented.
        """
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(len(self.images), generator=generator)[:images]
        for part in chosen.to(self.images.device).split(size):
            yield self.images[part]

    def _draw(self, epoch: int) -> None:
        generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
        n, device = len(self.images), self.images.device
        self.order = torch.randperm(n, generator=generator).to(device)
        if self.augment:
            places = 2 * self.augment.shift + 1
            drawn = torch.randint(places, (2, n), generator=generator).to(device)
            self.top, self.left = drawn.unbind()
            if self.augment.alternating:  # drawn for the images, alike in all epochs
                generator = torch.Generator().manual_seed(mixed(self.seed, 0, 1))
            self.mirror = torch.randint(2, (n,), generator=generator).bool().to(device)
            if self.augment.alternating:
                self.mirror = self.mirror[self.order] ^ bool(epoch % 2)
        self._epoch = epoch


def augmented(images: Tensor, shift: int, top: Tensor, left: Tensor, mirror: Tensor) -> Tensor:
    """Move images by (`top`, `left`) - `shift` pixels, fill with black, and mirror if `mirror`."""
    n, _, height, width = images.shape
    padded = F.pad(images, (shift,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # [n, c, ., ., h, w], not copied
    cropped = windows[torch.arange(n, device=images.device), :, top, left]
    return torch.where(mirror[:, None, None, None], cropped.flip(3), cropped)


def share(images: Tensor, labels: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return a rank's contiguous part for evaluation; the parts together hold every image once."""
    first, last = (len(images) * r // ranks for r in (rank, rank + 1))
    return images[first:last], labels[first:last]


def parts(images: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return `size` images at a time; the last part may be smaller."""
    return zip(images.split(size), labels.split(size))
