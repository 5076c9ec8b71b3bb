"""What MPI reads and writes: numbers that it can sum, in pieces, in the host's memory or not.

A buffer is a NumPy array, or a tensor on a device. Device buffers go to MPI directly when it is
CUDA-aware, otherwise through pinned host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mpikfac.trace import Trace

# mpi4py sends a dtype unknown to MPI as bytes, and sums of those are garbage without an error.
SUMMABLE = (torch.float32, torch.float64)
MAX_COUNT = 2**31 - 1  # elements in one message; Open MPI before 6 refuses more


def check_summable(flat: Tensor) -> None:
    """Returns if MPI adds up what is sent of `flat`.

    Raises:
        ValueError: its dtype is none that MPI knows, or it is not contiguous.
    """
    if flat.dtype not in SUMMABLE:
        allowed = ", ".join(map(str, SUMMABLE))
        raise ValueError(f"dtype {flat.dtype} cannot be summed by MPI; use one of {allowed}")
    if not flat.is_contiguous():
        raise ValueError(f"a tensor of strides {flat.stride()} is not contiguous; copy it first")


def pieces(buffer: Any, start: int, stop: int, count: int) -> Iterator[Any]:
    """Views of the elements from `start` to `stop`, of at most `count` each."""
    for offset in range(start, stop, count):
        yield buffer[offset : min(offset + count, stop)]


def settle(buffer: Any) -> None:
    """Waits for what fills a device buffer: DLPack hands over the pointer alone."""
    if isinstance(buffer, Tensor) and buffer.is_cuda:
        torch.cuda.current_stream(buffer.device).synchronize()


class Buffers:
    """Buffers of one thread, which it keeps: copies on the host, and room to work in."""

    def __init__(self, trace: Trace, direct: bool) -> None:
        """`direct`: MPI takes device buffers."""
        self._trace = trace
        self._direct = direct
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}

    @contextmanager
    def of(self, flat: Tensor, stage: str, summed: bool = True) -> Iterator[Any]:
        """What MPI may read and write in place of `flat`; copies are part of the stage."""
        ours = summed and flat.dtype not in SUMMABLE  # such sums are made on the host
        if flat.is_cuda and self._direct and not ours:
            settle(flat)
            yield flat
            return
        with self.on_host(flat, stage) as buffer:
            yield buffer

    @contextmanager
    def on_host(self, flat: Tensor, stage: str) -> Iterator[Any]:
        """The same in the host's memory."""
        if not flat.is_cuda:
            yield flat.numpy()
            return
        host = self.like(torch.empty(0, dtype=flat.dtype), "host", flat.numel(), pinned=True)
        with self._trace.stage(stage):
            host.copy_(flat)
        yield host.numpy()
        with self._trace.stage(stage):
            flat.copy_(host)

    def joined(self, buffer: Any, spans: Sequence[tuple[int, int]]) -> Any:
        """All spans in one piece, without a copy where they are."""
        first, last = spans[0][0], spans[-1][1]
        count = sum(stop - start for start, stop in spans)
        if last - first == count:
            return buffer[first:last]
        joined, end = self.like(buffer, "joined", count), 0
        for start, stop in spans:
            joined[end : end + stop - start] = buffer[start:stop]
            end += stop - start
        settle(joined)
        return joined

    def like(self, buffer: Any, use: str, count: int, pinned: bool = False) -> Any:
        """A kept buffer of the same kind as `buffer`, `[count]`, one for each use."""
        if not isinstance(buffer, Tensor):
            return self.like(torch.from_numpy(buffer), use, count).numpy()
        kept = self._scratch.get((use, buffer.dtype))
        if kept is None or len(kept) < count:
            kept = torch.empty(count, dtype=buffer.dtype, device=buffer.device, pin_memory=pinned)
            self._scratch[use, buffer.dtype] = kept
        return kept[:count]
