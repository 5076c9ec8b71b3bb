"""Test a run's network with the uncertainty of its weights: calibration, and foreign images.

    mpikfac laplace runs/a --measure
    mpirun -n 4 mpikfac laplace runs/a --weights last --prior evidence

The curvature at the weights of a checkpoint gives a Gaussian posterior of the weights. Predictions
are those of the weights themselves (MAP), of linearised outputs, and of sampled weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpikfac
from mpikfac_apps.guard.ranks import run_on_ranks
from mpikfac_apps.guard.watchdog import Watchdog
from mpikfac_apps.inspecting import export, weights
from mpikfac_apps.lab.finished import Finished, examples, tested, uncovered
from mpikfac_apps.lab.laplace import measures
from mpikfac_apps.lab.laplace.options import LAPLACE, LaplaceOptions
from mpikfac_apps.options.strategy import coverage
from mpikfac_apps.place import share_cores
from mpikfac_apps.problems import datasets
from mpikfac_apps.text import is_own, percent, show, table
from mpikfac_apps.training.batches import parts, share
from mpikfac_apps.training.parts.problem import Problem

PASS = 128  # images per pass
STATISTICS = 1024  # training images from which statistics of BatchNorm are estimated
PERMUTED = "permuted"
PENALTIES = ("sgd", "lars")  # optimizers whose weight decay is a penalty of the loss
GRID = [10 ** (number / 4) for number in range(-8, 25)]
"""Precisions from which held-out images choose: 0.01 to 1,000,000, four per power of ten."""


@dataclass(frozen=True)
class Prior:
    """Precisions of the prior.

    Attributes:
        by_evidence: with the largest evidence, which is `log_evidence`.
        heldout: with the smallest loss of held-out images.
        chosen: the one that predictions use.
    """

    by_evidence: float
    log_evidence: float
    heldout: float
    chosen: float


@dataclass(frozen=True)
class Predictions:
    """Probabilities of classes `[images, classes]` by method: "MAP", "linear" and "samples".

    Attributes:
        test: of every second test image.
        ood: of foreign images.
        labels: of the test images.
    """

    test: Mapping[str, Tensor]
    ood: Mapping[str, Tensor]
    labels: Tensor

    def report(self) -> list[str]:
        """Return a table with a row for each method."""
        rows: list[Sequence[str]]
        rows = [(f"{len(self.labels)} images", "NLL", "ECE", "Brier", "accuracy", "OOD AUROC")]
        for name, found in self.test.items():
            numbers = [
                measure(found, self.labels)
                for measure in (
                    measures.negative_log_likelihood,
                    measures.calibration_error,
                    measures.brier_score,
                )
            ]
            right = percent(measures.accuracy(found, self.labels))
            area = measures.auroc(found, self.ood[name])
            rows.append((name, *(f"{number:.4f}" for number in numbers), right, f"{area:.3f}"))
        return table(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the measures of all predictions; return 0.

    Collective over: world.

    Raises:
        SystemExit: with code 2, after a single line about an error that the user can correct.
    """
    return run_on_ranks(lambda _: LAPLACE.read(argv), laplace)


def laplace(comm: mpikfac.comm.Comm, options: LaplaceOptions, watchdog: Watchdog) -> int:
    """Print the measures of all predictions on rank 0, and write the predictions; return 0.

    Collective over: comm.
    """
    share_cores(comm, None)
    finished = Finished.of(comm, "laplace", options, watchdog, factors=not options.measure)
    problem, step = finished.problem, finished.checkpoint.step
    images, labels, first = tested(problem)
    with mpikfac.comm.together(comm, f"laplace {finished.path}"):
        check_posterior(finished, options)
        foreign = foreign_images(problem, images, options)

    def progress() -> None:
        watchdog.enter("laplace", step)

    progress()
    curvature, notes = curvature_of(finished, options, progress)
    heldout = torch.arange(first, first + len(images), device=images.device) % 2 == 0
    count, everywhere = len(examples(problem)[0]), curvature.replicate()
    task = Posterior(problem, curvature, everywhere, count, images, labels, heldout, progress)
    prior = task.prior(options.prior)
    predicted = task.predictions(prior.chosen, foreign, options)
    curvature.close()
    with mpikfac.comm.together(comm, f"writing {options.out}"):
        if predicted is not None and options.out is not None:
            write(predicted, prior, finished, options)
    problem.batches.close()
    if predicted is not None:
        head = [
            f"{finished.path}: step {step}, {count:,} training images",
            *notes,
            f"precision of the prior: {prior.by_evidence:.4g} by evidence, with the log-evidence "
            f"{prior.log_evidence:.1f}; {prior.heldout:.4g} by the loss of held-out images; "
            f"{prior.chosen:.4g} is used",
        ]
        show([head, predicted.report()])
    return 0


