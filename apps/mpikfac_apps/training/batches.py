"""Select a rank's shard of each batch, and determine the order and augmentation of the images.

`Batches` holds all images in memory, and `FileBatches` reads them from files; both have the same
methods.

Order and augmentation depend only on (seed, epoch, position in the epoch). The global batches are
the same for every number of ranks, and each rank gets a contiguous shard of every batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import mpikfac
from mpikfac_apps.images.decoders import TRAINING
from mpikfac_apps.images.listing import Images, Listing
from mpikfac_apps.images.reader import DecodeRequest, Draw, ImageReader
from mpikfac_apps.options.by_epoch import ByEpoch, numbers_of
from mpikfac_apps.options.conflicts import check_size
from mpikfac_apps.options.options import DataOptions, Options
from mpikfac_apps.problems.datasets import Dataset
from mpikfac_apps.training.augmentation.moves import Augmentation, augmented
from mpikfac_apps.training.calendar import Calendar

SEEN = 1024  # how many images in files are used to compute the mean and variance of pixels
ROOM = 128  # the minimum number of images that an `ImageReader` can decode at a time
WORKERS = 2  # the default number of processes per rank that decode images


def mixed(*numbers: int) -> int:
    """Return a seed that depends on all `numbers` (each >= 0)."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


class Normalise:
    """Convert pixels to floats that have mean 0 and variance 1 per channel over given images.

    Pixels can be bytes or, for images mixed by `Mixes`, weighted means of bytes in float32.

    Args:
        images: the images over which mean and variance are computed, as bytes
            `[n, channels, h, w]`, or volumes, in one or several tensors.
    """

    def __init__(self, images: Tensor | Iterable[Tensor], device: torch.device) -> None:
        levels = torch.arange(256, dtype=torch.float64)
        parts = [images] if isinstance(images, Tensor) else images
        counts = torch.stack([counted(part) for part in parts]).sum(0).double()
        weights = counts / counts.sum(1, keepdim=True)
        mean = weights @ levels
        variance = weights @ levels**2 - mean**2
        scale = variance.clamp(min=1e-12).rsqrt()
        self.mean, self.scale = (value.float().to(device) for value in (mean, scale))

    def __call__(self, images: Tensor) -> Tensor:
        sides = [1] * (images.dim() - 2)
        mean, scale = (value.view(-1, *sides) for value in (self.mean, self.scale))
        return images.to(torch.float32, copy=True).sub_(mean).mul_(scale)


def counted(images: Tensor) -> Tensor:
    """Return how many pixels of each channel have each of the 256 values, `[channels, 256]`."""
    channels = images.unbind(1)
    return torch.stack([torch.bincount(pixels.flatten(), minlength=256) for pixels in channels])


def unit(images: Tensor, white: int) -> Tensor:
    """Return bytes as floats between 0 and 1, where `white` becomes 1."""
    return images.float().div_(white)


class EpochDraws(NamedTuple):
    """The random draws for an epoch: the order of the images, and the shifts of the augmentation.

    Attributes:
        order: the indices of the images, in the order in which the epoch uses them.
        moves: the arguments `top`, `left` and `mirror` of `augmented`, by position in the epoch;
            empty without augmentation.
    """

    epoch: int
    order: Tensor
    moves: tuple[Tensor, ...] = ()


