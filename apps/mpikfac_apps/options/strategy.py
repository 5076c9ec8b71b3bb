"""Create the strategy, K-FAC's settings and the learning rate from options."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mpikfac
from mpikfac import (
    KINDS,
    NORMS,
    Coverage,
    Damping,
    LayerShape,
    LevenbergMarquardt,
    Strategy,
    default_rule,
    get_strategy,
    schedule,
)
from mpikfac.layers import Kinds
from mpikfac.plan import CHANNELS, Channels, Grafting, LayerCall, Plan, Sharding, forward_only
from mpikfac.preconditioners import Preconditioner, forms, named_preconditioner
from mpikfac.predict import Job, choose, choose_tensor_parallel_plan, load_machine, tuned
from mpikfac.settings import SETTLED, usual_intervals
from mpikfac_apps.options.by_epoch import at_start, by_step, numbers_of
from mpikfac_apps.options.choices import with_choices
from mpikfac_apps.options.fields import Group, flat
from mpikfac_apps.options.options import AUTO, KfacOptions, Options, StrategyOptions

Shapes = tuple[Sequence[LayerShape], Sequence[tuple[str, tuple[int, ...]]]]

ITEMSIZE = 4  # bytes per float32 value
OF_STRATEGY = ("preconditioner", "inv_update_steps")
"""Settings of `KFAC` that a strategy can set."""
TUNED = ("transport.fusion", "assignment.replicate_below")
"""The choices that are tuned to a machine, unless options set them."""


def preconditioner_of(settings: Mapping[str, Any]) -> Preconditioner:
    """Return the preconditioner among settings of `KFAC`, or the default."""
    return named_preconditioner(settings.get("preconditioner", "inverse"))


def lasting_inv_update_steps(settings: Mapping[str, Any], strategy: Strategy) -> int:
    """Return `inv_update_steps` at epoch 0 or, if it is not set, the default after 160 steps."""
    usual = usual_intervals(strategy.refresh.stagger).inv_update_steps(SETTLED)
    interval: int = at_start(settings.get("inv_update_steps", usual))
    return interval


def serving_ranks(options: Options) -> tuple[str, int]:
    """Return the key of an option, and the number of ranks that it exempts from training.

    These ranks keep the weights, or decompose factors, for the ranks that train.
    """
    distribution = options.distribution
    if not distribution.sync.waits_for_all:
        return "sync.servers", distribution.sync.server_ranks
    return "refresh.servers", distribution.refresh.servers if options.optimizer == "kfac" else 0


def no_servers(options: Options) -> str:
    """Describe, for an error message, the choice with which all ranks train and the current one."""
    distribution = options.distribution
    if not distribution.sync.waits_for_all:
        return f"sync=synchronous, not {distribution.sync.name}"
    return f"refresh=owners, not {distribution.refresh.name}"


def training_ranks(options: Options, ranks: int) -> int:
    """Return the number of a job's ranks that train a model together.

    Raises:
        ValueError: no rank would train, `shrink` is set although some ranks do not train, or the
            groups of ranks would differ in size.
    """
    name, spared = serving_ranks(options)
    groups = options.codistillation.groups
    if ranks % groups:
        raise ValueError(f"groups={groups} must divide the number of ranks ({ranks})")
    if groups > 1 and spared:
        raise ValueError(f"groups={groups} needs {no_servers(options)}")
    if spared >= ranks:
        raise ValueError(f"{name}={spared} must be less than the number of ranks ({ranks})")
    if spared and options.shrink:
        raise ValueError(f"shrink=true needs {no_servers(options)}")
    return ranks // groups - spared


def make_strategy(
    distribution: StrategyOptions, kfac: KfacOptions, ranks: int
) -> tuple[Strategy, dict[str, Any]]:
    """Return the strategy for the ranks that train, and the `KFAC` settings in `OF_STRATEGY`.

    A setting that neither the options nor the strategy chooses is left out.

    Raises:
        ValueError: choices cannot be combined, or are invalid for the number of ranks.
    """
    given = {key: getattr(kfac, key) for key in OF_STRATEGY}
    overrides = {key: value for key, value in given.items() if value is not None}
    if distribution.strategy == AUTO:
        own = distribution.own_choices()
        if distribution.machine is None or own:
            raise ValueError(
                f"strategy=auto needs a machine and no other choices; got "
                f"machine={distribution.machine} and the choices {', '.join(own) or 'none'}"
            )
        return distribution.chosen, overrides  # `for_machine` makes the choices
    _, settings = get_strategy(distribution.strategy)
    chosen, settings = distribution.chosen, {**settings, **overrides}
    chosen.check_ranks(ranks)
    interval, turns = settings.get("inv_update_steps", 0), chosen.refresh.stagger
    if any(number % turns for number in numbers_of(interval)):
        raise ValueError(
            f"inv_update_steps={interval} must be a multiple of refresh.stagger={turns}"
        )
    return chosen, settings


def of_gradients(options: Options) -> Grafting:
    """Return K-FAC's grafting, with gradient momentum if the options choose it."""
    grafting = options.kfac.grafting
    momentum = options.momentum if options.momentum_of_gradients else 0.0
    return grafting.with_momentum(momentum)


