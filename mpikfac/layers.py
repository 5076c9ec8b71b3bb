"""Each supported module as matrices, and everything else that travels with the gradients.

A covered layer's weight and bias are one matrix `[outputs, inputs]`, the bias its last column.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from mpikfac import convolution, moments
from mpikfac.layout import Shape
from mpikfac.plan import LayerShape

VOTES = 16  # blocks of arenas begin at multiples of 16 elements: fewer would not be less to send


class Layer:
    """A module whose gradient K-FAC preconditions.

    Attributes:
        name: the module's name in the model.
        shape: orders of its factors.
        factors: their names, A's and G's.
        parameters: the weight, and the bias if it is trained.
        spatial: whether positions are pixels, as normalisations other than "expand" ask.
    """

    spatial = False

    def __init__(self, name: str, module: nn.Linear | nn.Conv2d) -> None:
        self.name = name
        self.module = module
        self.parameters: list[Tensor] = [module.weight]
        if module.bias is not None and module.bias.requires_grad:
            self.parameters.append(module.bias)
        self.bias = len(self.parameters) == 2
        outputs, fan_in = module.weight.shape[0], module.weight[0].numel()
        self.shape = LayerShape(name, fan_in + self.bias, outputs)
        self.factors = tuple(factor for factor, _ in self.shape.factors)

    def input_sum(self, x: Tensor) -> Tensor:
        """`sum(a a^T)` `[inputs, inputs]` of one forward call's input."""
        return moments.linear_input_sum(x, self.bias)

    def output_sum(self, g: Tensor) -> Tensor:
        """`sum(g g^T)` `[outputs, outputs]` of the gradient at the call's output."""
        return moments.linear_output_sum(g)

    def input_vector(self, x: Tensor) -> Tensor:
        """`sum(a)` `[inputs]` of one forward call's input."""
        return moments.linear_input_vector(x, self.bias)

    def output_vector(self, g: Tensor) -> Tensor:
        """`sum(g)` `[outputs]` of the gradient at the call's output."""
        return moments.linear_output_vector(g)

    def positions(self, g: Tensor) -> int:
        """Number of vectors `a` (and `g`) in a call: batch times shared positions."""
        return g.numel() // self.shape.outputs

    def read_gradient(self, matrix: Tensor) -> None:
        """Copies the gradients of weight and bias into `matrix` `[outputs, inputs]`."""
        for part, parameter in zip(self.parts(matrix), self.parameters):
            _read_gradient(part, parameter)

    def write_gradient(self, matrix: Tensor) -> None:
        """Makes `matrix` the gradients of weight and bias."""
        for part, parameter in zip(self.parts(matrix), self.parameters):
            _write_gradient(parameter, part)

    def read_values(self, matrix: Tensor) -> None:
        """Copies weight and bias into `matrix`."""
        for part, parameter in zip(self.parts(matrix), self.parameters):
            part.copy_(parameter.detach())

    def write_values(self, matrix: Tensor) -> None:
        """Makes `matrix` the weight and bias."""
        for part, parameter in zip(self.parts(matrix), self.parameters):
            parameter.detach().copy_(part)

    def leave(self) -> None:
        """Takes the gradients away: the optimizer leaves weight and bias as they are."""
        for parameter in self.parameters:
            parameter.grad = None

    def parts(self, matrix: Tensor) -> list[Tensor]:
        """Views of `matrix`, shaped as the weight and the bias."""
        weight = matrix[:, : self.shape.inputs - self.bias].view(self.module.weight.shape)
        return [weight, matrix[:, -1]] if self.bias else [weight]


