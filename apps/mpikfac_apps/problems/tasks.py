"""What a network learns from images: the targets, the loss, and the measure of success.

A classifier learns labels. An autoencoder learns the pixels of its own input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Measure = Literal["accuracy", "error"]


@dataclass(frozen=True)
class Task:
    """What a network learns.

    Attributes:
        loss_name: the name of the loss in `KFAC.record`.
        loss: returns the mean loss of outputs and targets.
        targets: returns the targets of inputs `[n, channels, h, w]` and labels `[n]`.
        measure: the name of the measure. A high accuracy is good, a low error is good.
        measured: returns the sum of the measure over the images of outputs and targets.
        unit: whether pixels lie between 0 and 1; otherwise pixels have mean 0 and variance 1.
    """

    loss_name: Literal["cross-entropy", "logistic"]
    loss: Callable[..., Tensor]
    targets: Callable[[Tensor, Tensor], Tensor]
    measure: Measure
    measured: Callable[[Tensor, Tensor], Tensor]
    unit: bool


def labels_of(inputs: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001 (as all targets)
    """Return the labels."""
    return labels


def right(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the number of images whose label has the largest score."""
    return (scores.argmax(1) == labels).sum()


def pixels_of(inputs: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001 (as all targets)
    """Return the inputs as `[n, pixels]`."""
    return inputs.flatten(1)


def squared_error(logits: Tensor, pixels: Tensor) -> Tensor:
    """Return the sum of squared errors of all pixels `[n, pixels]`."""
    return (logits.sigmoid() - pixels).square().sum()


CLASSIFICATION = Task("cross-entropy", F.cross_entropy, labels_of, "accuracy", right, unit=False)
RECONSTRUCTION = Task(
    "logistic",
    F.binary_cross_entropy_with_logits,  # the mean over images and pixels
    pixels_of,
    "error",
    squared_error,
    unit=True,
)
