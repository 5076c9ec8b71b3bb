"""Store a whole data set in a single HDF5 file: the encoded images one after another.

    images   all bytes of all images, training images first
    starts   the offset of each image's first byte in `images`, and the end of the last image
    labels   the class of each image
    train    the number of training images
    size     the maximum length in pixels of shorter sides, or 0 if the images are unchanged
    classes  the names of the classes, as a JSON list
    digest   the BLAKE3 hash of `images`, in hexadecimal digits; older files have none

`images` is stored in one piece, so ranks read images directly from the file, without HDF5.
"""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

import mpikfac
from mpikfac import files
from mpikfac_apps.images.listing import Content, ImagePlace, Images, Listing

LARGE = "images"
FORM = {"starts": torch.Tensor, "labels": torch.Tensor, "train": int, "size": int, "classes": str}
QUALITY = 95  # the quality of JPEG files
AHEAD = 256  # the number of images that are encoded at a time


def listed(path: str, images: int | None = None, size: int = 224) -> Listing:  # noqa: ARG001
    """Return the images of a packed file.

    `images` is ignored, because `load` selects images from the list.

    Raises:
        ValueError: the file is not a packed file.
        OSError: the file cannot be read.
    """
    header, first, length = mpikfac.checkpoint.read_around(Path(path), LARGE)
    if not all(isinstance(header.get(key), kind) for key, kind in FORM.items()):
        raise ValueError(f"{path} was not written by mpikfac pack: it lacks {', '.join(FORM)}")
    items: dict[str, Any] = header
    starts, labels = items["starts"].numpy(), items["labels"].numpy()
    train, classes = items["train"], len(names(path, items["classes"]))
    if not (
        (starts.dtype, labels.dtype, labels.ndim) == (np.int64, np.int64, 1)
        and starts.shape == (len(labels) + 1,)
        and 0 < train < len(labels)
        and (starts[0], starts[-1]) == (0, length)
        and (np.diff(starts) >= 0).all()
        and 0 <= labels.min() <= labels.max() < classes
    ):
        raise ValueError(f"{path} is damaged; create it again with mpikfac pack")
    spans = np.stack([first + starts[:-1], np.diff(starts)], axis=1)
    parts = (slice(0, train), slice(train, None))
    trained, tested = (Images(path, labels[part], spans=spans[part]) for part in parts)
    content = Content(ImagePlace(path, first, length), str(items.get("digest", "")))
    return Listing(trained, tested, classes, size, content=content)


def names(path: str, text: str) -> list[str]:
    """Return the names of the classes, given as a JSON list.

    Raises:
        ValueError: the string is not a JSON list of names.
    """
    classes = files.json_of(text)
    if not files.has_form(classes, [str]):
        raise ValueError(f"{path} was not written by mpikfac pack: classes is not a list of names")
    return list(classes)


def write(listing: Listing, classes: Sequence[str], out: Path, size: int | None = None) -> int:
    """Write a packed file, and return its size in bytes; if this fails, there is no new file.

    The images are first gathered in a temporary file next to `out`, because HDF5 needs all lengths
    to lay out a file.

    Args:
        size: the length in pixels to which the shorter side of larger images is reduced; they are
            re-encoded as JPEG. None to keep the bytes of all images.

    Raises:
        ValueError: an image cannot be decoded; the message names it.
        OSError: a file cannot be read or written.
    """
    gathered, partial_file = (out.with_name(f".{out.name}.{end}") for end in ("images", "partial"))
    parts = (listing.train_images, listing.test_images)
    try:
        sizes, digest = gather(gathered, encoded(parts, size))
        items: dict[str, Any] = {
            LARGE: torch.from_numpy(np.memmap(gathered, np.uint8, "c")),
            "starts": torch.tensor([0, *itertools.accumulate(sizes)]),
            "labels": torch.from_numpy(np.concatenate([part.labels for part in parts])),
            "train": len(parts[0]),
            "size": size or 0,
            "classes": json.dumps(list(classes)),
            "digest": digest,
        }
        written = mpikfac.checkpoint.write_shard(partial_file, items)
        os.replace(partial_file, out)
    finally:
        gathered.unlink(missing_ok=True)
        partial_file.unlink(missing_ok=True)
    return int(written["size"])


def gather(path: Path, images: Iterator[bytes]) -> tuple[list[int], str]:
    """Write images to a file one after another; return their sizes in bytes, and their hash."""
    sizes, digest = [], blake3()
    with io.BufferedWriter(files.writing(path)) as file:
        for image in images:
            sizes.append(file.write(image))
            digest.update(image)
    return sizes, digest.hexdigest()


def encoded(parts: Sequence[Images], size: int | None) -> Iterator[bytes]:
    """Yield the bytes of all images in order; threads read and encode images in advance."""
    places = (part.place(number) for part in parts for number in range(len(part)))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        while chunk := list(itertools.islice(places, AHEAD)):
            yield from pool.map(partial(shrunk, size=size), chunk)


def shrunk(place: ImagePlace, size: int | None) -> bytes:
    """Return an image with a shorter side of at most `size` pixels; small images are unchanged.

    Raises:
        ValueError: the image cannot be decoded.
    """
    from mpikfac_apps.images import decoding

    try:
        content = decoding.content(place)
        image = decoding.opened(content)
        if size is None or min(image.size) <= size:
            return content
        small, target = decoding.shorter_side(image.convert("RGB"), size), io.BytesIO()
        small.save(target, "JPEG", quality=QUALITY)
        return target.getvalue()
    except Exception as error:  # decoding a damaged file can raise any exception
        raise ValueError(f"{place} cannot be decoded: {files.one_line(error)}") from error