class Batches:
    """This rank's shard of every global batch; the last, partial batch of an epoch is dropped.

    Args:
        images: all training images, bytes `[n, channels, h, w]`.
        labels: int64 `[n]`.
        batch: the number of images per step across all ranks, constant or by epoch; a multiple
            of `ranks`.
        augment: how images are shifted, with black borders, and mirrored; None for neither.
        tested: the images and labels of the rank's shard of the test set.

    Attributes:
        calendar: the number of steps of every epoch.
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
        tested: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.images, self.labels = images, labels
        self.tested = tested or (images[:0], labels[:0])
        self.seed, self.augment = seed, augment
        self.rank, self.ranks = rank, ranks
        self.calendar = Calendar(len(images), batch)
        self._draws: EpochDraws | None = None

    def per_rank(self, epoch: int) -> int:
        """Return the number of images in a rank's shard of a batch."""
        return self.calendar.at(epoch).batch // self.ranks

    def get(self, epoch: int, index: int) -> tuple[Tensor, Tensor]:
        """Return images (bytes) and labels of the rank's shard of batch `index` of `epoch`."""
        if self._draws is None or epoch != self._draws.epoch:
            self._draws = self._draw(epoch)
        share = self.per_rank(epoch)
        first = index * self.calendar.at(epoch).batch + self.rank * share
        positions = slice(first, first + share)
        chosen = self._draws.order[positions]
        images = self.images[chosen]
        if self.augment:
            moves = (draws[positions] for draws in self._draws.moves)
            images = augmented(images, self.augment.shift, *moves)
        return images, self.labels[chosen]

    def sample(self, images: int, size: int) -> Iterator[Tensor]:
        """Yield up to `images` randomly chosen images (bytes), in tensors of `size` images.

        The images are the same on all ranks and in every call, and are not augmented.
        """
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(len(self.images), generator=generator)[:images]
        for part in chosen.to(self.images.device).split(size):
            yield self.images[part]

    def first(self, count: int) -> Tensor:
        """Return the first `count` training images (bytes), without augmentation."""
        return self.images[:count]

    def pixels(self) -> Iterator[Tensor]:
        """Yield the images (bytes) used to compute mean and variance: all training images."""
        yield self.images.cpu()

    def test(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images (bytes) and labels of the rank's shard of the test set, `size` at a time."""
        return parts(*self.tested, size)

    def share_broken(self, comm: mpikfac.comm.Comm) -> None:
        """Do nothing, because no image in memory is broken."""

    def close(self) -> None:
        """Do nothing, because no process reads images."""

    def _draw(self, epoch: int) -> EpochDraws:
        generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
        n, device = len(self.images), self.images.device
        order = torch.randperm(n, generator=generator).to(device)
        if not self.augment:
            return EpochDraws(epoch, order)
        places = 2 * self.augment.shift + 1
        top, left = torch.randint(places, (2, n), generator=generator).to(device).unbind()
        if self.augment.alternating:  # drawn once per image, and inverted in every second epoch
            generator = torch.Generator().manual_seed(mixed(self.seed, 0, 1))
        mirror = torch.randint(2, (n,), generator=generator).bool().to(device)
        if self.augment.alternating:
            mirror = mirror[order] ^ bool(epoch % 2)
        return EpochDraws(epoch, order, (top, left, mirror))


class FileBatches:
    """Like `Batches`, but for images in files, which worker processes of the rank decode.

    Several batches are decoded in advance, so a slow image or process does not delay a step.

    Args:
        listing: the list of images.
        batch: the number of images per step across all ranks, constant or by epoch; a multiple
            of `ranks`.
        data: the augmentation, the number of processes, and how many broken images may be replaced.

    Attributes:
        calendar: the number of steps of every epoch.
    """

    def __init__(
        self,
        listing: Listing,
        batch: int | ByEpoch,
        data: DataOptions,
        *,
        seed: int,
        device: torch.device,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.seed, self.augment, self.device = seed, data.augment, device
        self.rank, self.ranks = rank, ranks
        self.calendar = Calendar(len(listing.train_images), batch)
        self._train, self._test = listing.train_images, listing.test_images
        room = max(ROOM, *(size // ranks for size in numbers_of(batch)))
        workers = WORKERS if data.workers is None else data.workers
        self._reader = ImageReader(listing.size, room, workers, data.max_broken_images or 0)
        self._epoch, self._order = -1, torch.empty(0)
        self._ahead: deque[tuple[int, int, DecodeRequest]] = deque()  # (epoch, index, request)

    def per_rank(self, epoch: int) -> int:
        """Return the number of images in a rank's shard of a batch."""
        return self.calendar.at(epoch).batch // self.ranks

    def get(self, epoch: int, index: int) -> tuple[Tensor, Tensor]:
        """Return images (bytes) and labels of the rank's shard of batch `index` of `epoch`.

        The worker processes also start to decode a later batch.

        Raises:
            UserError: an image is broken, and the options do not allow replacing it.
        """
        if not self._ahead or self._ahead[0][:2] != (epoch, index):
            self._ahead.clear()
            self._begin(epoch, index, TRAINING[0])
            for slot in TRAINING[1:]:
                self._begin_next(slot)
        *_, request = self._ahead.popleft()
        images = self._reader.result(request, self.device)
        self._begin_next(request.slot)
        return images, self._labels(self._train, request.numbers)

    def _begin_next(self, slot: int) -> None:
        """Start decoding the batch that follows the last one in the queue."""
        epoch, index, _ = self._ahead[-1]
        last = index + 1 == self.calendar.at(epoch).steps
        self._begin(epoch + last, 0 if last else index + 1, slot)

    def _begin(self, epoch: int, index: int, slot: int) -> None:
        """Start decoding the rank's shard of a batch."""
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
            self._order = torch.randperm(len(self._train), generator=generator)
            self._epoch = epoch
        count = self.per_rank(epoch)
        first = index * self.calendar.at(epoch).batch + self.rank * count
        positions = range(first, first + count)
        numbers = self._order[first : first + count].tolist()
        draws: list[Draw] = [(self.seed, epoch, position) for position in positions]
        chosen = draws if self.augment else None
        request = self._reader.begin(self._train, numbers, chosen, slot)
        self._ahead.append((epoch, index, request))

    def sample(self, images: int, size: int) -> Iterator[Tensor]:
        """Yield up to `images` randomly chosen images (bytes), in tensors of `size` images.

        The images are the same on all ranks and in every call, and are not augmented.
        """
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(len(self._train), generator=generator)[:images].tolist()
        return self._reader.read(self._train, chosen, size, self.device)

    def first(self, count: int) -> Tensor:
        """Return the first `count` training images (bytes), without augmentation."""
        numbers = range(min(count, len(self._train)))
        return torch.cat(list(self._reader.read(self._train, numbers, ROOM, self.device)))

    def pixels(self) -> Iterator[Tensor]:
        """Yield the images (bytes) used to compute mean and variance: up to `SEEN` random ones."""
        return (part.cpu() for part in self.sample(SEEN, ROOM))

    def test(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images (bytes) and labels of the rank's shard of the test set, `size` at a time."""
        numbers = range(len(self._test))[slice(*bounds(len(self._test), self.rank, self.ranks))]
        read = self._reader.read(self._test, numbers, size, self.device)
        for start, images in zip(range(numbers.start, numbers.stop, size), read):
            yield images, self._labels(self._test, range(start, start + len(images)))

    def _labels(self, images: Images, numbers: Sequence[int]) -> Tensor:
        return torch.from_numpy(images.labels[list(numbers)]).to(self.device)

    def share_broken(self, comm: mpikfac.comm.Comm) -> None:
        """Exchange lists of broken images between ranks, and log each image once.

        Collective over: comm, or none if no broken image is allowed.

        Raises:
            UserError: the ranks together have found more broken images than the options allow.
        """
        self._reader.share_broken(comm)

    def close(self) -> None:
        """Stop the worker processes."""
        self._reader.close()


def make_batches(
    data: Dataset | Listing, options: Options, device: torch.device, rank: int, ranks: int
) -> Batches | FileBatches:
    """Return a rank's batches, for images in memory or in files.

    Raises:
        ValueError: the network requires images of a different size.
    """
    if isinstance(data, Listing):
        return FileBatches(
            data,
            options.batches,
            options.data,
            seed=options.seed,
            device=device,
            rank=rank,
            ranks=ranks,
        )
    check_size(options, tuple(data.train_images.shape[2:]))
    images, labels = share(data.test_images, data.test_labels, rank, ranks)
    return Batches(
        data.train_images.to(device),
        data.train_labels.to(device),
        options.batches,
        seed=options.seed,
        augment=Augmentation.of(options.data),
        rank=rank,
        ranks=ranks,
        tested=(images.to(device), labels.to(device)),
    )


def share(images: Tensor, labels: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return a rank's contiguous shard of a data set; each image is in exactly one shard."""
    positions = slice(*bounds(len(images), rank, ranks))
    return images[positions], labels[positions]


def bounds(images: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the start and end of a rank's contiguous shard of `images` images."""
    return images * rank // ranks, images * (rank + 1) // ranks


def parts(images: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images and labels, `size` at a time; the last tensors can be shorter."""
    return zip(images.split(size), labels.split(size))
