"""Provide the buffers that MPI reads and writes, in host or device memory.

A buffer is a NumPy array or a device tensor. A CUDA-aware MPI gets device buffers directly; any
other MPI gets a copy in pinned host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpikfac.trace import Trace

# If MPI does not know a dtype, mpi4py sends the values as bytes, and would silently sum the bytes.
SUMMABLE = (torch.float32, torch.float64)
MAX_COUNT = 2**31 - 1  # elements in one message; Open MPI before 6 rejects more


def check_summable(flat: Tensor) -> None:
    """Check that MPI can sum the elements of `flat`.

    Raises:
        ValueError: MPI does not support the dtype, or `flat` is not contiguous.
    """
    if flat.dtype not in SUMMABLE:
        allowed = ", ".join(map(str, SUMMABLE))
        raise ValueError(f"dtype {flat.dtype} cannot be summed by MPI; use one of {allowed}")
    if not flat.is_contiguous():
        raise ValueError(f"a tensor with strides {flat.stride()} is not contiguous; copy it first")


def check_sendable(stage: str, count: int) -> None:
    """Check that `count` elements or bytes fit into one MPI message.

    Raises:
        ValueError: there are more than `MAX_COUNT`.
    """
    if count > MAX_COUNT:
        raise ValueError(
            f"a message of the stage {stage!r} has {count} elements or bytes, and MPI accepts at "
            f"most {MAX_COUNT}: this transport works only for smaller models"
        )


def pieces(buffer: Any, start: int, stop: int, count: int) -> Iterator[Any]:
    """Yield views of the elements from `start` to `stop`, at most `count` elements per view."""
    for offset in range(start, stop, count):
        yield buffer[offset : min(offset + count, stop)]


def synchronize(buffer: Any) -> None:
    """Wait for the kernels that fill a device buffer, because DLPack passes only a pointer."""
    if isinstance(buffer, Tensor) and not buffer.is_cpu:
        torch.accelerator.current_stream(buffer.device).synchronize()


class Buffers:
    """Hold the host copies of device buffers, and the scratch memory, that one thread uses."""

    def __init__(self, trace: Trace, direct: bool) -> None:
        """Start without buffers; `direct` says whether MPI accepts device buffers."""
        self._trace = trace
        self._direct = direct
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}

    @contextmanager
    def of(self, flat: Tensor, stage: str, summed: bool = True) -> Iterator[Any]:
        """Yield a buffer that MPI uses in place of `flat`; copies are timed as part of `stage`.

        Args:
            summed: whether MPI sums the values; sums that it computes with mpikfac's own operation
                need host memory.
        """
        by_host = summed and flat.dtype not in SUMMABLE  # mpikfac's own MPI.Op runs on the host
        if not flat.is_cpu and self._direct and not by_host:
            synchronize(flat)
            yield flat
            return
        with self.on_host(flat, stage) as buffer:
            yield buffer

    @contextmanager
    def on_host(self, flat: Tensor, stage: str) -> Iterator[Any]:
        """Yield a buffer in host memory in place of `flat`; afterwards, copy it back to `flat`."""
        if flat.is_cpu:
            yield flat.numpy()
            return
        kind = torch.empty(0, dtype=flat.dtype, device="cpu")
        host = self.like(kind, "host", flat.numel(), pinned=True)
        with self._trace.stage(stage):
            host.copy_(flat)
        yield host.numpy()
        with self._trace.stage(stage):
            flat.copy_(host)

    @contextmanager
    def both(self, sent: Tensor, received: Tensor, stage: str) -> Iterator[tuple[Any, Any]]:
        """Yield two buffers for MPI: one to read in place of `sent`, one to fill for `received`."""
        if sent.is_cpu:  # sent.numpy() would permanently fix the size of the program's tensor
            yield np.from_dlpack(sent), received.numpy()
            return
        if self._direct:
            synchronize(sent)
            yield sent, received
            return
        kind = torch.empty(0, dtype=sent.dtype, device="cpu")
        host = self.like(kind, "host", sent.numel() + received.numel(), pinned=True)
        of_sent, of_received = host[: sent.numel()], host[sent.numel() :]
        with self._trace.stage(stage):
            of_sent.copy_(sent)
        yield of_sent.numpy(), of_received.numpy()
        with self._trace.stage(stage):
            received.copy_(of_received)

    def joined(self, buffer: Any, spans: Sequence[tuple[int, int]]) -> Any:
        """Return all spans of `buffer` as one buffer, without a copy if they are adjacent."""
        first, last = spans[0][0], spans[-1][1]
        count = sum(stop - start for start, stop in spans)
        if last - first == count:
            return buffer[first:last]
        joined, end = self.like(buffer, "joined", count), 0
        for start, stop in spans:
            joined[end : end + stop - start] = buffer[start:stop]
            end += stop - start
        synchronize(joined)
        return joined

    def like(self, buffer: Any, use: str, count: int, pinned: bool = False) -> Any:
        """Return a reusable buffer `[count]` with the dtype and device of `buffer`.

        Each `use` and dtype has its own.
        """
        if not isinstance(buffer, Tensor):
            return self.like(torch.from_numpy(buffer), use, count).numpy()
        memory = self._scratch.get((use, buffer.dtype))
        if memory is None or len(memory) < count:
            memory = torch.empty(count, dtype=buffer.dtype, device=buffer.device, pin_memory=pinned)
            self._scratch[use, buffer.dtype] = memory
        return memory[:count]
