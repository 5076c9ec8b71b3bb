"""Train torchvision's Mask R-CNN on drawn shapes, with K-FAC, SGD or AdamW, on one or more ranks.

    mpirun -n 2 mpikfac train-detection
    mpirun -n 2 mpikfac train-detection --optimizer sgd --run_dir runs/shapes

The loss of a detector is a sum of several losses, so K-FAC estimates the factors from the gradients
of this sum, which gives the empirical Fisher matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

import mpikfac
from mpikfac_apps.detection import networks, precision
from mpikfac_apps.detection.shapes import CLASSES, Example, Shapes
from mpikfac_apps.options.fields import bounded, choice
from mpikfac_apps.programs.draws import generator, mixed
from mpikfac_apps.programs.options import ProgramOptions
from mpikfac_apps.programs.run import main as run
from mpikfac_apps.programs.trainer import trainer_of
from mpikfac_apps.programs.work import Taken, Work

PROGRAM = "mpikfac train-detection"
LOSSES = ("loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg")
SHOWN = 0.5  # the minimum probability at which a pixel of a predicted mask belongs to the shape


@dataclass(frozen=True)
class DetectionOptions(ProgramOptions):
    """Train torchvision's Mask R-CNN on drawn shapes, with K-FAC, SGD or AdamW.

    Args:
        model: the network, with random initial weights: "small", for images of a few large shapes,
            or "resnet50", torchvision's Mask R-CNN with a ResNet-50 and a feature pyramid.
        size: the height and width of images in pixels.
        images: the number of images in an epoch.
        test_images: the number of separate images for the evaluation after each epoch.
        batch: the number of images per step, over all ranks.
    """

    rates: ClassVar[Mapping[str, float]] = {"kfac": 0.0003, "sgd": 0.1, "adamw": 0.001}

    model: str = choice("small", networks.NETWORKS)
    size: int = bounded(64, ">= 32")
    images: int = bounded(256, ">= 1")
    test_images: int = bounded(64, ">= 1")
    batch: int = bounded(8, ">= 1")
    run_dir: str = "runs/detection"

    def check(self, ranks: int) -> None:
        """Check that ranks get shards of equal size, and that an epoch has at least one step.

        Raises:
            ValueError: the batch is not a multiple of the number of ranks, or larger than an epoch.
        """
        if self.batch % ranks:
            raise ValueError(
                f"batch={self.batch} must be a multiple of the number of ranks ({ranks})"
            )
        if self.batch > self.images:
            raise ValueError(
                f"batch={self.batch} must not exceed the number of images ({self.images})"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Train; see `programs.run.main`.

    Collective over: world.
    """
    return run(PROGRAM, DetectionOptions, Detection, argv)


class Detection(Work):
    """A detector that is trained on generated shapes.

    Collective over: comm, as are all methods.

    Raises:
        UserError: the options cannot be combined, or do not fit the number of ranks.
    """

    measures = tuple(name.removeprefix("loss_") for name in LOSSES)

    def __init__(
        self, comm: mpikfac.comm.Comm, options: DetectionOptions, device: torch.device
    ) -> None:
        self.comm, self.options, self.device = comm, options, device
        with mpikfac.comm.together(comm, "options"):
            options.check(comm.size)
            model = networks.build(options.model, len(CLASSES), options.size).to(device)
            coverage = mpikfac.Coverage(own_examples=[networks.HEADS])
        self.model = model
        self.trainer = trainer_of(comm, model, options, coverage)
        self.examples_per_step = options.batch
        self.steps_per_epoch = options.images // options.batch  # the remaining images are skipped
        last = options.images + options.test_images
        self._training = Shapes(range(options.images), options.size, options.seed)
        numbers = range(last)[options.images + comm.rank :: comm.size]
        self._tests = Shapes(numbers, options.size, options.seed)

    def step(self, step: int) -> Taken:
        """Take a step on this rank's shard of the batch."""
        images, targets = zip(*(self._on_device(self._training[n]) for n in self._share(step)))
        # With this seed, torchvision samples the same anchors and boxes after a restart.
        torch.manual_seed(mixed(self.options.seed, step, self.comm.rank))
        self.trainer.optimizer.zero_grad()
        losses_by_name = self.model(list(images), list(targets))
        losses = torch.stack([losses_by_name[name] for name in LOSSES])
        losses.sum().backward()
        self.trainer.step()
        losses = losses.detach()
        return Taken(losses.sum(), len(images), losses * len(images))

    def _share(self, step: int) -> list[int]:
        """Return the indices of this rank's images in a step."""
        epoch, index = divmod(step, self.steps_per_epoch)
        draws = generator(self.options.seed, epoch)
        order = torch.randperm(len(self._training), generator=draws)
        batch = order[index * self.options.batch :][: self.options.batch]
        return batch.chunk(self.comm.size)[self.comm.rank].tolist()

    def test(self) -> dict[str, float]:
        """Return the mean average precision of boxes and of masks on the test images."""
        boxes, masks = [], []
        self.model.eval()
        for number in range(len(self._tests)):
            image, target = self._on_device(self._tests[number])
            with torch.no_grad():
                [detections] = self.model([image])
            over = precision.overlaps_of_boxes(detections["boxes"], target["boxes"])
            boxes.append(precision.tallied(detections, target, over))
            over = precision.overlaps_of_masks(detections["masks"][:, 0] >= SHOWN, target["masks"])
            masks.append(precision.tallied(detections, target, over))
        self.model.train()
        everyone = self.comm.allgather((precision.merged(boxes), precision.merged(masks)))
        means = map(precision.mean_average_precision, map(precision.merged, zip(*everyone)))
        return dict(zip(("AP50 of boxes", "AP50 of masks"), means))

    def _on_device(self, example: Example) -> Example:
        """Return an image and its target on the device."""
        image, target = example
        return image.to(self.device), {
            name: value.to(self.device) for name, value in target.items()
        }

    def summary(self) -> str:
        """Summarise the network and the data; not collective."""
        return f"{self.options.model} on {self.options.images} generated images"
