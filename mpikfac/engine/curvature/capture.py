"""Start the kernels of a region of a step by one call: as they were started in a step before.

A region starts many small kernels, and a GPU can be done with a kernel before the host has started
the next. A graph has all kernels of a region, with the addresses and the numbers of the host as
they were when the graph was recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping

import torch

Compute = Callable[[], object]
Record = Callable[[Compute], Compute]
"""Runs a function once, and returns what runs the function's kernels again."""

log = logging.getLogger("mpikfac")


def eagerly(_: Hashable, compute: Compute) -> None:
    """Run a region."""
    compute()


class Captured:
    """A region that is recorded in the second step of a kind, and replayed from then on.

    Every other step runs the region itself: the first step of a kind also starts libraries that a
    recording cannot start.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._last: Hashable = None
        self._replays: dict[Hashable, Compute] = {}

    def __call__(self, key: Hashable, compute: Compute) -> None:
        """Run or replay a region.

        Args:
            key: all that the region reads on the host, and that may differ between steps.
        """
        if key in self._replays:
            self._replays[key]()
        elif key == self._last:
            self._replays = {key: self._record(compute)}  # drops the memory of the one before
        else:
            compute()
        self._last = key


def cuda_graph(compute: Compute) -> Compute:
    """Run `compute` as a CUDA graph, and return the replay; run it eagerly if it has no graph."""
    try:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            compute()
    except RuntimeError as error:
        log.warning("directions run without a CUDA graph: %s", str(error).partition("\n")[0])
        compute()
        return compute
    graph.replay()
    return graph.replay


RECORDS: Mapping[str, Record] = {"cuda": cuda_graph}
"""How a region is recorded, by the type of the device."""


def runner(capture: bool, device: torch.device) -> Callable[[Hashable, Compute], None]:
    """Return what runs a region.

    Raises:
        ValueError: nothing records on the device.
    """
    if not capture:
        return eagerly
    if device.type not in RECORDS:
        raise ValueError(f"capture=True needs a model on a GPU of NVIDIA, not on {device}")
    return Captured(RECORDS[device.type])
