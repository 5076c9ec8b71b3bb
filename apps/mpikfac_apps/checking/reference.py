"""Compute K-FAC from its definition, with the modules' own outputs and full Kronecker products.

The check compares a model's layers with the results of this module, in which nothing is optimised
or distributed. The only library code it uses is each layer's mapping between its matrices and the
elements of weight, bias and outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mpikfac
from mpikfac.numerics import copy_all
from mpikfac_apps.checking.inside import Use, is_inside, watched


class Call(NamedTuple):
    """A use of a layer: its input, and the gradient of the mean loss with respect to its output."""

    x: Tensor
    g: Tensor


def calls(
    layers: Sequence[mpikfac.Layer], loss: Callable[[], Tensor]
) -> dict[str, list[list[Call]]]:
    """Run `loss` and its backward pass, and return all uses of each layer.

    A product inside a module has one list of uses per group; any other layer has a single list. The
    gradients of the parameters are left in `.grad`.
    """
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def keep(name: str, _: nn.Module, inputs: Any, named: Any, output: Tensor) -> Tensor:
        if not output.requires_grad:
            return output
        output.retain_grad()
        x = inputs[0] if inputs else named["input"]
        seen.setdefault(name, []).append((x.detach().clone(), output))
        return output.clone()  # an in-place activation must not change the stored output

    by_name = {layer.name: layer for layer in layers if not is_inside(layer)}
    hooks = [
        module.register_forward_hook(partial(keep, name), with_kwargs=True)
        for name, layer in by_name.items()
        for module in layer.modules
    ]
    with watched([layer for layer in layers if is_inside(layer)]) as inside:
        loss().backward()
    for hook in hooks:
        hook.remove()
    of_modules = {
        name: [[_call(by_name[name], x, y.grad) for x, y in uses if y.grad is not None]]
        for name, uses in seen.items()
    }
    of_groups = {name: [_inside(uses) for uses in groups] for name, groups in inside.items()}
    return {name: uses for name, uses in {**of_modules, **of_groups}.items() if any(uses)}


def _call(layer: mpikfac.Layer, x: Tensor, g: Tensor) -> Call:
    """Return a call, treating an example without a batch dimension as a batch of one."""
    return Call(x[None], g[None]) if x.dim() < layer.dimensions else Call(x, g)


def _inside(uses: Iterable[Use]) -> list[Call]:
    """Return uses with a gradient as calls; in outputs `y`, positions come before examples."""
    gradient_calls = []
    for x, y, columns in uses:
        if y.grad is not None:
            g = y.grad[..., columns]
            gradient_calls.append(Call(x, g.reshape(-1, len(x), g.shape[-1]).transpose(0, 1)))
    return gradient_calls


def output_vectors(layer: mpikfac.Layer, g: Tensor) -> Tensor:
    """Return all `g` (or outputs, passed as `g`) as `[batch, shared, groups, outputs]`."""
    if not layer.spatial:
        return layer.outputs(g).unsqueeze(2)
    return g.reshape(len(g), layer.shape.groups, layer.shape.outputs, -1).movedim(3, 1)


@torch.no_grad()
def input_vectors(layer: mpikfac.Layer, x: Tensor) -> Tensor:
    """Return all vectors `a`, `[batch, shared, groups, inputs]`, computed from module outputs.

    Outputs are linear in the weight: if the weight's rows are unit vectors, the outputs are the
    elements of `a`.
    """
    probe, shape = copy.deepcopy(layer), layer.shape
    matrix = torch.zeros(shape.groups, shape.outputs, shape.inputs).to(layer.parameters[0])

    def outputs() -> Tensor:
        copy_all(probe.values_from(probe.parts(matrix.view(shape.gradient))))
        return output_vectors(layer, probe.module(x))

    of_bias, columns = outputs(), []  # contributions of a frozen bias
    for start in range(0, shape.inputs, shape.outputs):
        rows = torch.arange(min(shape.outputs, shape.inputs - start))
        matrix.zero_()[:, rows, start + rows] = 1
        columns.append((outputs() - of_bias)[..., : len(rows)])
    vectors = torch.cat(columns, -1)
    if (padding := getattr(layer.module, "padding_idx", None)) is not None:
        vectors[..., padding] = 0  # an embedding's padding entry has no gradient
    return vectors


def factors(layer: mpikfac.Layer, uses: Sequence[Call]) -> dict[str, Tensor]:
    """Return the layer's factors A and G `[groups, order, order]`.

    A is the mean of `a a^T`, and G is the batch size times the sum of `g g^T`. For a normalisation,
    A is the batch size times the sum of the outer products of each example's gradient with itself.
    """
    if is_norm(layer):
        per_example = torch.cat([norm_gradients(layer, call) for call in uses])
        return {"A": len(uses[0].x) * torch.einsum("bui,buj->uij", per_example, per_example)}
    g = torch.cat([output_vectors(layer, call.g).flatten(0, 1) for call in uses])
    matrices = {"G": len(uses[0].x) * torch.einsum("vgi,vgj->gij", g, g)}
    if "A" in layer.shape.sides:
        a = torch.cat([input_vectors(layer, call.x).flatten(0, 1) for call in uses])
        matrices["A"] = torch.einsum("vgi,vgj->gij", a, a) / len(a)
    return {side: matrices[side] for side in layer.shape.sides}


def gradients(layer: mpikfac.Layer, call: Call) -> Tensor:
    """Return each example's `sum(g a^T)` over positions `[batch, groups, outputs, inputs]`."""
    if is_norm(layer):
        return norm_gradients(layer, call).unsqueeze(2)
    g, a = output_vectors(layer, call.g), input_vectors(layer, call.x)
    return torch.einsum("bsgo,bsgi->bgoi", g, a)


