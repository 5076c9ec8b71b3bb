"""Score the training images of a K-FAC run by their influence on the loss of test images.

    mpikfac influence runs/a --queries 20 --out influence.h5 --report influence.html
    mpirun -n 4 mpikfac influence runs/a

A positive score means that a training image helps: without it, the test image's loss would rise.
Images with a large self-influence often have wrong labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import mpikfac
from mpikfac import files
from mpikfac_apps.guard.ranks import run_on_ranks
from mpikfac_apps.guard.watchdog import Watchdog
from mpikfac_apps.lab.finished import (
    Finished,
    announce,
    augmentations,
    examples,
    tested,
    uncovered,
)
from mpikfac_apps.lab.influence.options import INFLUENCE, InfluenceOptions
from mpikfac_apps.lab.influence.page import page
from mpikfac_apps.lab.memory import FEW, MemoryReport
from mpikfac_apps.options.strategy import coverage
from mpikfac_apps.place import share_cores
from mpikfac_apps.text import listed, show, table
from mpikfac_apps.training.batches import parts, share
from mpikfac_apps.training.parts.problem import Problem

Losses = Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]

PASS = 128  # training images per backward pass
NAMES = 4  # maximum number of parameters that a printed line names


@dataclass(frozen=True)
class Influence:
    """The influence scores of all training images; queries are test images.

    Attributes:
        scores: the influence of each training image on each query, `[queries, images]`.
        own: the self-influence of each training image, `[images]`.
        labels: the labels of the training images.
        queries: the images of the queries, bytes `[queries, channels, h, w]`.
        query_labels: the labels of the queries.
        predicted: the classes that the network predicts for the queries; None for an autoencoder.
    """

    scores: Tensor
    own: Tensor
    labels: Tensor
    queries: Tensor
    query_labels: Tensor
    predicted: Tensor | None

    def report(self, top: int) -> list[list[str]]:
        """Return sections: the most helpful and harmful images, and the largest self-influences."""
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
    """Print the training images with the largest influence scores; return 0.

    Collective over: world.

    Raises:
        SystemExit: with code 2, after a single line about an error that the user can correct.
    """
    return run_on_ranks(lambda _: INFLUENCE.read(argv), influence)


def influence(comm: mpikfac.comm.Comm, options: InfluenceOptions, watchdog: Watchdog) -> int:
    """Print the largest influence scores on rank 0, and write the requested files; return 0.

    Collective over: comm.
    """
    share_cores(comm, None)
    written = options.out, options.report
    finished = Finished.of(comm, "influence", options, watchdog, written)
    checkpoint, problem = finished.checkpoint, finished.problem
    found = scored(finished, options, lambda: watchdog.enter("influence", checkpoint.step))
    kind = finished.options.kfac.estimator.fisher_type
    head = f"{finished.path}: step {checkpoint.step}, {kind} Fisher"
    with mpikfac.comm.together(comm, f"writing {options.out}"):
        if found is not None and options.out is not None:
            write(found, finished, options)
    with mpikfac.comm.together(comm, f"writing {options.report}"):
        if found is not None and options.report is not None:
            text = page(found, examples(problem)[0], head, options.top)
            files.write_text(options.report, text, named=True)
    problem.batches.close()
    if found is not None:
        show([[head], *found.report(options.top)])
    return 0


def scored(
    finished: Finished, options: InfluenceOptions, progress: Callable[[], None]
) -> Influence | None:
    """Return the scores of all training images on rank 0, and None on other ranks.

    Collective over: comm of the run's problem.

    Args:
        progress: called before the pass that plans memory, and before each batch.

    Raises:
        UserError: the checkpoint contains no factors, or there are too many queries.
    """
    path, problem, model = finished.path, finished.problem, finished.model
    comm = problem.comm
    with mpikfac.comm.together(comm, f"influence {path}"):
        covered = coverage(problem.options.kfac, problem.network.covers)
        left = uncovered(model, covered)
    images, labels = examples(problem)
    curvature = mpikfac.lab.Curvature.load(path, model, comm, coverage=covered, skip=left)
    if left and comm.rank == 0:
        names = ", ".join(left[:NAMES]) + (f" and {len(left) - NAMES} more" if left[NAMES:] else "")
        print(f"no factors cover {names}: scores ignore these parameters", flush=True)
    if (changed := augmentations(problem.options)) and comm.rank == 0:
        what = f"{len(images):,} plain images and labels"
        print(f"the run used {listed(changed)}, but scores are those of the {what}", flush=True)
    if problem.options.ema_decay and comm.rank == 0:
        print("scores are computed at the weights themselves, not at their averages", flush=True)
    model.eval()

    own = share(images, labels, comm.rank, comm.size)
    queries = queries_of(problem, options.queries)
    damping = mpikfac.Damping(relative=options.damping)
    losses, plain = (each_loss(problem, loss) for loss in (problem.loss, problem.task.loss))
    few, size = [tensor[:FEW] for tensor in own], min(PASS, len(own[0]))
    memory = MemoryReport(comm, problem.device)
    progress()
    with mpikfac.comm.together(comm, f"influence {path}"):
        planned = mpikfac.lab.influence_memory(curvature, losses, few, size, len(queries[0]))

    def batches(doing: str) -> Iterator[tuple[Tensor, Tensor]]:
        for number, batch in enumerate(parts(*own, PASS)):
            progress()
            announce(comm, doing, number, PASS, len(own[0]))
            yield batch

    with mpikfac.comm.together(comm, f"--queries={options.queries}"):
        scores = mpikfac.lab.influence(
            curvature, losses, batches("influence"), queries, damping, measure=plain
        )
    of_self = mpikfac.lab.self_influence(curvature, losses, batches("self-influence"), damping)
    curvature.close()
    memory.show(planned)
    with torch.no_grad():
        predicted = problem.outputs(model, *queries)[0].flatten(1).argmax(1)
    parts_of = of_self, own[1].cpu(), *(tensor.cpu() for tensor in (*queries, predicted))
    gathered = comm.gather((scores, *parts_of))
    if gathered is None:
        return None
    of_ranks, *others = zip(*gathered)
    found = Influence(torch.cat(of_ranks, 1), *map(torch.cat, others))
    return found if problem.task.learns == "labels" else replace(found, predicted=None)


def each_loss(problem: Problem, loss: Callable[..., Tensor]) -> Losses:
    """Return a function that computes `loss` separately for each image of a batch."""

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs, targets = problem.outputs(model, *batch)
        each = [loss(y[None], t[None]) for y, t in zip(outputs, targets)]
        return torch.stack(each) if each else outputs.flatten(1).sum(1)

    return losses


def queries_of(problem: Problem, count: int) -> tuple[Tensor, Tensor]:
    """Return those of the first `count` test images that this rank holds, and their labels.

    Collective over: comm of the problem.
    """
    images, labels, before = tested(problem)
    return images[: max(0, count - before)], labels[: max(0, count - before)]


def write(found: Influence, finished: Finished, options: InfluenceOptions) -> None:
    """Write all scores, and the damping and checkpoint they were computed from, to an HDF5 file.

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
        "fisher_type": finished.options.kfac.estimator.fisher_type,
        "step": finished.checkpoint.step,
        "checkpoint": finished.checkpoint.digest,
    }
    if found.predicted is not None:
        items["predicted"] = found.predicted
    mpikfac.checkpoint.write_shard(options.out, items)
