"""Folders of small images, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

COUNTS = {"train": 16, "val": 5}
CLASSES = ("ant", "bee", "cat")


def noise(root: Path, counts: Mapping[str, int] = COUNTS, suffix: str = "jpg") -> Path:
    """Write noise images of several sizes, with a colour for each class."""
    draw = np.random.default_rng(0)
    for part, count in counts.items():
        for label, name in enumerate(CLASSES):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                height, width = draw.integers(20, 50, size=2)
                pixels = draw.integers(128, size=(height, width, 3), dtype=np.uint8)
                pixels[..., label] += 100
                Image.fromarray(pixels).save(folder / f"{number:02}.{suffix}")
    return root


def plain(root: Path, counts: Mapping[str, int] = COUNTS) -> Path:
    """Write images of one colour, whose red byte is the image's position in its part's list."""
    for part, count in counts.items():
        for label, name in enumerate(CLASSES):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                colour = (label * count + number, 0, 0)
                Image.new("RGB", (24, 30), colour).save(folder / f"{number:02}.png")
    return root
