"""Count and report non-finite values, and warn about settings that are probably unintended.

On a GPU, the flags that show whether values are finite stay on the device until the host has to
wait for the GPU anyway.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from mpikfac.errors import UserError
from mpikfac.layers import Layer, skipping

LEAST_DAMPING = 1e-8  # a smaller damping causes a warning in float32
TOLERATED = 3  # the number of times in a row that a value can be non-finite before the run ends

log = logging.getLogger("mpikfac")


class Nonfinite:
    """Count the non-finite values among those for which this rank is responsible.

    Attributes:
        counts: the counts by kind: "gradient", "statistics", "scales", "decomposition".
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.counts: Counter[str] = Counter()
        self._streaks: dict[str, dict[str, int]] = {}

    def __repr__(self) -> str:
        """Return the rank and its counts by kind."""
        counts = ", ".join(f"{kind} {times}" for kind, times in self.counts.items() if times)
        return f"Nonfinite(rank {self.rank}: {counts or 'all values were finite'})"

    def note(
        self,
        kind: str,
        names: Collection[str],
        step: int,
        instead: str,
        tried: Collection[str] | None = None,
    ) -> None:
        """Record that, of the values computed in this step, only `names` were not finite.

        Args:
            kind: the kind of the values, as in `counts`.
            instead: what happens instead of using the values, as text for the log.
            tried: the names of the values of this kind that were computed in this step; None for
                all.

        Raises:
            UserError: a value was not finite more than `TOLERATED` times in a row.
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
                    f"rank {self.rank}, step {step}: NaN or infinity {times} times in a row in the "
                    f"{kind} of {name!r}; check the losses, or try a smaller learning rate or more "
                    f"damping"
                )
        if begun := [name for name in names if name not in before]:
            further = f" and {len(begun) - 1} more" if len(begun) > 1 else ""
            log.warning(
                "rank %d, step %d: NaN or infinity in the %s of %r%s; %s",
                *(self.rank, step, kind, begun[0], further, instead),
            )


class Flags:
    """Values on the device that the host reads together, because each wait for a GPU costs time."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Callable[[list[float]], None]]] = []

    def keep(self, numbers: Tensor, report: Callable[[list[float]], None]) -> None:
        """Keep `numbers` `[n]`; the next `read` passes them to `report`."""
        self._waiting.append((numbers, report))

    def read(self, *numbers: Tensor) -> list[float]:
        """Return all `numbers`, `[n]` each, and report all values kept so far, in order."""
        waiting, self._waiting = self._waiting, []
        sizes = [sum(map(len, numbers)), *(len(flags) for flags, _ in waiting)]
        values = torch.cat([*numbers, *(x.to(numbers[0].dtype) for x, _ in waiting)]).tolist()
        ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
        for (_, report), start, stop in zip(waiting, ends, ends[1:]):
            report(values[start:stop])
        return values[: sizes[0]]


class Cautions:
    """Warn about settings and layers that work but may not be what the user intended."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def _once(self, kind: str, text: str, *values: object) -> None:
        if kind not in self._said:
            self._said.add(kind)
            log.warning(text, *values)

    def little_damping(self, damping: float, step: int) -> None:
        """Warn if an absolute damping is too small for a model in float32."""
        if damping < LEAST_DAMPING:
            self._once(
                "little damping",
                "damping=%g at step %d is below %g: float32 has too few digits for directions "
                "with so little damping; use more damping, or a model in float64",
                *(damping, step, LEAST_DAMPING),
            )

    def large_factors(self, layers: Sequence[str], damping: float, step: int) -> None:
        """Warn about the first of `layers`, whose factors are rounded too much for the damping."""
        if layers:
            self._once(
                "large factors",
                "layer %r at step %d: float32 rounds the factors of such large inputs and "
                "gradients by more than damping=%g, so directions may be wrong; normalise "
                "the inputs, or use more damping, or a model in float64",
                *(layers[0], step, damping),
            )

    def unseen(self, layer: Layer) -> None:
        """Warn about a layer that has a gradient, but no call that K-FAC has recorded."""
        self._once(
            f"unseen {layer.name}",
            "layer %r has a gradient, but K-FAC recorded no call of the module in train() mode, "
            "so the layer has no statistics, and its gradient is not preconditioned; "
            "call the module itself in train() mode, pass all heads to record() if fisher_type "
            "needs it, or train the layer first-order with %s",
            *(layer.name, skipping([layer.path])),
        )

    def without_gradient(self, layers: Sequence[str]) -> None:
        """Warn about layers whose gradients were removed after a backward pass."""
        if layers:
            self._once(
                "without gradient",
                "layer %r and %d more have statistics from a backward pass, but their gradients "
                "are gone, and K-FAC treats them as 0; leave gradients in .grad until step()",
                *(layers[0], len(layers) - 1),
            )
