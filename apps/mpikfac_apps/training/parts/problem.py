"""The problem that a run solves: the images, the task of the network, the loss and the test."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import mpikfac
from mpikfac_apps.images import cache
from mpikfac_apps.images.listing import Listing
from mpikfac_apps.options.by_epoch import numbers_of
from mpikfac_apps.options.conflicts import doubt
from mpikfac_apps.options.options import Options
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.running.metrics import Meter
from mpikfac_apps.text import measured, percent
from mpikfac_apps.training import batches, settings
from mpikfac_apps.training.parts.optimizers import Average, make_optimizer

# Training images used to compute BatchNorm's statistics for averaged weights: total, per pass.
SAMPLE, PASS = 1024, 128
FURTHER = {"top5": "top-5", "voxel accuracy": "voxel accuracy"}  # logged after the main metric

log = logging.getLogger("mpikfac.train")


def first_model(options: Options, classes: int, channels: int, device: torch.device) -> nn.Module:
    """Return the model with its initial weights.

    Raises:
        ValueError: the model cannot be created.
    """
    torch.manual_seed(options.seed)
    model = models.build(options.model, classes, channels)
    return models.channels_last(model.to(device))


def build(
    options: Options, classes: int, channels: int, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model with its initial weights, and the optimizer.

    Raises:
        ValueError: the model cannot be created.
    """
    model = first_model(options, classes, channels, device)
    return model, make_optimizer(options, model)


def load_data(comm: mpikfac.comm.Comm, options: Options) -> datasets.Dataset | Listing:
    """Return the data set that the options select.

    Collective over: comm.

    Raises:
        UserError: the data cannot be read, or a batch is larger than the data set.
    """
    with mpikfac.comm.together(comm, "reading data"):
        names = inspect.signature(datasets.load).parameters
        data = datasets.load(**{name: getattr(options.data, name) for name in names})
        largest = max(numbers_of(options.batches))
        if largest > len(data.train_images):
            images = len(data.train_images)
            raise ValueError(f"batch={largest} must not exceed the number of images ({images})")
    if options.data.cache is None:
        return data
    assert isinstance(data, Listing), "only packed files have this option"
    return cache.on_nodes(comm, data, options.data.cache)


class Problem:
    """The data, the loss and the test of a run.

    Collective over: comm, as are all methods.

    Args:
        images_before: the image checksums in a checkpoint; empty to accept any images.

    Attributes:
        network: the registry entry for the network.
        task: what the network learns.
        batches: this rank's images.
        checksums: the checksums of all images, by name; see `Dataset.checksums`.
        calendar: the number of steps of every epoch.
        normalise: converts images from `batches` to inputs of the network.
        loss: returns the mean training loss, given outputs and targets.
    """

    def __init__(
        self,
        comm: mpikfac.comm.Comm,
        options: Options,
        device: torch.device,
        images_before: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.comm, self.options, self.device = comm, options, device
        with mpikfac.comm.together(comm, "options"):
            self.network = models.network(options.model)
        self.task = self.network.task
        data = load_data(comm, options)
        self.channels, self.classes = data.channels, data.classes
        with mpikfac.comm.together(comm, "reading data"):
            self.batches = batches.make_batches(data, options, device, comm.rank, comm.size)
            self.checksums = data.checksums
            settings.check_images(images_before, self.checksums)
        mpikfac.comm.agree(comm, {"training images": self.checksums["images"]})
        if data.about:
            log.info("%s", data.about)
        self.calendar = self.batches.calendar
        self.loss: Callable[..., Tensor] = self.task.loss
        if options.label_smoothing:
            self.loss = partial(self.task.loss, label_smoothing=options.label_smoothing)
        self.normalise = self._normalisation(data.white)
        if comm.rank == 0 and (words := doubt(options)):
            log.warning("%s", words)

    def _normalisation(self, white: int) -> Callable[[Tensor], Tensor]:
        """Return the function that converts images to inputs of the network.

        Args:
            white: the value of a white pixel.
        """
        if self.task.inputs == "tokens":
            return Tensor.long
        if self.task.inputs == "unit":
            return partial(batches.unit, white=white)
        with mpikfac.comm.together(self.comm, "reading data"):
            return batches.Normalise(self.batches.pixels(), self.device)

    def outputs(self, model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return a model's outputs for images, and the corresponding targets; not collective."""
        inputs, rounded = self.normalise(images), self.options.autocast is not None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=rounded):
            return model(inputs).float(), self.task.targets(inputs, labels)

    def check(self, model: nn.Module) -> None:
        """Check that a third-party network accepts the images and has one output per class.

        Warn if its outputs are probabilities or log-probabilities.

        Raises:
            ValueError: see `models.check`.
        """
        first = self.normalise(self.batches.first(2))
        doubts = models.check(self.options.model, model, first, self.classes)
        if self.comm.rank == 0 and doubts:
            log.warning("%s", doubts)

    def averaged_model(self, average: Average) -> nn.Module:
        """Return the model with averaged weights; sampled images set BatchNorm's statistics."""
        torch.manual_seed(self.options.seed)  # dropout is equal on all ranks
        return average.model(map(self.normalise, self.batches.sample(SAMPLE, PASS)))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the mean loss and the metrics over all test images; each image counts once."""
        measures = self.task.tests(self.classes)
        numbers = self.task.numbers(self.classes)  # the number of values of the first metric
        meter = Meter(self.comm, self.device, measures=numbers + len(measures) - 1)
        model.eval()
        with torch.no_grad():
            for images, labels in self.batches.test(self.batches.per_rank(0)):
                outputs, targets = self.outputs(model, images, labels)
                sums = [measured(outputs, targets).double() for measured in measures.values()]
                meter.add(self.task.loss(outputs, targets), torch.hstack(sums), len(outputs))
        model.train()
        loss, *means = meter.everything()
        values = loss, self.task.value(means[:numbers]), *means[numbers:]
        return dict(zip(("loss", *measures), values))


def words_of(tested: Mapping[str, float], measure: str) -> str:
    """Describe the metrics of a test, except the loss."""
    further = (f", {words} {percent(tested[n], 2)}" for n, words in FURTHER.items() if n in tested)
    return f"{measure} {measured(measure, tested[measure])}{''.join(further)}"
