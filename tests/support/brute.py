"""Vectors and moments of a layer by brute force, with a call of autograd for every output.

The module uses only the layout of parameters and outputs from the library.
"""

from __future__ import annotations

import torch
from torch import nn

from mpikfac import layers
from mpikfac.numerics import copy_all


def matrices(layer, gradients):
    """Return gradients of the parameters as the layer's matrix."""
    for parameter, gradient in zip(layer.parameters, gradients):
        parameter.grad = gradient
    matrix = torch.empty(layer.shape.gradient, dtype=layer.parameters[0].dtype)
    copy_all(layer.gradients_to(layer.parts(matrix)))
    return matrix.view(layer.shape.groups, layer.shape.outputs, layer.shape.inputs)


def vectors(layer, x):
    """Return all `a` `[batch, shared, groups, inputs]`, the outputs' gradients for weight and bias.

    The gradient of an output is `a` in the output's own row and group, and 0 elsewhere.
    """
    y = layer.module(x)
    groups, outputs = layer.shape.groups, layer.shape.outputs
    if not isinstance(layer, layers.ConvLayer):
        y = y.movedim(-1, 1)
    y = y.reshape(len(x), groups, outputs, -1)
    found = y.new_zeros(len(x), y.shape[3], groups, layer.shape.inputs)
    for b, group, output, s in torch.cartesian_prod(*map(torch.arange, y.shape)).tolist():
        gradients = torch.autograd.grad(y[b, group, output, s], layer.parameters, retain_graph=True)
        matrix = matrices(layer, gradients)
        own = matrix[group, output].clone()
        matrix[group, output] = 0
        assert not matrix.any()
        assert output == 0 or torch.equal(found[b, s, group], own)
        found[b, s, group] = own
    return found


def rows(layer, g):
    """Return all `g` `[batch, shared, groups, outputs]`."""
    if not isinstance(layer, layers.ConvLayer):
        g = g.movedim(-1, 1)
    return g.reshape(len(g), layer.shape.groups, layer.shape.outputs, -1).movedim(3, 1)


def squares(vectors):
    """Return `sum(v v^T)` over all but the last two dimensions; for one group, a single matrix."""
    total = torch.einsum("...gi,...gj->gij", vectors, vectors)
    return total[0] if len(total) == 1 else total


def own_gradients(module, x, g):
    """Return a normalisation's unscaled values, and every example's gradients of scale and shift.

    Autograd computes the gradients from the gradient `g` of the outputs. Their shape is `[batch,
    units, 1 or 2]`, for the trained parameters.
    """
    given, first = dict(module.named_parameters()), next(module.parameters())
    own = {
        n: p.detach().expand(len(x), *p.shape).clone().requires_grad_() for n, p in given.items()
    }
    plain = torch.func.functional_call(
        module, {n: torch.full_like(p, float(n == "weight")) for n, p in given.items()}, x
    )
    form = (len(x), *[1] * (g.dim() - 1 - first.dim()), *first.shape)
    if not isinstance(module, nn.LayerNorm | nn.RMSNorm):  # channels come first
        form = (len(x), -1, *[1] * (g.dim() - 2))
    y = plain * own["weight"].view(form)
    if "bias" in own:
        y = y + own["bias"].view(form)
    trained = [own[name] for name, p in given.items() if p.requires_grad]
    gradients = torch.autograd.grad(y, trained, g)
    return plain, torch.stack([gradient.flatten(1) for gradient in gradients], -1)