def gradients_alone(layer: mpikfac.Layer, call: Call) -> Tensor:
    """Return each example's gradient, computed by autograd in a separate pass."""
    probe, per_example = copy.deepcopy(layer), []
    for x, g in zip(call.x.split(1), call.g.split(1)):
        parts = torch.autograd.grad(probe.module(x), probe.parameters, g)
        for parameter, part in zip(probe.parameters, parts):
            parameter.grad = part
        per_example.append(gradient_of(probe))
    return torch.stack(per_example)


def gradient_of(layer: mpikfac.Layer) -> Tensor:
    """Return the gradients of weight and bias as the layer's matrix `[groups, outputs, inputs]`."""
    shape = layer.shape
    matrix = torch.zeros(shape.gradient).to(layer.parameters[0])
    copy_all(layer.gradients_to(layer.parts(matrix)))
    return matrix.view(shape.groups, shape.outputs, shape.inputs)


def is_norm(layer: mpikfac.Layer) -> bool:
    """Return whether a layer is a normalisation: a scale and a shift, without a matrix."""
    return isinstance(layer, mpikfac.layers.NormLayer)


@torch.no_grad()
def norm_gradients(layer: mpikfac.Layer, call: Call) -> Tensor:
    """Return each example's gradient of the trained scale and shift `[batch, units, 1 or 2]`."""
    module = copy.deepcopy(layer.module)
    for name, parameter in module.named_parameters():
        parameter.fill_(float(name == "weight"))
    of = {"weight": call.g * module(call.x), "bias": call.g}
    trained = [of[name] for name, p in layer.module.named_parameters() if p.requires_grad]
    # In the outputs of these modules, units are the last dimension; for all others, the second.
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        sums = [product.reshape(len(product), -1, layer.shape.groups).sum(1) for product in trained]
    else:
        sums = [product.reshape(len(product), layer.shape.groups, -1).sum(2) for product in trained]
    return torch.stack(sums, -1)


# -- solves --------------------------------------------------------------------------------------


def kronecker_solve(gradient: Tensor, a: Tensor, g: Tensor, damping: float) -> Tensor:
    """Return `(G (x) A + damping I)^-1 gradient`, computed with the full Kronecker product."""
    matrix = torch.kron(g, a) + damping * torch.eye(gradient.numel(), dtype=gradient.dtype)
    return torch.linalg.solve(matrix, gradient.reshape(-1)).view_as(gradient)


def tikhonov_solve(gradient: Tensor, a: Tensor, g: Tensor, damping: float) -> Tensor:
    """Solve with factored Tikhonov damping: `pi sqrt(damping)` for A, `sqrt(damping) / pi` for G.

    A factor that is zero has no scale, so pi is 1. An example is the factor G of a layer that is
    followed by a layer initialised to zero.
    """
    means = a.trace() / len(a), g.trace() / len(g)
    pi = (means[0] / means[1]) ** 0.5 if all(mean > 0 for mean in means) else 1.0
    damped_a = a + pi * damping**0.5 * torch.eye(len(a), dtype=a.dtype)
    damped_g = g + damping**0.5 / pi * torch.eye(len(g), dtype=g.dtype)
    return kronecker_solve(gradient, damped_a, damped_g, 0.0)


SOLVES: Mapping[str, Callable[..., Tensor]] = {
    "eigen": kronecker_solve,
    "inverse": tikhonov_solve,
}


def solve(
    preconditioner: str, gradient: Tensor, sides: Mapping[str, Tensor], damping: float
) -> Tensor:
    """Return a direction for a gradient `[groups, outputs, inputs]`, group by group.

    The identity replaces a missing side of a layer; the other side then gets all of the damping.
    """
    eye = partial(torch.eye, dtype=gradient.dtype)
    groups, outputs, inputs = gradient.shape
    a = sides.get("A", eye(inputs).expand(groups, -1, -1))
    g = sides.get("G", eye(outputs).expand(groups, -1, -1))
    chosen = SOLVES[preconditioner] if len(sides) == 2 else kronecker_solve
    return torch.stack([chosen(*group, damping) for group in zip(gradient, a, g)])
