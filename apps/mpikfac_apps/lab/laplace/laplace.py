"""Evaluate a network with uncertain weights: calibration and detection of foreign images.

    mpikfac laplace runs/a --measure
    mpirun -n 4 mpikfac laplace runs/a --weights last --prior evidence

The curvature at the weights of a checkpoint defines a Gaussian posterior over the weights.
Predictions are made with the weights themselves (MAP), with linearised outputs, and with sampled
weights.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import mpikfac
from mpikfac_apps.guard.ranks import run_on_ranks
from mpikfac_apps.guard.watchdog import Watchdog
from mpikfac_apps.inspecting import export, weights
from mpikfac_apps.lab.finished import (
    Finished,
    announce,
    augmentations,
    examples,
    tested,
    uncovered,
)
from mpikfac_apps.lab.laplace.options import LAPLACE, LaplaceOptions
from mpikfac_apps.lab.laplace.posterior import (
    GRID,
    PASS,
    Posterior,
    Predictions,
    Prior,
    outputs_of,
)
from mpikfac_apps.lab.memory import FEW, MemoryReport
from mpikfac_apps.options.strategy import coverage
from mpikfac_apps.place import share_cores
from mpikfac_apps.problems import datasets
from mpikfac_apps.text import is_own, show
from mpikfac_apps.training.batches import parts, share
from mpikfac_apps.training.parts.problem import Problem

PERMUTED = "permuted"
PENALTIES = ("sgd", "lars")  # optimizers whose weight decay is a penalty term of the loss


def main(argv: Sequence[str] | None = None) -> int:
    """Print metrics of the predictions by each method; return 0.

    Collective over: world.

    Raises:
        SystemExit: with code 2, after a single line about an error that the user can correct.
    """
    return run_on_ranks(lambda _: LAPLACE.read(argv), laplace)


def laplace(comm: mpikfac.comm.Comm, options: LaplaceOptions, watchdog: Watchdog) -> int:
    """Print each method's metrics on rank 0, and write the predictions if requested; return 0.

    Collective over: comm.
    """
    share_cores(comm, None)
    written, factors = [options.out], not options.measure
    finished = Finished.of(comm, "laplace", options, watchdog, written, factors)
    problem, step = finished.problem, finished.checkpoint.step
    images, labels, first = tested(problem)
    with mpikfac.comm.together(comm, f"laplace {finished.path}"):
        check_posterior(finished, options)
        heldout = torch.arange(first, first + len(images), device=images.device) % 2 == 0
        foreign = foreign_images(problem, images[~heldout], options)

    def progress() -> None:
        watchdog.enter("laplace", step)

    progress()
    curvature, notes = curvature_of(finished, options, progress)
    memory = MemoryReport(comm, problem.device)
    outputs, size = outputs_of(problem, progress), min(PASS, len(images) + len(foreign))
    priors = len(GRID) if options.prior == "heldout" else 1
    few = images[:FEW], labels[:FEW]
    with mpikfac.comm.together(comm, f"laplace {finished.path}"):
        planned = mpikfac.lab.variances_memory(curvature, outputs, few, size, priors)
    total, everywhere = len(examples(problem)[0]), curvature.replicate()
    task = Posterior(problem, curvature, everywhere, total, images, labels, heldout, progress)
    prior = task.prior(options.prior)
    predicted = task.predictions(prior.precision, foreign, options)
    curvature.close()
    memory.show({"linearised outputs": planned})
    with mpikfac.comm.together(comm, f"writing {options.out}"):
        if predicted is not None and options.out is not None:
            write(predicted, prior, finished, options)
    problem.batches.close()
    if predicted is not None:
        head = [
            f"{finished.path}: step {step}, {total:,} training images",
            *notes,
            f"precision of the prior: {prior.precision:.4g}, {prior.by}; log-evidence "
            f"{prior.log_evidence:.1f}",
        ]
        show([head, predicted.report()])
    return 0


def check_posterior(finished: Finished, options: LaplaceOptions) -> None:
    """Check that the run trained a classifier, and that its factors define a posterior.

    Raises:
        ValueError: the network is not a classifier, or its factors define no posterior.
    """
    run = finished.options
    if (task := finished.problem.task).learns != "labels":
        raise ValueError(f"the network learns {task.learns}; the program needs a classifier")
    if run.kfac.estimator.fisher_type == "empirical" and not options.measure:
        raise ValueError(
            "the run has fisher_type=empirical, whose factors vanish as the images are fitted and "
            "define no posterior; pass --measure, or train with --kfac.fisher_type=type-2 or mc"
        )


def notes_of(finished: Finished, images: int) -> list[str]:
    """Return lines about how the run's options relate to the posterior and its prior."""
    run, found = finished.options, []
    if run.weight_decay and run.optimizer in PENALTIES:
        precision = images * run.weight_decay
        found.append(f"weight_decay={run.weight_decay:g} is a prior of precision {precision:.4g}")
    elif run.weight_decay:
        found.append(
            f"weight_decay={run.weight_decay:g} of {run.optimizer} is not a penalty of the loss, "
            f"so the weights are not the mode under a Gaussian prior"
        )
    softened = [*(["label_smoothing"] if run.label_smoothing else []), *augmentations(run)]
    if softened:
        found.append(
            f"the run used {', '.join(softened)}, but the evidence is that of the plain images and "
            f"labels"
        )
    if run.ema_decay:
        found.append("the posterior is centred on the weights themselves, not on their averages")
    return found


