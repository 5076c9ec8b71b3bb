"""What a network learns: the targets, the loss, and the measure of success.

A classifier learns the labels of images. An autoencoder learns the pixels of its own input. A
language model learns the next token of a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Measure = Literal["accuracy", "error", "bits per byte"]


@dataclass(frozen=True)
class Task:
    """What a network learns.

    Attributes:
        learns: the part of a data set that the network learns.
        loss_name: the name of the loss in `KFAC.record`.
        loss: returns the mean loss of outputs and targets.
        targets: returns the targets of inputs and labels: `[n, channels, h, w]` and `[n]` of
            images, or `[n, classes]` of mixed images; or windows of tokens `[n, positions]` and the
            next tokens `[n, positions]`.
        measure: the name of the measure. A high accuracy is good; a low error and few bits are.
        measured: returns the sum of the measure over the examples of outputs and targets.
        inputs: the network takes "tokens", pixels between 0 and 1 ("unit"), or pixels of mean 0 and
            variance 1 ("normal").
    """

    learns: Literal["labels", "pixels", "text"]
    loss_name: Literal["cross-entropy", "logistic"]
    loss: Callable[..., Tensor]
    targets: Callable[[Tensor, Tensor], Tensor]
    measure: Measure
    measured: Callable[[Tensor, Tensor], Tensor]
    inputs: Literal["normal", "unit", "tokens"]

    def tests(self, classes: int) -> Mapping[str, Callable[[Tensor, Tensor], Tensor]]:
        """Return what a test measures, by name, as sums over images; the measure comes first.

        Args:
            classes: the number of classes; top-5 accuracy needs more than 5 classes.
        """
        top5 = self.measure == "accuracy" and classes > 5
        return {self.measure: self.measured} | ({"top5": right_in_5} if top5 else {})

    def better(self, value: float, than: float) -> bool:
        """Return whether a value of the measure is better than another value; NaN is not."""
        return value > than if self.measure == "accuracy" else value < than


def labels_of(inputs: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001 (as all targets)
    """Return the labels."""
    return labels


def right(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the number of images whose label has the largest score.

    Args:
        labels: `[n]`; or the shares of the classes in mixed images, `[n, classes]`: an image counts
            as much as its share of the class with the largest score.
    """
    best = scores.argmax(1)
    if labels.is_floating_point():
        return labels.gather(1, best.unsqueeze(1)).sum()
    return (best == labels).sum()


def right_in_5(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the number of images whose label has one of the five largest scores."""
    return (scores.topk(5, 1).indices == labels.unsqueeze(1)).any(1).sum()


def pixels_of(inputs: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001 (as all targets)
    """Return the inputs as `[n, pixels]`."""
    return inputs.flatten(1)


def squared_error(logits: Tensor, pixels: Tensor) -> Tensor:
    """Return the sum of squared errors of all pixels `[n, pixels]`."""
    return (logits.sigmoid() - pixels).square().sum()


def tokens_of(inputs: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001 (as all targets)
    """Return bytes as the classes of a cross entropy."""
    return labels.long()


def bits(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return the bits of a token `[n, positions]`: mean over positions, sum over windows.

    Args:
        scores: `[n, classes, positions]`.
    """
    positions = tokens.shape[1]
    return F.cross_entropy(scores, tokens, reduction="sum") / (positions * math.log(2))


CLASSIFICATION = Task(
    "labels", "cross-entropy", F.cross_entropy, labels_of, "accuracy", right, inputs="normal"
)
RECONSTRUCTION = Task(
    "pixels",
    "logistic",
    F.binary_cross_entropy_with_logits,  # the mean over images and pixels
    pixels_of,
    "error",
    squared_error,
    inputs="unit",
)
LANGUAGE = Task(
    "text",
    "cross-entropy",
    F.cross_entropy,  # the mean over windows and positions
    tokens_of,
    "bits per byte",
    bits,
    inputs="tokens",
)
