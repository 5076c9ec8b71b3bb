"""Handle tensors sent with the gradients that no layer covers: parameters, statistics, votes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

VOTES = 16  # blocks of arenas begin at multiples of 16 elements: fewer votes would save no bytes


class Other:
    """Handle a trained parameter that no layer covers; ranks average the parameter's gradient."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.parameters = [tensor]

    def read_gradient(self, out: Tensor) -> None:
        """Copy the gradient into `out`."""
        read_gradient(out, self.tensor)

    def write_gradient(self, value: Tensor) -> None:
        """Set the gradient to `value`."""
        write_gradient(self.tensor, value)

    def read_values(self, out: Tensor) -> None:
        """Copy the tensor into `out`."""
        out.copy_(self.tensor.detach())

    def write_values(self, value: Tensor) -> None:
        """Set the tensor's content to `value`."""
        self.tensor.detach().copy_(value)

    def leave(self) -> None:
        """Set the gradient to None, so that the optimizer skips the parameter."""
        self.tensor.grad = None


class Statistic(Other):
    """Handle a running statistic of a normalisation layer; ranks average the statistic's value.

    The value is sent with the gradients, so that all ranks hold the same model after every step.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        super().__init__(name, tensor)
        self.parameters = []
        self._kept = tensor.clone()  # equal on all ranks; a forward pass changes only `tensor`

    def read_gradient(self, out: Tensor) -> None:
        """Copy the statistic's value into `out`."""
        self.read_values(out)

    def write_gradient(self, value: Tensor) -> None:
        """Set the statistic to `value`."""
        self.write_values(value)

    def write_values(self, value: Tensor) -> None:
        """Set the statistic to `value`, and keep `value` for `leave`."""
        super().write_values(value)
        self.keep()

    def keep(self) -> None:
        """Keep the present value for `leave`."""
        self._kept.copy_(self.tensor)

    def leave(self) -> None:
        """Set the statistic back to the value after the last step."""
        self.tensor.copy_(self._kept)


class Votes(Statistic):
    """Send a few numbers of the rank with the gradients; after the step, hold means over ranks.

    Ranks share small facts as votes without an extra message.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__("(votes)", torch.zeros(VOTES, dtype=dtype, device=device))

    def leave(self) -> None:
        """Keep the votes: votes stay until sent."""


def read_gradient(
    out: Tensor, parameter: Tensor, arranged: Callable[[Tensor], Tensor] = torch.Tensor.detach
) -> None:
    """Copy the view `arranged` of a parameter's gradient into `out`; without a gradient, zeros."""
    if parameter.grad is None:
        out.zero_()
    else:
        out.copy_(arranged(parameter.grad))


def write_gradient(
    parameter: Tensor, value: Tensor, arranged: Callable[[Tensor], Tensor] = torch.Tensor.detach
) -> None:
    """Set a parameter's gradient to `value`, the inverse of `read_gradient`."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    arranged(parameter.grad).copy_(value)
