"""Evaluate the weights in a checkpoint, or in a separate file, on the test images of the run.

    mpikfac evaluate runs/a
    mpirun -n 4 mpikfac evaluate runs/a --weights runs/a/best.pt

This repeats the test of the training run, with the same images, metrics and averaged weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import mpikfac
from mpikfac_apps.cli import checkpoint_at
from mpikfac_apps.guard.ranks import run_on_ranks
from mpikfac_apps.guard.watchdog import Watchdog
from mpikfac_apps.inspecting import export, weights
from mpikfac_apps.options.conflicts import check_data
from mpikfac_apps.options.fields import flat
from mpikfac_apps.options.options import JOINTS, TRAIN, Options
from mpikfac_apps.place import share_cores
from mpikfac_apps.training import settings
from mpikfac_apps.training.parts.optimizers import AVERAGED, Average
from mpikfac_apps.training.parts.problem import Problem, first_model, words_of
from mpikfac_apps.training.testing.options import EVALUATE, EvaluateOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Print the test results on one line; return 0.

    Collective over: world.

    Raises:
        SystemExit: with code 2, after a one-line message about an error that the user can correct.
    """
    return run_on_ranks(lambda _: EVALUATE.read(argv), evaluate)


def evaluate(comm: mpikfac.comm.Comm, evaluation: EvaluateOptions, watchdog: Watchdog) -> int:
    """Print the line with the results on rank 0; return 0.

    Collective over: comm.
    """
    share_cores(comm, None)
    with mpikfac.comm.together(comm, "options"):
        device = mpikfac.device(comm, evaluation.device)
    line = tested(comm, evaluation, device, watchdog)
    if comm.rank == 0:
        print(line, flush=True)
    return 0


def tested(
    comm: mpikfac.comm.Comm,
    evaluation: EvaluateOptions,
    device: torch.device,
    watchdog: Watchdog,
) -> str:
    """Return a line with the test results; the option `watchdog_timeout` of the run applies.

    Collective over: comm.

    Raises:
        UserError: a file is missing or damaged, or contains the weights of another network.
    """
    located: tuple[Path, Options] | None = None
    with mpikfac.comm.together(comm, f"evaluate {evaluation.path}"):
        if comm.rank == 0:
            path = checkpoint_at(evaluation.path)
            located = path, options_of(path, evaluation, comm.size)
    path, options = comm.bcast(located)
    watchdog.follow(options.watchdog_timeout)
    checkpoint = mpikfac.load_checkpoint(comm, path)
    problem = Problem(comm, options, device)
    with mpikfac.comm.together(comm, "building the network"):
        model = first_model(options, problem.classes, problem.channels, device)
        problem.check(model)
    source = evaluation.weights or path
    with mpikfac.comm.together(comm, f"reading {source}", untrusted=True):
        file = evaluation.weights
        tensors = export.weights(checkpoint) if file is None else weights.read(file, model)
        if left := weights.load(model, tensors):
            raise ValueError(
                f"a test needs all tensors, but {', '.join(left)} are missing or have the wrong "
                f"shape; the data has {problem.classes} classes"
            )
        average = average_of(options, model, checkpoint) if file is None else None
    watchdog.enter("evaluation", checkpoint.step)
    results = problem.evaluate(problem.averaged_model(average) if average else model)
    problem.batches.close()
    return f"{source}: test loss {results['loss']:.4f}, {words_of(results, problem.task.measure)}"


def options_of(checkpoint: Path, evaluation: EvaluateOptions, ranks: int) -> Options:
    """Return the options of the run of a checkpoint, with a batch that is a multiple of `ranks`.

    Raises:
        ValueError: the checkpoint has no settings, or its run would execute a Python file and
            `evaluation.trust` is not set.
    """
    before = settings.of_checkpoint(checkpoint)
    if before is None:
        raise ValueError(
            f"{checkpoint} has no settings; pass a checkpoint inside its run directory"
        )
    kept = settings.kept_of(before.resolved, ["metrics", "strategy"])
    kept = {key: value for key, value in kept.items() if key.partition(".")[0] not in JOINTS}
    options = TRAIN.read([], kept)
    for key, value, file in settings.code_of(flat(options)):
        if not evaluation.trust:
            raise ValueError(f"{key}={value} would run {file}; if you trust the file, pass --trust")
    data = dataclasses.replace(options.data, cache=None)  # useless, as images are read once
    if evaluation.data_path is not None:
        data = dataclasses.replace(data, path=evaluation.data_path)
        check_data(data)
    batch = max(ranks, options.step_batch // ranks * ranks)
    return dataclasses.replace(options, batch=batch, data=data)


def average_of(
    options: Options, model: nn.Module, checkpoint: mpikfac.checkpoint.Checkpoint
) -> Average | None:
    """Return a checkpoint's averaged weights, or None if the run did not average them."""
    if not options.ema_decay or AVERAGED not in checkpoint:
        return None
    average = Average(model, options.ema_decay)
    average.load(checkpoint)
    return average