def job_of(options: Options, ranks: int, inv_update_steps: int) -> Job:
    """Return the description of the training job whose step times are predicted.

    Args:
        ranks: the number of ranks that train.
        inv_update_steps: steps between two refreshes, at the start.
    """
    return Job(
        options.model,
        options.step_batch // ranks,
        options.kfac.lasting_factor_update_steps,
        inv_update_steps,
        grafting=of_gradients(options),
    )


def for_machine(
    options: Options, shapes: Shapes, ranks: int, strategy: Strategy, settings: dict[str, Any]
) -> tuple[str, Strategy]:
    """Return the name of the strategy, and the strategy with the choices made for the machine.

    Choices that the options set are kept.

    Args:
        options: the model, the batch and the K-FAC options of a run.
        shapes: covered layers, and names and shapes of the uncovered tensors that are sent.
        ranks: the number of ranks that train.

    Raises:
        ValueError: the file describes no machine, or the machine was not measured with the network.
    """
    distribution = options.distribution
    if distribution.machine is None:
        return distribution.strategy, strategy
    machine = load_machine(distribution.machine)
    preconditioner = preconditioner_of(settings)
    job = job_of(options, ranks, lasting_inv_update_steps(settings, strategy))
    if distribution.strategy == AUTO:
        return choose(*shapes, ranks, machine, job, forms(preconditioner))
    chosen = tuned(strategy, *shapes, ranks, machine, job, forms(preconditioner))
    usual, now = flat(get_strategy(distribution.strategy)[0]), flat(strategy)
    explicit = {key: now[key] for key in TUNED if now[key] != usual[key]}
    return distribution.strategy, with_choices(chosen, explicit)


def dealt_out(split: Sequence[str]) -> dict[str, Channels]:
    """Return which channels of each split layer are divided among ranks, by layer name.

    Raises:
        ValueError: an entry is not NAME=outputs or NAME=inputs.
    """
    channels: dict[str, Channels] = {}
    for text in split:
        name, _, axis = text.rpartition("=")
        if not name or axis not in CHANNELS:
            raise ValueError(f"split_layers={text} must be NAME=outputs, NAME=inputs, or only auto")
        channels[name] = axis
    return channels


def tensor_parallel_plan(
    distribution: StrategyOptions, calls: Sequence[LayerCall], ranks: int
) -> mpikfac.TensorParallelPlan:
    """Return how the layers of a network are split over groups of ranks.

    Args:
        calls: the layers that can be split, with the sizes of a rank's batch.
        ranks: the number of ranks that train.

    Raises:
        ValueError: the file does not describe a machine.
    """
    if distribution.split == [AUTO]:
        machine = load_machine(distribution.machine) if distribution.machine else None
        return choose_tensor_parallel_plan(calls, ranks, machine, ITEMSIZE)
    return mpikfac.TensorParallelPlan(distribution.tp_size or ranks, dealt_out(distribution.split))


def make_plan(
    options: KfacOptions,
    layers: Sequence[LayerShape],
    others: Sequence[tuple[str, tuple[int, ...]]],
    ranks: int,
    strategy: Strategy,
    preconditioner: Preconditioner,
    sharding: Sharding | None = None,
) -> Plan:
    """Return the plan for a run in float32 on `ranks` ranks.

    Args:
        sharding: the parameters of which each rank holds a shard; None if there are none.

    Raises:
        ValueError: choices cannot be combined.
    """
    dtypes = options.estimator.factor_dtype, preconditioner.dtype
    averages, bases = (None if dtype is None else dtype.itemsize for dtype in dtypes)
    of_run = layers, ranks, strategy, others, preconditioner
    return mpikfac.make_plan(*of_run, ITEMSIZE, averages, bases, sharding)


