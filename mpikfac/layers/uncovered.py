"""Handle tensors sent with the gradients that no layer covers: parameters, statistics, votes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

VOTES = 16  # blocks of arenas begin at multiples of 16 elements: fewer votes would save no bytes


class Other:
    """Handle a trained parameter that no layer covers; ranks average the parameter's gradient."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.parameters = [tensor]

    def parts(self, matrix: Tensor) -> list[Tensor]:
        """Return views of `matrix`, shaped as the tensors: `matrix` itself."""
        return [matrix]

    def read_gradient(self, parts: Sequence[Tensor]) -> None:
        """Copy the gradient into the `parts` of a matrix; without a gradient, zeros."""
        if self.tensor.grad is None:
            parts[0].zero_()
        else:
            parts[0].copy_(self.tensor.grad)

    def write_gradient(self, parts: Sequence[Tensor]) -> None:
        """Set the gradient to the `parts` of a matrix."""
        if self.tensor.grad is None:
            self.tensor.grad = torch.empty_like(self.tensor)
        self.tensor.grad.copy_(parts[0])

    def read_values(self, parts: Sequence[Tensor]) -> None:
        """Copy the tensor into the `parts` of a matrix."""
        parts[0].copy_(self.tensor.detach())

    def write_values(self, parts: Sequence[Tensor]) -> None:
        """Set the tensor's content to the `parts` of a matrix."""
        self.tensor.detach().copy_(parts[0])

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

    def read_gradient(self, parts: Sequence[Tensor]) -> None:
        """Copy the statistic's value into the `parts` of a matrix."""
        self.read_values(parts)

    def write_gradient(self, parts: Sequence[Tensor]) -> None:
        """Set the statistic to the `parts` of a matrix."""
        self.write_values(parts)

    def write_values(self, parts: Sequence[Tensor]) -> None:
        """Set the statistic to the `parts` of a matrix, and keep the value for `leave`."""
        super().write_values(parts)
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
