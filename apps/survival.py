"""When a rank dies and MPI survives it (ULFM): how the ranks that are left go on."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import mpikfac
from mpikfac_apps import checkpoints
from mpikfac_apps.options import Options

if TYPE_CHECKING:
    from mpikfac_apps.train_cnn import Run

log = logging.getLogger("mpikfac.train")


def go_on(run: Run) -> tuple[Any, Options]:
    """The ranks that are left, and the options with which they start again.

    Their own state is written as a checkpoint if it is whole: else they go back to the last one.

    Collective over: the ranks that are left.
    """
    left = mpikfac.survivors(run.comm, run.trainer.gradients.grid)
    run.saver.abandon()
    if left.rank == 0:
        lost = run.comm.size - left.size
        log.warning("step %d: lost %d of %d ranks", run.trainer.steps, lost, run.comm.size)
        if run.comm.rank != 0:
            run.guard.inherit()
    run.comm = left
    run.meter.leave_out_lost(left)
    save_what_is_left(run)
    root, found = checkpoints.root(run.options), None
    if left.rank == 0:
        found = mpikfac.latest_checkpoint(root)
    resume = "auto" if left.bcast(found) else run.options.resume
    return left, dataclasses.replace(run.options, resume=resume)


def save_what_is_left(run: Run) -> None:
    """Writes the state after the newest step of which the ranks together still hold all, if any.

    Collective over: run.comm.
    """
    trainer, comm = run.trainer, run.comm
    trainer.gradients.discard()  # running statistics of the step that was not finished
    steps = comm.allgather(trainer.steps if trainer.intact else -1)
    newest = max(steps)
    items = trainer.state_dict() if steps[comm.rank] == newest >= 0 else {}
    names = {name for held in comm.allgather(list(items)) for name in held}
    if not names or trainer.missing(names):
        if comm.rank == 0:
            log.warning("what was lost is in no other memory: back to the last checkpoint")
        return
    counted = run.meter.state()
    if comm.rank == 0:
        items |= counted | run.about()
    mpikfac.save_checkpoint(comm, checkpoints.root(run.options), items, newest)
