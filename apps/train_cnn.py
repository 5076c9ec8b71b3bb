"""Trains a CNN with K-FAC or SGD on as many ranks as it is started with.

    mpirun -n 4 python -m mpi4py apps/train_cnn.py --config jobs/configs/cifar10_resnet20_kfac.yaml

Every option of `--help` may stand in the file or, as `--key value`, on the command line.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import platform
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mpikfac
from mpikfac_apps import batches, config, data, models, record
from mpikfac_apps.metrics import Meter, Speed
from mpikfac_apps.options import Options

KFAC_SETTINGS = (
    *("damping", "factor_every", "basis_every", "decay", "kl_clip"),
    *("solver", "normalization", "start", "subsample", "delay", "skip"),
)
KFAC_DTYPES = ("statistics_dtype", "precondition_dtype")

log = logging.getLogger("mpikfac.train")


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the command line says; 0 when the run is complete.

    Collective over: world.

    Raises:
        SystemExit: code 2 after one line about what the user can mend.
    """
    comm = mpikfac.world()
    with mpikfac.ending(comm):
        options = read_options(comm, argv)
        if options is not None:
            Run(comm, options).train()
    return 0


def read_options(comm: Any, argv: Sequence[str] | None) -> Options | None:
    """Rank 0's options on every rank; None if it was asked for help only.

    Collective over: comm.
    """
    options = None
    with mpikfac.together(comm, "options"):
        if comm.rank == 0:
            try:
                options = config.parse(argv, comm.size)
                record.check_directory(options.run_dir, options.resume)
            except SystemExit as leave:
                if leave.code:
                    raise
    return comm.bcast(options)


