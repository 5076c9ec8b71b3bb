"""Train a Mask R-CNN of torchvision on drawn shapes, with K-FAC or SGD, on one or more ranks.

    mpirun -n 2 python -m mpi4py apps/train_detection.py
    mpirun -n 2 python -m mpi4py apps/train_detection.py --optimizer sgd --checkpoints runs/shapes

The loss of a detector is a sum of losses, so K-FAC takes the factors from the gradients of the sum:
the empirical Fisher.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import mpikfac
from mpikfac_apps.detection import networks, precision
from mpikfac_apps.detection.shapes import CLASSES, Example, Shapes, mixed
from mpikfac_apps.guard.ranks import run_on_ranks
from mpikfac_apps.guard.watchdog import Watchdog
from mpikfac_apps.options.command_line import read
from mpikfac_apps.options.fields import bounded, choice
from mpikfac_apps.place import share_cores

PROGRAM = "train_detection.py"
RATES = {"kfac": 0.0003, "sgd": 0.1}
MEASURES = ("loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg")
SHOWN = 0.5  # a pixel of a predicted mask belongs to the shape from this probability on
OPTIONS = "run/options"


@dataclass(frozen=True)
class Kfac:
    """The settings of K-FAC.

    Args:
        damping: the damping of a layer, in units of the mean eigenvalue of the layer's curvature.
        factor_every: the number of steps from one update of the factors to the next.
        basis_every: the number of steps from one decomposition of the factors to the next.
        workers: the number of ranks that precondition a layer; null for all ranks (COMM-OPT).
        largest: the largest order of a factor; a larger factor falls into equal blocks. null for no
            limit.
        skip: the names of modules that are trained without K-FAC, such as backbone.
    """

    damping: float = bounded(0.1, "> 0")
    factor_every: int = bounded(1, ">= 1")
    basis_every: int = bounded(10, ">= 1")
    workers: int | None = bounded(None, ">= 1")
    largest: int | None = bounded(None, ">= 1")
    skip: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class DetectionOptions:
    """Train a Mask R-CNN of torchvision on drawn shapes, with K-FAC or SGD.

    Args:
        model: the network, with random first weights: "small", for pictures of few large shapes, or
            "resnet50", the Mask R-CNN of torchvision with a ResNet-50 and a feature pyramid.
        size: the height and width of pictures in pixels.
        images: the number of pictures in an epoch.
        test_images: the number of other pictures, for the test after each epoch.
        batch: the number of pictures in a step, over all ranks.
        epochs: the number of passes over the pictures.
        optimizer: "kfac" or "sgd"; both take momentum.
        lr: the learning rate after the warm-up; falls to 0 in a line. null: 0.0003 for kfac, 0.1
            for sgd.
        warmup: the number of steps in which the learning rate grows.
        momentum: the momentum of both optimizers.
        weight_decay: the weight decay of both optimizers.
        seed: the seed of first weights, pictures and their order.
        checkpoints: a directory for checkpoints, one after each epoch; a run goes on from the
            newest checkpoint in the directory. null for no checkpoints.
        device: the device of each rank; "auto" takes a GPU if a GPU exists.
        kfac: the settings of K-FAC.
    """

    model: str = choice("small", networks.NETWORKS)
    size: int = bounded(64, ">= 32")
    images: int = bounded(256, ">= 1")
    test_images: int = bounded(64, ">= 1")
    batch: int = bounded(8, ">= 1")
    epochs: int = bounded(5, ">= 1")
    optimizer: str = choice("kfac", RATES)
    lr: float | None = bounded(None, "> 0")
    warmup: int = bounded(10, ">= 0")
    momentum: float = bounded(0.9, ">= 0", "< 1")
    weight_decay: float = bounded(0.0001, ">= 0")
    seed: int = bounded(0, ">= 0")
    checkpoints: Path | None = None
    device: str = choice("auto", ("auto", "cpu", "cuda", "xpu"))
    kfac: Kfac = field(default_factory=Kfac)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in an epoch; pictures that fill no batch are left out."""
        return self.images // self.batch

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        steps = self.epochs * self.steps_per_epoch
        return (self.lr or RATES[self.optimizer]) * min(
            (step + 1) / (self.warmup + 1), 1 - step / steps
        )

    def check(self, ranks: int) -> None:
        """Check the batch.

        Raises:
            ValueError: ranks would get uneven shares, or an epoch has no step.
        """
        if self.batch % ranks:
            raise ValueError(f"batch={self.batch} must be a multiple of the {ranks} ranks")
        if self.batch > self.images:
            raise ValueError(f"batch={self.batch} is more than the {self.images} images")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and print a line after each epoch; return 0.

    Collective over: world.

    Raises:
        SystemExit: code 2 after a single line about a mistake that the user can correct.
    """
    return run_on_ranks(lambda _: read(PROGRAM, DetectionOptions, argv), train)


def train(comm: mpikfac.comm.Comm, options: DetectionOptions, watchdog: Watchdog) -> int:
    """Train a network with random weights; return 0.

    Collective over: comm.

    Raises:
        UserError: the options fit neither each other nor the ranks.
    """
    share_cores(comm, None)
    with mpikfac.comm.together(comm, "options"):
        options.check(comm.size)
        device = mpikfac.device(comm, options.device)
        torch.manual_seed(options.seed)
        model = networks.build(options.model, len(CLASSES), options.size).to(device)
    run(comm, options, trainer_of(comm, model, options), device, watchdog)
    return 0


Trainer = mpikfac.KFAC | mpikfac.DataParallel


def trainer_of(comm: mpikfac.comm.Comm, model: nn.Module, options: DetectionOptions) -> Trainer:
    """Return the trainer of a network, with K-FAC or without.

    Collective over: comm.

    Raises:
        ValueError: a setting of K-FAC cannot work.
        UserError: ranks disagree.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    momentum, decay, kfac = options.momentum, options.weight_decay, options.kfac
    optimizer = torch.optim.SGD(trained, options.rate(0), momentum, weight_decay=decay)
    if options.optimizer == "sgd":
        return mpikfac.DataParallel(model, optimizer, comm)

    def rule(layer: mpikfac.LayerShape) -> mpikfac.LayerShape:
        return dataclasses.replace(mpikfac.usual_rule(layer), largest=kfac.largest)

    with mpikfac.comm.together(comm, "options"):
        strategy = mpikfac.Strategy.hybrid(comm.size, workers=kfac.workers or comm.size)
        coverage = mpikfac.Coverage(kfac.skip, rule=rule, own_examples=[networks.HEADS])
        mpikfac.layers.cover(model, coverage)
    return mpikfac.KFAC(
        model,
        optimizer,
        comm,
        strategy,
        damping=mpikfac.Damping(relative=kfac.damping),
        factor_every=kfac.factor_every,
        basis_every=kfac.basis_every,
        coverage=coverage,
    )


