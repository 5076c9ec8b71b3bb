"""Values of options that are refused: out of bounds, or in conflict with other options."""

from __future__ import annotations

import importlib.util
import math
import operator
from pathlib import Path

from mpikfac_apps.options.options import OPTIONS, Options, allowed
from mpikfac_apps.options.strategy import make_strategy
from mpikfac_apps.problems.models import MODELS

COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def check_bounds(options: Options) -> None:
    """Refuse numbers that are not finite or out of their bounds.

    Raises:
        ValueError: one line with key, value and bounds.
    """
    for key, (_, bounds) in OPTIONS.items():
        value = operator.attrgetter(key)(options)
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, int | float):
                continue
            inside = (COMPARE[sign](number, float(limit)) for sign, limit in map(str.split, bounds))
            if not math.isfinite(number) or not all(inside):
                raise ValueError(f"{key}={value} must be {allowed(key)}")


def check_conflicts(options: Options, ranks: int) -> None:
    """Refuses values that are right by themselves but not together."""
    if options.model not in MODELS:
        raise ValueError(f"model={options.model} is unknown; try one of {', '.join(MODELS)}")
    if options.data.name == "cifar10" and options.data.path is None:
        raise ValueError(
            "data.path=null: cifar10 needs the directory in which its archive was unpacked"
        )
    for key, name in (("path", "cifar10"), ("size", "synthetic"), ("classes", "synthetic")):
        value = getattr(options.data, key)
        if value is not None and options.data.name != name:
            raise ValueError(f"data.{key}={value} needs data.name={name}, not {options.data.name}")
    _check_schedule(options)
    if options.optimizer == "kfac":
        try:
            make_strategy(options.kfac, ranks, options.parts)
        except ValueError as error:
            raise ValueError(f"kfac: {error}") from error
    if options.resume not in ("never", "auto") and not Path(options.resume).is_dir():
        raise ValueError(f"resume={options.resume} must be never, auto or a checkpoint's directory")
    if options.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("tensorboard=true needs the package tensorboard, which is not installed")


def check_parts(options: Options, ranks: int) -> None:
    """Refuse a number of parts that does not fit the number of ranks or the batch."""
    parts, batch = options.parts, options.batch
    if parts and parts % ranks:
        raise ValueError(f"parts={parts} must be a multiple of the number of ranks ({ranks})")
    if parts and batch and batch % parts:
        raise ValueError(f"parts={parts} must divide batch={batch}")


def _check_schedule(options: Options) -> None:
    epochs = options.decay_epochs
    if (options.schedule == "step") != bool(epochs):
        raise ValueError(
            f"decay_epochs={epochs} with schedule={options.schedule}: step needs epochs at which "
            "to decay, and the other schedules take []"
        )
    if options.schedule != "step" and options.decay_factor != Options.decay_factor:
        raise ValueError(
            f"decay_factor={options.decay_factor} needs schedule=step, not {options.schedule}"
        )
    if any(later <= earlier for earlier, later in zip(epochs, epochs[1:])):
        raise ValueError(f"decay_epochs={epochs} must increase")
    if options.warmup_epochs >= options.epochs:
        raise ValueError(
            f"warmup_epochs={options.warmup_epochs} must be less than epochs={options.epochs}"
        )


def global_batch(options: Options, ranks: int) -> int:
    """Return the images of a step, of all ranks together.

    Raises:
        ValueError: no batch is given, or two, or no multiple of the number of ranks.
    """
    batch, per_rank = options.batch, options.batch_per_rank
    if (batch is None) == (per_rank is None):
        raise ValueError(
            f"batch={batch} and batch_per_rank={per_rank}: give one of them, and null for the other"
        )
    total = batch or ranks * (per_rank or 0)
    if total % ranks:
        lower = total // ranks * ranks
        raise ValueError(
            f"batch={total} must be a multiple of the number of ranks ({ranks}); "
            f"try {lower or ranks} or {lower + ranks}"
        )
    return total
