"""A finished run with its images and its network, for programs that use its curvature."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from torch import Tensor, nn

import mpikfac
from mpikfac_apps.cli import checkpoint_at
from mpikfac_apps.guard.watchdog import Watchdog
from mpikfac_apps.options.options import Options
from mpikfac_apps.problems import models
from mpikfac_apps.training.batches import Batches
from mpikfac_apps.training.parts.problem import Problem, first_model
from mpikfac_apps.training.restart import CHECKSUMS
from mpikfac_apps.training.settings import saved_run
from mpikfac_apps.training.testing.evaluate import options_of
from mpikfac_apps.training.testing.options import EvaluateOptions

LINES = 20  # batches between two lines of progress
Batch = TypeVar("Batch")


class OfRun(Protocol):
    """The options of a program that reads a finished run; see `LaplaceOptions`."""

    @property
    def path(self) -> Path:
        """The directory of a run or of a checkpoint."""

    @property
    def trust(self) -> bool:
        """Whether Python files named in the run's options may be executed."""

    @property
    def data_path(self) -> str | None:
        """The directory of the data set; None for the one that the run used."""

    @property
    def device(self) -> Literal["auto", "cpu", "cuda", "xpu"]:
        """The device of each rank."""


@dataclass(frozen=True)
class Finished:
    """A checkpoint of a run, and the objects that are created from the run's options.

    Attributes:
        path: the directory of the checkpoint.
        options: the options of the run.
        model: the network, with its initial weights.
    """

    path: Path
    checkpoint: mpikfac.checkpoint.Checkpoint
    options: Options
    problem: Problem
    model: nn.Module

    @classmethod
    def of(
        cls,
        comm: mpikfac.comm.Comm,
        program: str,
        options: OfRun,
        watchdog: Watchdog,
        written: Iterable[Path | None],
        factors: bool = True,
    ) -> Finished:
        """Return the run at `options.path`, after checking that output files can be written.

        Collective over: comm.

        Args:
            program: the name of the program, for messages.
            written: the program's output files; None for an output that was not requested.
            factors: whether the program needs the Kronecker factors that the run estimated.

        Raises:
            UserError: there is no suitable checkpoint (see `locate`), an output file cannot be
                written, or the images differ from those that the run used, or are stored in files.
        """
        located: tuple[Path, Options] | None = None
        with mpikfac.comm.together(comm, f"{program} {options.path}"):
            device = mpikfac.device(comm, options.device)
            if comm.rank == 0:
                located = locate(options, comm.size, factors)
                for file in filter(None, written):
                    check_folder(file.parent)
        path, run = comm.bcast(located)
        watchdog.follow(run.watchdog_timeout)
        checkpoint = mpikfac.load_checkpoint(comm, path)
        with mpikfac.comm.together(comm, f"reading {path}"):
            saved = saved_run(checkpoint)
        images = {key: saved[key] for key in CHECKSUMS if key in saved}
        problem = Problem(comm, dataclasses.replace(run, autocast=None), device, images)
        with mpikfac.comm.together(comm, f"{program} {path}"):
            check_in_memory(problem)
        with mpikfac.comm.together(comm, "building the network"):
            model = first_model(run, problem.classes, problem.channels, device)
        return cls(path, checkpoint, run, problem, model)


def locate(options: OfRun, ranks: int, factors: bool) -> tuple[Path, Options]:
    """Return the path of the checkpoint at `options.path`, and the options of its run.

    Raises:
        ValueError: there is no checkpoint, the run's network learns several labels per example,
            or `factors` is set but the run has no factors that estimate a Fisher matrix.
    """
    path = checkpoint_at(options.path)
    of_test = EvaluateOptions(path, trust=options.trust, data_path=options.data_path)
    run = options_of(path, of_test, ranks)
    if factors and run.optimizer != "kfac":
        raise ValueError(
            f"{path} belongs to a run with optimizer={run.optimizer}; use one with optimizer=kfac"
        )
    if (task := models.network(run.model).task).dimensions:
        raise ValueError(
            f"{path} belongs to a run with model={run.model}, which learns {task.learns}; use a "
            f"run of a network with one label per image"
        )
    estimator = run.kfac.estimator
    wrong = estimator.fisher_type == "forward-only" or estimator.normalization != "expand"
    if factors and wrong:
        raise ValueError(
            f"{path} belongs to a run with fisher_type={estimator.fisher_type} and "
            f"normalization={estimator.normalization}, whose factors do not estimate a Fisher "
            f"matrix; train with another fisher_type and normalization=expand"
        )
    return path, run


def check_folder(folder: Path) -> None:
    """Create a folder if it is missing, and check that files can be written into it.

    Raises:
        OSError: the folder cannot be created, or files cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def check_in_memory(problem: Problem) -> None:
    """Check that the run's images are stored in memory.

    Raises:
        ValueError: the images are read from files.
    """
    if not isinstance(problem.batches, Batches):
        raise ValueError("the images of the run are in files; the program needs images in memory")


def examples(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return all training images, without augmentation, and their labels."""
    assert isinstance(problem.batches, Batches)
    return problem.batches.images, problem.batches.labels


def augmentations(run: Options) -> list[str]:
    """Return the names of the options with which a run augmented its training images."""
    data = run.data
    values = {"data.augment": data.augment, "data.mixup": data.mixup, "data.cutmix": data.cutmix}
    return [name for name, value in values.items() if value]


def tested(problem: Problem) -> tuple[Tensor, Tensor, int]:
    """Return this rank's test images, their labels, and the first one's index in the test set.

    Collective over: comm of the problem.
    """
    assert isinstance(problem.batches, Batches)
    images, labels = problem.batches.tested
    return images, labels, sum(problem.comm.allgather(len(images))[: problem.comm.rank])


def announced(
    comm: mpikfac.comm.Comm, doing: str, batches: Iterable[Batch], size: int, images: int
) -> Iterator[Batch]:
    """Yield batches of this rank's images; rank 0 prints a line after every `LINES` batches.

    Args:
        doing: a description of the computation, for the printed line.
        size: the number of images in a batch.
        images: the number of this rank's images, in all batches.
    """
    for number, batch in enumerate(batches):
        announce(comm, doing, number, size, images)
        yield batch


def announce(comm: mpikfac.comm.Comm, doing: str, number: int, size: int, images: int) -> None:
    """Every `LINES` batches, print on rank 0 how many of its images were processed."""
    if comm.rank == 0 and number and number % LINES == 0:
        print(f"{doing}: {number * size:,} of {images:,} images of rank 0", flush=True)


def uncovered(model: nn.Module, covered: mpikfac.Coverage) -> list[str]:
    """Return the names of the trained parameters that no covered layer contains."""
    layers, _ = mpikfac.layers.cover(model, covered)
    of_layers = {id(parameter) for layer in layers for parameter in layer.parameters}
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return [name for name, parameter in trained if id(parameter) not in of_layers]
