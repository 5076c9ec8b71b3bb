"""Start the kernels of a region of a step by one call: as they were started in a step before.

A region starts many small kernels, and a GPU can be done with a kernel before the host has started
the next. A graph has all kernels of a region, with the addresses and the numbers of the host as
they were when the graph was recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from functools import partial

import torch

from mpikfac.settings import Numbers

Region = Callable[[Numbers], None]
Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function once, and returns what runs the function's kernels again."""

log = logging.getLogger("mpikfac")


class Captured:
    """A region that is recorded in the second step of a kind, and replayed from then on.

    Every other step runs the region itself: the first step of a kind also starts libraries that a
    recording cannot start.
    """

    def __init__(
        self, region: Region, key: Callable[[Numbers], Hashable], device: torch.device
    ) -> None:
        """Begin without a record.

        Args:
            key: returns all that the region reads on the host, and that may differ between steps.

        Raises:
            ValueError: nothing records on the device.
        """
        if device.type not in RECORDS:
            raise ValueError(f"cuda_graph=True needs a model on a GPU of NVIDIA, not on {device}")
        self._region, self._key, self._record = region, key, RECORDS[device.type]
        self._last: Hashable = None
        self._replays: dict[Hashable, Callable[[], None]] = {}

    def __call__(self, numbers: Numbers) -> None:
        """Run or replay the region."""
        key, run = self._key(numbers), partial(self._region, numbers)
        if key in self._replays:
            self._replays[key]()
        elif key == self._last:
            self._replays = {key: self._record(run)}  # drops the memory of the one before
        else:
            run()
        self._last = key


def cuda_graph(compute: Callable[[], None]) -> Callable[[], None]:
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
