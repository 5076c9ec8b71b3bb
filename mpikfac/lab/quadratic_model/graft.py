"""Choose a step's length with a quadratic model of the loss [Martens & Grosse 2015, 6.4 and 7].

The curvature is a batch's full Gauss-Newton matrix `J^T H J`, evaluated along a few directions. J
contains the derivatives of the outputs with respect to the parameters, and H is the Hessian of the
loss with respect to the outputs. Multiplying J by a direction takes one pass of forward-mode
differentiation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from mpikfac.comm import summed
from mpikfac.engine import Gradients, Graft, Stack
from mpikfac.errors import UserError
from mpikfac.model import MOMENTUM, check_plain, members
from mpikfac.plan import Grafting
from mpikfac.plan.names import QUADRATIC_MODEL

log = logging.getLogger("mpikfac")

Direction = Mapping[str, Tensor]
Criterion = Callable[[Tensor], Tensor]
PARALLEL = 1e-6  # a relative tolerance, about the accuracy of Jacobian products in float32


class QuadraticGraft(Graft):
    """The length and the momentum that minimise a quadratic model of the batch's loss.

    The step is a linear combination of the layers' directions, the gradients of uncovered
    parameters, and the last step, which is stored in the optimizer's state as momentum.
    """

    predicted = False

    def __init__(
        self,
        grafting: Grafting,
        gradients: Gradients,
        stacks: Sequence[Stack],
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        super().__init__(grafting, gradients, stacks, model, optimizer)
        self._next: Batch | None = None
        self._batch: Batch | None = None
        self._compared = False  # whether the slopes of loss and gradients have been compared

    def set_batch(self, inputs: Tensor | tuple[Any, ...], loss: Criterion) -> None:
        """Store the rank's shard of the batch, or a part of the shard, before the step.

        Args:
            inputs: the model's argument, or a tuple of arguments.
            loss: the mean loss of `inputs` as a function of the model's outputs, not multiplied by
                a gradient scaler's factor.
        """
        self._next = Batch(inputs if isinstance(inputs, tuple) else (inputs,), loss)

    def begin_step(self) -> None:
        """Begin a step with the batch that was passed to `set_batch`.

        Raises:
            ValueError: no batch was passed, or the optimizer modifies gradients.
        """
        self._batch, self._next = self._next, None
        if self._batch is None:
            raise ValueError(
                "grafting=QuadraticModel() needs grafting.set_batch(inputs, loss) before step()"
            )
        check_plain(self.optimizer)

    def descend(self, damping: float) -> Tensor:
        """Replace the gradients by the step that minimises the damped quadratic model.

        Collective over: world.
        """
        assert self._batch is not None, "begin_step() was called"
        site, shortened = self.gradients.site, self.gradients.shortened
        expected = self.gradients.arena.flat.new_zeros(1)
        stepped = members(self.optimizer)
        parameters = {name: p for name, p in self.model.named_parameters() if p in stepped}
        with site.trace.stage(QUADRATIC_MODEL):
            if not (directions := self._spanning(parameters)):
                return expected
            self.gradients.write(slot for slot in self.gradients.slots if slot.block.parameters)
            gradients = gradients_of(parameters)  # averaged over all ranks
            slopes = inner_products(directions, [gradients])[:, 0].cpu()
            measured, curvatures = self._measured(self._batch, directions)
            of_loss = slopes / float(shortened)  # undo the bound on the gradient's norm
            self._compare(measured[0].item(), of_loss[0].item())
            lengths = inner_products(directions, directions).cpu()
            curvatures += damping * lengths
            multiples = lowest(slopes, curvatures)
            expected.fill_(multiples @ (curvatures @ multiples / 2 - of_loss))
            for name, gradient in gradients.items():
                terms = [x * v[name] for x, v in zip(multiples.tolist(), directions) if name in v]
                gradient.copy_(torch.stack(terms).sum(0))
                self.optimizer.state[parameters[name]][MOMENTUM] = gradient.clone()
        return expected

    def _spanning(self, parameters: Mapping[str, nn.Parameter]) -> list[Direction]:
        """Return copies of the directions to combine, by parameter name."""
        covered = {p for layer in self.gradients.layers for p in layer.parameters}
        steps = {n: step.clone() for n, step in gradients_of(parameters).items()}
        inside = {n: step for n, step in steps.items() if parameters[n] in covered}
        outside = {n: step for n, step in steps.items() if parameters[n] not in covered}
        states = {n: self.optimizer.state.get(parameters[n], {}) for n in steps}
        last = {n: state[MOMENTUM] for n, state in states.items() if MOMENTUM in state}
        return [direction for direction in (inside, outside, last) if direction]

    def _measured(self, batch: Batch, directions: Sequence[Direction]) -> tuple[Tensor, Tensor]:
        """Return slopes and curvatures along `directions` of the loss averaged over all ranks.

        Collective over: world.
        """
        site, weight = self.gradients.site, self.gradients.weight
        shape = 1 + len(directions), len(directions)
        numbers = torch.zeros(shape, dtype=torch.float64, device="cpu")
        if weight:  # a mean over no examples is NaN
            try:
                local = slopes_and_curvatures(self.model, batch, directions)
            except NotImplementedError as error:
                why = str(error).partition(" because")[0]
                raise UserError(
                    f"grafting=QuadraticModel() needs forward-mode derivatives: {why}"
                ) from error
            numbers = torch.vstack(local).cpu() * weight / site.plan.grid.count
        mean = summed(site.grid.world, numbers.flatten().tolist())
        numbers = torch.tensor(mean, dtype=torch.float64, device="cpu").view_as(numbers)
        return numbers[0], numbers[1:]

    def _compare(self, slope: float, expected: float) -> None:
        """Warn in the first step if the gradients do not match the loss passed to `set_batch`."""
        if not (self._compared or 0.1 * expected <= slope <= 10 * expected):
            log.warning(
                "the loss of grafting.set_batch(inputs, loss) has slope %g along the directions, "
                "but the gradients have slope %g: pass the loss that backward() differentiates to "
                "set_batch",
                *(slope, expected),
            )
        self._compared = True


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the gradients of the parameters that have one, by name."""
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


