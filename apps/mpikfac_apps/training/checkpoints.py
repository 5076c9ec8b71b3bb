"""When a training run writes its state, what becomes of failures, and how it goes on from one."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mpikfac
from mpikfac_apps.guard.requests import Requests
from mpikfac_apps.options.options import Options

log = logging.getLogger("mpikfac.train")


class Saver:
    """Writes checkpoints beside the training; a failure costs that checkpoint, not the run.

    Collective over: comm, as are all its methods.

    Attributes:
        step: of the last checkpoint that was begun or gone on from; -1 if it failed.
    """

    step = -1

    def __init__(self, comm: Any, root: Path, requests: Requests) -> None:
        self._writer = mpikfac.CheckpointWriter(comm, root)
        self._requests = requests
        self._began = 0.0

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is being written; the same on all ranks, not collective."""
        return self._writer.pending

    @property
    def written(self) -> bool:
        """Whether this rank has done its part of what is pending; not collective."""
        return self._writer.written

    def save(self, items: Mapping[str, Any], step: int, last: bool = False) -> None:
        """Begins a checkpoint; the last one of a run is on disk when this returns.

        Raises:
            UserError: the last one cannot be written.
        """
        self.settle(last and self.step == step)
        if self.step == step:
            return
        self._began = time.monotonic()
        try:
            self._writer.begin(items, step)
        except mpikfac.UserError as error:
            self._failed(error, last)
            return
        self.step = step
        if last:
            self.settle(last)

    def settle(self, last: bool = False) -> None:
        """Waits for all ranks' parts of what is pending, and makes it count."""
        try:
            path = self._writer.commit()
        except mpikfac.UserError as error:
            self._failed(error, last)
            return
        if path:
            seconds = time.monotonic() - self._began
            self._requests.saved(seconds)
            log.info("wrote %s in %.1f s", path, seconds)

    def abandon(self) -> None:
        """Forgets what is pending, whose other parts may be missing; not collective."""
        self._writer.abandon()

    def _failed(self, error: mpikfac.UserError, last: bool) -> None:
        self.step = -1
        self._requests.saved(time.monotonic() - self._began)
        if last:
            raise error
        log.warning("%s; training goes on, the next one is tried when it is due", error)


def open_checkpoint(comm: Any, options: Options) -> Any:
    """The checkpoint to go on from, or None.

    Collective over: comm.

    Raises:
        UserError: there is none that is good.
    """
    if options.resume == "never":
        return None
    if options.resume != "auto":
        return mpikfac.load_checkpoint(comm, options.resume)
    return mpikfac.find_checkpoint(comm, root(options))


def megabytes(plan: mpikfac.plan.Plan) -> float:
    """About what a checkpoint takes: weights, momentum, triangles of factors, bases, scales."""
    factors = plan.factors.values()
    averages = sum(math.prod(factor.triangle) for factor in factors)
    bases = sum(math.prod(factor.part(2)) + math.prod(factor.part(1)) for factor in factors)
    layouts = plan.of(0).layouts
    rest = 2 * layouts.gradients.size + layouts.scales.size
    kept = plan.factor_itemsize * averages + plan.basis_itemsize * bases
    return (plan.itemsize * rest + kept) / 1e6


def root(options: Options) -> Path:
    """Where a run's checkpoints are."""
    return Path(options.run_dir) / "checkpoints"


def identity(options: Options) -> dict[str, Any]:
    """What a step number and the weights mean; these must not change in a restart."""
    chosen = dataclasses.asdict(options.data)
    del chosen["path"]  # where the files are may change
    return {
        "model": options.model,
        **{f"data.{key}": value for key, value in chosen.items()},
        "batch": options.batch,
        "parts": options.parts,
        "seed": options.seed,
    }


def follow(options: Options, saved: Mapping[str, Any], ranks: int) -> None:
    """Makes `options` those of the saved run, as far as they may not change.

    Raises:
        ValueError: they differ, or the batch does not suit so many ranks.
    """
    given = options.batch
    if options.batch_per_rank:
        options.batch = saved["batch"]
    for key, value in identity(options).items():
        if (before := saved.get(key)) != value:
            raise ValueError(
                f"it was saved with {key}={in_yaml(before)}; this run has {in_yaml(value)}; "
                f"give --{key}={in_yaml(before)}"
            )
    batch, began_on = options.batch or 0, saved["ranks"]
    if batch % ranks and not options.shrink:
        raise ValueError(
            f"it was saved with batch={batch}, no multiple of {ranks} ranks; "
            f"start one of {mpikfac.plan.divisors(batch)} ranks"
        )
    if given != batch or (options.scale_lr and began_on != ranks):
        scaled = f", lr scaled by {began_on}" if options.scale_lr else ""
        log.info("begun with ranks=%d; kept: batch=%d%s", began_on, batch, scaled)


def in_yaml(value: object) -> str:
    """A value as one writes it on the command line."""
    return value if isinstance(value, str) else json.dumps(value)
