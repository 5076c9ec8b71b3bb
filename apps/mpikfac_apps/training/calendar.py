"""The number of steps in each epoch of a run; the batch size can change between epochs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mpikfac_apps.options.by_epoch import ByEpoch, numbers_of


@dataclass(frozen=True)
class EpochSpan:
    """Consecutive epochs with the same batch size.

    Attributes:
        epoch: the first of these epochs.
        step: the first step of that epoch, counted from the start of the run.
        batch: the number of images per step across all ranks.
        steps: the number of steps per epoch.
    """

    epoch: int
    step: int
    batch: int
    steps: int


@dataclass(frozen=True)
class Calendar:
    """The steps of every epoch; images that do not fill the last batch of an epoch are dropped.

    Attributes:
        images: the number of training images.
        batch: the number of images per step across all ranks, constant or by epoch; at most
            the number of training images.
    """

    images: int
    batch: int | ByEpoch

    @cached_property
    def spans(self) -> tuple[EpochSpan, ...]:
        """The spans of epochs with equal batch size, in order; the last one has no end."""
        changes = self.batch.changes if isinstance(self.batch, ByEpoch) else ()
        spans: list[EpochSpan] = []
        for epoch, batch in zip([0, *(start for start, _ in changes)], numbers_of(self.batch)):
            step = spans[-1].step + (epoch - spans[-1].epoch) * spans[-1].steps if spans else 0
            spans.append(EpochSpan(epoch, step, batch, self.images // batch))
        return tuple(spans)

    def at(self, epoch: int) -> EpochSpan:
        """Return the span that contains an epoch."""
        return next(span for span in reversed(self.spans) if epoch >= span.epoch)

    def _of(self, step: int) -> EpochSpan:
        return next(span for span in reversed(self.spans) if step >= span.step)

    def first(self, epoch: int) -> int:
        """Return the first step of an epoch: the number of steps of all earlier epochs."""
        span = self.at(epoch)
        return span.step + (epoch - span.epoch) * span.steps

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and the step's index within the epoch."""
        span = self._of(step)
        epochs, index = divmod(step - span.step, span.steps)
        return span.epoch + epochs, index

    def epochs(self, step: int) -> float:
        """Return the number of epochs before a step; 2.5 is the middle of the third epoch."""
        span = self._of(step)
        return span.epoch + (step - span.step) / span.steps

    def clock(self, step: int) -> int:
        """Convert a step to the step at the same epoch in a run that keeps epoch 0's batch size.

        Learning rate schedules use the result, so they depend on the epoch, and not on changes of
        the batch size.
        """
        span, steps = self._of(step), self.spans[0].steps
        return span.epoch * steps + (step - span.step) * steps // span.steps