def foreign_images(problem: Problem, images: Tensor, options: LaplaceOptions) -> Tensor:
    """Return this rank's share of the foreign (out-of-distribution) images, as bytes.

    Args:
        images: this rank's share of the test images, without held-out ones.

    Raises:
        ValueError: the foreign images differ in shape from the run's images, or a file would be
            executed without `options.trust`.
    """
    if options.ood == PERMUTED:
        generator = torch.Generator("cpu").manual_seed(options.seed)
        order = torch.randperm(images.shape[2:].numel(), generator=generator).to(images.device)
        return images.flatten(2)[..., order].view(images.shape)
    if is_own(options.ood) and not options.trust:
        file = options.ood.rpartition(":")[0]
        raise ValueError(f"ood={options.ood} would run {file}; if you trust the file, pass --trust")
    data = datasets.load(options.ood, options.ood_path)
    if not isinstance(data, datasets.Dataset) or data.test_images.shape[1:] != images.shape[1:]:
        raise ValueError(
            f"ood={options.ood} must be a data set with images of the run's shape, "
            f"{[*images.shape[1:]]}"
        )
    comm = problem.comm
    return share(data.test_images, data.test_labels, comm.rank, comm.size)[0].to(images.device)


def curvature_of(
    finished: Finished, options: LaplaceOptions, progress: Callable[[], None]
) -> tuple[mpikfac.lab.Curvature, list[str]]:
    """Return the curvature for the weights that have a posterior, and lines that describe it.

    Collective over: comm of the run's problem.

    Raises:
        UserError: no factors cover the last layer, which alone is to have a posterior; or the
            checkpoint lacks the factors or, if the curvature is measured, a tensor of the network.
    """
    problem, model, path = finished.problem, finished.model, finished.path
    comm, covered = problem.comm, coverage(problem.options.kfac, problem.network.covers)
    with mpikfac.comm.together(comm, f"laplace {path}", untrusted=True):
        if options.weights == "last":
            covered = last_alone(model, covered)
        left = uncovered(model, covered)
        tensors = export.weights(finished.checkpoint) if options.measure else {}
        if options.measure and (lacking := weights.load(model, tensors)):
            raise ValueError(
                f"the curvature needs all tensors, but {', '.join(lacking)} are missing or have "
                f"another shape; the data has {problem.classes} classes"
            )
    if options.measure:
        own = share(*examples(problem), comm.rank, comm.size)
        batches = [batch for batch in parts(*own, PASS) if len(batch[0])]
        numbers = itertools.count()

        def announced_progress() -> None:
            progress()
            number = next(numbers) % max(1, len(batches))
            announce(comm, "curvature", number, PASS, len(own[0]))

        curvature = mpikfac.lab.Curvature.measured(
            model.eval(),
            outputs_of(problem, announced_progress),
            batches,
            problem.task.loss_name,
            comm,
            coverage=covered,
            skip=left,
        )
    else:
        curvature = mpikfac.lab.Curvature.load(path, model, comm, coverage=covered, skip=left)
        model.eval()
    count = sum(p.numel() for layer in curvature.layers.values() for p in layer.parameters)
    total = sum(p.numel() for p in model.parameters())
    kind = (
        "measured" if options.measure else f"{finished.options.kfac.estimator.fisher_type} Fisher"
    )
    about = f"curvature: {kind}, of {count:,} of {total:,} parameters; all others are fixed"
    return curvature, [about, *notes_of(finished, len(examples(problem)[0]))]


def last_alone(model: nn.Module, covered: mpikfac.Coverage) -> mpikfac.Coverage:
    """Return `covered`, restricted to the last module that has parameters.

    Raises:
        ValueError: no factors cover this module.
    """
    layers, last = mpikfac.layers.cover(model, covered)[0], weights.last_module(model)
    if last not in [layer.path for layer in layers]:
        raise ValueError(f"no factors cover the last layer, {last}; use --weights=all")
    others = [layer.path for layer in layers if layer.path != last]
    return dataclasses.replace(covered, skip=[*covered.skip, *others])


def write(found: Predictions, prior: Prior, finished: Finished, options: LaplaceOptions) -> None:
    """Write all predictions, and the prior and checkpoint they come from, to an HDF5 file.

    Raises:
        OSError: the file cannot be written.
    """
    assert options.out is not None
    items: dict[str, Tensor | int | float | str] = {
        **{name.lower(): probabilities for name, probabilities in found.test.items()},
        **{f"ood_{name.lower()}": probabilities for name, probabilities in found.ood.items()},
        "labels": found.labels,
        "prior": prior.precision,
        "log_evidence": prior.log_evidence,
        "step": finished.checkpoint.step,
        "checkpoint": finished.checkpoint.digest,
    }
    mpikfac.checkpoint.write_shard(options.out, items)
