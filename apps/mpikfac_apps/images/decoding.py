"""Decode images with Pillow, and crop them to what a network receives."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from PIL import Image, UnidentifiedImageError

from mpikfac import files
from mpikfac_apps.images.listing import ImagePlace

FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
LIMIT = 2**28  # maximum size of an image file in bytes
AREA = (0.08, 1.0)  # minimum and maximum fraction of an image that a random crop covers
RATIO = (3 / 4, 4 / 3)  # minimum and maximum width / height of a random crop
TRIES = 10


class Broken(ValueError):
    """Raised for an image that cannot be decoded."""


def decoded(place: ImagePlace, size: int, draw: Sequence[int] | None = None) -> np.ndarray:
    """Return an image as a network receives it: bytes `[size, size, 3]`.

    Args:
        draw: the seed of a random crop and of mirroring; None for the central crop.

    Raises:
        Broken: the image cannot be read or decoded.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damaged camera metadata are harmless
            image = opened(content(place)).convert("RGB")
        return np.asarray(centre(image, size) if draw is None else random_crop(image, size, draw))
    except Exception as error:  # decoding a damaged file can raise any exception
        raise Broken(files.one_line(error)) from error


def content(place: ImagePlace) -> bytes:
    """Return the bytes of an image.

    Raises:
        OSError: the file cannot be read, or ends before the image does.
    """
    if place.size is None:
        return files.read_bytes(place.path, LIMIT, links=True)
    path, start = place.copy or (place.path, place.start)
    data = os.pread(_packed(path).fileno(), place.size, start)
    if len(data) < place.size:
        raise OSError("the file ends before the image does")
    return data


@lru_cache(maxsize=4)
def _packed(path: str) -> io.BufferedReader:
    """Open a file that contains many images, and keep it open."""
    return files.reading(path, links=True)


def opened(encoded: bytes) -> Image.Image:
    """Open an image in one of `FORMATS`, regardless of its file name; decode only the header.

    Raises:
        ValueError: the bytes are not an image in one of these formats, or its channels have more
            than 8 bits.
    """
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"it is not an image in one of the formats {', '.join(FORMATS)}") from None
    if image.mode[0] in "IF":  # Pillow would convert all values above 255 to white
        raise ValueError(f"its pixels have 16 or 32 bits (mode {image.mode}); store it with 8 bits")
    return image


def centre(image: Image.Image, size: int) -> Image.Image:
    """Resize the shorter side to 8/7 of `size`, and return the central square of `size` pixels."""
    image = shorter_side(image, round(size * 8 / 7))
    left, top = (round((side - size) / 2) for side in image.size)
    return image.crop((left, top, left + size, top + size))


def shorter_side(image: Image.Image, pixels: int) -> Image.Image:
    """Scale an image to a shorter side of `pixels`, with Pillow's antialiased bilinear filter."""
    shorter = min(image.size)
    width, height = (pixels * side // shorter for side in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def random_crop(image: Image.Image, size: int, draw: Sequence[int]) -> Image.Image:
    """Return a random crop of the image as `size` x `size` pixels; half of the crops are mirrored.

    The crop covers a fraction of the area within the bounds `AREA`, and its aspect ratio is within
    the bounds `RATIO` [Szegedy et al. 2015].
    """
    generator = np.random.default_rng(draw)
    mirror = generator.random() < 0.5
    part = image.crop(drawn_box(*image.size, generator))
    part = part.resize((size, size), Image.Resampling.BILINEAR)
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror else part


def drawn_box(width: int, height: int, generator: np.random.Generator) -> tuple[int, int, int, int]:
    """Return the left, top, right and bottom of a random crop.

    If none of `TRIES` crops fits into the image, return the largest central crop within `RATIO`.
    """
    narrowest, widest = RATIO
    for _ in range(TRIES):
        area = width * height * generator.uniform(*AREA)
        ratio = math.exp(generator.uniform(math.log(narrowest), math.log(widest)))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left = int(generator.integers(width - across + 1))
            top = int(generator.integers(height - down + 1))
            return left, top, left + across, top + down
    across = min(width, max(1, round(height * widest)))
    down = min(height, max(1, round(width / narrowest)))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down