class ConvLayer(Layer):
    """A `Conv2d`: inputs are its patches, positions its output pixels."""

    spatial = True
    module: nn.Conv2d

    def __init__(
        self, name: str, module: nn.Conv2d, statistics_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(name, module)
        self._statistics_dtype = statistics_dtype
        if module.groups != 1:
            raise ValueError(
                f"layer {name!r}: Conv2d with groups={module.groups} is not covered; "
                f"add {name!r} to skip to train it first-order"
            )
        self._padding = _padding(module)
        self._pads_by_zeros = module.padding_mode == "zeros"
        self._window = convolution.Window(
            module.kernel_size,
            module.stride,
            self._padding if self._pads_by_zeros else ((0, 0), (0, 0)),
            module.dilation,
        )

    def input_sum(self, x: Tensor) -> Tensor:
        """`sum(a a^T)` over all patches, in the order of the weight's elements."""
        return convolution.input_sum(
            self._padded(x), self._window, self.bias, self._statistics_dtype
        )

    def output_sum(self, g: Tensor) -> Tensor:
        """`sum(g g^T)` over all output pixels."""
        return convolution.output_sum(g)

    def input_vector(self, x: Tensor) -> Tensor:
        """`sum(a)` over all patches, in the order of the weight's elements."""
        return convolution.input_vector(self._padded(x), self._window, self.bias)

    def output_vector(self, g: Tensor) -> Tensor:
        """`sum(g)` over all output pixels."""
        return g.sum((0, 2, 3))

    def _padded(self, x: Tensor) -> Tensor:
        """The input as patches are taken from it; zeros around it are the window's."""
        if self._pads_by_zeros:
            return x
        (top, bottom), (left, right) = self._padding
        return F.pad(x, (left, right, top, bottom), mode=self.module.padding_mode)


class Other:
    """A trained parameter that no layer covers; its gradient is averaged over ranks."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.parameters = [tensor]

    def read_gradient(self, out: Tensor) -> None:
        """Copies the gradient into `out`."""
        _read_gradient(out, self.tensor)

    def write_gradient(self, value: Tensor) -> None:
        """Makes `value` the gradient."""
        _write_gradient(self.tensor, value)

    def read_values(self, out: Tensor) -> None:
        """Copies the tensor into `out`."""
        out.copy_(self.tensor.detach())

    def write_values(self, value: Tensor) -> None:
        """Makes `value` the tensor's content."""
        self.tensor.detach().copy_(value)

    def leave(self) -> None:
        """Takes the gradient away: the optimizer leaves the parameter as it is."""
        self.tensor.grad = None


class Statistic(Other):
    """A running statistic of a normalisation layer: its value is averaged over ranks.

    It travels with the gradients, so that all ranks hold the same model after every step.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        super().__init__(name, tensor)
        self.parameters = []
        self._kept = tensor.clone()  # the value that all ranks share; a forward pass changes it

    def read_gradient(self, out: Tensor) -> None:
        """Copies the value into `out`."""
        self.read_values(out)

    def write_gradient(self, value: Tensor) -> None:
        """Makes `value` the value."""
        self.write_values(value)

    def write_values(self, value: Tensor) -> None:
        """Makes `value` the value, which `leave` goes back to."""
        super().write_values(value)
        self.keep()

    def keep(self) -> None:
        """Makes the present value the one that `leave` goes back to."""
        self._kept.copy_(self.tensor)

    def leave(self) -> None:
        """Takes the value back to that after the last step."""
        self.tensor.copy_(self._kept)


class Votes(Statistic):
    """Numbers of a rank that travel beside the gradients and come back as their mean over ranks.

    What all ranks have to know of one another costs no message of its own so.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__("(votes)", torch.zeros(VOTES, dtype=dtype, device=device))

    def leave(self) -> None:
        """Nothing: they stay until they have travelled."""


def cover(
    model: nn.Module, skip: Iterable[str] = (), statistics_dtype: torch.dtype | None = None
) -> tuple[list[Layer], list[Other]]:
    """The layers that K-FAC covers and everything else that is trained, both in model order.

    `Linear` and `Conv2d` are covered, except where the weight is frozen or `skip` names the module
    or a module that holds it.

    Args:
        statistics_dtype: what inputs of convolutions are rounded to before they are multiplied.

    Raises:
        ValueError: a layer that cannot be covered exactly, or a name in `skip` that no module has.
    """
    skip = tuple(skip)
    _check_skip(model, skip)
    layers: list[Layer] = []
    for name, module in model.named_modules():
        skipped = any(name == s or name.startswith(f"{s}.") for s in skip)
        if type(module) not in (nn.Linear, nn.Conv2d) or skipped or not module.weight.requires_grad:
            continue
        if type(module) is nn.Conv2d:
            layers.append(ConvLayer(name, module, statistics_dtype))
        else:
            layers.append(Layer(name, module))
    _check_shared(model, layers)
    covered = {id(parameter) for layer in layers for parameter in layer.parameters}
    return layers, uncovered(model, covered)


def uncovered(model: nn.Module, covered: Collection[int] = ()) -> list[Other]:
    """Trained parameters whose `id` is not in `covered`, and all running statistics.

    Raises:
        ValueError: a layer whose gradients are sparse.
    """
    others = [
        Other(name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in covered
    ]
    for name, module in model.named_modules():
        if getattr(module, "sparse", False):
            raise ValueError(f"layer {name!r} has sparse gradients; make it with sparse=False")
        if isinstance(module, (_BatchNorm, _InstanceNorm)):
            buffers = module.named_buffers(name, recurse=False)
            others += [Statistic(n, b) for n, b in buffers if b.is_floating_point()]
    return others


def covered_shapes(
    model: nn.Module, skip: Sequence[str] = ()
) -> tuple[list[LayerShape], list[tuple[str, Shape]]]:
    """What `make_plan` asks of a model: layer shapes, and names and shapes of all that travels."""
    layers, others = cover(model, skip)
    others.append(Votes(torch.float32, torch.device("cpu")))
    return [layer.shape for layer in layers], [(o.name, tuple(o.tensor.shape)) for o in others]


def _read_gradient(out: Tensor, parameter: Tensor) -> None:
    if parameter.grad is None:
        out.zero_()
    else:
        out.copy_(parameter.grad)


def _write_gradient(parameter: Tensor, value: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    parameter.grad.copy_(value)


def _padding(module: nn.Conv2d) -> tuple[tuple[int, int], tuple[int, int]]:
    """Elements before and after each dimension; "same" puts an odd one after."""
    if module.padding == "valid":
        return (0, 0), (0, 0)
    if module.padding == "same":
        reach = [(k - 1) * d for k, d in zip(module.kernel_size, module.dilation)]
        return tuple((r // 2, r - r // 2) for r in reach)  # type: ignore[return-value]
    return tuple((p, p) for p in module.padding)  # type: ignore[return-value]


def _check_skip(model: nn.Module, skip: tuple[str, ...]) -> None:
    names = [name for name, _ in model.named_modules()]
    for name in skip:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"skip names {name!r}, which is no module of the model{hint}")


def _check_shared(model: nn.Module, layers: list[Layer]) -> None:
    """Tied weights have one gradient of several uses, of which a layer sees its own only."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(name)
    for layer in layers:
        for parameter in layer.parameters:
            if len(names := holders[id(parameter)]) > 1:
                raise ValueError(
                    f"layers {' and '.join(map(repr, names))} share a parameter, which is not "
                    f"covered; add {layer.name!r} to skip to train it first-order"
                )
