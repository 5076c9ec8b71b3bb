"""Predict the effects of a run's budget before its first batch, from passes on meta tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import mpikfac
from mpikfac.plan import CallSize, Plan
from mpikfac.preconditioners import Preconditioner
from mpikfac.settings import (
    SETTLED,
    Settings,
    budget_of,
    cost,
    evaluate,
)
from mpikfac_apps.options.by_epoch import at_start
from mpikfac_apps.options.options import KfacOptions
from mpikfac_apps.options.strategy import Shapes, coverage, make_plan
from mpikfac_apps.problems import models

Calls = Mapping[str, Sequence[CallSize]]
"""The sizes of each covered layer's calls in a pass, by layer name; empty if they are unknown."""


@dataclass(frozen=True)
class Foreseen:
    """The predicted plan, intervals and cost of a run after its first batch.

    Attributes:
        plan: the plan, with factors cut into blocks to meet the budget.
        factor_update_steps: the steps between updates of factors, once this number no longer grows.
        inv_update_steps: the steps between refreshes, once this number no longer grows.
        times: the number of operations in a step, divided by the number in its passes alone.
        line: a line about these operations, as a run logs it; "" if the calls are unknown.
    """

    plan: Plan
    factor_update_steps: int
    inv_update_steps: int
    times: float
    line: str


def calls_of(
    name: str, model: nn.Module, kfac: KfacOptions, image: tuple[int, ...] | None, examples: int
) -> Calls:
    """Return the sizes of the calls of a network's layers in a pass over `examples` images.

    The result is empty if the shape of an image is unknown, or if the network's code reads the
    values of tensors.

    Args:
        model: the network `name`, which is moved to the meta device and loses its weights.
        image: the shape of an image, or the number of tokens in a window.
    """
    entry = models.network(name)
    if image is None:
        return {}
    model = model.to("meta").train()
    layers, _ = mpikfac.layers.cover(model, coverage(kfac, entry.covers))
    dtype = torch.long if entry.task.inputs == "tokens" else torch.float32
    inputs = torch.empty((examples, *image), dtype=dtype, device="meta")
    try:
        return mpikfac.layers.call_sizes(model, layers, inputs)
    except Exception:  # the network's code can raise any exception
        return {}


def foreseen(
    kfac: KfacOptions,
    preconditioner: Preconditioner,
    settings: Mapping[str, Any],
    shapes: Shapes,
    plan: Plan,
    calls: Calls,
    passes: int,
) -> Foreseen:
    """Return the predicted plan, intervals and cost of a run after its first batch.

    Args:
        preconditioner: the plan's preconditioner.
        settings: the strategy's settings; see `make_strategy`.
        shapes: the shapes of the network's layers, with the factors that the options select.
        plan: the plan for these shapes.
        calls: the sizes of each layer's calls in a pass.
        passes: the number of passes in a step, across all ranks.
    """
    chosen = preconditioner.defaults.override(
        factor_update_steps=at_start(kfac.factor_update_steps),
        inv_update_steps=at_start(settings.get("inv_update_steps")),
    )
    by_hand = chosen.factor_update_steps, chosen.inv_update_steps
    budget = budget_of(
        kfac.budget, by_hand, preconditioner.form, coverage(kfac).rule, plan.strategy
    )
    intervals = chosen.intervals(budget, plan.strategy.refresh.stagger)
    begin = Settings(kfac.damping, *intervals, 0.0).begin(0)
    of_rank = plan.of(0)
    if calls:
        budget.seen = {
            layer.name: kfac.estimator.subsampled(layer, of_rank.pooled).seen(
                passes * list(calls[layer.name]), begin
            )
            for layer in of_rank.layers
        }
    if calls and any(budget.cut(layer) != layer for layer in plan.layers):
        layers, others = shapes
        cut = list(map(budget.cut, layers))
        choices = plan.ranks, plan.strategy, preconditioner, plan.sharding
        plan = make_plan(kfac, cut, others, *choices)
    budget.count(plan.of(0).layers, kfac.grafting.orthogonalize)
    factor_update_steps, inv_update_steps = (
        int(evaluate(interval, SETTLED)) for interval in intervals
    )
    of_layers = {layer.name: layer for layer in plan.layers}
    times, line = cost(budget.operations, of_layers, *intervals)
    return Foreseen(plan, factor_update_steps, inv_update_steps, times, line)
