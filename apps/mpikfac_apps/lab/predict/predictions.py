"""Predict the step times of named strategies for several numbers of ranks, without MPI."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mpikfac
from mpikfac.plan import BASIS_EVERY
from mpikfac.preconditioners import Inverse
from mpikfac_apps.lab.predict.options import SGD, PredictionOptions
from mpikfac_apps.options.choices import with_choices
from mpikfac_apps.options.options import Options, StrategyOptions
from mpikfac_apps.options.strategy import (
    Shapes,
    coverage,
    make_plan,
    make_strategy,
    of_gradients,
    preconditioner_of,
)
from mpikfac_apps.planning.budget import Calls, Foreseen, calls_of, foreseen
from mpikfac_apps.planning.facts import at_ranks
from mpikfac_apps.problems import models
from mpikfac_apps.text import number

BOUNDED = ("stale-inverse", "event-driven")  # strategies whose predictions are upper bounds
OVERLAP = "transport.overlap"
WIDTH = 96
Row = dict[str, Any]
Parameters = Sequence[tuple[str, tuple[int, ...]]]


def predictions(options: PredictionOptions, machine: mpikfac.predict.Machine) -> list[Row]:
    """Return, for each strategy and number of ranks, a prediction or the reason why there is none.

    Raises:
        ValueError: no strategy can be predicted.
    """
    network = network_of(options)
    rows = [
        predicted(options, network, name, ranks, machine)
        for ranks in dict.fromkeys(options.ranks)
        for name in dict.fromkeys(options.strategy)
    ]
    if all("left_out" in row for row in rows):
        raise ValueError(rows[0]["left_out"])
    return rows


def predicted(
    options: PredictionOptions,
    network: NetworkShapes,
    name: str,
    ranks: int,
    machine: mpikfac.predict.Machine,
) -> Row:
    """Return a row with a strategy's prediction, or with the reason why there is none.

    "sgd" is the baseline for all other strategies: it overlaps its messages if that is faster,
    unless the options set whether to overlap.
    """
    if name != "sgd" or OVERLAP in options.given:
        return predicted_as_given(options, network, name, ranks, machine)
    rows = [
        predicted_as_given(
            replace(options, given={**options.given, OVERLAP: overlap}),
            network,
            name,
            ranks,
            machine,
        )
        for overlap in (False, True)
    ]
    return min(rows, key=lambda row: math.inf if "left_out" in row else row["mean"]["seconds"])


def predicted_as_given(
    options: PredictionOptions,
    network: NetworkShapes,
    name: str,
    ranks: int,
    machine: mpikfac.predict.Machine,
) -> Row:
    """Return a row with a strategy's prediction for the given options, or why there is none."""
    row: Row = {"strategy": name, "ranks": ranks}
    try:
        run = foreseen_of(options, network, name, ranks, machine)
        job = job_of(options, run.factor_update_steps, run.inv_update_steps)
        found = mpikfac.predict.simulate(run.plan, machine, job).as_dict()
    except ValueError as error:
        return row | {"left_out": str(error)}
    intervals = {
        "factor_update_steps": run.factor_update_steps,
        "inv_update_steps": run.inv_update_steps,
    }
    return row | {"workers": run.plan.grid.workers} | intervals | found


def job_of(
    options: PredictionOptions, factor_update_steps: int, inv_update_steps: int
) -> mpikfac.predict.Job:
    """Return the training job to predict, with the given intervals."""
    return mpikfac.predict.Job(
        options.model,
        options.batch_per_rank,
        factor_update_steps,
        inv_update_steps,
        options.stragglers,
        of_gradients(Options(kfac=options.kfac)),
    )


@dataclass(frozen=True)
class NetworkShapes:
    """What predictions need to know about a network.

    Attributes:
        covered: the layer shapes for training with K-FAC.
        bare: the layer shapes for training without K-FAC.
        parameters: the block and the shape of every trained parameter, with K-FAC.
        bare_parameters: the block and the shape of every trained parameter, without K-FAC.
        calls: the calls of the covered layers in a pass over a rank's batch; empty if unknown.
    """

    covered: Shapes
    bare: Shapes
    parameters: Parameters
    bare_parameters: Parameters
    calls: Calls


