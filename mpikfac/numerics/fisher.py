"""Gradients of outputs from which the Fisher matrix of a model's own distribution is estimated.

The empirical Fisher takes the gradients of the loss at the data's labels. These take labels that
the model itself gives [Martens 2020; Kunstner et al. 2019]: drawn ones, or all of them at once, as
the columns of a root of the loss's Hessian, which is the generalised Gauss-Newton matrix (type-2).

Outputs are `[batch, outputs]`, or for drawn labels `[batch, outputs, *positions]`, and the loss
is what `F.cross_entropy` or `F.mse_loss` gives for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

Fisher = Literal["empirical", "sampled", "exact", "forward-only"]
FISHERS: tuple[Fisher, ...] = ("empirical", "sampled", "exact", "forward-only")
Loss = Literal["cross-entropy", "squared-error"]
LOSSES: tuple[Loss, ...] = ("cross-entropy", "squared-error")


def sampled(outputs: Tensor, loss: Loss) -> Tensor:
    """Gradient of the mean loss `[batch, outputs, *positions]` at labels that the model gives.

    Positions' own gradients are added up as independent ones are: their labels are drawn one by
    one, and what they have in common does not count.
    """
    with torch.no_grad():
        positions = math.prod(outputs.shape[2:])
        return DRAWN[loss](outputs) / (len(outputs) * math.sqrt(positions))


def exact(outputs: Tensor, loss: Loss) -> Iterator[Tensor]:
    """Gradients `[batch, outputs]`, as many as there are outputs, that stand for all labels.

    Of each example, the sum of their outer products is the Hessian of its part of the mean loss,
    divided by the batch as squares of gradients of the mean loss are.

    Raises:
        ValueError: outputs have positions, each of which would take as many.
    """
    if outputs.dim() != 2:
        raise ValueError(
            f"fisher='exact' takes outputs [batch, outputs], not {list(outputs.shape)}; "
            f"use fisher='sampled'"
        )
    with torch.no_grad():
        yield from ROOTS[loss](outputs).unbind(2)


def _drawn_class(outputs: Tensor) -> Tensor:
    probabilities = outputs.softmax(1)
    rows = probabilities.movedim(1, -1).reshape(-1, outputs.shape[1])
    labels = torch.multinomial(rows, 1).view(len(outputs), 1, *outputs.shape[2:])
    return probabilities.scatter_add_(1, labels, -torch.ones_like(labels, dtype=outputs.dtype))


def _drawn_noise(outputs: Tensor) -> Tensor:
    # The mean over outputs of squared errors is -log N(outputs, outputs / 2).
    return torch.randn_like(outputs) * math.sqrt(2 / outputs.shape[1])


def _class_root(outputs: Tensor) -> Tensor:
    """`diag(p) - p p^T` has the root `(I - p 1^T) diag(p)^(1/2)`."""
    p = outputs.softmax(1)
    root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
    return root / len(outputs)


def _noise_root(outputs: Tensor) -> Tensor:
    batch, count = outputs.shape
    root = math.sqrt(2 / count) * torch.eye(count).to(outputs)
    return root.expand(batch, count, count) / batch


DRAWN: Mapping[Loss, Callable[[Tensor], Tensor]] = {
    "cross-entropy": _drawn_class,
    "squared-error": _drawn_noise,
}
ROOTS: Mapping[Loss, Callable[[Tensor], Tensor]] = {
    "cross-entropy": _class_root,
    "squared-error": _noise_root,
}
