"""Predictions of a Gaussian posterior over the weights, and the choice of its prior."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpikfac
from mpikfac_apps.lab.finished import announced, examples
from mpikfac_apps.lab.laplace import measures
from mpikfac_apps.lab.laplace.options import LaplaceOptions
from mpikfac_apps.text import percent, table
from mpikfac_apps.training.batches import parts, share
from mpikfac_apps.training.parts.problem import Problem

PASS = 128  # images per pass
STATISTICS = 1024  # training images from which statistics of BatchNorm are estimated
GRID = [10 ** (number / 4) for number in range(-8, 25)]
"""The prior precisions to try on held-out images: 0.01 to 1,000,000, four per power of ten."""
BY = {"evidence": "by evidence", "heldout": "by the loss of held-out images"}


@dataclass(frozen=True)
class Prior:
    """The prior over the weights.

    Attributes:
        by: how the precision was chosen: a value of `BY`, or "given".
        log_evidence: the logarithm of the evidence with this prior.
    """

    precision: float
    by: str
    log_evidence: float


@dataclass(frozen=True)
class Predictions:
    """Class probabilities `[images, classes]` by method: "MAP", "linear" and "samples".

    Attributes:
        test: the probabilities for test images that are not held out, which are every second one.
        ood: the probabilities for foreign images.
        labels: the labels of the images in `test`.
    """

    test: Mapping[str, Tensor]
    ood: Mapping[str, Tensor]
    labels: Tensor

    def report(self) -> list[str]:
        """Return a table of metrics, with a row for each method."""
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


def outputs_of(
    problem: Problem, progress: Callable[[], None]
) -> Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]:
    """Return a function that calls `progress`, and returns a model's outputs for a batch."""

    def outputs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        progress()
        return problem.outputs(model, *batch)[0]

    return outputs


@dataclass(frozen=True)
class Posterior:
    """A Gaussian posterior over the weights, which predicts class probabilities.

    Collective over: comm of the problem, as are all methods.

    Attributes:
        everywhere: the same curvature, with the eigenbases of all layers on every rank.
        examples: the number of training images.
        images, labels: this rank's share of the test images, and their labels.
        heldout: whether each of these images is held out; every second test image is.
        progress: called before each pass.
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
        """Return the prior; `chosen` is a method in `PRIORS`, or the precision as text.

        Raises:
            UserError: the evidence has no maximum.
        """
        if chosen == "evidence":
            with mpikfac.comm.together(self.problem.comm, "--prior=evidence"):
                precision = mpikfac.lab.evidence_prior(self.curvature, self.examples)
        else:
            precision = self._heldout() if chosen == "heldout" else float(chosen)
        evidence = mpikfac.lab.log_evidence(
            self.curvature, self._log_likelihood(), self.examples, precision
        )
        return Prior(precision, BY.get(chosen, "given"), evidence)

    def predictions(
        self, prior: float, foreign: Tensor, options: LaplaceOptions
    ) -> Predictions | None:
        """Return the predictions by all methods on rank 0, and None on other ranks."""
        kept = ~self.heldout
        images, labels = self.images[kept], self.labels[kept]
        both = torch.cat([images, foreign])
        found = {"MAP": self._mode(both, "MAP"), "linear": self._linear(both, prior)}
        if options.samples:
            found["samples"] = self._sampled(both, prior, options)
        gathered = self.problem.comm.gather((found, len(images), labels.cpu()))
        if gathered is None:
            return None
        test = {n: torch.cat([of[n][:count] for of, count, _ in gathered]) for n in found}
        ood = {n: torch.cat([of[n][count:] for of, count, _ in gathered]) for n in found}
        return Predictions(test, ood, torch.cat([labels for *_, labels in gathered]))

    def _log_likelihood(self) -> float:
        """Return the log-likelihood of all training images, without augmentation or smoothing."""
        comm, total = self.problem.comm, 0.0
        with torch.no_grad():
            own = share(*examples(self.problem), comm.rank, comm.size)
            for batch in announced(comm, "evidence", parts(*own, PASS), PASS, len(own[0])):
                losses = F.cross_entropy(self._outputs(batch[0]), batch[1], reduction="sum")
                total -= losses.double().item()
        return mpikfac.comm.summed(comm, [total])[0]

    def _heldout(self) -> float:
        """Return the prior precision in `GRID` with the smallest loss on the held-out images."""
        total = torch.zeros(len(GRID), dtype=torch.float64)
        images, labels = self.images[self.heldout], self.labels[self.heldout]
        batches = parts(images, labels, PASS)
        for batch, targets in announced(self.problem.comm, "held-out", batches, PASS, len(images)):
            if len(batch):
                found = self._linear_probabilities(batch, GRID)
                total -= found[:, torch.arange(len(batch)), targets].log().sum(1).cpu()
        losses = mpikfac.comm.summed(self.problem.comm, total.tolist())
        return GRID[losses.index(min(losses))]

    def _mode(self, images: Tensor, doing: str) -> Tensor:
        with torch.no_grad():
            found = [
                self._outputs(part).double().softmax(1).cpu() for part in self._split(images, doing)
            ]
        return torch.cat(found)

    def _linear(self, images: Tensor, prior: float) -> Tensor:
        return torch.cat(
            [
                self._linear_probabilities(part, [prior])[0].cpu()
                for part in self._split(images, "linear")
            ]
        )

    def _split(self, images: Tensor, doing: str) -> Iterable[Tensor]:
        return announced(self.problem.comm, doing, images.split(PASS), PASS, len(images))

    def _linear_probabilities(self, images: Tensor, priors: Sequence[float]) -> Tensor:
        """Return class probabilities from linearised outputs, `[priors, images, classes]`."""
        batch = images, self.labels[:0]
        outputs = outputs_of(self.problem, self.progress)
        variances = mpikfac.lab.output_variances(
            self.everywhere, outputs, batch, self.examples, priors
        )
        with torch.no_grad():
            return mpikfac.lab.probit(self._outputs(images).double(), variances)

    def _sampled(self, images: Tensor, prior: float, options: LaplaceOptions) -> Tensor:
        """Return class probabilities, averaged over sampled weights."""
        moved = options.weights == "all"  # then inputs of normalisation layers change
        statistics = list(self._statistics()) if moved else []
        generator = torch.Generator("cpu").manual_seed(options.seed)
        arguments = self.curvature, self.examples, prior, generator, options.samples, statistics
        samples = mpikfac.lab.sampled_models(*arguments)
        return torch.stack(
            [
                self._mode(images, f"sample {number} of {options.samples}")
                for number, _ in enumerate(samples, 1)
            ]
        ).mean(0)

    def _statistics(self) -> Iterator[Tensor]:
        """Yield normalised batches of randomly chosen training images, the same on all ranks."""
        return map(self.problem.normalise, self.problem.batches.sample(STATISTICS, PASS))

    def _outputs(self, images: Tensor) -> Tensor:
        self.progress()
        return self.problem.outputs(self.curvature.model, images, self.labels[:0])[0]
