"""Facts that lie on the device until the host waits for the device anyway."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Flags:
    """Numbers on the device that the host reads together: every wait for a GPU costs time."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Callable[[list[float]], None]]] = []

    def keep(self, numbers: Tensor, tell: Callable[[list[float]], None]) -> None:
        """Keep `numbers` `[n]`; the next `read` gives the numbers to `tell`."""
        self._kept.append((numbers, tell))

    def read(self, numbers: Tensor) -> list[float]:
        """Return `numbers` `[n]`, and give all kept numbers to their `tell`, in order."""
        kept, self._kept = self._kept, []
        sizes = [len(numbers), *(len(some) for some, _ in kept)]
        read = torch.cat([numbers, *(some.to(numbers.dtype) for some, _ in kept)]).tolist()
        ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
        for (_, tell), start, stop in zip(kept, ends, ends[1:]):
            tell(read[start:stop])
        return read[: sizes[0]]
