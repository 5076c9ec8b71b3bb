"""List the images of a folder that has one subfolder per class, in the layout of ImageFolder.

The images are DIR/train/CLASS/*.jpg, and DIR/val/CLASS/*.jpg or DIR/test/CLASS/*.jpg.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from mpikfac_apps.images.listing import Images, Listing

KINDS = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
EXPECTED = "pass a folder with train/CLASS/*.jpg and val/CLASS/*.jpg (or test/CLASS/*.jpg)"


def listed(path: str, images: int | None = None, size: int = 224) -> Listing:  # noqa: ARG001
    """Return the images of a folder, sorted by class and name; each class is a subfolder.

    `images` is ignored, because `load` selects images from the list.

    Raises:
        ValueError: the folder has a different layout; the message is one line with the expected
            layout.
    """
    listing, _ = with_names(path, size)
    return listing


def with_names(path: str, size: int) -> tuple[Listing, list[str]]:
    """Return the images of a folder, and the names of the classes.

    Raises:
        ValueError: the folder has a different layout.
    """
    root = Path(path)
    train = root / "train"
    test = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
    if not train.is_dir():
        raise ValueError(f"data.path={path} has no subfolder named train; {EXPECTED}")
    if test is None:
        raise ValueError(f"data.path={path} has no subfolder named val or test; {EXPECTED}")
    classes = folders(train)
    if not classes:
        raise ValueError(f"{train} has no folders of classes; {EXPECTED}")
    if unknown := sorted(set(folders(test)) - set(classes)):
        raise ValueError(
            f"{test / unknown[0]} does not belong to a class: {train} has no {unknown[0]}"
        )
    trained, tested = images_of(train, classes), images_of(test, classes)
    missing = np.flatnonzero(np.bincount(trained.labels, minlength=len(classes)) == 0)
    if len(missing):
        raise ValueError(f"{train / classes[missing[0]]} has no images; {EXPECTED}")
    if not len(tested):
        raise ValueError(f"{test} has no images; {EXPECTED}")
    return Listing(trained, tested, len(classes), size), classes


def folders(path: Path) -> list[str]:
    """Return the sorted names of a folder's subfolders, except hidden ones."""
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and entry.name[0] != ".")


def images_of(part: Path, classes: list[str]) -> Images:
    """Return the images of a part of the data set; the folder of a class can be missing.

    Hidden files, and files whose suffix is not in `KINDS`, are skipped.
    """
    names: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        folder = part / name
        inside = sorted(os.listdir(folder)) if folder.is_dir() else []
        images = [file for file in inside if file.lower().endswith(KINDS) and file[0] != "."]
        names += [os.fsencode(f"{name}/{file}") for file in images]
        labels += [label] * len(images)
    return Images(str(part), np.array(labels, np.int64), np.array(names, np.bytes_))
