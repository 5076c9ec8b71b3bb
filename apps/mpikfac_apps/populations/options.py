"""The options of a population, and the training options that it does not support."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpikfac_apps.options.by_epoch import ByEpoch
from mpikfac_apps.options.command_line import CommandLine
from mpikfac_apps.options.fields import bounded, inline
from mpikfac_apps.options.options import BASIC, PRESETS, Options, usual_values
from mpikfac_apps.options.parse import checked
from mpikfac_apps.options.strategy import make_strategy, no_servers, serving_ranks
from mpikfac_apps.problems.datasets import source

OF_ONE_NETWORK = (
    *("accumulate", "eval_every", "eval_steps", "keep_best", "patience", "ema_decay"),
    *("frozen_epochs", "shrink", "trace_steps", "mixup", "cutmix", "damping_adapt", "scale_lr"),
    *("split_layers", "tp_size", "groups", "burn_in", "swap_every", "distill_weight"),
)
"""Fields of the training options that a population does not support."""


@dataclass(frozen=True)
class Search:
    """A population that searches for the learning rate and the damping [populations].

    Args:
        members: the number of networks. Each rank trains several members, or each group of ranks
            trains one.
        every: the number of steps from one selection to the next.
        numbers: the hyperparameters that the search changes, "lr" or "damping"; null for both, or
            only lr without K-FAC.
        worst: the fraction of the members that a selection replaces; parents are drawn from the
            same fraction of the best members.
        spread: the maximum factor by which the options are multiplied or divided at random to
            give a member's initial hyperparameters. The first member uses the options unchanged.
        explore: the factor by which each hyperparameter of a replaced member is multiplied or
            divided.
        held_out: the number of training images, taken from the end, that are used to rank the
            members and not to train them.
        crossover: whether a replaced member gets each layer from one of two parents, at random.
        mutation: the standard deviation of the Gaussian noise that is added to the weights of a
            replaced member, relative to the root mean square of a tensor.
        near: members whose weights are closer to each other than this distance form a cluster, of
            which only the best member is kept. The distance is the norm of the difference, relative
            to the mean of both norms. null for no clusters.
    """

    members: int = bounded(4, ">= 2")
    every: int = bounded(20, ">= 1")
    numbers: list[str] | None = None
    worst: float = bounded(0.25, "> 0", "<= 0.5")
    spread: float = bounded(3.0, ">= 1")
    explore: float = bounded(1.2, ">= 1")
    held_out: int = bounded(256, ">= 1")
    crossover: bool = False
    mutation: float = bounded(0.0, ">= 0")
    near: float | None = bounded(None, "> 0")


@dataclass(frozen=True)
class PopulationOptions:
    """Train a population of networks that searches for the learning rate and the damping.

    Args:
        train: the options of the training of each member.
        population: the options of the search.
    """

    population: Search = field(default_factory=Search)
    train: Options = inline(Options, without=OF_ONE_NETWORK)


def usual(_: type, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the defaults of the chosen preconditioner for options that the user does not set."""
    return usual_values(Options, given)


POPULATION = CommandLine(
    "mpikfac train-population",
    PopulationOptions,
    [*BASIC, *(f"population.{entry.name}" for entry in dataclasses.fields(Search))],
    files=True,
    usual=usual,
    presets=PRESETS,
)


def parse(argv: Sequence[str] | None, ranks: int) -> PopulationOptions:
    """Return the checked options of a command line, for a job of `ranks` ranks.

    Raises:
        ValueError: an option is invalid; the message is one line with the key, the value and the
            allowed values.
        SystemExit: code 0, after --help, --help_all or --print_config.
    """
    options = POPULATION.read(argv)
    check(options, ranks)
    train = checked(options.train, ranks_of_a_member(options, ranks))
    return dataclasses.replace(options, train=train)


def ranks_of_a_member(options: PopulationOptions, ranks: int) -> int:
    """Return the number of ranks that train each member together."""
    return max(1, ranks // options.population.members)


def check(options: PopulationOptions, ranks: int) -> None:
    """Check for options that a population does not support.

    Raises:
        ValueError: an option is not supported; the one-line message names the option and a valid
            value.
    """
    members, names, train = options.population.members, options.population.numbers, options.train
    known = ("lr", "damping") if train.optimizer == "kfac" else ("lr",)
    if ranks > members and ranks % members:
        raise ValueError(
            f"population.members={members} must divide the number of ranks ({ranks}), or be at "
            f"least this number"
        )
    strategy, _ = make_strategy(train.distribution, train.kfac, ranks)
    sync, number = strategy.sync, train.kfac.damping.number
    for wrong, need in (
        (serving_ranks(train)[1], no_servers(train)),
        (sync.local_steps or not sync.waits_for_all, f"sync=synchronous, not {sync.name}"),
        (isinstance(number, ByEpoch), f"a single damping, not {number}"),
        (
            not {*(names or ())} <= {*known},
            f"population.numbers of {', '.join(known)}, not {names}",
        ),
        (train.quadratic, "a kfac.grafting other than quadratic-model"),
        (train.model == "airbench94", "a model other than airbench94"),
        (source(train.data.name).files, f"images in memory, not data.name={train.data.name}"),
    ):
        if wrong:
            raise ValueError(f"a population needs {need}")
