"""Score the training images of a K-FAC run by their influence on the loss of test images.

    mpikfac influence runs/a --queries 20 --out influence.h5
    mpirun -n 4 mpikfac influence runs/a

A positive score means that a training image helps: without it, the test image's loss would rise.
Images with a large self-influence often have wrong labels.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import mpikfac
from mpikfac_apps.cli import checkpoint_at
from mpikfac_apps.guard.ranks import run_on_ranks
from mpikfac_apps.guard.watchdog import Watchdog
from mpikfac_apps.lab.influence.options import INFLUENCE, InfluenceOptions
from mpikfac_apps.options.options import Options
from mpikfac_apps.options.strategy import coverage
from mpikfac_apps.place import share_cores
from mpikfac_apps.problems import models
from mpikfac_apps.text import show, table
from mpikfac_apps.training.batches import Batches, parts, share
from mpikfac_apps.training.parts.problem import Problem, first_model
from mpikfac_apps.training.restart import CHECKSUMS
from mpikfac_apps.training.settings import saved_run
from mpikfac_apps.training.testing.evaluate import options_of
from mpikfac_apps.training.testing.options import EvaluateOptions

Losses = Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]

PASS = 128  # training images per backward pass
LINES = 20  # passes between two lines of progress


@dataclass(frozen=True)
class Influence:
    """The scores of all training images.

    Attributes:
        scores: the influence of each training image on each query, `[queries, images]`.
        own: the self-influence of each training image, `[images]`.
        labels: the labels of the training images.
        query_labels: the labels of the queries.
    """

    scores: Tensor
    own: Tensor
    labels: Tensor
    query_labels: Tensor

    def report(self, top: int) -> list[list[str]]:
        """Return sections of lines with the images of the largest scores, and their labels."""
        rows = [("query", "label", "most helpful images (label)", "most harmful images (label)")]
        for number, (scores, label) in enumerate(zip(self.scores[:top], self.query_labels)):
            images = self._largest(scores, top), self._largest(-scores, top)
            rows.append((str(number), str(label.item()), *images))
        suspects = self._largest(self.own, top)
        return [table(rows, left=4), [f"largest self-influence, images (label): {suspects}"]]

    def _largest(self, scores: Tensor, top: int) -> str:
        indices = scores.topk(min(top, len(scores))).indices.tolist()
        return " ".join(f"{i} ({self.labels[i].item()})" for i in indices)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the images with the largest scores; return 0.

    Collective over: world.

    Raises:
        SystemExit: with code 2, after a single line about an error that the user can correct.
    """
    return run_on_ranks(lambda _: INFLUENCE.read(argv), influence)


def influence(comm: mpikfac.comm.Comm, options: InfluenceOptions, watchdog: Watchdog) -> int:
    """Print the images with the largest scores on rank 0, and write all scores; return 0.

    Collective over: comm.
    """
    share_cores(comm, None)
    located: tuple[Path, Options] | None = None
    with mpikfac.comm.together(comm, f"influence {options.path}"):
        device = mpikfac.device(comm, options.device)
        if comm.rank == 0:
            located = locate(options, comm.size)
            if options.out is not None:
                check_folder(options.out.parent)
    path, run = comm.bcast(located)
    watchdog.follow(run.watchdog_timeout)
    checkpoint = mpikfac.load_checkpoint(comm, path)
    with mpikfac.comm.together(comm, f"reading {path}"):
        saved = saved_run(checkpoint)
    images = {key: saved[key] for key in CHECKSUMS if key in saved}
    problem = Problem(comm, dataclasses.replace(run, autocast=None), device, images)
    with mpikfac.comm.together(comm, "building the network"):
        model = first_model(run, problem.classes, problem.channels, device)
    found = scored(
        problem, model, path, options, lambda: watchdog.enter("influence", checkpoint.step)
    )
    with mpikfac.comm.together(comm, f"writing {options.out}"):
        if found is not None and options.out is not None:
            write(found, checkpoint, run, options)
    problem.batches.close()
    if found is not None:
        kind = run.kfac.estimator.fisher_type
        show([[f"{path}: step {checkpoint.step}, {kind} Fisher"], *found.report(options.top)])
    return 0


def locate(options: InfluenceOptions, ranks: int) -> tuple[Path, Options]:
    """Return the checkpoint and the options of its run.

    Raises:
        ValueError: there is no checkpoint, or its run's images have no single labels, or it
            estimated no Fisher matrix.
    """
    path = checkpoint_at(options.path)
    of_test = EvaluateOptions(path, trust=options.trust, data_path=options.data_path)
    run = options_of(path, of_test, ranks)
    if run.optimizer != "kfac":
        raise ValueError(f"{path} is of a run with optimizer={run.optimizer}; it needs kfac")
    if (task := models.network(run.model).task).dimensions:
        raise ValueError(
            f"{path} is of a run with model={run.model}, which learns {task.learns}; it needs a "
            f"network with one label per image"
        )
    estimator = run.kfac.estimator
    if estimator.fisher_type == "forward-only" or estimator.normalization != "expand":
        raise ValueError(
            f"{path} is of a run with fisher_type={estimator.fisher_type} and "
            f"normalization={estimator.normalization}, whose factors estimate no Fisher matrix; "
            f"train with another fisher_type and normalization=expand"
        )
    return path, run


