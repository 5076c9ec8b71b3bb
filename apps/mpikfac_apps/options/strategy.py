"""The strategy, the settings of K-FAC and the learning rate that follow from options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpikfac import (
    KINDS,
    NORMS,
    Clip,
    Coverage,
    Damping,
    Estimator,
    LayerShape,
    LevenbergMarquardt,
    Strategy,
    named,
    schedule,
    usual_rule,
)
from mpikfac.layers import covered_shapes
from mpikfac.plan import NAMED, forward_only
from mpikfac.predict import Job, choose, load_machine, tuned
from mpikfac.solvers import forms, named_solver
from mpikfac_apps.options.options import KfacOptions, Options

CHOICES = (  # of a strategy
    *("reduction", "update", "balance", "colocate", "replicate_below", "reduce_at", "packing"),
    *("stagger", "delay", "tolerance", "sums", "ranks_per_node", "curvature_ranks"),
    *("overlap", "factor_wire", "basis_wire", "gradient_wire", "top_share"),
)
USUAL = {"solver": "inverse", "basis_every": 10}  # settings of `KFAC` that a strategy may change


def curvature_ranks(options: Options) -> int:
    """How many of the job's ranks do not train but decompose for the others."""
    chosen, way = options.kfac.curvature_ranks, NAMED.get(options.kfac.strategy)
    if options.optimizer != "kfac" or way is None:
        return 0
    return way.choices.get("curvature_ranks", 0) if chosen is None else chosen


def training_ranks(options: Options, ranks: int) -> int:
    """How many of a job's ranks train.

    Raises:
        ValueError: none is left, or the job is to go on without some.
    """
    spared = curvature_ranks(options)
    if spared >= ranks:
        raise ValueError(
            f"kfac: curvature_ranks={spared} must be less than the number of ranks ({ranks})"
        )
    if spared and options.shrink:
        raise ValueError(f"shrink=true needs kfac.curvature_ranks=0, not {spared}")
    return ranks - spared


def make_strategy(
    options: KfacOptions, ranks: int, parts: int | None = None
) -> tuple[Strategy, dict[str, Any]]:
    """How K-FAC is distributed over the ranks that train, and settings that a strategy may change.

    Raises:
        ValueError: choices that do not fit together or the number of ranks.
    """
    given = {key: getattr(options, key) for key in USUAL if getattr(options, key) is not None}
    choices = {key: getattr(options, key) for key in CHOICES if getattr(options, key) is not None}
    if options.fusion is not None:
        choices["fusion"] = tuple(options.fusion) if len(options.fusion) != 1 else options.fusion[0]
    if parts is not None:
        choices["parts"] = parts
    if options.strategy == "hybrid":
        choices["workers"] = _workers(options, ranks)
    else:
        for key in ("workers", "fraction"):
            if getattr(options, key) is not None:
                raise ValueError(
                    f"{key}={getattr(options, key)} needs strategy=hybrid, not {options.strategy}"
                )
    if options.strategy == "auto":
        if options.machine is None or choices:
            raise ValueError(
                f"strategy=auto needs machine, and none of its own choices; machine is "
                f"{options.machine}, choices are {', '.join(choices) or 'none'}"
            )
        choices["workers"] = ranks  # until the model is known: see `for_machine`
        return Strategy().changed(**choices), {**USUAL, **given}
    chosen, settings = named(options.strategy, ranks, **choices)
    settings = {**USUAL, **settings, **given}
    if settings["basis_every"] % chosen.refresh.stagger:
        raise ValueError(
            f"basis_every={settings['basis_every']} must be a multiple of "
            f"stagger={chosen.refresh.stagger}"
        )
    wire = chosen.transport.wires.gradient_wire
    if options.top_share is not None and wire != "top-k":
        raise ValueError(f"top_share={options.top_share} needs gradient_wire=top-k, not {wire}")
    return chosen, settings


def for_machine(
    options: Options, model: nn.Module, ranks: int, strategy: Strategy, settings: dict[str, Any]
) -> tuple[str, Strategy]:
    """The strategy as the machine would have it where nothing else is asked, and its name.

    Raises:
        ValueError: the file is no machine, or the machine was not measured with this network.
    """
    if options.kfac.machine is None:
        return options.kfac.strategy, strategy
    machine = load_machine(options.kfac.machine)
    every, solver = (options.kfac.factor_every, settings["basis_every"]), settings["solver"]
    job = Job(options.model, (options.batch or ranks) // ranks, *every)
    layers, others = covered_shapes(model, coverage(options.kfac))
    if options.kfac.strategy == "auto":
        return choose(layers, others, ranks, machine, job, forms(solver))
    chosen = tuned(strategy, layers, others, ranks, machine, job, forms(solver))
    asked = {
        key: strategy.choices()[key]
        for key in ("fusion", "replicate_below")
        if getattr(options.kfac, key) is not None
    }
    return options.kfac.strategy, chosen.changed(**asked)


def coverage(options: KfacOptions) -> Coverage:
    """The layers that K-FAC covers, and in what form."""

    def rule(layer: LayerShape) -> LayerShape:
        chosen = {key: getattr(options, key) for key in ("sharing", "largest", "rank")}
        layer = dataclasses.replace(usual_rule(layer), **chosen)
        return forward_only(layer) if options.fisher == "forward-only" else layer

    return Coverage(options.skip, {**KINDS, **(NORMS if options.norms else {})}, rule)


def kfac_settings(options: KfacOptions, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `KFAC`; `chosen` holds the settings that a strategy may change."""
    every = options.damping_adapt
    damping = LevenbergMarquardt(options.damping, every) if every else options.damping
    return {
        "damping": Damping(damping, options.relative_damping),
        "factor_every": options.factor_every,
        "clip": Clip(options.kl_clip, options.norm_clip, options.graft),
        "estimator": Estimator(
            options.decay,
            options.start,
            options.normalization,
            options.fisher,
            options.samples,
            options.subsample,
            _dtype(options.statistics_dtype),
            _dtype(options.factor_dtype),
        ),
        "coverage": coverage(options),
        "basis_every": chosen["basis_every"],
        "solver": named_solver(chosen["solver"], _dtype(options.basis_dtype)),
    }


def _dtype(name: str | None) -> torch.dtype | None:
    return torch.bfloat16 if name else None


def _workers(options: KfacOptions, ranks: int) -> int:
    return Strategy.hybrid(ranks, options.workers, options.fraction).workers


def learning_rate(options: Options, steps_per_epoch: int, ranks: int) -> Callable[[int], float]:
    """The learning rate as a function of the step, for a run that began on `ranks` ranks."""
    peak = options.lr * (ranks if options.scale_lr else 1)
    rate = schedule.constant(peak)
    if options.schedule == "step":
        at = [epoch * steps_per_epoch for epoch in options.decay_epochs]
        rate = schedule.step_decay(peak, at, options.decay_factor)
    elif options.schedule == "linear":
        rate = schedule.linear(peak, 0.0, options.epochs * steps_per_epoch)
    warm = round(options.warmup_epochs * steps_per_epoch)
    if warm:
        rate = schedule.warmup(rate, warm, 1 / ranks if options.scale_lr else 1 / (warm + 1))
    return rate
