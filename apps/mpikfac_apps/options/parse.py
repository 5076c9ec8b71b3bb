"""Read and check the options of a training run; resolve the choices that options leave open."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mpikfac_apps.options.conflicts import (
    check_conflicts,
    check_pairs,
    check_parts,
    global_batch,
    pixels,
)
from mpikfac_apps.options.documents import nested
from mpikfac_apps.options.fields import flat
from mpikfac_apps.options.options import AUTO, TRAIN, KfacOptions, Options
from mpikfac_apps.options.strategy import make_strategy, preconditioner_of, training_ranks
from mpikfac_apps.problems.models import network


def parse(argv: Sequence[str] | None, ranks: int, kept: Mapping[str, Any] | None = None) -> Options:
    """Return the checked options of a command line, for a job of `ranks` ranks.

    `batch` and `kfac.num_per_example_loss_terms` are filled in. Values come from the defaults,
    `kept`, `--config FILE`, and the rest of the command line; later sources override earlier ones.

    Args:
        kept: options by key, as in a YAML file.

    Raises:
        ValueError: an option is invalid; the one-line message states key, value and allowed values.
        SystemExit: code 0, after --help, --help_all or --print_config.
    """
    return checked(TRAIN.read(argv, kept), ranks)


def checked(options: Options, ranks: int) -> Options:
    """Check that options can be combined; return them with `batch` and loss terms filled in.

    Raises:
        ValueError: options cannot be combined, or are invalid for the number of ranks.
    """
    training = training_ranks(options, ranks)
    check_conflicts(options, training)
    batch, kfac = global_batch(options, training), of_run(options)
    options = dataclasses.replace(options, batch=batch, kfac=kfac)
    check_parts(options, training)
    check_pairs(options, training)
    return options


def of_run(options: Options) -> KfacOptions:
    """Return K-FAC's settings, with the momentum and the loss terms that other options imply."""
    estimator, grafting = options.kfac.estimator, options.kfac.grafting
    dimensions = network(options.model).task.dimensions
    if dimensions and estimator.num_per_example_loss_terms == 1:
        positions = (pixels(options.data) or 1) ** dimensions
        estimator = dataclasses.replace(estimator, num_per_example_loss_terms=positions)
    if options.momentum_of_gradients:
        grafting = grafting.with_momentum(options.momentum)
    return dataclasses.replace(options.kfac, estimator=estimator, grafting=grafting)


def resolved(options: Options, ranks: int) -> dict[str, Any]:
    """Return all options as in a YAML file, with the strategy's settings in place of nulls.

    A run with this file gives the same results.

    Args:
        ranks: the number of ranks that train.
    """
    if options.optimizer == "kfac" and options.distribution.strategy != AUTO:
        _, settings = make_strategy(options.distribution, options.kfac, ranks)
        settings["preconditioner"] = preconditioner_of(settings)
        options = dataclasses.replace(options, kfac=dataclasses.replace(options.kfac, **settings))
    values = flat(options) | {"batch_per_rank": None, "lr": options.rate}
    if options.optimizer == "kfac":
        values["kfac.momentum_of"] = options.momentum_of
    return nested(values)