def network_of(options: PredictionOptions) -> NetworkShapes:
    """Return the shapes of the network that the options name."""
    entry = models.network(options.model)
    covers = coverage(options.kfac, entry.covers)
    covered = models.shapes_of(options.model, options.classes, covers)
    bare = mpikfac.Coverage(skip=[layer.name for layer in covered[0]])
    model = models.skeleton(options.model, options.classes)
    return NetworkShapes(
        covered,
        models.shapes_of(options.model, options.classes, bare),
        mpikfac.layers.trained_shapes(model, covers),
        mpikfac.layers.trained_shapes(model, bare),
        calls_of(options.model, model, options.kfac, entry.image, options.batch_per_rank),
    )


def foreseen_of(
    options: PredictionOptions,
    network: NetworkShapes,
    name: str,
    ranks: int,
    machine: mpikfac.predict.Machine,
) -> Foreseen:
    """Return the plan and intervals of a named strategy, with messages chosen for the machine.

    Raises:
        ValueError: a choice does not exist in the strategy or cannot be combined with others, or
            the machine has no times for the network.
    """
    usual = options.inv_update_steps or BASIS_EVERY  # not the strategy's own interval
    kfac = replace(options.kfac, inv_update_steps=usual)
    first_order = name.startswith("sgd")
    shapes = network.bare if first_order else network.covered
    parameters = network.bare_parameters if first_order else network.parameters
    name = "mem-opt" if name == "sgd" else name.removeprefix(SGD)
    strategy, settings = make_strategy(chosen(options, name, ranks), kfac, ranks)
    preconditioner = preconditioner_of(settings)
    if options.preconditioner is not None and not preconditioner.form.vector:
        preconditioner = options.preconditioner
    if first_order:
        strategy, preconditioner = strategy.first_order(), Inverse()
    forms, job = (
        mpikfac.preconditioners.forms(preconditioner),
        job_of(options, kfac.lasting_factor_update_steps, usual),
    )
    strategy = mpikfac.predict.tuned(strategy, *shapes, ranks, machine, job, forms)
    sharding = options.sharding.of(parameters, ranks)
    plan = make_plan(kfac, *shapes, ranks, strategy, preconditioner, sharding)
    given = {"inv_update_steps": options.inv_update_steps}
    return foreseen(kfac, preconditioner, given, shapes, plan, network.calls, ranks)


def chosen(options: PredictionOptions, name: str, ranks: int) -> StrategyOptions:
    """Return a named strategy, after replacing its choices by those that the user has set.

    Raises:
        ValueError: the strategy lacks a choice that the user has set, or choices cannot be
            combined.
    """
    strategy, _ = mpikfac.get_strategy(name)
    if not any(key.startswith("assignment.") for key in options.change):
        strategy = at_ranks(strategy, ranks)
    return StrategyOptions(name, **vars(with_choices(strategy, options.change)))


def without_factors(options: PredictionOptions) -> bool:
    """Return whether the preconditioner has no factors, and therefore no intervals."""
    return options.preconditioner is not None and not options.preconditioner.form.blocks


def machine_in_words(machine: mpikfac.predict.Machine) -> list[str]:
    """Return lines with the machine's name and the names of its estimated values."""
    words = f"Estimated: {', '.join(machine.estimated)}" if machine.estimated else ""
    lines = textwrap.wrap(words, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return [f"Machine: {machine.name}; predicted, not measured", *lines]


def job_in_words(options: PredictionOptions) -> str:
    """Return the model, batch, preconditioner and intervals of the runs to predict."""
    words = f"{options.model}, {options.batch_per_rank} images per rank, "
    if options.sharding.fully_shard:
        words += "fully_shard without its own messages, "
    chosen = options.preconditioner
    words += f"preconditioner {chosen.form.name}" if chosen else "each strategy's preconditioner"
    if without_factors(options):
        return f"{words}, without factors"
    given = options.kfac.factor_update_steps, options.inv_update_steps
    if given == (None, None):
        return f"{words}, default intervals"
    return f"{words}, {in_words(options.kfac.lasting_factor_update_steps, given[1] or BASIS_EVERY)}"


def in_words(factor_update_steps: int, inv_update_steps: int) -> str:
    """Describe the intervals of a run's factors and bases."""
    return f"factors every {number(factor_update_steps, 'step')}, bases every {inv_update_steps}"


def intervals_in_words(rows: Sequence[Row]) -> list[str]:
    """Return a line for each pair of intervals that strategies with factors use."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if "left_out" not in row and not row["strategy"].startswith("sgd"):
            words = in_words(row["factor_update_steps"], row["inv_update_steps"])
            names.setdefault(words, []).append(row["strategy"])
    several = len(names) > 1
    return [
        words[0].upper() + words[1:] + (f": {', '.join(of)}" if several else "")
        for words, of in names.items()
    ]
