"""Work beside the training step: on a thread, and on a GPU on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch

Item = TypeVar("Item")


class Background:
    """One thread that does one thing after the other."""

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, "mpikfac")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, items: Iterable[Item]) -> Callable[[], list[Item]]:
        """Starts to make `items`; returns what waits for them, and raises what they raised.

        Tensors that they are made of must not change meanwhile.
        """
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return self._thread.submit(self._make, items).result

    def _make(self, items: Iterable[Item]) -> list[Item]:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            made = list(items)
            if self._stream:
                self._stream.synchronize()
            return made
