"""Create the network and the trainer of a run from its options."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import nn

import mpikfac
from mpikfac.plan import tensor_parallel_table
from mpikfac_apps.inspecting import weights
from mpikfac_apps.options.choices import differences
from mpikfac_apps.options.conflicts import check_momenta
from mpikfac_apps.options.options import Options
from mpikfac_apps.options.strategy import (
    coverage,
    for_machine,
    kfac_settings,
    make_strategy,
    skippable,
    tensor_parallel_plan,
)
from mpikfac_apps.problems import airbench
from mpikfac_apps.running.votes import AnyTrainer
from mpikfac_apps.training.parts.optimizers import Frozen
from mpikfac_apps.training.parts.problem import Problem, build
from mpikfac_apps.training.parts.trainings import (
    ClientTraining,
    GroupTraining,
    KfacTraining,
    QuadraticTraining,
    Training,
)

log = logging.getLogger("mpikfac.train")


def make_model(problem: Problem, starts: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the network with its initial weights, and the optimizer.

    Collective over: problem.comm.

    Args:
        starts: whether the run starts at step 0; otherwise, weights come from a checkpoint. At step
            0, they come from the file that the option `weights` names, if any.
    """
    comm, options = problem.comm, problem.options
    with mpikfac.comm.together(comm, "building the network"):
        model, optimizer = build(options, problem.classes, problem.channels, problem.device)
        problem.check(model)
    if isinstance(model, airbench.Airbench):
        model.whiten(problem.normalise(problem.batches.first(airbench.SEEN)))
    if options.weights is not None and starts:
        load_weights(comm, model, Path(options.weights))
    elif options.weights is not None:
        log.info("weights=%s is ignored: the run continues from a checkpoint", options.weights)
    return model, optimizer


def load_weights(comm: mpikfac.comm.Comm, model: nn.Module, file: Path) -> None:
    """Load weights on rank 0; the trainer broadcasts them.

    Collective over: comm.
    """
    with mpikfac.comm.together(comm, f"weights={file}"):
        if comm.rank == 0:
            left = ", ".join(weights.load(model, weights.read(file, model))) or "none"
            log.info(
                "loaded weights from %s; tensors that keep their initial values: %s", file, left
            )


def frozen_layers(model: nn.Module, options: Options) -> Frozen | None:
    """Return the layers that are frozen in the first epochs, or None if there are none."""
    if not options.frozen_epochs:
        return None
    frozen = Frozen(model, options.frozen_epochs)
    log.info("only %s is trained in the first %d epochs", frozen.last, options.frozen_epochs)
    return frozen


def split_layers(
    problem: Problem, model: nn.Module, trace: mpikfac.Trace
) -> mpikfac.lab.SplitLayers | None:
    """Split layers across groups of ranks, if the options request it.

    Collective over: problem.comm.
    """
    comm, choices = problem.comm, problem.options.distribution
    if not choices.split:
        return None
    with mpikfac.comm.together(comm, "split_layers"):
        image = problem.normalise(problem.batches.first(1))
        share = problem.options.step_batch // comm.size
        calls = mpikfac.lab.layer_calls(model, image.expand(share, *image.shape[1:]))
        distribution = tensor_parallel_plan(choices, calls, comm.size)
        log.info("%s", tensor_parallel_table(calls, distribution, comm.size))
        return mpikfac.lab.split_layers(model, comm, distribution, trace)


def give_feedback(problem: Problem, trainer: AnyTrainer) -> None:
    """Set up direct feedback for the blocks that the options name.

    Collective over: problem.comm.
    """
    ends, seed = problem.options.direct_feedback, problem.options.seed
    if ends:
        with mpikfac.comm.together(problem.comm, f"direct_feedback={ends}"):
            mpikfac.lab.DirectFeedback(trainer, ends, seed)
        log.info("blocks with direct feedback end at %s", ", ".join(ends))


def in_words(options: Options, preconditioner: mpikfac.preconditioners.Preconditioner) -> str:
    """Describe the main hyperparameters of a run with K-FAC or another preconditioner."""
    damping = options.kfac.damping
    relative = "relative " if damping.is_relative else ""
    words = (
        f"learning rate {options.rate:g}, momentum {options.momentum:g} of {options.momentum_of}, "
        f"weight decay {options.weight_decay:g}, grafting {options.kfac.grafting.name}"
    )
    return words + (f", {relative}damping {damping.number}" if preconditioner.form.blocks else "")


def make_training(
    problem: Problem,
    team: mpikfac.comm.SplitComm,
    world: mpikfac.comm.Comm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trace: mpikfac.Trace,
) -> Training:
    """Return the training of a run, with a new trainer; a checkpoint can be loaded later.

    Collective over: the team, and all groups.

    Args:
        team: the ranks that train one network together.
        world: the ranks of all groups.
    """
    training = training_of_group(problem, team, model, optimizer, trace)
    chosen = problem.options.codistillation
    if chosen.groups == 1:
        return training
    burn_in = problem.calendar.at(0).steps if chosen.burn_in is None else chosen.burn_in
    steps = problem.calendar.first(problem.options.epochs)
    if burn_in >= steps and world.rank == 0:
        log.warning(
            "burn_in=%d: groups learn nothing from each other in the %d steps of the run; use a "
            "smaller value",
            *(burn_in, steps),
        )
    codistillation = mpikfac.lab.Codistillation(
        model,
        world,
        burn_in=burn_in,
        groups=chosen.groups,
        every=chosen.swap_every,
        weight=chosen.distill_weight,
        trace=trace,
    )
    return GroupTraining(training, codistillation, world)


def training_of_group(
    problem: Problem,
    team: mpikfac.comm.SplitComm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trace: mpikfac.Trace,
) -> Training:
    """Return the training for the ranks that train one model together.

    Collective over: the team.
    """
    comm, options = problem.comm, problem.options
    with mpikfac.comm.together(comm, "options"):
        kfac = options.kfac
        strategy, chosen = make_strategy(options.distribution, kfac, comm.size)
        if not strategy.sync.waits_for_all:
            assert team.intercomm, "this rank's job has a server"
            mpikfac.comm.announce(team.intercomm, (problem.classes, problem.channels))
            clients = mpikfac.lab.AsyncSGD(model, optimizer, team, strategy)
            return ClientTraining(problem, clients)
        if options.optimizer != "kfac":
            averaging = mpikfac.FirstOrderTrainer(model, optimizer, comm, strategy, trace)
            return Training(problem, averaging)
        covers = problem.network.covers
        with skippable():
            shapes = mpikfac.layers.covered_shapes(model, coverage(kfac, covers))
        name, strategy = for_machine(options, shapes, comm.size, strategy, chosen)
        check_momenta(options, strategy)
        log.info("strategy %s: %s", name, differences(strategy))
        settings = kfac_settings(kfac, chosen, problem.calendar.epochs, covers)
        log.info(
            "preconditioner %s with %s",
            settings["preconditioner"].form.name,
            in_words(options, settings["preconditioner"]),
        )
        preconditioning = mpikfac.KFAC(model, optimizer, team, strategy, trace=trace, **settings)
        kind = QuadraticTraining if options.quadratic else KfacTraining
        return kind(problem, preconditioning)
