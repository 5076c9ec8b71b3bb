"""Replay, with a single call, all kernels that a region of a step launched in an earlier step.

A region launches many small kernels, and a GPU can finish one before the host has launched the next
one. A CUDA graph contains all kernels of a region, with the addresses and host values at the time
of recording.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from functools import partial

import torch

from mpikfac.settings import Numbers

Region = Callable[[Numbers], None]
Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function once, and returns a function that launches the same kernels again."""

log = logging.getLogger("mpikfac")


class Captured:
    """Record a region in the second of two consecutive steps with the same key; then replay it.

    Other steps run the region directly: the first step with a key also initialises libraries, which
    is impossible while recording.
    """

    def __init__(
        self, region: Region, key: Callable[[Numbers], Hashable], device: torch.device
    ) -> None:
        """Start without a recording.

        Args:
            key: returns everything that the region reads on the host and that can change between
                steps.

        Raises:
            ValueError: the device does not support recording.
        """
        if device.type not in RECORDS:
            raise ValueError(f"cuda_graph=True needs a model on an NVIDIA GPU, not on {device}")
        self._region, self._key, self._record = region, key, RECORDS[device.type]
        self._last: Hashable = None
        self._replays: dict[Hashable, Callable[[], None]] = {}

    def __call__(self, numbers: Numbers) -> None:
        """Run or replay the region."""
        key, run = self._key(numbers), partial(self._region, numbers)
        if key in self._replays:
            self._replays[key]()
        elif key == self._last:
            self._replays = {key: self._record(run)}  # frees the previous recording's memory
        else:
            run()
        self._last = key


def cuda_graph(compute: Callable[[], None]) -> Callable[[], None]:
    """Run `compute`, as a CUDA graph if recording succeeds; return a function to repeat it."""
    try:
        graph = torch.cuda.CUDAGraph()
        # Other threads can use the device at the same time.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            compute()
    except RuntimeError as error:
        log.warning("directions do not use a CUDA graph: %s", str(error).partition("\n")[0])
        compute()
        return compute
    graph.replay()
    return graph.replay


RECORDS: Mapping[str, Record] = {"cuda": cuda_graph}
"""The function that records a region, by type of device."""
