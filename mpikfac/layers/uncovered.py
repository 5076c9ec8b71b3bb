"""What travels with the gradients though no layer covers it: parameters, statistics, votes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

VOTES = 16  # blocks of arenas begin at multiples of 16 elements: fewer would not be less to send


class Other:
    """A trained parameter that no layer covers; its gradient is averaged over ranks."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.parameters = [tensor]

    def parts(self, matrix: Tensor) -> list[Tensor]:
        """Return views of `matrix`, shaped as the tensors of this block: `matrix` itself."""
        return [matrix]

    def read_gradient(self, parts: Sequence[Tensor]) -> None:
        """Copy the gradient into the parts of a matrix; 0 if there is no gradient."""
        if self.tensor.grad is None:
            parts[0].zero_()
        else:
            parts[0].copy_(self.tensor.grad)

    def write_gradient(self, parts: Sequence[Tensor]) -> None:
        """Make the parts of a matrix the gradient."""
        if self.tensor.grad is None:
            self.tensor.grad = torch.empty_like(self.tensor)
        self.tensor.grad.copy_(parts[0])

    def read_values(self, parts: Sequence[Tensor]) -> None:
        """Copy the tensor into the parts of a matrix."""
        parts[0].copy_(self.tensor.detach())

    def write_values(self, parts: Sequence[Tensor]) -> None:
        """Make the parts of a matrix the tensor's content."""
        self.tensor.detach().copy_(parts[0])

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

    def read_gradient(self, parts: Sequence[Tensor]) -> None:
        """Copy the statistic into the parts of a matrix."""
        self.read_values(parts)

    def write_gradient(self, parts: Sequence[Tensor]) -> None:
        """Make the parts of a matrix the statistic."""
        self.write_values(parts)

    def write_values(self, parts: Sequence[Tensor]) -> None:
        """Make the parts of a matrix the statistic, which `leave` goes back to."""
        super().write_values(parts)
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