def coverage(options: KfacOptions, covers: Kinds = KINDS) -> Coverage:
    """Return which layers K-FAC covers, and the rule that determines the form of their factors.

    Args:
        covers: the covering classes of the network, by type of module.
    """
    settings = options.coverage
    kinds = {**covers, **(NORMS if settings.norms else {})}
    fisher = options.estimator.fisher_type
    chosen = settings.kfac_approx, settings.largest, settings.rank
    if chosen == ("expand", None, None) and fisher != "forward-only":
        return Coverage(settings.skip, kinds)

    def rule(layer: LayerShape) -> LayerShape:
        layer = default_rule(layer)
        layer = dataclasses.replace(
            layer,
            kfac_approx=settings.kfac_approx,
            largest=settings.largest or layer.largest,
            rank=settings.rank,
        )
        return forward_only(layer) if fisher == "forward-only" else layer

    return Coverage(settings.skip, kinds, rule)


@contextmanager
def skippable(option: str = "kfac.skip") -> Iterator[None]:
    """In messages about modules to skip, name the program's option instead of `KFAC`'s argument.

    Raises:
        ValueError: the library rejects modules.
    """
    try:
        yield
    except mpikfac.layers.Refused as error:
        names = json.dumps(error.skip)  # quoted, because a name can look like a number
        raise ValueError(
            f"{error.without_remedy}; for first-order training, pass --{option} '{names}'"
        ) from error


def kfac_settings(
    options: KfacOptions,
    chosen: dict[str, Any],
    epochs: Callable[[int], float],
    covers: Kinds = KINDS,
) -> dict[str, Any]:
    """Return the arguments of `KFAC`.

    Args:
        chosen: the settings of the strategy; see `make_strategy`.
        epochs: returns the number of epochs before a step.
        covers: the covering classes of the network, by type of module.
    """
    damping, interval = options.damping, options.damping_adapt
    if interval is not None:
        kind = "relative" if damping.is_relative else "value"
        assert not callable(damping.number), "`check_conflicts` rejects schedules"
        damping = Damping(**{kind: LevenbergMarquardt(damping.number, interval)})

    def scheduled(value: Group) -> Group:
        """Return a setting in which schedules by epoch are replaced by schedules of steps."""
        numbers = {n: by_step(v, epochs) for n, v in vars(value).items()}
        return dataclasses.replace(value, **numbers)

    return {
        "damping": scheduled(damping),
        "factor_update_steps": by_step(options.factor_update_steps, epochs),
        "inv_update_steps": by_step(chosen.get("inv_update_steps"), epochs),
        "preconditioner": preconditioner_of(chosen),
        "grafting": scheduled(options.grafting),
        "clip": None if options.clip is None else scheduled(options.clip),
        "matmul_precision": options.matmul_precision,
        "cuda_graph": options.cuda_graph,
        "estimator": scheduled(options.estimator),
        "coverage": coverage(options, covers),
        "budget": options.budget,
    }


def learning_rate(options: Options, steps_per_epoch: int, ranks: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, for a run that began on `ranks` ranks."""
    scale = {"linear": float(ranks), "sqrt": math.sqrt(ranks)}.get(options.scale_lr or "", 1.0)
    peak = options.rate * scale
    rate = schedule.constant(peak)
    if options.schedule == "step":
        at = [epoch * steps_per_epoch for epoch in options.decay_epochs]
        rate = schedule.step_decay(peak, at, options.decay_factor)
    elif options.schedule == "linear":
        rate = schedule.linear(peak, 0.0, options.epochs * steps_per_epoch)
    elif options.schedule == "cosine":
        rate = schedule.cosine(peak, 0.0, options.epochs * steps_per_epoch)
    warm = round(options.warmup_epochs * steps_per_epoch)
    if warm:
        rate = schedule.warmup(rate, warm, 1 / scale if options.scale_lr else 1 / (warm + 1))
    return rate
