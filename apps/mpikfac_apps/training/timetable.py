"""Determine when epochs end, and when tests, clients' checkpoints and the end of a run are due."""

from __future__ import annotations

import sys

from mpikfac_apps.options.options import Options
from mpikfac_apps.options.strategy import learning_rate
from mpikfac_apps.training.calendar import Calendar


class Timetable:
    """Determine what is due after each step, counted from 0, identically on all ranks.

    Attributes:
        steps: the number of steps of the whole run.
    """

    def __init__(self, calendar: Calendar, options: Options, ranks: int) -> None:
        """Create the timetable of a run that was first started on `ranks` ranks."""
        self._calendar, self._options = calendar, options
        self._rate = learning_rate(options, calendar.at(0).steps, ranks)
        self.steps = min(calendar.first(options.epochs), options.max_steps or sys.maxsize)

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and the step's index within the epoch."""
        return self._calendar.place(step)

    def batch(self, step: int) -> int:
        """Return the number of images in a step, across all ranks."""
        return self._calendar.at(self.place(step)[0]).batch

    def rate(self, step: int) -> float:
        """Return the learning rate in a step."""
        return self._rate(self._calendar.clock(step))

    def epochs(self, steps: int) -> float:
        """Return the number of epochs in `steps` steps; 2.5 is the middle of the third epoch."""
        return self._calendar.epochs(steps)

    def ended_epoch(self, steps: int) -> int | None:
        """Return the number of finished epochs if one ends after `steps` steps, otherwise None."""
        epoch, index = self.place(steps - 1)
        return epoch + 1 if index + 1 == self._calendar.at(epoch).steps else None

    def test_due(self, steps: int) -> bool:
        """Return whether a test is due after `steps` steps, for example because an epoch ends."""
        return self.ended_epoch(steps) is not None or _due(self._options.eval_steps, steps)

    def test_of_epoch_due(self, epochs: int) -> bool:
        """Return whether a test is due at the end of an epoch, after `epochs` epochs."""
        return epochs % self._options.eval_every == 0 or epochs == self._options.epochs

    def meeting_due(self, steps: int) -> bool:
        """Return whether independent clients meet for a checkpoint after `steps` steps."""
        return _due(self._options.checkpoint_every, steps)

    def words(self) -> str:
        """Return the number of steps per epoch, and how it changes during the run, as text."""
        return ", then ".join(str(span.steps) for span in self._calendar.spans)


def _due(interval: int | None, steps: int) -> bool:
    return interval is not None and steps % interval == 0
