"""What travels with the gradients though no layer covers it: parameters, statistics, votes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

VOTES = 16  # blocks of arenas begin at multiples of 16 elements: fewer would not be less to send


class Other:
    """A trained parameter that no layer covers; its gradient is averaged over ranks."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.parameters = [tensor]

    def read_gradient(self, out: Tensor) -> None:
        """Copies the gradient into `out`."""
        read_gradient(out, self.tensor)

    def write_gradient(self, value: Tensor) -> None:
        """Makes `value` the gradient."""
        write_gradient(self.tensor, value)

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


def read_gradient(
    out: Tensor, parameter: Tensor, arranged: Callable[[Tensor], Tensor] = torch.Tensor.detach
) -> None:
    """Copies a parameter's gradient, or 0 for none, as the view of it that `arranged` makes."""
    if parameter.grad is None:
        out.zero_()
    else:
        out.copy_(arranged(parameter.grad))


def write_gradient(
    parameter: Tensor, value: Tensor, arranged: Callable[[Tensor], Tensor] = torch.Tensor.detach
) -> None:
    """The inverse of `read_gradient`."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    arranged(parameter.grad).copy_(value)
