"""Generate images of smooth curves, a data set without files for deep autoencoders.

Each image shows a parabola through three random points, so it is determined by six numbers. All
operations are correctly rounded (IEEE 754), and no value depends on the order of evaluation, so the
images are bitwise identical on all machines.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SIDE = 28  # the side length in pixels
POINTS = 128  # points drawn per curve, less than a pixel apart
INK = 1.5  # the distance in pixels from a curve at which its brightness reaches 0
MARGIN = 4  # pixels around the three points, because a curve extends up to 12 % beyond them
CHUNK = 2048  # the number of images that are drawn at a time


def drawn(images: int, seed: int) -> Tensor:
    """Return white curves on black, as bytes `[images, 1, 28, 28]` that depend only on the seed."""
    # The raw output of a bit generator is the same in all versions of NumPy.
    raw = np.random.PCG64(seed).random_raw(6 * images).reshape(images, 3, 2)
    knots = MARGIN + (SIDE - 1 - 2 * MARGIN) * (raw >> 53) / 2**11
    parts = [painted(knots[i : i + CHUNK]) for i in range(0, images, CHUNK)]
    return torch.from_numpy(np.concatenate(parts)).view(images, 1, SIDE, SIDE)


def painted(knots: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return images of curves through the points `[n, 3, 2]`, as bytes `[n, 28 * 28]`.

    Each point of a curve brightens the 3x3 pixels around it, the more distant ones less. A pixel
    keeps its highest brightness.
    """
    t = np.linspace(0.0, 1.0, POINTS)[:, None]
    first, middle, last = (knots[:, number, None] for number in range(3))
    weights = (1 - t) * (1 - 2 * t), 4 * t * (1 - t), t * (2 * t - 1)  # Lagrange polynomials
    points = weights[0] * first + weights[1] * middle + weights[2] * last  # [n, POINTS, 2]
    nearest = np.rint(points)
    brightness = np.zeros((len(knots), SIDE * SIDE))
    image = np.arange(len(knots))[:, None]
    for step in itertools.product((-1.0, 0.0, 1.0), repeat=2):
        pixel = nearest + step
        apart = points - pixel
        distance = np.sqrt(apart[..., 0] ** 2 + apart[..., 1] ** 2)
        place = (SIDE * pixel[..., 1] + pixel[..., 0]).astype(np.intp)
        np.maximum.at(brightness, (image, place), np.clip(INK - distance, 0.0, 1.0))
    return np.rint(255 * brightness).astype(np.uint8)