@dataclass(frozen=True)
class Batch:
    """A rank's shard of a batch, which defines a mean loss as a function of the parameters.

    Attributes:
        inputs: the arguments of the model.
        loss: returns the mean loss `[]` of the shard's outputs.
    """

    inputs: tuple[Any, ...]
    loss: Criterion


def slopes_and_curvatures(
    model: nn.Module, batch: Batch, directions: Sequence[Direction]
) -> tuple[Tensor, Tensor]:
    """Return slopes `v_i^T gradient` `[n]` and curvatures `v_i^T J^T H J v_j` `[n, n]` in float64.

    Args:
        directions: `v_1` to `v_n`, at least one, by parameter name; missing parameters are 0.
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
    """Return a gradient's derivative at `at` along `vector`; zeros for a constant gradient."""
    if not gradient.requires_grad:
        return torch.zeros_like(at)
    (derivative,) = torch.autograd.grad(gradient, at, vector, retain_graph=True)
    return derivative


def jacobian_product(
    model: nn.Module, direction: Direction, inputs: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Return the model's outputs, and their derivative along a direction.

    Running statistics and the random state are left unchanged, so dropout is the same in all
    passes.

    Raises:
        ValueError: the model does not return a tensor.
    """
    values = {name: p.detach() for name, p in model.named_parameters()}
    device = next(iter(values.values())).device
    devices = [] if device.type == "cpu" else [device]
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices, device_type=device.type),
        sdpa_kernel(SDPBackend.MATH),  # the only kernel that supports forward mode
        torch.compiler.set_stance("force_eager"),  # compiled code does not support forward mode
        forward_ad.dual_level(),
    ):
        for name, tangent in direction.items():
            values[name] = forward_ad.make_dual(values[name], tangent)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        result = functional_call(model, values | buffers, inputs)
        if not torch.is_tensor(result):
            raise ValueError(
                f"the model returns a {type(result).__name__}; grafting=QuadraticModel() needs a "
                f"model that returns a tensor"
            )
        outputs, product = forward_ad.unpack_dual(result)
        product = torch.zeros_like(outputs) if product is None else product
    precise = torch.promote_types(outputs.dtype, torch.float32)
    return outputs.to(precise), product.to(precise)


def inner_products(ones: Sequence[Direction], others: Sequence[Direction]) -> Tensor:
    """Return the inner products `v_i^T w_j` `[n, m]` of directions, in float64."""

    def product(v: Direction, w: Direction) -> Tensor:
        terms = [(v[name].double() * w[name].double()).sum() for name in v if name in w]
        return torch.stack(terms).sum() if terms else zero

    zero = next(iter(ones[0].values())).new_zeros((), dtype=torch.float64)
    return torch.stack([torch.stack([product(v, w) for w in others]) for v in ones])


def lowest(slopes: Tensor, curvatures: Tensor) -> Tensor:
    """Return the `x` `[n]` that minimises `1/2 x^T curvatures x - slopes^T x`, in float64.

    The result is 0 for directions of zeros. Parallel directions are treated as one: an angle below
    about `sqrt(PARALLEL)` is considered a rounding error. If any slope or curvature is not finite,
    `x` is 0.
    """
    if not (slopes.isfinite().all() and curvatures.isfinite().all()):
        return torch.zeros_like(slopes)
    scales = curvatures.diagonal().clamp(min=0).rsqrt().nan_to_num(posinf=0)
    unit = scales[:, None] * curvatures * scales
    return scales * (torch.linalg.pinv(unit, rtol=PARALLEL, hermitian=True) @ (scales * slopes))
