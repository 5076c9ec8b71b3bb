"""Handle tensors that are sent with the gradients although no layer covers them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from mpikfac.numerics import Copies

NAMED = 8  # how many modules of a kind are named; the rest are counted


def in_words(model: nn.Module, names: Iterable[str]) -> str:
    """List the parameters by kind of module, as in "BatchNorm2d 1 and 4 (weight, bias)"."""
    of_modules: dict[str, list[str]] = {}
    for name in names:
        module, _, parameter = name.rpartition(".")
        of_modules.setdefault(module, []).append(parameter)
    kinds: dict[tuple[str, str], list[str]] = {}
    for module, parameters in of_modules.items():
        kind = type(model.get_submodule(module)).__name__
        kinds.setdefault((kind, ", ".join(parameters)), []).append(module)
    return "; ".join(
        f"{kind} {_listed(modules)}".strip() + f" ({parameters})"
        for (kind, parameters), modules in kinds.items()
    )


def _listed(names: Sequence[str]) -> str:
    if len(names) > NAMED:
        return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


class Other:
    """Handle a trained parameter that no layer covers; ranks average its gradient.

    Args:
        ties: the parameter's names in the modules that share it, if no layer covers all of them.
    """

    def __init__(self, name: str, tensor: Tensor, ties: Sequence[str] = ()) -> None:
        self.name = name
        self.tensor = tensor
        self.parameters = [tensor]
        self.ties = ties

    def parts(self, matrix: Tensor) -> list[Tensor]:
        """Return views of `matrix`, shaped like the tensors: here, `matrix` itself."""
        return [matrix]

    def arranged(self, parameter: Tensor) -> Tensor:
        """Return the parameter, whose elements are already in the order of the matrix."""
        return parameter

    def gradients_to(self, parts: Sequence[Tensor]) -> Copies:
        """Return the copy that writes the gradient to `parts`; without a gradient, zero `parts`."""
        if self.tensor.grad is None:
            parts[0].zero_()
        else:
            yield parts[0], self.tensor.grad

    def gradients_from(self, parts: Sequence[Tensor]) -> Copies:
        """Return the copy that writes the `parts` of a matrix to the gradient."""
        if self.tensor.grad is None:
            self.tensor.grad = torch.empty_like(self.tensor)
        yield self.tensor.grad, parts[0]

    def values_to(self, parts: Sequence[Tensor]) -> Copies:
        """Return the copy that writes the tensor to the `parts` of a matrix."""
        yield parts[0], self.tensor.detach()

    def values_from(self, parts: Sequence[Tensor]) -> Copies:
        """Return the copy that writes the `parts` of a matrix to the tensor."""
        yield self.tensor.detach(), parts[0]

    def abort_batch(self) -> None:
        """Drop the gradient, so that the optimizer skips the parameter."""
        self.tensor.grad = None


class Statistic(Other):
    """Handle a running statistic of a normalisation layer; ranks average its value.

    The value is sent with the gradients, so all ranks have the same model after every step.

    Attributes:
        count: the layer's batch count; None if the layer does not count batches.
    """

    def __init__(self, name: str, tensor: Tensor, count: Tensor | None = None) -> None:
        super().__init__(name, tensor)
        self.parameters = []
        self.count = count
        self._snapshot = tensor.clone()  # equal on all ranks; a forward pass changes only `tensor`

    def gradients_to(self, parts: Sequence[Tensor]) -> Copies:
        """Return the copy that writes the statistic to the `parts` of a matrix."""
        return self.values_to(parts)

    def gradients_from(self, parts: Sequence[Tensor]) -> Copies:
        """Return the copies from the `parts` of a matrix to the statistic and its snapshot."""
        return self.values_from(parts)

    def values_from(self, parts: Sequence[Tensor]) -> Copies:
        """Return the copies from the `parts` of a matrix to the statistic and its snapshot."""
        yield self.tensor, parts[0]
        yield self._snapshot, parts[0]

    def snapshot(self) -> Copies:
        """Return the copy that stores the current value for `abort_batch`."""
        yield self._snapshot, self.tensor

    def abort_batch(self) -> None:
        """Reset the statistic to its value after the last step."""
        self.tensor.copy_(self._snapshot)


class Counts:
    """Make normalisation layers count a batch only once, even if it is processed in parts.

    A forward pass adds 1 to a layer's count, on which the weight of a batch in running statistics
    can depend. With this class, every part sees the same count, and counts do not depend on the
    number of ranks.
    """

    def __init__(self, statistics: Iterable[Statistic]) -> None:
        counts = {id(s.count): s.count for s in statistics if s.count is not None}
        self._counts = list(counts.values())
        self._snapshots = [count.clone() for count in self._counts]
        self._accumulated: list[Tensor] = []

    def keep(self) -> None:
        """Store the current counts for `abort_batch`."""
        for count, snapshot in zip(self._counts, self._snapshots):
            snapshot.copy_(count)

    def accumulate(self) -> None:
        """Restore the counts after a part of a batch, but store the increased counts for `step`."""
        accumulated = [count.clone() for count in self._counts]
        self.abort_batch()
        self._accumulated = accumulated

    def step(self) -> None:
        """Set the counts to those stored by `accumulate`, and store them for `abort_batch`."""
        for count, accumulated in zip(self._counts, self._accumulated):
            count.copy_(accumulated)
        self._accumulated = []
        self.keep()

    def abort_batch(self) -> None:
        """Reset the counts to their values after the last step."""
        self._accumulated = []
        for count, snapshot in zip(self._counts, self._snapshots):
            count.copy_(snapshot)
