"""Laplace approximation: a Gaussian posterior of the weights from the curvature at a mode.

For N examples and the prior `N(0, I / prior)` of the covered weights, the posterior is
`N(w, (N C + prior I)^-1)`, if w is its mode [MacKay 1992]. Kronecker factors make this feasible for
networks [Ritter et al. 2018]. The linearised outputs are then Gaussian, too, and predict better
than sampled weights do [Immer et al. 2021].
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from mpikfac.errors import UserError
from mpikfac.lab.curvature.curvature import Curvature
from mpikfac.lab.curvature.records import Outputs, record_columns, rotated_inputs, weighted_squares
from mpikfac.plan import check_positive

CHANGE = 1e-10  # the iteration stops when log(prior) changes by no more than this
FEW, MANY = 1e-10, 1e15  # prior precisions between which a maximum is searched for


def log_evidence(curvature: Curvature, log_likelihood: float, examples: int, prior: float) -> float:
    """Return the log marginal likelihood of the data, integrated over the covered weights.

    Collective over: comm of the curvature.

    Args:
        log_likelihood: the sum of the log-probabilities of all labels, on all ranks.
        examples: N, the number of examples on all ranks.
        prior: the precision of the prior, > 0.
    """
    count, squares = _weights(curvature)
    volume = curvature.logdet(examples, prior) - count * math.log(prior)
    return log_likelihood - (prior * squares + volume) / 2


def evidence_prior(curvature: Curvature, examples: int) -> float:
    """Return the prior precision that maximizes the evidence, a root of `prior |w|^2 = gamma`.

    MacKay's fixed-point iteration is `prior <- gamma / |w|^2`, where gamma is the sum of
    `curvature.effective`. Here, each iteration takes the geometric mean of the old and the new
    value, which at least halves the error of `log(prior)`.

    Collective over: comm of the curvature.

    Args:
        examples: see `log_evidence`.

    Raises:
        UserError: the evidence has no maximum, because the curvature or the weights are 0.
    """
    _, squares = _weights(curvature)
    prior, change = 1.0, math.inf
    while abs(change) > CHANGE:
        gamma = sum(curvature.effective(examples, prior).values())
        ratio = gamma / (prior * squares) if squares else math.inf
        if not FEW < prior * ratio < MANY:
            raise UserError(
                f"the evidence has no maximum: the squared norm of the weights is {squares:.3g}, "
                f"and the data determine {gamma:.3g} of the weights; pass a number as the prior "
                f"precision"
            )
        change = math.log(ratio) / 2
        prior *= math.exp(change)
    return prior


def output_variances(
    curvature: Curvature, outputs: Outputs, batch: Any, examples: int, priors: Sequence[float]
) -> Tensor:
    """Return variances of the linearised outputs, `[priors, batch, outputs]` in float64.

    The variance of an output with gradient J is `J^T (N C + prior I)^-1 J`. Computing it takes one
    backward pass per output.

    Collective over: none.

    Args:
        curvature: a curvature computed on a single rank, or returned by `replicate`.
        outputs: returns the outputs of a batch, `[examples, outputs]`.
        examples: see `log_evidence`.
        priors: prior precisions.

    Raises:
        ValueError: a module is in training mode; a prior is not positive; or the layers are
            distributed over several ranks.
    """
    for prior in priors:
        check_positive("prior", prior)
    if missing := [name for name in curvature.layers if name not in curvature.bases]:
        raise ValueError(f"another rank owns layer {missing[0]!r}; pass curvature.replicate()")

    def columns(found: Tensor) -> Iterator[Tensor]:
        for number in range(found.shape[1]):
            column = torch.zeros_like(found)
            column[:, number] = 1
            yield column

    layers = list(curvature.layers.values())
    variances: list[Tensor] = []
    inputs: dict[str, list[Tensor | None]] = {}
    for count, records in record_columns(curvature.model, layers, outputs, batch, columns):
        if not inputs:
            inputs = {n: rotated_inputs(curvature.bases[n], calls) for n, calls in records.items()}
        of_layers = []
        for layer in layers:
            basis, name = curvature.bases[layer.name], layer.name
            precisions = basis.values.new_tensor(priors).view(-1, 1, 1, 1)
            inverses = 1 / (examples * basis.values + precisions)
            arguments = records[name], count, inputs[name], inverses
            of_layers.append(weighted_squares(basis, layer, *arguments))
        variances.append(torch.stack(of_layers).sum(0))
    return torch.stack(variances, -1)


def probit(outputs: Tensor, variances: Tensor) -> Tensor:
    """Return class probabilities for Gaussian logits, `[..., classes]` [MacKay 1992].

    The approximation divides a logit with variance v by `sqrt(1 + pi v / 8)`.
    """
    return (outputs / (1 + math.pi / 8 * variances).sqrt()).softmax(-1)


def sampled_models(
    curvature: Curvature,
    examples: int,
    prior: float,
    generator: torch.Generator,
    count: int,
    inputs: Collection[Tensor] = (),
) -> Iterator[nn.Module]:
    """Yield the model `count` times, each time with weights sampled from the posterior.

        samples = mpikfac.lab.sampled_models(curvature, 50_000, 10.0, generator, 20, inputs)
        probabilities = sum(model(images).softmax(1) for model in samples) / 20

    When the iteration ends, the model's weights and statistics are restored.

    Collective over: comm of the curvature; all ranks draw all samples.

    Args:
        examples: see `log_evidence`.
        prior: see `log_evidence`.
        generator: see `Curvature.sample`.
        inputs: batches of training inputs, the same on all ranks, from which BatchNorm's statistics
            are estimated anew for each sample of the weights; empty to use the model's statistics.
    """
    model = curvature.model
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        for _ in range(count):
            drawn = curvature.sample(examples, prior, generator)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name in drawn:
                        parameter.copy_(own[name].double() + drawn[name][0])
                if inputs:
                    update_bn(inputs, model)
            yield model
    finally:
        model.load_state_dict(own)


def _weights(curvature: Curvature) -> tuple[int, float]:
    """Return the number of covered weights, and the sum of their squares."""
    covered = [p.detach() for layer in curvature.layers.values() for p in layer.parameters]
    squares = sum(p.double().square().sum().item() for p in covered)
    return sum(p.numel() for p in covered), squares
