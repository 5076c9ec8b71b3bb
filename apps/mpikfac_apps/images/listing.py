"""List the images of a data set that are read from files: their locations and their labels."""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

SAMPLE = 64  # number of images whose bytes a restart compares; comparing all would take minutes


class ImagePlace(NamedTuple):
    """The location of an image's bytes.

    Attributes:
        path: a file.
        start: the offset of the first byte in the file.
        size: the number of bytes; None for the whole file.
        copy: a copy of the bytes, as a file and the offset of the first byte; None for no copy.
    """

    path: str
    start: int = 0
    size: int | None = None
    copy: tuple[str, int] | None = None

    def __str__(self) -> str:
        return self.path if self.size is None else f"{self.path}, image at byte {self.start}"


class Content(NamedTuple):
    """The bytes of all images in a single file.

    Attributes:
        place: the location of the bytes.
        digest: the BLAKE3 hash of the bytes; empty if the file does not store it.
    """

    place: ImagePlace
    digest: str


@dataclass(frozen=True)
class Images:
    """The training or test images of a data set, in separate files or in a single file.

    The lists are arrays, because a Python list of a million names takes ten times as much memory.

    Attributes:
        root: the folder of the files, or the single file.
        labels: int64 `[n]`.
        names: the paths of the files inside `root`, bytes `[n]`; None for a single file.
        spans: the offset of each image in the single file, and its number of bytes, int64 `[n, 2]`;
            None for separate files.
        copy: a file with a copy of a part of the single file, and the offset of this part in the
            single file; None for no copy.
    """

    root: str
    labels: np.ndarray
    names: np.ndarray | None = None
    spans: np.ndarray | None = None
    copy: tuple[str, int] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def place(self, number: int) -> ImagePlace:
        """Return the location of image `number`."""
        if self.names is not None:
            return ImagePlace(os.path.join(self.root, os.fsdecode(self.names[number])))
        assert self.spans is not None, "a single file has spans"
        start, size = self.spans[number].tolist()
        copy = (self.copy[0], start - self.copy[1]) if self.copy else None
        return ImagePlace(self.root, start, size, copy)

    def following(self, number: int) -> int:
        """Return the index of the next image of the same class, cyclically."""
        alike = np.flatnonzero(self.labels == self.labels[number])
        return int(alike[(np.searchsorted(alike, number) + 1) % len(alike)])

    def spread(self, count: int | None) -> Images:
        """Return `count` evenly spaced images of the list; None for all images.

        A list is sorted by class, so the first images would all be of one class.
        """
        if count is None:
            return self
        numbers = np.arange(count) * len(self) // count
        names, spans = (None if a is None else a[numbers] for a in (self.names, self.spans))
        return replace(self, labels=self.labels[numbers], names=names, spans=spans)

    @property
    def digest(self) -> int:
        """A checksum of the labels and of the file names or locations, but not of `root`."""
        parts = (self.labels, self.names, self.spans)
        return zlib.crc32(b"".join(part.tobytes() for part in parts if part is not None))

    @property
    def sample(self) -> int:
        """A checksum of up to `SAMPLE` evenly spaced images; unreadable ones are skipped."""
        from mpikfac_apps.images.decoding import content  # needs Pillow

        count, total = min(SAMPLE, len(self)), 0
        for number in range(count):
            with suppress(OSError):
                total = zlib.crc32(content(self.place(number * len(self) // count)), total)
        return total


@dataclass(frozen=True)
class Listing:
    """The images of a data set that are read from files, for training and for the test.

    Attributes:
        classes: the number of classes.
        size: the side length in pixels of the images that a network receives.
        channels: the number of channels, which are red, green and blue.
        white: the byte value of a white pixel.
        about: a description of the data for the log.
        content: where the bytes of all images are, if they are in a single file.
    """

    train_images: Images
    test_images: Images
    classes: int
    size: int
    channels: int = 3
    white: int = 255
    about: str = ""
    content: Content | None = None

    @property
    def checksums(self) -> dict[str, int]:
        """Checksums that a restart compares; unlike in `Dataset.checksums`, pixels are sampled."""
        whole = self.content.digest.encode() if self.content else b""
        return {
            "images": self.train_images.digest,
            "pixels": zlib.crc32(whole, self.train_images.sample),
            "tests": self.test_images.digest ^ self.test_images.sample,
        }

    def part(self, train: int | None, test: int | None) -> Listing:
        """Return the data set with `train` training and `test` test images, evenly spaced.

        None keeps all images.
        """
        return replace(
            self,
            train_images=self.train_images.spread(train),
            test_images=self.test_images.spread(test),
        )
