"""Compare the weights and buffers of all ranks, by checksums of their bits."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from mpikfac.comm import Comm
from mpikfac.errors import RanksDifferError

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype with as many bits as an element, by the element's bytes."""

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
    tensors = {name: tensor.detach() for name, tensor in named if id(tensor) not in left}
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors.values():
        sums.setdefault(tensor.device, []).append(_sum_of_bits(tensor))
    values = {device: iter(torch.stack(some).tolist()) for device, some in sums.items()}
    return {name: next(values[tensor.device]) for name, tensor in tensors.items()}


def _sum_of_bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(BITS[tensor.element_size()]).sum(dtype=torch.int64)


def check_equal(comm: Comm, model: nn.Module, leave: Collection[Tensor]) -> list[str]:
    """Compare the weights and buffers of all ranks, and warn about buffers that differ.

    A program can have a reason for different buffers, but never for different weights.

    Collective over: comm.

    Args:
        leave: tensors to leave out.

    Returns:
        The names of the buffers that differ.

    Raises:
        RanksDifferError: parameters differ; the message names the first one.
    """
    differing = _differing(comm.allgather(checksums(model, leave)))
    weights = [name for name, _ in model.named_parameters()]
    for name in weights:
        if name in differing:
            raise RanksDifferError(
                f"parameter {name!r} has other values on rank {differing[name]} than on rank 0; "
                f"make the same change on all ranks, or copy rank 0's by mpikfac.comm.broadcast("
                f"comm, [*model.parameters(), *model.buffers()])"
            )
    buffers = sorted(differing)
    if buffers and comm.rank == 0:
        more = f", and so have {len(buffers) - 1} others" if len(buffers) > 1 else ""
        log.warning(
            "buffer %r has other values on rank %d than on rank 0%s: steps do not average it, and "
            "it cannot be saved in a checkpoint; write the same values on all ranks, or copy rank "
            "0's by mpikfac.comm.broadcast(comm, [buffer])",
            buffers[0],
            differing[buffers[0]],
            more,
        )
    return buffers


def _differing(sums: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the first rank that differs from rank 0, by name."""
    differing: dict[str, int] = {}
    first, *others = sums
    for rank, of_rank in enumerate(others, start=1):
        for name in first.keys() | of_rank.keys():
            if first.get(name) != of_rank.get(name):
                differing.setdefault(name, rank)
    return differing
