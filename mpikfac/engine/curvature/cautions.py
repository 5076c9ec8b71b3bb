"""Warnings about a run that goes on: each warning once in a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

LEAST_DAMPING = 1e-8  # in float32

log = logging.getLogger("mpikfac")


class Cautions:
    """Warn of settings and layers that K-FAC can use and the user may not want."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def _once(self, kind: str, text: str, *values: object) -> None:
        if kind not in self._said:
            self._said.add(kind)
            log.warning(text, *values)

    def little_damping(self, damping: float, step: int) -> None:
        """Warn of an absolute damping of a model in float32 that rounding hides."""
        if damping < LEAST_DAMPING:
            self._once(
                "little damping",
                "damping=%g at step %d is below %g: float32 has too few digits for directions with "
                "so little damping; take more damping, or a model in float64",
                *(damping, step, LEAST_DAMPING),
            )

    def large_factors(self, layers: Sequence[str], damping: float, step: int) -> None:
        """Warn of the first of the layers whose factors float32 rounds by more than the damping."""
        if layers:
            self._once(
                "large factors",
                "layer %r at step %d: float32 rounds the factors of such large inputs and "
                "gradients by more than damping=%g covers, so directions may be wrong; normalise "
                "the inputs, or take more damping, or a model in float64",
                *(layers[0], step, damping),
            )

    def unseen(self, layer: str) -> None:
        """Warn of a layer with a gradient and without a call that K-FAC saw."""
        self._once(
            f"unseen {layer}",
            "layer %r has a gradient, and K-FAC saw no call of the module in train() mode: "
            "without statistics, K-FAC does not change the direction of its gradient; call "
            "the module itself in train() mode, or add %r to skip",
            *(layer, layer),
        )
