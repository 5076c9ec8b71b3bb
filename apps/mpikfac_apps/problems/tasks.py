"""What a network learns: the targets, the loss, and the metric.

A classifier learns the labels of images. An autoencoder learns the pixels of its input. A
language model learns to predict the next token of a text, and a segmenter the class of each voxel
of a volume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Measure = Literal["accuracy", "error", "bits per byte", "dice"]
Sums = Mapping[str, Callable[[Tensor, Tensor], Tensor]]
"""Functions by name that take outputs and targets, and return a metric summed over examples."""


@dataclass(frozen=True)
class Task:
    """What a network learns.

    Attributes:
        learns: the part of a data set that the network learns to predict.
        loss_name: the name of the loss in `KFAC.record`.
        loss: returns the mean loss, given outputs and targets.
        targets: returns the targets, given inputs and labels: images `[n, channels, h, w]` and
            labels `[n]` (`[n, classes]` for mixed images), windows of tokens `[n, positions]` and
            the next tokens `[n, positions]`, or volumes and classes `[n, d, h, w]`.
        measure: the name of the task's metric. Higher is better for accuracy and the Dice
            coefficient, lower for the error and bits per byte.
        measured: returns, given outputs and targets, the metric summed over examples, or the sums
            of the values from which the metric is computed.
        inputs: what the network takes: "tokens", pixels between 0 and 1 ("unit"), or pixels with
            mean 0 and variance 1 ("normal").
        dimensions: the number of dimensions within an example over which the loss averages, such as
            1 for a text and 3 for a volume; 0 if an example has a single loss.
        further: functions for further metrics of a test, by name.
        per_class: the number of values per class from which the metric is computed; 0 if the metric
            is a mean over examples.
        value: returns the metric, given the means over all examples of the values from which it is
            computed.
    """

    learns: Literal["labels", "pixels", "text", "voxels"]
    loss_name: Literal["cross-entropy", "logistic"]
    loss: Callable[..., Tensor]
    targets: Callable[[Tensor, Tensor], Tensor]
    measure: Measure
    measured: Callable[[Tensor, Tensor], Tensor]
    inputs: Literal["normal", "unit", "tokens"]
    dimensions: int = 0
    further: Sums = field(default_factory=dict)
    per_class: int = 0
    value: Callable[[Sequence[float]], float] = itemgetter(0)

    def tests(self, classes: int) -> Sums:
        """Return the functions of a test's metrics, by name; the task's metric comes first.

        Args:
            classes: the number of classes; top-5 accuracy needs more than 5 classes.
        """
        top5 = self.measure == "accuracy" and classes > 5
        further = {"top5": right_in_5} if top5 else self.further
        return {self.measure: self.measured, **further}

    def numbers(self, classes: int) -> int:
        """Return the number of values from which the task's metric is computed."""
        return self.per_class * classes or 1

    def better(self, value: float, than: float) -> bool:
        """Return whether a value of the task's metric is better than another; NaN never is."""
        return value > than if self.measure in ("accuracy", "dice") else value < than


def labels_of(inputs: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001 (as all targets)
    """Return the labels as the targets; `inputs` is ignored."""
    return labels


def right(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the number of images whose label has the largest score.

    Args:
        labels: `[n]`; or, for mixed images, the weights of the classes, `[n, classes]`: an image
            then counts with the weight of the class that has the largest score.
    """
    best = scores.argmax(1)
    if labels.is_floating_point():
        return labels.gather(1, best.unsqueeze(1)).sum()
    return (best == labels).sum()


def right_in_5(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the number of images whose label has one of the five largest scores."""
    return (scores.topk(5, 1).indices == labels.unsqueeze(1)).any(1).sum()


def pixels_of(inputs: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001 (as all targets)
    """Return the inputs, reshaped to `[n, pixels]`, as the targets; `labels` is ignored."""
    return inputs.flatten(1)


def squared_error(logits: Tensor, pixels: Tensor) -> Tensor:
    """Return the sum of the squared errors of all pixels; both tensors are `[n, pixels]`."""
    return (logits.sigmoid() - pixels).square().sum()


def classes_of(inputs: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001 (as all targets)
    """Return labels stored as bytes as int64 targets, which cross entropy expects."""
    return labels.long()


def bits(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return the bits per token, averaged over positions and summed over windows.

    Args:
        scores: `[n, classes, positions]`.
        tokens: `[n, positions]`.
    """
    positions = tokens.shape[1]
    return F.cross_entropy(scores, tokens, reduction="sum") / (positions * math.log(2))


def overlaps(scores: Tensor, classes: Tensor) -> Tensor:
    """Return counts of voxels per class `[2 * classes]`, summed over volumes, for `dice`.

    Let A be the voxels where a class has the largest score, and B the voxels of the class. The
    counts are |A and B| for every class, then |A| + |B| for every class.

    Args:
        scores: `[n, classes, d, h, w]`.
        classes: `[n, d, h, w]`.
    """
    names = torch.arange(scores.shape[1], device=scores.device)[:, None]
    best, right = (of_voxels.flatten() == names for of_voxels in (scores.argmax(1), classes))
    return torch.cat([(best & right).sum(1), best.sum(1) + right.sum(1)])


def dice(means: Sequence[float]) -> float:
    """Return the Dice coefficient 2 |A and B| / (|A| + |B|), averaged over classes except 0.

    For each class, A are the voxels where it has the largest score, and B its voxels, over all
    volumes together. A class for which both A and B are empty is ignored.

    Args:
        means: the counts returned by `overlaps`, averaged over volumes.
    """
    both, sizes = np.split(np.asarray(means), 2)
    here = sizes[1:] > 0
    return float(np.mean(2 * both[1:][here] / sizes[1:][here])) if here.any() else math.nan


def right_voxels(scores: Tensor, classes: Tensor) -> Tensor:
    """Return the fraction of voxels whose class has the largest score, summed over volumes."""
    return (scores.argmax(1) == classes).flatten(1).float().mean(1).sum()


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
    classes_of,
    "bits per byte",
    bits,
    inputs="tokens",
    dimensions=1,
)
SEGMENTATION = Task(
    "voxels",
    "cross-entropy",
    F.cross_entropy,  # the mean over volumes and voxels
    classes_of,
    "dice",
    overlaps,
    inputs="normal",
    dimensions=3,
    further={"voxel accuracy": right_voxels},
    per_class=2,
    value=dice,
)
