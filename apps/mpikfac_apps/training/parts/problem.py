"""The problem of a run: the images, the network, the loss and the test."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

import mpikfac
from mpikfac_apps.images import cache
from mpikfac_apps.images.listing import Listing
from mpikfac_apps.options.by_epoch import numbers_of
from mpikfac_apps.options.conflicts import doubt
from mpikfac_apps.options.options import Options
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.text import measured, percent
from mpikfac_apps.training import batches, checkpoints
from mpikfac_apps.training.metrics import Meter
from mpikfac_apps.training.parts.optimizers import Average, make_optimizer

# Training images that give averaged weights their statistics: all at once, and in a pass.
SAMPLE, PASS = 1024, 128

log = logging.getLogger("mpikfac.train")


def first_model(options: Options, classes: int, channels: int, device: torch.device) -> nn.Module:
    """Return the model with its first weights.

    Raises:
        ValueError: the model cannot be made.
    """
    torch.manual_seed(options.seed)
    model = models.build(options.model, classes, channels)
    return models.channels_last(model.to(device))


def build(
    options: Options, classes: int, channels: int, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model with its first weights, and the optimizer.

    Raises:
        ValueError: the model cannot be made.
    """
    model = first_model(options, classes, channels, device)
    return model, make_optimizer(options, model)


class Problem:
    """The data, the network and the test of a run.

    Collective over: comm, as are all methods.

    Attributes:
        model: the network; the caller gives the network.
        average: the average of the network's weights, if tests take averages.
        began_with: the checksum of the training images in the checkpoint, if there is a checkpoint.
    """

    model: nn.Module
    average: Average | None = None
    began_with: int | None = None
    normalise: Callable[[Tensor], Tensor]
    loss: Callable[..., Tensor]

    def __init__(self, comm: mpikfac.comm.Comm, options: Options, device: torch.device) -> None:
        self.comm, self.options, self.device = comm, options, device
        self._load_data()

    def _load_data(self) -> None:
        comm, options, device = self.comm, self.options, self.device
        chosen = options.data
        with mpikfac.comm.together(comm, "options"):
            self.network = models.network(options.model)
        with mpikfac.comm.together(comm, "reading data"):
            asked = inspect.signature(datasets.load).parameters
            found = datasets.load(**{name: getattr(chosen, name) for name in asked})
            largest = max(numbers_of(options.batches))
            if largest > len(found.train_images):
                raise ValueError(
                    f"batch={largest} is more than the {len(found.train_images)} images"
                )
        if chosen.cache is not None:
            assert isinstance(found, Listing), "only a packed file takes the option"
            found = cache.on_nodes(comm, found, chosen.cache)
        with mpikfac.comm.together(comm, "reading data"):
            self.batches = batches.made(found, options, device, comm.rank, comm.size)
            checkpoints.check_images(self.began_with, self.batches.digest)
        mpikfac.comm.agree(comm, {"training images": self.batches.digest})
        if found.about:
            log.info("%s", found.about)
        self.task = self.network.task
        self.loss = self.task.loss
        if options.label_smoothing:
            self.loss = partial(self.task.loss, label_smoothing=options.label_smoothing)
        if self.task.inputs == "tokens":
            self.normalise = Tensor.long
        elif self.task.inputs == "unit":
            self.normalise = partial(batches.unit, white=found.white)
        else:
            with mpikfac.comm.together(comm, "reading data"):
                self.normalise = batches.Normalise(self.batches.pixels(), device)
        self.calendar = self.batches.calendar
        self.channels, self.classes = found.channels, found.classes
        if comm.rank == 0 and (words := doubt(options)):
            log.warning("%s", words)

    def _outputs(self, model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return a model's outputs for images, and the targets of the outputs."""
        inputs, rounded = self.normalise(images), self.options.autocast is not None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=rounded):
            return model(inputs).float(), self.task.targets(inputs, labels)

    def check(self, model: nn.Module) -> None:
        """Check that a network takes the images, and has an output for each class.

        Raises:
            ValueError: see `models.check`.
        """
        first = self.normalise(self.batches.first(2))
        models.check(self.options.model, model, first, self.classes)

    def tested_model(self) -> nn.Module:
        """Return the model, or the model of averaged weights if there are averages."""
        if not self.average:
            return self.model
        torch.manual_seed(self.options.seed)  # dropout is alike on all ranks
        return self.average.model(map(self.normalise, self.batches.sample(SAMPLE, PASS)))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return means of loss and measures over all test images, each image counted once."""
        measures = self.task.tests(self.classes)
        meter = Meter(self.comm, self.device, measures=len(measures))
        model.eval()
        with torch.no_grad():
            for images, labels in self.batches.test(self.batches.per_rank(0)):
                outputs, targets = self._outputs(model, images, labels)
                sums = [measured(outputs, targets).double() for measured in measures.values()]
                meter.add(self.task.loss(outputs, targets), torch.stack(sums), len(outputs))
        model.train()
        return dict(zip(("loss", *measures), meter.everything()))


def words_of(tested: Mapping[str, float], measure: str) -> str:
    """Return the measures of a test in words, without the loss."""
    more = f", top-5 {percent(tested['top5'], 2)}" if "top5" in tested else ""
    return f"{measure} {measured(measure, tested[measure])}{more}"
