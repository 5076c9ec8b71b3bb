"""Continue training on the remaining ranks after a rank has died, with a fault-tolerant MPI."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import TYPE_CHECKING, Any

import mpikfac
from mpikfac_apps.options.options import Options
from mpikfac_apps.running import checkpoints

if TYPE_CHECKING:
    from mpikfac_apps.training.run import Run

log = logging.getLogger("mpikfac.train")


def go_on(run: Run) -> tuple[mpikfac.comm.Comm, Options]:
    """Return the remaining ranks, and the options with which they start again.

    If the remaining ranks hold a complete state in memory, they write it as a checkpoint.
    Otherwise, they resume from the last checkpoint.

    Collective over: the remaining ranks.
    """
    left = mpikfac.comm.survivors(run.comm, run.trainer.communicators)
    run.saver.abandon()
    if run.record:
        run.record.close()
    if left.rank == 0:
        lost = run.comm.size - left.size
        log.warning("step %d: lost %d of %d ranks", run.trainer.steps, lost, run.comm.size)
        if run.comm.rank != 0:
            run.guard.inherit()
    run.comm = left
    run.meter.leave_out_lost(left)
    save_what_is_left(run)
    root, checkpoint = checkpoints.root(run.options), None
    if left.rank == 0:
        checkpoint = mpikfac.checkpoint.latest_checkpoint(root)
    anew = run.options.resume == "never"  # the run continues in its directory
    resume = "auto" if left.bcast(checkpoint) or anew else run.options.resume
    return left, dataclasses.replace(run.options, resume=resume)


def save_what_is_left(run: Run) -> None:
    """Write a checkpoint if the remaining ranks have the complete state of a step.

    The state after the lowest step of all ranks is written, because ranks at a later step may have
    used the output of a broken collective. Items that several ranks hold are compared, so a single
    surviving rank writes nothing.

    Collective over: run.comm.
    """
    trainer, comm = run.trainer, run.comm
    trainer.clear_statistics()  # restores running statistics changed by the unfinished step
    steps = comm.allgather(trainer.steps if trainer.is_consistent else math.inf)
    step, items = min(steps), dict[str, Any]()
    if steps[comm.rank] == step < math.inf:
        run.set_rate(step)  # some ranks may already have started the next step
        items = run.state()
    names = {name for held in comm.allgather(list(items)) for name in held}
    lost = "no complete state could be verified on the remaining ranks"
    if comm.size > 1 and names and not trainer.missing(names):
        counted = run.meter.state()
        try:
            with mpikfac.comm.together(comm, f"run_dir={run.options.run_dir}"):
                if comm.rank == 0:
                    items |= counted | run.items_of_rank_0()
            mpikfac.save_checkpoint(comm, checkpoints.root(run.options), items, step)
            return
        except mpikfac.UserError as error:
            lost = str(error)
    if comm.rank == 0:
        log.warning("%s: continuing from the last checkpoint", lost)
