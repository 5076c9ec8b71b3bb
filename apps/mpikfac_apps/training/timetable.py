"""What is due after each step of a run: epochs, tests, checkpoints of clients, and the end."""

from __future__ import annotations

import sys

from mpikfac_apps.options.options import Options
from mpikfac_apps.options.strategy import learning_rate
from mpikfac_apps.training.calendar import Calendar


class Timetable:
    """Say what is due when; steps are numbered from 0, and all ranks have the same answers.

    Attributes:
        steps: the steps of the whole run.
    """

    def __init__(self, calendar: Calendar, options: Options, ranks: int) -> None:
        """Follow the steps of the epochs, for a run that began on `ranks` ranks."""
        self._calendar, self._options = calendar, options
        self._rate = learning_rate(options, calendar.at(0).steps, ranks)
        self.steps = min(calendar.first(options.epochs), options.max_steps or sys.maxsize)

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and the position of the step in the epoch."""
        return self._calendar.place(step)

    def batch(self, step: int) -> int:
        """Return the images of a step, of all ranks together."""
        return self._calendar.at(self.place(step)[0]).batch

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self._rate(self._calendar.clock(step))

    def epochs(self, steps: int) -> float:
        """Return the epochs after so many steps; 2.5 is the middle of the third epoch."""
        return self._calendar.epochs(steps)

    def ended_epoch(self, steps: int) -> int | None:
        """Return the number of epochs if the last one ends after so many steps; else None."""
        epoch, index = self.place(steps - 1)
        return epoch + 1 if index + 1 == self._calendar.at(epoch).steps else None

    def test_due(self, steps: int) -> bool:
        """Return whether an epoch ends after so many steps, or the options ask for a test."""
        return self.ended_epoch(steps) is not None or _due(self._options.eval_steps, steps)

    def test_of_epoch_due(self, epochs: int) -> bool:
        """Return whether the test set is due after so many epochs."""
        return epochs % self._options.eval_every == 0 or epochs == self._options.epochs

    def meeting_due(self, steps: int) -> bool:
        """Return whether clients that step alone meet after so many steps, for a checkpoint."""
        return _due(self._options.checkpoint_every, steps)

    def words(self) -> str:
        """Return the steps of an epoch in words, as they change in the run."""
        return ", then ".join(str(span.steps) for span in self._calendar.spans)


def _due(interval: int | None, steps: int) -> bool:
    return interval is not None and steps % interval == 0
