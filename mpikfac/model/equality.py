"""Compare the weights and buffers of all ranks by checksums of their bits."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from mpikfac.comm import Comm
from mpikfac.errors import RanksDifferError

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype of the same size as an element, by the size in bytes."""

SAMPLE = 16  # the number of elements per weight that are compared in every step
REPEATS = 3  # the number of votes on each write: one vote misses a difference with probability 1/64

log = logging.getLogger("mpikfac")


def checksums(model: nn.Module, leave: Collection[Tensor] = ()) -> dict[str, int]:
    """Return a checksum of each parameter and buffer, by name.

    A checksum is the sum of a tensor's elements, read as integers. Each tensor is read once, and
    the host waits once for each GPU.

    Args:
        leave: tensors to leave out.
    """
    left = {id(tensor) for tensor in leave}
    named = chain(model.named_parameters(), model.named_buffers())
    return sums_of_bits({name: x.detach() for name, x in named if id(x) not in left})


def sums_of_bits(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sum of each tensor's elements, read as integers; the host waits once per GPU."""
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors.values():
        sums.setdefault(tensor.device, []).append(_sum_of_bits(tensor))
    values = {device: iter(torch.stack(some).tolist()) for device, some in sums.items()}
    return {name: next(values[tensor.device]) for name, tensor in tensors.items()}


def _sum_of_bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return _bits(tensor).sum(dtype=torch.int64)


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements of a real tensor, read as integers."""
    return tensor.view(BITS[tensor.element_size()])


def check_equal(comm: Comm, model: nn.Module, leave: Collection[Tensor]) -> list[str]:
    """Compare the weights and buffers of all ranks, and warn about buffers that differ.

    A program may have a reason to let buffers differ, but never weights.

    Collective over: comm.

    Args:
        leave: tensors to leave out.

    Returns:
        The names of the buffers that differ.

    Raises:
        RanksDifferError: a parameter differs between ranks; the message names the first one.
    """
    differing = _differing(comm.allgather(checksums(model, leave)))
    weights = [name for name, _ in model.named_parameters()]
    for name in weights:
        if name in differing:
            raise RanksDifferError(
                f"parameter {name!r} has different values on rank {differing[name]} and rank 0; "
                f"make the same change on all ranks, or copy rank 0's with mpikfac.comm.broadcast("
                f"comm, [*model.parameters(), *model.buffers()])"
            )
    buffers = sorted(differing)
    if buffers and comm.rank == 0:
        more = f", as do {len(buffers) - 1} others" if len(buffers) > 1 else ""
        log.warning(
            "buffer %r has different values on rank %d and rank 0%s: steps do not average it, and "
            "it cannot be saved in a checkpoint; write the same values on all ranks, or copy rank "
            "0's with mpikfac.comm.broadcast(comm, [buffer])",
            buffers[0],
            differing[buffers[0]],
            more,
        )
    return buffers


def _differing(sums: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return, for each name whose checksums differ, the first rank that differs from rank 0."""
    differing: dict[str, int] = {}
    first, *others = sums
    for rank, of_rank in enumerate(others, start=1):
        for name in first.keys() | of_rank.keys():
            if first.get(name) != of_rank.get(name):
                differing.setdefault(name, rank)
    return differing


def check_written(comm: Comm, writes: Writes) -> None:
    """Check that all ranks wrote the same values to the same weights between recent steps.

    Collective over: comm.

    Raises:
        RanksDifferError: ranks have written different weights or values; the message names the
            first such weight.
    """
    recent = comm.allgather(writes.recent)
    writes.recent.clear()
    for step in sorted(set.intersection(*map(set, recent))):
        for name, rank in _differing(of_rank[step] for of_rank in recent).items():
            raise RanksDifferError(
                f"parameter {name!r} was written between two steps with different values on rank "
                f"{rank} and rank 0; with shard_optimizer=True, the owner's values have replaced "
                f"them; write the same values on all ranks"
            )


class Writes:
    """Find weights that the program writes between steps, and that owners would overwrite.

    A few elements of each weight are compared with those after the last step, so a write that
    changes only other elements is not found. On a GPU, where the host would have to wait, elements
    are compared only if autograd's version counter or a weight's address shows that the weight was
    written.

    Args:
        weights: the weights that owners update, by name; at least one, all of the same dtype on the
            same device.

    Attributes:
        recent: for each of the last few steps, the checksums of the compared elements of those
            weights that were written before the step, by name.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self.recent: dict[int, Mapping[str, int]] = {}
        self._views: tuple[list[int], list[Tensor]] = [], []  # weights' addresses, and the views
        self._elements, self._versions = torch.cat(self._samples()), self._present()

    def reset(self) -> None:
        """Forget what was written, because the program has loaded a state."""
        self.recent.clear()
        self.note()

    def note(self) -> None:
        """Store the compared elements at the end of a step."""
        self._elements, self._versions = torch.cat(self._samples()), self._present()

    def look(self, step: int) -> None:
        """Add what was written since `note`, before `step`, to `recent`."""
        self.recent[step] = self._written()
        if len(self.recent) > REPEATS:
            del self.recent[min(self.recent)]

    def _written(self) -> dict[str, int]:
        before, first = self._elements, next(iter(self._weights.values()))
        if first.device != before.device or first.dtype != before.dtype:
            return {}  # the step rejects a model that was moved or converted
        if before.device.type != "cpu" and self._present() == self._versions:
            return {}
        samples = self._samples()
        values, before = _bits(torch.cat(samples)), _bits(before)
        if torch.equal(values, before):
            return {}
        sizes = [len(sample) for sample in samples]
        pairs = zip(self._weights, values.split(sizes), before.split(sizes))
        return {n: int(x.sum()) for n, x, y in pairs if not torch.equal(x, y)}

    def _present(self) -> list[tuple[int, int]]:
        """Return each weight's address, and how many writes autograd has counted."""
        return [(weight.data_ptr(), weight._version) for weight in self._weights.values()]

    def _samples(self) -> list[Tensor]:
        """Return a few elements of each weight; on the CPU, their views are kept between steps."""
        addresses = [weight.data_ptr() for weight in self._weights.values()]
        if addresses == self._views[0]:
            return self._views[1]
        samples = [_sample(weight) for weight in self._weights.values()]
        # Keep only views, not copies of weights with gaps in memory, and only on the CPU.
        are_views = all(
            sample.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
            for sample, weight in zip(samples, self._weights.values())
        )
        if are_views and samples[0].device.type == "cpu":
            self._views = addresses, samples
        return samples


def _sample(weight: Tensor) -> Tensor:
    """Return a few evenly spaced elements, as a view if the weight has no gaps in memory."""
    order = sorted(range(weight.dim()), key=weight.stride, reverse=True)
    flat = weight.detach().permute(order).reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLE)]