def check_folder(folder: Path) -> None:
    """Create a folder if it is missing, and check that files can be written into it.

    Raises:
        OSError: they cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def scored(
    problem: Problem,
    model: nn.Module,
    path: Path,
    options: InfluenceOptions,
    progress: Callable[[], None],
) -> Influence | None:
    """Return the scores of all training images on rank 0, and None on other ranks.

    Collective over: comm of the problem.

    Args:
        progress: is called before each pass.

    Raises:
        UserError: the images are in files, the checkpoint has no factors of the network, or there
            are too many queries.
    """
    comm = problem.comm
    with mpikfac.comm.together(comm, f"influence {path}"):
        covered = coverage(problem.options.kfac, problem.network.covers)
        left = uncovered(model, covered)
        images, labels = examples(problem)
    curvature = mpikfac.lab.Curvature.load(path, model, comm, coverage=covered, skip=left)
    if left and comm.rank == 0:
        print(f"no factors cover {', '.join(left)}: scores ignore these parameters", flush=True)
    if problem.options.ema_decay and comm.rank == 0:
        print("scores are computed at the weights themselves, not at their averages", flush=True)
    model.eval()

    own = share(images, labels, comm.rank, comm.size)
    queries = queries_of(problem, options.queries)
    damping = mpikfac.Damping(relative=options.damping)
    losses, tested = (each_loss(problem, loss) for loss in (problem.loss, problem.task.loss))
    progress()

    def batches(doing: str) -> Iterator[tuple[Tensor, Tensor]]:
        for number, batch in enumerate(parts(*own, PASS)):
            progress()
            if comm.rank == 0 and number and number % LINES == 0:
                done = f"{number * PASS:,} of {len(own[0]):,}"
                print(f"{doing}: {done} images of rank 0", flush=True)
            yield batch

    with mpikfac.comm.together(comm, f"--queries={options.queries}"):
        scores = mpikfac.lab.influence(
            curvature, losses, batches("influence"), queries, damping, measure=tested
        )
    of_self = mpikfac.lab.self_influence(curvature, losses, batches("self-influence"), damping)
    curvature.close()
    gathered = comm.gather((scores, of_self, own[1].cpu(), queries[1].cpu()))
    if gathered is None:
        return None
    of_ranks, of_selves, of_images, of_queries = zip(*gathered)
    return Influence(torch.cat(of_ranks, 1), *map(torch.cat, (of_selves, of_images, of_queries)))


def each_loss(problem: Problem, loss: Callable[..., Tensor]) -> Losses:
    """Return a function that returns the loss of each image."""

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs, targets = problem.outputs(model, *batch)
        each = [loss(y[None], t[None]) for y, t in zip(outputs, targets)]
        return torch.stack(each) if each else outputs.flatten(1).sum(1)

    return losses


def examples(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return all training images, without augmentation, and their labels.

    Raises:
        ValueError: the images are in files.
    """
    if not isinstance(problem.batches, Batches):
        raise ValueError("the images of the run are in files; the program needs images in memory")
    return problem.batches.images, problem.batches.labels


def queries_of(problem: Problem, count: int) -> tuple[Tensor, Tensor]:
    """Return the rank's part of the first `count` test images, and their labels.

    Collective over: comm of the problem.
    """
    assert isinstance(problem.batches, Batches)
    images, labels = problem.batches.tested
    before = sum(problem.comm.allgather(len(images))[: problem.comm.rank])
    return images[: max(0, count - before)], labels[: max(0, count - before)]


def uncovered(model: nn.Module, covered: mpikfac.Coverage) -> list[str]:
    """Return the names of the trained parameters that no layer covers."""
    layers, _ = mpikfac.layers.cover(model, covered)
    of_layers = {id(parameter) for layer in layers for parameter in layer.parameters}
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return [name for name, parameter in trained if id(parameter) not in of_layers]


def write(
    found: Influence,
    checkpoint: mpikfac.checkpoint.Checkpoint,
    run: Options,
    options: InfluenceOptions,
) -> None:
    """Write all scores, with what they were computed from, to an HDF5 file.

    Raises:
        OSError: the file cannot be written.
    """
    assert options.out is not None
    items: dict[str, Tensor | int | float | str] = {
        "scores": found.scores,
        "self": found.own,
        "labels": found.labels,
        "query_labels": found.query_labels,
        "damping": options.damping,
        "fisher_type": run.kfac.estimator.fisher_type,
        "step": checkpoint.step,
        "checkpoint": checkpoint.digest,
    }
    mpikfac.checkpoint.write_shard(options.out, items)
