"""The options of a training run, read and checked; and with the choices that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mpikfac_apps.options.command_line import read
from mpikfac_apps.options.conflicts import check_conflicts, check_parts, global_batch
from mpikfac_apps.options.documents import nested
from mpikfac_apps.options.fields import flat
from mpikfac_apps.options.options import BASIC, Options
from mpikfac_apps.options.strategy import make_strategy, training_ranks


def parse(argv: Sequence[str] | None, ranks: int) -> Options:
    """Return the checked options of a command line, for a job of `ranks` ranks.

    `batch` is filled in. Values come from the defaults, then `--config FILE`, then the rest of the
    command line.

    Raises:
        ValueError: something is wrong; one line that names key, value and the allowed values.
        SystemExit: code 0, after --help or --print_config.
    """
    options = read("mpikfac train", Options, argv, basic=BASIC, files=True)
    training = training_ranks(options, ranks)
    check_conflicts(options, training)
    options = dataclasses.replace(options, batch=global_batch(options, training))
    check_parts(options, training)
    return options


def resolved(options: Options, ranks: int) -> dict[str, Any]:
    """Return all options as a YAML file has them, with the choices of the strategy for null.

    The file starts an equal run. The number of workers depends on the number of ranks and stays
    null; so do all choices of strategy=auto.

    Args:
        ranks: the ranks that train.
    """
    values = flat(options) | {"batch_per_rank": None}
    if options.optimizer == "kfac" and options.kfac.distribution.strategy != "auto":
        strategy, settings = make_strategy(options.kfac, ranks)
        for key, value in (strategy.choices() | settings).items():
            if key not in ("workers", "parts") and values[f"kfac.{key}"] is None:
                values[f"kfac.{key}"] = list(value) if isinstance(value, tuple) else value
    return nested(values)
