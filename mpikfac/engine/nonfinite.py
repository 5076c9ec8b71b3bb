"""Numbers that are not finite: counted, told once, and an error when they do not end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection

from mpikfac.errors import UserError

TOLERATED = 3  # times in a row that something may go wrong before the run ends

log = logging.getLogger("mpikfac")


class Nonfinite:
    """What went wrong on this rank, of what this rank answers for.

    Attributes:
        counts: how often by kind: "gradient", "statistics", "scales", "decomposition".
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
        """Counts that `names`, and no others of those that were `tried`, went wrong at `step`.

        Args:
            instead: what is done about it, for the log.
            tried: those of that kind whose turn it was; all if None.

        Raises:
            UserError: one of them has gone wrong more than `TOLERATED` times in a row.
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
