"""A self-contained page with the training images that have the largest influence scores."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from mpikfac_apps.lab.pages import rendered

if TYPE_CHECKING:
    from mpikfac_apps.lab.influence.influence import Influence

SUSPECTS = 60
"""The number of training images that are shown for their large self-influence."""


class Shown(NamedTuple):
    """A training image with a score: its influence on a query, or its self-influence.

    Attributes:
        png: the image as a PNG file in base64; "" if it cannot be drawn.
    """

    number: int
    label: int
    score: str
    png: str


class Query(NamedTuple):
    """A test image, with the training images that decrease and increase its loss most."""

    number: int
    label: int
    predicted: int | None
    png: str
    helpful: Sequence[Shown]
    harmful: Sequence[Shown]


def page(found: Influence, images: Tensor, head: str, top: int) -> str:
    """Return an HTML page with the largest scores for each query, and the largest self-influences.

    For images with neither one nor three channels, only number, label and score are shown.

    Args:
        images: all training images, bytes `[n, channels, h, w]`; the largest value is white.
        head: a line that describes the scores.
        top: how many helpful, and how many harmful, training images to show for each query.
    """
    white = max(1, int(images.max()))

    @cache
    def drawn(number: int) -> str:
        return png(images[number], white)

    def largest(scores: Tensor, of: Tensor, count: int) -> Iterator[Shown]:
        for number in of.topk(min(count, len(of))).indices.tolist():
            label = int(found.labels[number])
            yield Shown(number, label, f"{scores[number]:.2e}", drawn(number))

    queries = [
        Query(
            number,
            int(found.query_labels[number]),
            None if found.predicted is None else int(found.predicted[number]),
            png(found.queries[number], white),
            list(largest(scores, scores, top)),
            list(largest(scores, -scores, top)),
        )
        for number, scores in enumerate(found.scores)
    ]
    suspects = list(largest(found.own, found.own, SUSPECTS))
    template = Path(__file__).with_name("page.html")
    return rendered(template, head=head, queries=queries, suspects=suspects, images=len(images))


def png(pixels: Tensor, white: int) -> str:
    """Return an image (bytes) as a PNG file in base64; "" unless it has one or three channels.

    Args:
        pixels: the image, `[channels, h, w]`.
        white: the value that is drawn as white.
    """
    if pixels.dim() != 3 or pixels.shape[0] not in (1, 3):
        return ""
    levels = (pixels.cpu().float() * (255 / white)).clamp(max=255).round().byte()
    from matplotlib import image  # imported only when a page is written

    file = io.BytesIO()
    image.imsave(file, levels.expand(3, -1, -1).permute(1, 2, 0).numpy(), format="png")
    return base64.b64encode(file.getvalue()).decode()
