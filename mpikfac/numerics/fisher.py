"""Compute output gradients that estimate the Fisher matrix of a model's own distribution.

The empirical Fisher matrix uses gradients of the loss at the labels of the data. The functions here
use labels from the model's own distribution [Martens 2020; Kunstner et al. 2019]: sampled labels,
or all labels at once. The gradients for all labels are the columns of a square root of the loss's
Hessian, which gives the generalised Gauss-Newton matrix (type-2).

Outputs are `[batch, outputs]` or, for sampled labels, `[batch, outputs, *positions]`. The loss is
`F.cross_entropy`, `F.mse_loss` or `F.binary_cross_entropy_with_logits` of these outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Loss = Literal["cross-entropy", "squared-error", "logistic"]
LOSSES: tuple[Loss, ...] = ("cross-entropy", "squared-error", "logistic")


def sampled(outputs: Tensor, loss: Loss) -> Tensor:
    """Return the gradient of the mean loss `[batch, outputs, *positions]` for sampled labels.

    Labels are sampled independently at every position, and the gradients of positions are summed as
    if they were independent: correlations between positions are ignored.
    """
    with torch.no_grad():
        positions = math.prod(outputs.shape[2:])
        return DRAWN[loss](outputs) / (len(outputs) * math.sqrt(positions))


def exact(outputs: Tensor, loss: Loss) -> Iterator[Tensor]:
    """Yield gradients `[batch, outputs]`, one per output, that together represent all labels.

    For every example, the sum of the gradients' outer products is the Hessian of the example's part
    of the mean loss, divided by the batch size. Squared gradients of the mean loss have the same
    scale.

    Raises:
        ValueError: outputs have positions; each position would need one gradient per output.
    """
    if outputs.dim() != 2:
        raise ValueError(
            f"fisher_type='type-2' needs outputs [batch, outputs], not {list(outputs.shape)}; use "
            f"estimator=mpikfac.Estimator(fisher_type='mc')"
        )
    with torch.no_grad():
        yield from ROOTS[loss](outputs).unbind(2)


def _drawn_class(outputs: Tensor) -> Tensor:
    probabilities = outputs.softmax(1)
    rows = probabilities.movedim(1, -1).reshape(-1, outputs.shape[1])
    # If outputs are not finite, neither are the gradients, for any labels.
    drawn = torch.multinomial(torch.where(rows.isfinite(), rows, 1.0), 1)
    labels = drawn.view(len(outputs), 1, *outputs.shape[2:])
    return probabilities.scatter_add_(1, labels, -torch.ones_like(labels, dtype=outputs.dtype))


def _drawn_noise(outputs: Tensor) -> Tensor:
    # The mean squared error over outputs is -log N(outputs, outputs / 2), up to a constant.
    return torch.randn_like(outputs) * math.sqrt(2 / outputs.shape[1])


def _drawn_bits(outputs: Tensor) -> Tensor:
    # Scaled so that squared gradients match the Hessian of the mean over outputs, p (1 - p) / n.
    p, q = outputs.sigmoid(), (-outputs).sigmoid()
    labels = torch.rand_like(p) < p
    return torch.where(labels, -q, p) / math.sqrt(outputs.shape[1])


def _class_root(outputs: Tensor) -> Tensor:
    """Return `(I - p 1^T) diag(p)^(1/2) / batch`; times `batch`, a root of `diag(p) - p p^T`."""
    p = outputs.softmax(1)
    root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
    return root / len(outputs)


def _noise_root(outputs: Tensor) -> Tensor:
    batch, count = outputs.shape
    root = math.sqrt(2 / count) * torch.eye(count).to(outputs)
    return root.expand(batch, count, count) / batch


def _bit_root(outputs: Tensor) -> Tensor:
    batch, count = outputs.shape
    variances = outputs.sigmoid() * (-outputs).sigmoid()  # 1 - p would round to 0 or eps
    return torch.diag_embed((variances / count).sqrt()) / batch


DRAWN: Mapping[Loss, Callable[[Tensor], Tensor]] = {
    "cross-entropy": _drawn_class,
    "squared-error": _drawn_noise,
    "logistic": _drawn_bits,
}
ROOTS: Mapping[Loss, Callable[[Tensor], Tensor]] = {
    "cross-entropy": _class_root,
    "squared-error": _noise_root,
    "logistic": _bit_root,
}


def check_outputs(heads: Sequence[Tensor], losses: Sequence[Loss]) -> None:
    """Check that `heads`, each `[batch, outputs, ...]`, are valid outputs for `losses`.

    Raises:
        ValueError: the numbers of heads and losses differ, heads have different numbers of rows, or
            a head does not match its loss.
    """
    rows = [len(outputs) if outputs.dim() else 0 for outputs in heads]
    if len(losses) != len(heads) or len(set(rows)) != 1:
        raise ValueError(
            f"record() needs one loss per head, and the same number of rows in all heads; this "
            f"call has {len(losses)} losses, and heads with {rows} rows"
        )
    for outputs, loss in zip(heads, losses):
        _check_head(outputs, loss)


def _check_head(outputs: Tensor, loss: Loss) -> None:
    """Check that `outputs` `[batch, outputs, ...]` are valid outputs for `loss`.

    Raises:
        ValueError: there is no output dimension; or, for a cross-entropy, outputs are
            probabilities, or there is only one output.
    """
    if outputs.dim() < 2:
        raise ValueError(
            f"record() needs outputs [batch, outputs, ...], not {list(outputs.shape)}; for a "
            f"single output, use outputs.unsqueeze(1)"
        )
    if loss != "cross-entropy":
        return
    if outputs.shape[1] == 1:
        raise ValueError(
            "the cross-entropy of a single output is always 0; for a binary problem, pass "
            "loss='logistic' or 2 outputs to record()"
        )
    sums = outputs.detach().sum(1)
    if bool((outputs >= 0).all()) and bool(((sums - 1).abs() < 1e-4).all()):
        raise ValueError(
            "outputs are positive and sum to 1, so they are probabilities; record() needs logits"
        )