def run(
    comm: mpikfac.comm.Comm,
    options: DetectionOptions,
    trainer: Trainer,
    device: torch.device,
    watchdog: Watchdog,
) -> None:
    """Train and test epoch after epoch, from the newest checkpoint on.

    Collective over: comm.

    Raises:
        UserError: a checkpoint cannot be read or written, or belongs to another run.
    """
    training = Shapes(range(options.images), options.size, options.seed)
    sampler = DistributedSampler[Example](
        training, comm.size, comm.rank, seed=options.seed, drop_last=True
    )
    share = options.batch // comm.size
    loader = DataLoader(training, share, sampler=sampler, collate_fn=list, drop_last=True)
    last = options.images + options.test_images
    test_pictures = Shapes(
        range(last)[options.images + comm.rank :: comm.size], options.size, options.seed
    )
    for epoch in range(resumed(comm, options, trainer), options.epochs):
        # After a restart, torchvision samples the anchors and boxes of a run without restart.
        torch.manual_seed(mixed(options.seed, epoch, comm.rank))
        sampler.set_epoch(epoch)
        begun = time.perf_counter()
        losses = trained(comm, options, trainer, loader, device, watchdog)
        seconds = time.perf_counter() - begun
        watchdog.enter("evaluation", trainer.steps)
        results = tested(comm, trainer.model, test_pictures, device)
        if comm.rank == 0:
            print(line(epoch, losses, results, seconds), flush=True)
        if options.checkpoints is not None:
            watchdog.enter("checkpoint", trainer.steps)
            state = {**trainer.state_dict(), OPTIONS: identity(options)}
            mpikfac.save_checkpoint(comm, options.checkpoints, state, trainer.steps)


