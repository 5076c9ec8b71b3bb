"""Model the loss along a few directions by a quadratic function [Martens & Grosse 2015, 6.4 and 7].

The curvature is the whole Gauss-Newton matrix `J^T H J` of a batch. J holds the derivatives of the
outputs by the parameters, and H is the Hessian of the loss by the outputs. A product of J and a
direction is a single pass of forward-mode differentiation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

Direction = Mapping[str, Tensor]
Criterion = Callable[[Tensor], Tensor]
PARALLEL = 1e-6  # in float32, products of a model are no more exact


@dataclass(frozen=True)
class Batch:
    """A rank's share of a batch: a mean loss as a function of the parameters.

    Attributes:
        inputs: the arguments of the model.
        loss: the mean loss of the share's outputs, `[]`.
    """

    inputs: tuple[Any, ...]
    loss: Criterion


def slopes_and_curvatures(
    model: nn.Module, batch: Batch, directions: Sequence[Direction]
) -> tuple[Tensor, Tensor]:
    """Return slopes `v_i^T gradient` `[n]` and curvatures `v_i^T J^T H J v_j` `[n, n]`, in float64.

    Args:
        directions: `v_1` to `v_n`, at least one, by names of parameters; 0 where a name is missing.
    """
    passes = [jacobian_product(model, direction, batch.inputs) for direction in directions]
    products = torch.stack([product for _, product in passes])
    with torch.enable_grad():
        at = passes[0][0].requires_grad_()
        (gradient,) = torch.autograd.grad(batch.loss(at), at, create_graph=True)
    curved = torch.stack([hessian_product(gradient, at, product) for product in products])
    rows, columns = products.flatten(1).double(), curved.flatten(1).double()
    return rows @ gradient.detach().flatten().double(), rows @ columns.T


def hessian_product(gradient: Tensor, at: Tensor, vector: Tensor) -> Tensor:
    """Return the derivative by `at` of a gradient along `vector`; zeros for a constant gradient."""
    if not gradient.requires_grad:
        return torch.zeros_like(at)
    (found,) = torch.autograd.grad(gradient, at, vector, retain_graph=True)
    return found


def jacobian_product(
    model: nn.Module, direction: Direction, inputs: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Return the model's outputs, and the derivative of the outputs along a direction.

    Running statistics and random numbers stay as they are, so all passes drop the same units.

    Raises:
        ValueError: the model returns no tensor.
    """
    values = {name: p.detach() for name, p in model.named_parameters()}
    device = next(iter(values.values())).device
    devices = [] if device.type == "cpu" else [device]
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices, device_type=device.type),
        sdpa_kernel(SDPBackend.MATH),  # the only attention with a forward mode
        torch.compiler.set_stance("force_eager"),  # compiled code has no forward mode
        forward_ad.dual_level(),
    ):
        for name, tangent in direction.items():
            values[name] = forward_ad.make_dual(values[name], tangent)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        found = functional_call(model, values | buffers, inputs)
        if not torch.is_tensor(found):
            raise ValueError(
                f"the model returns a {type(found).__name__}; length='quadratic' takes a model "
                f"that returns a tensor"
            )
        outputs, product = forward_ad.unpack_dual(found)
        product = torch.zeros_like(outputs) if product is None else product
    precise = torch.promote_types(outputs.dtype, torch.float32)
    return outputs.to(precise), product.to(precise)


def inner_products(ones: Sequence[Direction], others: Sequence[Direction]) -> Tensor:
    """Return the products `v_i^T w_j` `[n, m]` of directions, in float64."""

    def product(v: Direction, w: Direction) -> Tensor:
        terms = [(v[name].double() * w[name].double()).sum() for name in v if name in w]
        return torch.stack(terms).sum() if terms else zero

    zero = next(iter(ones[0].values())).new_zeros((), dtype=torch.float64)
    return torch.stack([torch.stack([product(v, w) for w in others]) for v in ones])


def lowest(slopes: Tensor, curvatures: Tensor) -> Tensor:
    """Return the `x` `[n]` where `1/2 x^T curvatures x - slopes^T x` is lowest, in float64.

    Directions of zeros get 0, and parallel directions share: the angle of directions that are less
    than about `sqrt(PARALLEL)` apart is rounding. Zeros if a number is not finite.
    """
    if not (slopes.isfinite().all() and curvatures.isfinite().all()):
        return torch.zeros_like(slopes)
    scales = curvatures.diagonal().clamp(min=0).rsqrt().nan_to_num(posinf=0)
    unit = scales[:, None] * curvatures * scales
    return scales * (torch.linalg.pinv(unit, rtol=PARALLEL, hermitian=True) @ (scales * slopes))
