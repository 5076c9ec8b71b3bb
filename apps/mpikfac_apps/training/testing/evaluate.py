"""Test the network of a checkpoint, or of a file of weights, on the test images of its run.

    mpikfac evaluate runs/a
    mpirun -n 4 python -m mpi4py -m mpikfac_apps evaluate runs/a --weights runs/a/best.pt

The test is the test of the training program: the same images, numbers and averages of weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

import mpikfac
from mpikfac_apps.cli import checkpoint_at, run_on_ranks
from mpikfac_apps.inspecting import export, weights
from mpikfac_apps.options.command_line import read
from mpikfac_apps.options.conflicts import check_data
from mpikfac_apps.options.fields import positional
from mpikfac_apps.options.options import Options
from mpikfac_apps.place import share_cores
from mpikfac_apps.training.parts.optimizers import AVERAGED, Average
from mpikfac_apps.training.parts.problem import Problem, first_model, words_of

PROGRAM = "mpikfac evaluate"


@dataclass(frozen=True)
class EvaluateOptions:
    """Test the network of a checkpoint on the test images of its run, on one or more ranks.

    Args:
        path: the directory of a run, or of a checkpoint inside the directory of a run; of a run,
            the newest checkpoint is taken.
        weights: a file of weights to test in the place of the checkpoint's weights, such as
            RUN_DIR/best.pt; null for the checkpoint's weights, or the averages of a run with
            `average`.
        data_path: the directory of the data set; null for the directory of the run.
        device: the device of each rank; "auto" takes a GPU if a GPU exists.
    """

    path: Path = positional()
    weights: Path | None = None
    data_path: str | None = None
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line with the results; return 0.

    Collective over: world.

    Raises:
        SystemExit: code 2 after a single line about a mistake that the user can correct.
    """
    return run_on_ranks(lambda _: read(PROGRAM, EvaluateOptions, argv), evaluate)


def evaluate(comm: mpikfac.comm.Comm, evaluation: EvaluateOptions) -> int:
    """Print the line with the results on rank 0; return 0.

    Collective over: comm.
    """
    share_cores(comm, None)
    with mpikfac.comm.together(comm, "options"):
        device = mpikfac.device(comm, evaluation.device)
    line = tested(comm, evaluation, device)
    if comm.rank == 0:
        print(line, flush=True)
    return 0


def tested(comm: mpikfac.comm.Comm, evaluation: EvaluateOptions, device: torch.device) -> str:
    """Return a line with the results of the test.

    Collective over: comm.

    Raises:
        UserError: a file is missing or damaged, or belongs to another network.
    """
    located: tuple[Path, Options] | None = None
    with mpikfac.comm.together(comm, f"evaluate {evaluation.path}"):
        if comm.rank == 0:
            path = checkpoint_at(evaluation.path)
            located = path, options_of(path, evaluation.data_path, comm.size)
    path, options = comm.bcast(located)
    checkpoint = mpikfac.load_checkpoint(comm, path)
    problem = Problem(comm, options, device)
    with mpikfac.comm.together(comm, "building the network"):
        model = first_model(options, problem.classes, problem.channels, device)
        problem.check(model)
    source = evaluation.weights or path
    with mpikfac.comm.together(comm, f"reading {source}", untrusted=True):
        file = evaluation.weights
        tensors = export.weights(checkpoint) if file is None else weights.read(file)
        if left := weights.load(model, tensors):
            raise ValueError(
                f"a test needs all tensors, and {', '.join(left)} differ; the data has "
                f"{problem.classes} classes"
            )
        average = average_of(options, model, checkpoint) if file is None else None
    results = problem.evaluate(problem.averaged_model(average) if average else model)
    problem.batches.close()
    return f"{source}: test loss {results['loss']:.4f}, {words_of(results, problem.task.measure)}"


def options_of(checkpoint: Path, data_path: str | None, ranks: int) -> Options:
    """Return the options of the run of a checkpoint, with a batch for the number of ranks.

    Raises:
        ValueError: the checkpoint is in no directory of a run.
    """
    config = checkpoint.resolve().parent.parent / "config.yaml"
    options = read("mpikfac train", Options, [f"--config={config}"], files=True)
    data = dataclasses.replace(options.data, cache=None)  # a test reads each image once
    if data_path is not None:
        data = dataclasses.replace(data, path=data_path)
        check_data(data)
    batch = max(ranks, options.step_batch // ranks * ranks)
    return dataclasses.replace(options, batch=batch, data=data)


def average_of(
    options: Options, model: nn.Module, checkpoint: mpikfac.checkpoint.Checkpoint
) -> Average | None:
    """Return the averages of weights of a checkpoint; None if the run tested no averages."""
    if not options.average or AVERAGED not in checkpoint:
        return None
    average = Average(model, options.average)
    average.load(checkpoint)
    return average
