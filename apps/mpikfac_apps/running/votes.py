"""Make the ranks agree after each step on stops, on checkpoints, and on non-finite values."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

import mpikfac
from mpikfac_apps.guard.guard import Guard
from mpikfac_apps.options.run import RunOptions
from mpikfac_apps.running.checkpoints import Saver

AnyTrainer = mpikfac.KFAC | mpikfac.FirstOrderTrainer | mpikfac.lab.AsyncSGD

log = logging.getLogger("mpikfac.train")

CHECKPOINT, STOP, WRITTEN, LATE, TROUBLES, DECOMPOSITIONS = range(6)


class StepVotes:
    """The votes of the ranks: values that each rank sends to all ranks together with gradients.

    A request to save or stop can reach any rank, and all ranks follow it after the same step.

    Args:
        call_meeting: sends this rank's votes to all ranks, if ranks step independently.
        asked: returns the votes summed over all groups of ranks; collective.

    Attributes:
        troubles: the number of values that were not finite, summed over all ranks, as of the last
            votes.
    """

    def __init__(
        self,
        comm: mpikfac.comm.Comm,
        options: RunOptions,
        guard: Guard,
        saver: Saver,
        trainer: AnyTrainer,
        call_meeting: Callable[[], None],
        asked: Callable[[list[int]], list[int]],
    ) -> None:
        self._comm, self._options = comm, options
        self._guard, self._saver = guard, saver
        self._trainer, self._call_meeting, self._asked = trainer, call_meeting, asked
        self._due = False  # whether a checkpoint is due according to the number of steps
        self._own_troubles = 0  # this rank's number of non-finite values, before the step
        self._losses = torch.zeros(()), torch.zeros(())
        self._troubled = False  # whether the previous step had a value that was not finite
        self.troubles = 0

    def cast(self) -> None:
        """Pass this rank's votes to the trainer, which sends them in the next step.

        A rank votes on requests to save or stop, and reports the progress of its checkpoint, its
        non-finite values, and its decompositions.

        Collective over: none.
        """
        trainer, saver = self._trainer, self._saver
        requests, troubles = self._guard.requests, trainer.nonfinite.counts.total()
        self._own_troubles = troubles
        pending, written = saver.pending, saver.written
        due = requests.checkpoint and not pending
        late = self._comm.rank + 1 if pending and not written else 0
        decompositions = trainer.trace.calls["decompositions"]
        votes = [due, requests.stop, written, late, troubles, decompositions]
        trainer.votes[: len(votes)] = torch.tensor(votes, dtype=torch.float64)
        if due or requests.stop or written:
            self._call_meeting()

    def note(self, loss: torch.Tensor) -> None:
        """Remember this rank's loss in a step until the votes show whether to warn about it.

        Collective over: none.
        """
        self._losses = loss, self._losses[0]

    def follow(self, save: Callable[[], None]) -> bool:
        """Follow requests on any rank to save or stop; return whether the run must stop.

        Between two exchanges of weights, a rank knows only its own votes, so requests are delayed.

        Collective over: world.

        Args:
            save: writes a checkpoint.
        """
        interval, ranks = self._options.checkpoint_every, self._comm.size
        self._due |= bool(interval and self._trainer.steps % interval == 0)
        if not self._trainer.combined:
            return False
        votes = [round(mean * ranks) for mean in self._trainer.votes.tolist()]
        self._tell_of_loss(troubled=votes[TROUBLES] > self.troubles)
        self.troubles = votes[TROUBLES]
        stop, checkpoint = self._asked([votes[STOP], votes[CHECKPOINT]])
        if stop:
            return True
        if votes[WRITTEN] == ranks:
            self._saver.settle()
        elif self._comm.rank == 0:
            self._saver.remind(votes[WRITTEN], votes[LATE], self._options.watchdog_timeout)
        if checkpoint or self._due:
            # A diverging run must not replace good checkpoints, so the checkpoint is postponed to a
            # step in which all values are finite.
            self._due = self.troubled()
            if not self._due:
                save()
        return False

    def _tell_of_loss(self, troubled: bool) -> None:
        """Warn if values became non-finite in the previous step, including this rank's loss."""
        if troubled and not self._troubled and not self._losses[1].isfinite():
            log.warning(
                "rank %d, step %d: the loss is %s; check the rank's batch and the model's outputs",
                *(self._comm.rank, self._trainer.steps - 2, self._losses[1].item()),
            )
        self._troubled = troubled

    def troubled(self) -> bool:
        """Return whether a value in the last step was not finite on some rank.

        Collective over: world.
        """
        troubles = self._trainer.nonfinite.counts.total()
        troubled = any(self._comm.allgather(troubles > self._own_troubles))
        return any(self._asked([int(troubled)]))

    def decompositions(self) -> int:
        """Return the number of decompositions on all ranks since the start; not collective."""
        return round(self._trainer.votes[DECOMPOSITIONS].item() * self._comm.size)
