"""Generate images of shapes on noise, with their boxes and masks, as a data set without files."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mpikfac_apps.programs.draws import generator

CLASSES = ("background", "circle", "square", "triangle")
MOST = 3  # maximum number of shapes in an image
DARK, BRIGHT = 0.3, 0.4  # noise is darker than DARK, and colours are brighter than BRIGHT

Example = tuple[Tensor, dict[str, Tensor]]


class Shapes(Dataset[Example]):
    """Images of circles, squares and triangles with random colours, sizes and positions, on noise.

    An image depends only on its index and the seed, so each rank generates only its own images.

    Args:
        numbers: the indices of the images.
        size: the height and width in pixels, at least 32.
        seed: the random seed, at least 0.
    """

    def __init__(self, numbers: range, size: int, seed: int) -> None:
        self.numbers, self.size, self.seed = numbers, size, seed

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Example:
        """Return an image `[3, size, size]` and its target, in torchvision's format.

        The target contains `masks` `[shapes, size, size]`, `boxes` `[shapes, 4]` as left, top,
        right and bottom in pixels, and `labels` `[shapes]` as indices of `CLASSES`.
        """
        draws = generator(self.seed, self.numbers[index])
        picture = DARK * torch.rand(3, self.size, self.size, generator=draws)
        masks: list[Tensor] = []
        labels: list[int] = []
        for _ in range(int(torch.randint(1, MOST + 1, (), generator=draws))):
            label = int(torch.randint(1, len(CLASSES), (), generator=draws))
            radius, *centre = _placed(self.size, torch.rand(3, generator=draws))
            colour = BRIGHT + (1 - BRIGHT) * torch.rand(3, 1, generator=draws)
            mask = shape(CLASSES[label], self.size, radius, (centre[0], centre[1]))
            if not any(bool((mask & earlier).any()) for earlier in masks):  # no shape hides another
                picture[:, mask] = colour
                masks.append(mask)
                labels.append(label)
        stacked = torch.stack(masks)
        target = {"boxes": boxes_of(stacked), "labels": torch.tensor(labels), "masks": stacked}
        return picture, target


def shape(name: str, size: int, radius: float, centre: tuple[float, float]) -> Tensor:
    """Return the mask `[size, size]` of a shape inscribed in a square with side `2 radius`.

    Args:
        name: "circle", "square", or "triangle" with its base at the bottom.
        size: the height and width of the mask in pixels.
        centre: the row and column of the centre of the square, in pixels.
    """
    middles = torch.arange(size) + 0.5
    down, right = (middles - centre[0])[:, None], (middles - centre[1])[None]
    if name == "circle":
        return down**2 + right**2 <= radius**2
    if name == "square":
        return torch.maximum(down.abs(), right.abs()) <= radius
    return (down <= radius) & (2 * right.abs() <= down + radius)


def boxes_of(masks: Tensor) -> Tensor:
    """Return the smallest boxes `[shapes, 4]` around masks: left, top, right, bottom in pixels."""
    boxes = []
    for mask in masks:
        rows, columns = (mask.any(side).nonzero().flatten() for side in (1, 0))
        boxes.append([int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1])
    return torch.tensor(boxes, dtype=torch.float32)


def _placed(size: int, random: Tensor) -> list[float]:
    """Map three numbers in [0, 1) to the radius, row and column of a shape inside the image."""
    radius = float(size * (1 + random[0]) / 8)
    return [radius, *(radius + (size - 2 * radius) * random[1:]).tolist()]