class Run:
    """One training run: its parts, the loop over its steps, and its checkpoints.

    Collective over: world, as are all its methods.
    """

    def __init__(self, comm: Any, options: Options) -> None:
        self.comm, self.options = comm, options
        kept_log = record.start_log() if comm.rank == 0 else None
        hosts = share_cores(comm, options.threads)
        with mpikfac.together(comm, "options"):
            self.device = mpikfac.device(comm, options.device)
        self.began_on = comm.size  # ranks; a restart on others keeps batch and learning rate
        checkpoint = self._open_checkpoint()
        options.batch_per_rank = None  # from here on, `batch` says it
        self._load_data()
        self._build_trainer()
        self.steps = options.epochs * len(self.batches)
        if options.max_steps:
            self.steps = min(self.steps, options.max_steps)
        self.meter = Meter(comm, self.device)
        self.speed = Speed(options.batch, self.trainer.trace)
        metrics_bytes = self._restore(checkpoint) if checkpoint is not None else 0
        self.record = None
        with mpikfac.together(comm, f"run_dir={options.run_dir}"):
            if kept_log is not None:
                about = record.environment(hosts, self.device)
                self.record = record.Record(options, about, kept_log, metrics_bytes)

    # -- parts -----------------------------------------------------------------------------------

    def _load_data(self) -> None:
        comm, options, device = self.comm, self.options, self.device
        chosen = options.data
        with mpikfac.together(comm, "reading data"):
            found = data.load(
                chosen.name, chosen.path, chosen.train_images, chosen.size, chosen.classes
            )
            if options.batch > len(found.train_images):
                raise ValueError(
                    f"batch={options.batch} is more than the {len(found.train_images)} images"
                )
        mpikfac.agree(comm, {"training labels": zlib.crc32(found.train_labels.numpy())})
        self.normalise = batches.Normalise(found.train_images, device)
        self.batches = batches.Batches(
            found.train_images.to(device),
            found.train_labels.to(device),
            options.batch,
            seed=options.seed,
            augment=chosen.augment,
            rank=comm.rank,
            ranks=comm.size,
        )
        test = batches.share(found.test_images, found.test_labels, comm.rank, comm.size)
        self.test = [part.to(device) for part in test]
        self.channels, self.classes = found.train_images.shape[1], found.classes

    def _build_trainer(self) -> None:
        comm, options = self.comm, self.options
        torch.manual_seed(options.seed)
        model = models.build(options.model, self.classes, self.channels)
        model = model.to(self.device, memory_format=torch.channels_last)
        self.lr = config.learning_rate(options, len(self.batches), self.began_on)
        self.optimizer = torch.optim.SGD(
            model.parameters(), options.lr, options.momentum, weight_decay=options.weight_decay
        )
        self.model = model
        with mpikfac.together(comm, "options"):
            if options.optimizer == "sgd":
                self.trainer = mpikfac.DataParallel(model, self.optimizer, comm)
            else:
                strategy = config.strategy(options.kfac, comm.size)
                settings = {key: getattr(options.kfac, key) for key in KFAC_SETTINGS}
                for key in KFAC_DTYPES:
                    if name := getattr(options.kfac, key):
                        settings[key] = getattr(torch, name)
                self.trainer = mpikfac.KFAC(model, self.optimizer, comm, strategy, **settings)

    # -- training --------------------------------------------------------------------------------

    def train(self) -> None:
        """Takes the steps that are left."""
        first, per_epoch = self.trainer.steps, len(self.batches)
        log.info("%s", self._summary())
        progress = record.Progress(first, self.steps) if self.record else None
        for step in range(first, self.steps):
            epoch, index = divmod(step, per_epoch)
            with self.speed.step():
                self.step(step, *self.batches.get(epoch, index))
            if progress:
                progress.advance(self._describe)
            if (step + 1) % self.options.log_every == 0:
                self._report()
            epoch_ends = index + 1 == per_epoch
            if epoch_ends:
                self._end_epoch(epoch + 1)
            due = epoch_ends and (epoch + 1) % self.options.checkpoint_every == 0
            if due or step + 1 == self.steps:
                self._save()
        if progress:
            progress.close()
        log.info("complete after %d steps, %.1f s", self.trainer.steps, self.speed.seconds)

    def step(self, step: int, images: Tensor, labels: Tensor) -> None:
        """One training step on this rank's share of a batch."""
        # Seeded anew each time, the random number generators need not be saved.
        torch.manual_seed(batches.mixed(self.options.seed, step, self.comm.rank))
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr(step)
        self.optimizer.zero_grad()
        scores = self.model(self.normalise(images))
        loss = F.cross_entropy(scores, labels)
        loss.backward()
        self.trainer.step()
        self.meter.add(loss * len(labels), scores, labels)

    def evaluate(self) -> tuple[float, float]:
        """Mean loss and accuracy over all test images, each counted once."""
        meter = Meter(self.comm, self.device)
        self.model.eval()
        with torch.no_grad():
            for images, labels in batches.parts(*self.test, self.batches.per_rank):
                scores = self.model(self.normalise(images))
                meter.add(F.cross_entropy(scores, labels, reduction="sum"), scores, labels)
        self.model.train()
        return meter.everything()

    # -- records ---------------------------------------------------------------------------------

    def _report(self) -> None:
        loss = self._finite(self.meter.recent())
        speed, communication = self.speed.rates()
        self.speed.mark()
        clip = {} if self.options.optimizer == "sgd" else {"kl_scale": self.trainer.kl_scale.item()}
        self._row(loss=loss, images_per_second=speed, communication=communication, **clip)

    def _end_epoch(self, epoch: int) -> None:
        loss, accuracy = self.meter.everything()
        test_loss, test_accuracy = self.evaluate()
        self._row(
            train_loss=self._finite(loss),
            train_accuracy=accuracy,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
        )
        log.info(
            f"epoch {epoch}: loss {loss:.4f}, train {accuracy:.2%}, test {test_accuracy:.2%}, "
            f"{self.speed.seconds:.1f} s"
        )

    def _row(self, **values: float) -> None:
        if self.record:
            done = self.trainer.steps
            epoch, lr = done / len(self.batches), self.lr(done - 1)
            self.record.row(done, epoch=epoch, seconds=self.speed.seconds, lr=lr, **values)

    def _finite(self, loss: float) -> float:
        if not math.isfinite(loss):
            steps, lr = self.trainer.steps, self.options.lr
            raise mpikfac.UserError(f"the loss is {loss} after step {steps}; try a smaller lr={lr}")
        return loss

    def _describe(self) -> str:
        speed, communication = self.speed.rates()
        loss = "" if math.isnan(self.meter.loss) else f"loss {self.meter.loss:.4f}, "
        return f"{loss}{speed:,.0f} images/s, {communication:.0%} communication"

    def _summary(self) -> str:
        options = self.options
        return (
            f"{options.model} on {options.data.name} with {options.optimizer}; "
            f"ranks {self.comm.size}, batch {options.batch}, "
            f"steps {self.trainer.steps} to {self.steps}, {len(self.batches)} per epoch"
        )

    # -- checkpoints -----------------------------------------------------------------------------

    def _save(self) -> None:
        counted = self.meter.state()
        items = self.trainer.state_dict()
        if self.record:
            items |= counted | {
                "run/data": json.dumps(self._identity() | {"ranks": self.began_on}),
                "run/seconds": self.speed.seconds,
                "run/metrics_bytes": self.record.position(),
            }
        root = Path(self.options.run_dir) / "checkpoints"
        path = mpikfac.save_checkpoint(self.comm, root, items, self.trainer.steps)
        log.info("wrote %s", path)

    def _open_checkpoint(self) -> Any:
        """The checkpoint to go on from, whose batch and first ranks are taken over; or None."""
        resume = self.options.resume
        path = None if resume in ("never", "auto") else Path(resume)
        if resume == "auto":
            root = Path(self.options.run_dir) / "checkpoints"
            path = self.comm.bcast(mpikfac.latest_checkpoint(root) if not self.comm.rank else None)
        if path is None:
            return None
        checkpoint = mpikfac.load_checkpoint(self.comm, path)
        with mpikfac.together(self.comm, f"reading checkpoint {path}"):
            self._follow(json.loads(checkpoint["run/data"]))
        return checkpoint

    def _follow(self, saved: dict[str, Any]) -> None:
        """Makes this the same training as the saved one, or raises ValueError."""
        options, ranks = self.options, self.comm.size
        given = options.batch
        if options.batch_per_rank:
            options.batch = saved["batch"]
        for key, value in self._identity().items():
            if (before := saved.get(key)) != value:
                raise ValueError(
                    f"it was saved with {key}={in_yaml(before)}; this run has {in_yaml(value)}; "
                    f"give --{key}={in_yaml(before)}"
                )
        if options.batch % ranks:
            raise ValueError(
                f"it was saved with batch={options.batch}, no multiple of {ranks} ranks; "
                f"start one of {mpikfac.divisors(options.batch)} ranks"
            )
        self.began_on = saved["ranks"]
        if given != options.batch or (options.scale_lr and self.began_on != ranks):
            scaled = f", lr scaled by {self.began_on}" if options.scale_lr else ""
            log.info("begun with ranks=%d; kept: batch=%d%s", self.began_on, options.batch, scaled)

    def _restore(self, checkpoint: Any) -> int:
        """Goes on from the checkpoint; the bytes of metrics.jsonl to keep."""
        kept = 0
        with mpikfac.together(self.comm, f"reading checkpoint {checkpoint.path}"):
            self._load_trainer(checkpoint)
            self.meter.load(checkpoint["run/counted"], checkpoint["run/reported"])
            self.speed.seconds = checkpoint["run/seconds"]
            self.speed.mark()
            if self.options.resume == "auto":
                kept = checkpoint["run/metrics_bytes"]
        log.info("going on from %s", checkpoint.path)
        return kept

    def _load_trainer(self, state: Mapping[str, Any]) -> None:
        try:
            self.trainer.load_state_dict(state)
        except RuntimeError as error:  # torch's word for tensors of another shape
            raise ValueError(" ".join(str(error).split())) from error

    def _identity(self) -> dict[str, Any]:
        """What a step number and the weights mean; these must not change in a restart."""
        options = self.options
        chosen = dataclasses.asdict(options.data)
        del chosen["path"]  # where the files are may change
        return {
            "model": options.model,
            **{f"data.{key}": value for key, value in chosen.items()},
            "batch": options.batch,
            "seed": options.seed,
        }


def in_yaml(value: object) -> str:
    """A value as one writes it on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def share_cores(comm: Any, threads: int | None) -> list[str]:
    """Sets torch's threads, by default this rank's part of its node's cores; hosts of all ranks.

    Collective over: world.
    """
    mine = platform.node(), os.sched_getaffinity(0)
    places = comm.allgather(mine)
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        sharing = sum(host == mine[0] and not cores.isdisjoint(mine[1]) for host, cores in places)
        threads = max(1, len(mine[1]) // sharing)
    if threads is not None:
        torch.set_num_threads(threads)
    return [host for host, _ in places]


if __name__ == "__main__":
    sys.exit(main())