def check_posterior(finished: Finished, options: LaplaceOptions) -> None:
    """Check that the run is of a classifier, and that its factors have a posterior.

    Raises:
        ValueError: they do not.
    """
    run = finished.options
    if (task := finished.problem.task).learns != "labels":
        raise ValueError(f"the network learns {task.learns}; the program needs a classifier")
    if run.kfac.estimator.fisher_type == "empirical" and not options.measure:
        raise ValueError(
            "the run has fisher_type=empirical, whose factors vanish as the images are fitted and "
            "have no posterior; pass --measure, or train with --kfac.fisher_type=type-2 or mc"
        )


def notes_of(finished: Finished, images: int) -> list[str]:
    """Return lines on how far the weights are a mode of the posterior."""
    run, found = finished.options, []
    if run.weight_decay and run.optimizer in PENALTIES:
        precision = images * run.weight_decay
        found.append(f"weight_decay={run.weight_decay:g} is a prior of precision {precision:.4g}")
    elif run.weight_decay:
        found.append(
            f"weight_decay={run.weight_decay:g} of {run.optimizer} is no penalty of the loss: the "
            f"weights are not the mode under a Gaussian prior"
        )
    softened = [
        name
        for name, value in (
            ("label_smoothing", run.label_smoothing),
            ("data.mixup", run.data.mixup),
            ("data.cutmix", run.data.cutmix),
        )
        if value
    ]
    if softened:
        found.append(f"the run had {', '.join(softened)}: evidence is that of the plain labels")
    if run.ema_decay:
        found.append("the posterior is around the weights themselves, not their averages")
    return found


def foreign_images(problem: Problem, images: Tensor, options: LaplaceOptions) -> Tensor:
    """Return the rank's part of the foreign images, as bytes.

    Args:
        images: the rank's part of the test images.

    Raises:
        ValueError: they have another shape, or a file would be executed without `options.trust`.
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
    """Return the curvature of the weights with a posterior, and lines about it.

    Collective over: comm of the run's problem.

    Raises:
        UserError: no factors cover the last layer, or the checkpoint has none.
    """
    problem, model, path = finished.problem, finished.model, finished.path
    comm, covered = problem.comm, coverage(problem.options.kfac, problem.network.covers)
    with mpikfac.comm.together(comm, f"laplace {path}", untrusted=True):
        if options.weights == "last":
            covered = last_alone(model, covered)
        left = uncovered(model, covered)
        if options.measure:
            weights.load(model, export.weights(finished.checkpoint))
    if options.measure:
        own = share(*examples(problem), comm.rank, comm.size)
        batches = [batch for batch in parts(*own, PASS) if len(batch[0])]
        curvature = mpikfac.lab.Curvature.measured(
            model.eval(),
            outputs_of(problem, progress),
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
    """Return the coverage of the last module with parameters alone.

    Raises:
        ValueError: the coverage does not have it.
    """
    layers, last = mpikfac.layers.cover(model, covered)[0], weights.last_module(model)
    if last not in [layer.path for layer in layers]:
        raise ValueError(f"no factors cover the last layer, {last}; use --weights=all")
    others = [layer.path for layer in layers if layer.path != last]
    return dataclasses.replace(covered, skip=[*covered.skip, *others])


def outputs_of(
    problem: Problem, progress: Callable[[], None]
) -> Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]:
    """Return a function that returns a model's outputs for a batch of images and labels."""

    def outputs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        progress()
        return problem.outputs(model, *batch)[0]

    return outputs


