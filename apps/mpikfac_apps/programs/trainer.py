"""The trainer of a small program: K-FAC, or averaged gradients with a first-order optimizer."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

import mpikfac
from mpikfac_apps.options.strategy import skippable
from mpikfac_apps.programs.options import ProgramLearning

Trainer = mpikfac.KFAC | mpikfac.FirstOrderTrainer


def trainer_of(
    comm: mpikfac.comm.Comm,
    model: nn.Module,
    options: ProgramLearning,
    coverage: mpikfac.Coverage | None = None,
    estimator: mpikfac.Estimator | None = None,
    trace: mpikfac.Trace | None = None,
) -> Trainer:
    """Return the trainer of a network, with or without K-FAC.

    Collective over: comm.

    Args:
        coverage: which layers K-FAC covers; the K-FAC options `skip` and `largest` also apply. None
            for all layers.
        estimator: how K-FAC estimates factors; None for the default.
        trace: times the stages of a step; None for a new trace.

    Raises:
        UserError: a K-FAC setting is not supported, or values that must be equal on all ranks
            differ.
    """
    optimizer = optimizer_of(model, options)
    if options.optimizer != "kfac":
        return mpikfac.FirstOrderTrainer(model, optimizer, comm, trace=trace)
    kfac, coverage = options.kfac, coverage or mpikfac.Coverage()
    factors_of = coverage.rule

    def rule(layer: mpikfac.LayerShape) -> mpikfac.LayerShape:
        return dataclasses.replace(factors_of(layer), largest=kfac.largest)

    with mpikfac.comm.together(comm, "options"):
        strategy = mpikfac.Strategy(kfac.assignment)
        strategy.check_ranks(comm.size)
        coverage = dataclasses.replace(coverage, skip=[*coverage.skip, *kfac.skip], rule=rule)
        with skippable():
            mpikfac.layers.cover(model, coverage)
    return mpikfac.KFAC(
        *(model, optimizer, comm, strategy),
        damping=mpikfac.Damping(relative=kfac.damping),
        factor_update_steps=kfac.factor_update_steps,
        inv_update_steps=kfac.inv_update_steps,
        estimator=estimator,
        coverage=coverage,
        trace=trace,
    )


def optimizer_of(model: nn.Module, options: ProgramLearning) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters; K-FAC uses SGD to apply its directions."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    beta, decay = options.momentum, options.weight_decay
    if options.optimizer == "adamw":
        return torch.optim.AdamW(trained, options.rate, (beta, 0.999), weight_decay=decay)
    return torch.optim.SGD(trained, options.rate, beta, weight_decay=decay)
