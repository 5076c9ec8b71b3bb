"""Metrics of predicted class probabilities, and of their uncertainty."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 15  # the number of bins for the expected calibration error
TINY = torch.finfo(torch.float64).tiny


def negative_log_likelihood(probabilities: Tensor, labels: Tensor) -> float:
    """Return the mean negative log-probability of the labels, in nats.

    Args:
        probabilities: `[images, classes]`.
        labels: `[images]`.
    """
    return F.nll_loss(probabilities.double().clamp(min=TINY).log(), labels).item()


def calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """Return the expected calibration error [Guo et al. 2017], over 15 bins of equal width.

    It is the absolute difference between a bin's mean confidence and its accuracy, averaged over
    bins, each weighted by its number of images.
    """
    confidences, best = probabilities.double().max(1)
    bins = (confidences * BINS).ceil().long().clamp(1, BINS) - 1  # (0, 1/15], (1/15, 2/15], ...
    gaps = (best == labels).double() - confidences
    total = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, gaps)
    return (total.abs().sum() / len(labels)).item()


def brier_score(probabilities: Tensor, labels: Tensor) -> float:
    """Return the mean squared distance from the one-hot labels, which is between 0 and 2."""
    units = F.one_hot(labels, probabilities.shape[1])
    return (probabilities.double() - units).square().sum(1).mean().item()


def accuracy(probabilities: Tensor, labels: Tensor) -> float:
    """Return the fraction of images whose label is the most probable class."""
    return (probabilities.argmax(1) == labels).double().mean().item()


def auroc(probabilities: Tensor, others: Tensor) -> float:
    """Return the probability that a row of `others` has more entropy than one of `probabilities`.

    Ties count half. This is the area under the ROC curve of a detector that recognises foreign
    images, whose class probabilities are `others`, by their entropy.
    """
    own, other = entropy(probabilities).sort().values, entropy(others)
    below, up_to = (torch.searchsorted(own, other, right=right) for right in (False, True))
    return ((below + up_to).double().mean() / (2 * len(own))).item()


def entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy of each row of probabilities, in nats."""
    return torch.special.entr(probabilities.double()).sum(1)