@dataclass(frozen=True)
class Posterior:
    """The predictions of a posterior.

    Collective over: comm of the problem, as are all methods.

    Attributes:
        everywhere: the curvature with the eigenbases of all layers on this rank.
        examples: the number of training images.
        images, labels: the rank's part of the test images.
        heldout: whether an image is held out: every second test image.
    """

    problem: Problem
    curvature: mpikfac.lab.Curvature
    everywhere: mpikfac.lab.Curvature
    examples: int
    images: Tensor
    labels: Tensor
    heldout: Tensor
    progress: Callable[[], None]

    def prior(self, chosen: str) -> Prior:
        """Return the precisions of the prior; `chosen` is one of `PRIORS`, or a number."""
        precision = mpikfac.lab.evidence_prior(self.curvature, self.examples)
        evidence = mpikfac.lab.log_evidence(
            self.curvature, self._log_likelihood(), self.examples, precision
        )
        heldout = self._heldout()
        named = {"evidence": precision, "heldout": heldout}
        number = named[chosen] if chosen in named else float(chosen)
        return Prior(precision, evidence, heldout, number)

    def predictions(
        self, prior: float, foreign: Tensor, options: LaplaceOptions
    ) -> Predictions | None:
        """Return all predictions on rank 0, and None on other ranks."""
        kept = ~self.heldout
        images, labels = self.images[kept], self.labels[kept]
        both = torch.cat([images, foreign])
        found = {"MAP": self._mode(both), "linear": self._linear(both, prior)}
        if options.samples:
            found["samples"] = self._sampled(both, prior, options)
        gathered = self.problem.comm.gather((found, len(images), labels.cpu()))
        if gathered is None:
            return None
        test = {n: torch.cat([of[n][:count] for of, count, _ in gathered]) for n in found}
        ood = {n: torch.cat([of[n][count:] for of, count, _ in gathered]) for n in found}
        return Predictions(test, ood, torch.cat([labels for *_, labels in gathered]))

    def _log_likelihood(self) -> float:
        """Return the sum over all training images, without augmentation and smoothing."""
        comm, total = self.problem.comm, 0.0
        with torch.no_grad():
            for batch in parts(*share(*examples(self.problem), comm.rank, comm.size), PASS):
                losses = F.cross_entropy(self._outputs(batch[0]), batch[1], reduction="sum")
                total -= losses.double().item()
        return mpikfac.comm.summed(comm, [total])[0]

    def _heldout(self) -> float:
        """Return the precision of `GRID` with the smallest loss of the held-out images."""
        total = torch.zeros(len(GRID), dtype=torch.float64)
        images, labels = self.images[self.heldout], self.labels[self.heldout]
        for batch, targets in parts(images, labels, PASS):
            if len(batch):
                found = self._linear_probabilities(batch, GRID)
                total -= found[:, torch.arange(len(batch)), targets].log().sum(1).cpu()
        losses = mpikfac.comm.summed(self.problem.comm, total.tolist())
        return GRID[losses.index(min(losses))]

    def _mode(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            found = [self._outputs(part).double().softmax(1).cpu() for part in images.split(PASS)]
        return torch.cat(found)

    def _linear(self, images: Tensor, prior: float) -> Tensor:
        found = [self._linear_probabilities(part, [prior])[0].cpu() for part in images.split(PASS)]
        return torch.cat(found)

    def _linear_probabilities(self, images: Tensor, priors: Sequence[float]) -> Tensor:
        """Return probabilities of linearised outputs, `[priors, images, classes]`."""
        batch = images, self.labels[:0]
        outputs = outputs_of(self.problem, self.progress)
        variances = mpikfac.lab.output_variances(
            self.everywhere, outputs, batch, self.examples, priors
        )
        with torch.no_grad():
            return mpikfac.lab.probit(self._outputs(images).double(), variances)

    def _sampled(self, images: Tensor, prior: float, options: LaplaceOptions) -> Tensor:
        """Return the mean of the probabilities of sampled weights."""
        moved = options.weights == "all"  # those before normalisation layers, too
        statistics = list(self._statistics()) if moved else []
        generator = torch.Generator("cpu").manual_seed(options.seed)
        arguments = self.curvature, self.examples, prior, generator, options.samples, statistics
        samples = mpikfac.lab.sampled_models(*arguments)
        return torch.stack([self._mode(images) for _ in samples]).mean(0)

    def _statistics(self) -> Iterator[Tensor]:
        """Yield inputs of a sample of training images, the same on all ranks."""
        return map(self.problem.normalise, self.problem.batches.sample(STATISTICS, PASS))

    def _outputs(self, images: Tensor) -> Tensor:
        self.progress()
        return self.problem.outputs(self.curvature.model, images, self.labels[:0])[0]


def write(found: Predictions, prior: Prior, finished: Finished, options: LaplaceOptions) -> None:
    """Write all predictions, with what they were computed from, to an HDF5 file.

    Raises:
        OSError: the file cannot be written.
    """
    assert options.out is not None
    items: dict[str, Tensor | int | float | str] = {
        **{name.lower(): probabilities for name, probabilities in found.test.items()},
        **{f"ood_{name.lower()}": probabilities for name, probabilities in found.ood.items()},
        "labels": found.labels,
        "prior": prior.chosen,
        "prior_by_evidence": prior.by_evidence,
        "prior_by_heldout": prior.heldout,
        "log_evidence": prior.log_evidence,
        "step": finished.checkpoint.step,
        "checkpoint": finished.checkpoint.digest,
    }
    mpikfac.checkpoint.write_shard(options.out, items)