def trained(
    comm: mpikfac.comm.Comm,
    options: DetectionOptions,
    trainer: Trainer,
    loader: DataLoader[Example],
    device: torch.device,
    watchdog: Watchdog,
) -> list[float]:
    """Train for an epoch; return the means of the losses named in `MEASURES`.

    Collective over: comm.
    """
    totals = torch.zeros(len(MEASURES), dtype=torch.float64, device=device)
    for batch in loader:
        watchdog.enter("step", trainer.steps)
        for group in trainer.optimizer.param_groups:
            group["lr"] = options.rate(trainer.steps)
        trainer.optimizer.zero_grad()
        images, targets = zip(*(on(device, example) for example in batch))
        losses_by_name = trainer.model(list(images), list(targets))
        losses = torch.stack([losses_by_name[name] for name in MEASURES])
        losses.sum().backward()
        trainer.step()
        totals += losses.detach()
    sums = mpikfac.comm.summed(comm, [len(loader), *totals.tolist()])
    return [total / sums[0] for total in sums[1:]]


def tested(
    comm: mpikfac.comm.Comm, model: nn.Module, pictures: Shapes, device: torch.device
) -> list[float]:
    """Return the mean average precision of boxes and of masks over the pictures of all ranks.

    Collective over: comm.
    """
    boxes, masks = [], []
    model.eval()
    for number in range(len(pictures)):
        image, target = on(device, pictures[number])
        with torch.no_grad():
            [detections] = model([image])
        over = precision.overlaps_of_boxes(detections["boxes"], target["boxes"])
        boxes.append(precision.tallied(detections, target, over))
        over = precision.overlaps_of_masks(detections["masks"][:, 0] >= SHOWN, target["masks"])
        masks.append(precision.tallied(detections, target, over))
    model.train()
    everyone = comm.allgather((precision.merged(boxes), precision.merged(masks)))
    return [
        precision.mean_average_precision(precision.merged(tallies)) for tallies in zip(*everyone)
    ]


def on(device: torch.device, example: Example) -> Example:
    """Return a picture and its target on the device."""
    image, target = example
    return image.to(device), {name: value.to(device) for name, value in target.items()}


def line(epoch: int, losses: Sequence[float], results: Sequence[float], seconds: float) -> str:
    """Return the line about an epoch."""
    parts = ", ".join(f"{name[5:]} {loss:.3f}" for name, loss in zip(MEASURES, losses))
    boxes, masks = results
    return (
        f"epoch {epoch + 1}: loss {sum(losses):.4f} ({parts}), test AP50 of boxes {boxes:.3f}, of "
        f"masks {masks:.3f}, {seconds:.1f} s"
    )


# -- checkpoints -----------------------------------------------------------------------------------


def identity(options: DetectionOptions) -> str:
    """Return the options on which the numbers of a run depend."""
    values = dataclasses.asdict(options)
    return json.dumps({k: v for k, v in values.items() if k not in ("checkpoints", "device")})


def resumed(comm: mpikfac.comm.Comm, options: DetectionOptions, trainer: Trainer) -> int:
    """Load the newest checkpoint, if there is one; return the number of completed epochs.

    Collective over: comm.

    Raises:
        UserError: a checkpoint cannot be read, or belongs to a run with other options.
    """
    root = options.checkpoints
    checkpoint = None if root is None else mpikfac.find_checkpoint(comm, root)
    if checkpoint is None:
        return 0
    with mpikfac.comm.together(comm, f"reading checkpoint {checkpoint.path}", untrusted=True):
        check_options(json.loads(str(checkpoint[OPTIONS])), json.loads(identity(options)))
    trainer.load_state_dict(checkpoint)
    return trainer.steps // options.steps_per_epoch


def check_options(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Check that a run goes on with its options.

    Raises:
        ValueError: an option has changed.
    """
    for name, value in now.items():
        if before[name] != value:
            raise ValueError(
                f"the checkpoint belongs to a run with {name}={before[name]}, not {value}; give "
                f"the same options, or another directory"
            )
