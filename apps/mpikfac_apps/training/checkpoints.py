"""Write checkpoints of a training run, survive failures to write, and find a run's checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mpikfac
from mpikfac import files
from mpikfac_apps.cli import checkpoint_at
from mpikfac_apps.guard.guard import Guard
from mpikfac_apps.guard.watchdog import LONGER
from mpikfac_apps.options.options import Options
from mpikfac_apps.training import run_directory

RECORDS = {"run/seconds": float, "run/metrics_bytes": int, "run/metrics_waiting": str}
MOMENTA = "kfac/momentum/"  # begins the names of the items of a momentum of gradients
KINDS = {
    "factors": ("kfac/factors/", "kfac/vectors/", "kfac/gradient-factors/"),
    "decompositions": ("kfac/bases/",),
    "lengths": ("kfac/graft/",),
    "lengths in eigenbases": ("kfac/rotated/",),
    "lengths of rows": ("kfac/rows/",),
    "momenta": (MOMENTA,),
}
"""What a solver keeps, in words, and how the names of the items begin."""

log = logging.getLogger("mpikfac.train")


class Saver:
    """Write checkpoints during the training; the run survives a failure to write a checkpoint.

    Collective over: comm, as are all methods.

    Attributes:
        step: the step of the last checkpoint begun or resumed from; -1 if the checkpoint failed.
    """

    def __init__(self, comm: mpikfac.comm.Comm, root: Path, guard: Guard) -> None:
        self.step = -1
        self._writer = mpikfac.CheckpointWriter(comm, root)
        self._guard = guard
        self._began = self._reminded = 0.0

    @property
    def pending(self) -> bool:
        """True while a checkpoint is being written; the same on all ranks, not collective."""
        return self._writer.pending

    @property
    def written(self) -> bool:
        """True if the rank has written its part of the pending checkpoint; not collective."""
        return self._writer.written

    def save(self, items: Mapping[str, Any], step: int, last: bool = False) -> None:
        """Begin a checkpoint; the last checkpoint of a run is on disk when the method returns.

        Raises:
            UserError: the last checkpoint cannot be written.
        """
        self.settle(last and self.step == step)
        bare = self._is_bare()
        if self.step == step and not bare:
            return
        self._began = self._reminded = self._guard.clock()
        self._guard.begin_write(step, lambda: not self.written)
        try:
            self._writer.begin(items, step)
        except mpikfac.UserError as error:
            self._failed(error, last)
            return
        self.step = step
        if last:
            self.settle(last)

    def settle(self, last: bool = False) -> None:
        """Wait until all ranks have written the pending checkpoint, and commit the checkpoint."""
        try:
            path = self._writer.commit()
        except mpikfac.UserError as error:
            self._failed(error, last)
            return
        if path:
            self._guard.end_write()
            seconds = self._guard.clock() - self._began
            self._guard.requests.saved(seconds)
            log.info("wrote %s in %.1f s", path, seconds)

    def remind(self, written: int, late: int, limit: float | None) -> None:
        """Warn of a checkpoint that takes long, once for every `limit` seconds; not collective.

        Args:
            written: how many ranks have written their parts.
            late: the sum of `rank + 1` over the remaining ranks.
        """
        now = self._guard.clock()
        if not self.pending or limit is None or now - self._reminded < limit:
            return
        self._reminded = now
        writing = self._writer.comm.size - written
        who = f"rank {late - 1} still writes" if writing == 1 else f"{writing} ranks still write"
        log.warning(
            "%s a checkpoint of step %d, begun %d s ago; training goes on, and the job ends after "
            "%d s",
            *(who, self.step, now - self._began, LONGER * limit),
        )

    def abandon(self) -> None:
        """Forget the pending checkpoint, as parts of lost ranks may be missing; not collective."""
        self._guard.end_write()
        self._writer.abandon()

    def close(self) -> None:
        """Wait until older checkpoints are deleted; not collective."""
        self._writer.close()

    def _is_bare(self) -> bool:
        """Return whether checkpoints were made, and none is left; rank 0 tells."""
        root = self._writer.root
        bare = self._writer.comm.bcast(self.step >= 0 and not any(root.glob("step-*")))
        if bare:
            log.warning("%s was emptied or removed while the run writes; made anew", root)
        return bool(bare)

    def _failed(self, error: mpikfac.UserError, last: bool) -> None:
        self.step = -1
        self._guard.end_write()
        self._guard.requests.saved(self._guard.clock() - self._began)
        if last:
            raise error
        log.warning("%s; training goes on, the next one is tried when it is due", error)


def open_checkpoint(
    comm: mpikfac.comm.Comm, options: Options
) -> mpikfac.checkpoint.Checkpoint | None:
    """Return the checkpoint to resume from, or None to start at step 0.

    Collective over: comm.

    Raises:
        UserError: the checkpoint of `resume` is damaged, all checkpoints of the run are damaged, or
            a run that had checkpoints has none.
    """
    if options.resume == "never":
        return None
    if options.resume != "auto":
        with mpikfac.comm.together(comm, f"resume={options.resume}"):
            path = checkpoint_at(Path(options.resume)) if comm.rank == 0 else None
        return mpikfac.load_checkpoint(comm, comm.bcast(path))
    checkpoint = mpikfac.find_checkpoint(comm, root(options))
    if checkpoint is None:
        with mpikfac.comm.together(comm, f"run_dir={options.run_dir}"):
            if comm.rank == 0:
                run_directory.start_anew(Path(options.run_dir))
    return checkpoint


def megabytes(plan: mpikfac.plan.Plan, tensors_per_weight: int) -> float:
    """Estimate the MB of a checkpoint: weights, momentum, triangles of factors, bases, scales.

    Args:
        tensors_per_weight: numbers for each weight: the weight itself, and averages.
    """
    factors = plan.factors.values()
    averages = sum(math.prod(factor.triangle) for factor in factors)
    bases = sum(math.prod(factor.part(2)) + math.prod(factor.part(1)) for factor in factors)
    of_rank = plan.of(0)
    scales = mpikfac.plan.scales.layout(of_rank).size
    weights = tensors_per_weight * of_rank.layouts.gradients.size + scales
    curvature = plan.factor_itemsize * averages + plan.basis_itemsize * bases
    return (plan.itemsize * weights + curvature) / 1e6


def root(options: Options) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(options.run_dir) / "checkpoints"


def records(checkpoint: mpikfac.checkpoint.Checkpoint) -> tuple[float, int, str]:
    """Return seconds of training, bytes of metrics.jsonl, and the lines of metrics that waited.

    Raises:
        ValueError: an item has another form.
    """
    items = {name: checkpoint.get(name, "") for name in RECORDS}
    if not files.has_form(items, RECORDS) or not all(items[name] >= 0 for name in list(items)[:2]):
        raise ValueError(f"items {', '.join(RECORDS)} must be two numbers of at least 0 and a text")
    seconds, size, waiting = items.values()
    return seconds, size, waiting


def check_steps(steps: int, named: int, end: int, limit: str) -> None:
    """Raise ValueError if a checkpoint's steps differ, or lie past the end of the run.

    Args:
        limit: the option that ends the run.
    """
    if steps != named:
        raise ValueError(f"item 'trainer/steps' is {steps}; the manifest has step {named}")
    if steps > end:
        raise ValueError(f"it is of step {steps}; this run ends at step {end}: raise {limit}")


def carried(
    comm: mpikfac.comm.Comm, trainer: mpikfac.KFAC, items: Mapping[str, Any]
) -> tuple[str, str, str]:
    """Return what goes on, starts anew and is left, after the load of another solver's state.

    Collective over: comm.

    Args:
        items: the items of the checkpoint.
    """
    shares = comm.allgather([*trainer.state_dict()])
    now, before = _kinds(set().union(*shares)), _kinds(items)
    forms = [layer.solver for layer in trainer.plan.of(comm.rank).layers]
    kept = {"factors"} if trainer.plan.factors else set()
    kept |= {"decompositions"} if any(form.blocks for form in forms) else set()
    both = now & before
    parts = both, (now | kept) - both, before - now - kept
    going, anew, left = (", ".join(sorted(part)) or "nothing" for part in parts)
    return going, anew, left


def _kinds(names: Collection[str]) -> set[str]:
    """Return the kinds of items of K-FAC among names, in words."""
    return {
        word for word, prefixes in KINDS.items() if any(name.startswith(prefixes) for name in names)
    }


def check_momentum(options: Options, items: Mapping[str, Any]) -> None:
    """Refuse the state of a run whose momentum was of gradients, or of directions, and now is not.

    `KFAC.load_state_dict` refuses the same states, without the names of options.

    Args:
        items: the items of a checkpoint.

    Raises:
        ValueError: the momentum would be taken twice, or never.
    """
    now = options.momentum if options.momentum_of_gradients else 0.0
    if not now and any(name.startswith(MOMENTA) for name in items):
        raise ValueError(
            "it has momenta of gradients, and no momentum of directions; go on with "
            "optimizer=kfac, kfac.momentum_of=gradients and momentum above 0"
        )
    for name in items:
        of_group = name.startswith("optimizer/groups/") and name.endswith("/momentum")
        if now and of_group and items[name]:
            raise ValueError(
                f"it has momentum={items[name]} of directions, and none of gradients; go on with "
                f"kfac.momentum_of=directions"
            )
