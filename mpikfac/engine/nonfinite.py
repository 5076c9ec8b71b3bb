"""Numbers that are not finite: counted, logged once, and an error after too many in a row.

On a GPU, whether numbers are finite lies on the device until the host waits for the device anyway.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from mpikfac.errors import UserError

TOLERATED = 3  # times in a row that something may go wrong before the run ends

log = logging.getLogger("mpikfac")


class Nonfinite:
    """Count numbers that are not finite, among the numbers that the rank answers for.

    Attributes:
        counts: how often, by kind: "gradient", "statistics", "scales", "decomposition".
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.counts: Counter[str] = Counter()
        self._streaks: dict[str, dict[str, int]] = {}

    def note(
        self,
        kind: str,
        names: Collection[str],
        step: int,
        instead: str,
        tried: Collection[str] | None = None,
    ) -> None:
        """Count that `names` were not finite at `step`, and the rest of `tried` were finite.

        Args:
            instead: the remedy, for the log.
            tried: the names of the kind whose turn came at `step`; all if None.

        Raises:
            UserError: a name was not finite more than `TOLERATED` times in a row.
        """
        before = self._streaks.get(kind, {})
        if not names and not before:
            return
        streaks = {name: before.get(name, 0) + 1 for name in names}
        waiting = {} if tried is None else {n: k for n, k in before.items() if n not in tried}
        self._streaks[kind] = waiting | streaks
        self.counts[kind] += len(names)
        for name, times in streaks.items():
            if times > TOLERATED:
                raise UserError(
                    f"rank {self.rank}, step {step}: the {kind} of {name!r} was not finite "
                    f"{times} times in a row; try a smaller learning rate or a larger damping"
                )
        if new := [name for name in names if name not in before]:
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            log.warning(
                "rank %d, step %d: the %s of %r%s is not finite; %s",
                *(self.rank, step, kind, new[0], more, instead),
            )


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
