"""Train on images: build the parts, and say what a step, a test and the state are."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mpikfac
from mpikfac_apps.guard.guard import Guard
from mpikfac_apps.options.conflicts import check_pairs
from mpikfac_apps.options.options import Options
from mpikfac_apps.options.parse import resolved
from mpikfac_apps.options.strategy import learning_rate
from mpikfac_apps.place import RankPlace
from mpikfac_apps.problems import airbench
from mpikfac_apps.running import run_directory
from mpikfac_apps.running.loop import Loop
from mpikfac_apps.running.metrics import Meter
from mpikfac_apps.text import key_of, measured
from mpikfac_apps.training import batches, carried, settings
from mpikfac_apps.training.augmentation.mixes import Mixes
from mpikfac_apps.training.parts import groups, trainers
from mpikfac_apps.training.parts.optimizers import (
    AVERAGED,
    Average,
    decays_and_momenta,
    follow_options,
)
from mpikfac_apps.training.parts.problem import Problem, words_of
from mpikfac_apps.training.testing import best
from mpikfac_apps.training.traced_steps import Recording

GROWTH = 1000.0  # times the first loss: the training diverges

log = logging.getLogger("mpikfac.train")


class Run(Loop):
    """A training run: the problem, the training, the steps on images, and the state.

    Collective over: world, as are all methods.

    Args:
        world: the ranks of all groups.
        team: the ranks that train a network together.

    Attributes:
        origin: the first start of the run.
        problem: the data, the loss and the test.
        frozen: the layers that are frozen in the first epochs, if the options name epochs.
        split: the layers that groups of ranks share, if the options say so.
        training: the trainer, and what the run asks of the kind of trainer.
        average: the average of the network's weights, if tests take averages.
        best: the best test so far.
        recording: the steps whose stages are recorded.
    """

    unit = "images"
    options: Options

    def __init__(
        self,
        world: mpikfac.comm.Comm,
        team: mpikfac.comm.SplitComm,
        options: Options,
        guard: Guard,
        place: RankPlace,
    ) -> None:
        comm = team.trains
        early_log = run_directory.start_log(groups.writer(options)) if comm.rank == 0 else None
        checkpoint = groups.open_checkpoint(world, comm, options)
        self.origin, options = settings.origin_of(comm, options, checkpoint)
        options = dataclasses.replace(options, batch_per_rank=None)
        self.team, self.problem = team, Problem(comm, options, place.device, self.origin.images)
        calendar = self.problem.calendar
        with mpikfac.comm.together(comm, "options"):
            check_pairs(options, comm.size)  # a restart may have another number of ranks
        self.mixes = Mixes.of(options.data, self.problem.classes, options.seed)
        self.model, optimizer = trainers.make_model(self.problem, starts=checkpoint is None)
        self.frozen = trainers.frozen_layers(self.model, options)
        done = 0 if checkpoint is None else checkpoint.step
        self._begin_epoch(calendar.place(max(0, done - 1))[0])  # as at the last step
        trace = mpikfac.Trace()
        self.split = trainers.split_layers(self.problem, self.model, trace)
        self.training = trainers.make_training(
            self.problem, team, world, self.model, optimizer, trace
        )
        trainers.give_feedback(self.problem, self.training.trainer)
        self.average = Average(self.model, options.average) if options.average else None
        self.best = best.Best(self.problem.task)
        self._first_loss = math.nan  # of this rank, since this start
        rate = learning_rate(options, calendar.at(0).steps, self.origin.ranks)
        numbers = self.problem.task.numbers(self.problem.classes)  # of a measure
        super().__init__(
            *(comm, options, guard, self.training.trainer),
            steps=min(calendar.first(options.epochs), options.max_steps or sys.maxsize),
            meter=Meter(comm, place.device, self.training.alone, numbers),
            lr=lambda step: rate(calendar.clock(step)),
            rate=options.rate,
        )
        kept = self.restore(checkpoint)
        self.open_record(early_log, place, resolved(options, comm.size), *kept)
        self.recording = Recording(comm, options, self.training, self.steps)

    def _begin_epoch(self, epoch: int) -> None:
        """Freeze or unfreeze layers for an epoch; the trainer takes up changes at the next step."""
        if isinstance(self.model, airbench.Airbench):
            self.model.begin_epoch(epoch)
        if self.frozen:
            self.frozen.begin_epoch(epoch)

    # -- training --------------------------------------------------------------------------------

    def take(self, step: int) -> None:
        """Take the step of the calendar; ranks have one model where a test or a meeting is due."""
        epoch, index = self.problem.calendar.place(step)
        batch = self.problem.calendar.at(epoch).batch
        self._begin_epoch(epoch)
        with self.speed.step(batch), self.recording.step(step):
            with self.trainer.trace.stage("data"):
                images, labels = self.problem.batches.get(epoch, index)
                if self.mixes:
                    images, labels = self.mixes(epoch, index, images, labels)
            self.step(step, images, labels)
            if self.test_due(step + 1) or self._meets(step + 1):
                self.trainer.average_replicas()  # a test is of one model, and so is a checkpoint
        if step + 1 == self.recording.chosen.stop:
            self.recording.write()

    def step(self, step: int, images: Tensor, labels: Tensor) -> None:
        """Take a training step on the rank's share of a batch, in parts if the options say so."""
        self.set_rate(step)
        in_parts = self.trainer.plan.of(self.comm.rank).parts
        passes = in_parts or self.options.accumulate
        first = self.comm.rank * passes
        parts = list(zip(images.chunk(passes), labels.chunk(passes)))
        losses = []
        for number, part in enumerate(parts, first):
            self._seed(step, number)
            if in_parts or number == first:
                self.trainer.optimizer.zero_grad()
            losses.append(self._pass(*part, share=1.0 if in_parts else len(part[1]) / len(labels)))
            if in_parts:
                self.trainer.collect()
        mean_loss = torch.stack(losses).mean()
        if math.isnan(self._first_loss):
            self._first_loss = mean_loss.item()
        self.training.step(images, labels, mean_loss)
        self.votes.note(mean_loss)
        if self.average:
            self.average.add(self.model)
        self.training.adapt(mean_loss, lambda: self._loss_after(step, first, parts))

    def _loss_after(self, step: int, first: int, parts: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Return the loss after a step on the images of the step; running statistics stay."""
        problem, losses = self.problem, []
        statistics = [buffer.clone() for buffer in self.model.buffers()]
        with self.trainer.trace.stage("forward"), torch.no_grad():
            for number, (images, labels) in enumerate(parts, first):
                self._seed(step, number)
                losses.append(problem.loss(*problem.outputs(self.model, images, labels)))
            for buffer, value in zip(self.model.buffers(), statistics):
                buffer.copy_(value)
        return torch.stack(losses).mean().item()

    def _seed(self, step: int, number: int) -> None:
        """Seed each part of a batch anew; states of random number generators need no checkpoint."""
        torch.manual_seed(batches.mixed(self.options.seed, step, number))

    def _pass(self, images: Tensor, labels: Tensor, share: float) -> Tensor:
        """Return the mean loss after a forward and backward pass; gradients take the share."""
        problem, stage = self.problem, self.trainer.trace.stage
        with stage("forward"):
            outputs, targets = problem.outputs(self.model, images, labels)
            loss = problem.loss(outputs, targets)
        with stage("backward"):
            self.training.record(outputs)
            (self.training.objective(images, outputs, loss) * share).backward()
        with torch.no_grad():
            self.meter.add(loss, problem.task.measured(outputs, targets), len(outputs))
        return loss.detach()

    def _meets(self, steps: int) -> bool:
        """Return whether asynchronous clients meet after so many steps, for a checkpoint."""
        interval = self.options.checkpoint_every
        return interval is not None and steps % interval == 0 and self.training.alone

    def epochs(self, steps: int) -> float:
        """Return the epochs after so many steps; not collective."""
        return self.problem.calendar.epochs(steps)

    def call_meeting(self) -> None:
        """Let votes of this rank reach all clients; not collective."""
        self.training.call_meeting()

    def asked(self, votes: list[int]) -> list[int]:
        """Return the sums of votes over the ranks of all groups."""
        return self.training.asked(votes)

    @property
    def shows_progress(self) -> bool:
        """Whether the rank shows the progress of the run: of several groups the first."""
        return self.training.everyone.rank == 0

    def close(self) -> None:
        """Write what is recorded of a stopped run, and release the trainer and the split layers."""
        self.recording.write()
        self.training.log_end(self.comm)
        super().close()
        if self.split:
            self.split.detach()

    # -- records ---------------------------------------------------------------------------------

    def report(self) -> None:
        """Write a row about the steps since the last row, and warn of a loss that has grown."""
        super().report()
        self._compare_with_first(self.meter.loss)

    def numbers(self) -> dict[str, float]:
        """Return numbers of the training, of trouble and of decompositions; not collective."""
        numbers = self.training.numbers()
        if self.votes.troubles:
            numbers["troubles"] = self.votes.troubles
        # Without a tolerance, the options say how many.
        if self.trainer.plan.strategy.refresh.tolerance and self.trainer.combined:
            numbers["decompositions"] = self.votes.decompositions()
        return numbers

    def test_due(self, steps: int) -> bool:
        """Return whether an epoch ends after so many steps, or the options ask for a test."""
        interval = self.options.eval_steps
        return self._ends_epoch(steps) or (interval is not None and steps % interval == 0)

    def _ends_epoch(self, steps: int) -> bool:
        epoch, index = self.problem.calendar.place(steps - 1)
        return index + 1 == self.problem.calendar.at(epoch).steps

    def test_after(self, steps: int) -> None:
        """Test the network at the end of an epoch, or within an epoch."""
        if self._ends_epoch(steps):
            self._end_epoch(self.problem.calendar.place(steps - 1)[0] + 1)
        else:
            self._test(f"step {steps}:")

    def _end_epoch(self, epoch: int) -> None:
        measure = self.problem.task.measure
        loss, *means = self.meter.everything()
        value = self.problem.task.value(means)
        self._compare_with_first(loss)
        numbers = {"train_loss": loss, f"train_{key_of(measure)}": value}
        text = f"epoch {epoch}: loss {loss:.4f}, train {measure} {measured(measure, value)},"
        if epoch % self.options.eval_every == 0 or epoch == self.options.epochs:
            self._test(text, **numbers)
        else:
            self.row(**numbers)
            log.info(f"{text} {self.speed.seconds:.1f} s")
        self.problem.batches.share_broken(self.comm)

    def _test(self, text: str, **numbers: float) -> None:
        """Test the network, add the test to a row and to a line, and keep the best weights."""
        problem, model = self.problem, self.model
        if self.average:
            model = problem.averaged_model(self.average)
        results, measure = problem.evaluate(model), problem.task.measure
        if not math.isfinite(results["loss"]):
            log.warning(
                "the test loss is %s after step %d; look at the test data, or try a smaller lr=%s",
                *(results["loss"], self.trainer.steps, self.options.rate),
            )
        self.row(**numbers, **{f"test_{key_of(name)}": value for name, value in results.items()})
        words = f"test {words_of(results, measure)}"
        log.info(f"{text} {words}, {self.speed.seconds:.1f} s")
        if self.best.follow(results[measure]) and self.options.keep_best and self.record:
            words += f" after step {self.trainer.steps}, the best so far"
            best.keep(model, Path(self.options.run_dir), words)
        if self.over:
            log.info("%d tests in a row are no better: the run ends early", self.best.since)

    @property
    def over(self) -> bool:
        """Whether so many tests in a row were no better that the run ends early."""
        patience = self.options.patience
        return patience is not None and self.best.since >= patience

    def _compare_with_first(self, loss: float) -> None:
        """Warn once of a loss that has grown. The rules of a run need no interval of the log."""
        if self.record and loss > GROWTH * self._first_loss > 0:
            log.warning(
                "the loss is %s after step %d, and was %s at first; try a smaller lr=%s",
                *(f"{loss:.3g}", self.trainer.steps),
                *(f"{self._first_loss:.3g}", self.options.rate),
            )
            self._first_loss = math.inf  # one warning is enough

    def summary(self) -> str:
        """Return a line about the network, the ranks and the steps; not collective."""
        options = self.options
        link = self.team.intercomm
        tensors = self.training.tensors_per_weight + (self.average is not None)
        size = carried.megabytes(self.trainer.plan, tensors)
        per_epoch = ", then ".join(str(span.steps) for span in self.problem.calendar.spans)
        use = "as servers" if self.training.alone else "for curvature"
        spared = f" and {link.remote_size} {use}" if link else ""
        return (
            f"{options.model} on {options.data.name} with {options.optimizer}; "
            f"ranks {self.comm.size}{spared}, batch {options.batch}, "
            f"steps {self.trainer.steps} to {self.steps}, {per_epoch} per epoch; "
            f"a checkpoint takes about {size:,.1f} MB"
        )

    # -- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the rank's share of the trainer's state, and the averaged weights."""
        average = self.average.state() if self.average else {}
        return super().state() | self.training.state() | average

    def about(self) -> dict[str, Any]:
        """Return the options of the run, its first start, and the checksums of the images."""
        about = settings.about_run(self.options, self.comm.size)
        about |= {"ranks": self.origin.ranks, "threads": torch.get_num_threads()}
        return about | self.problem.checksums

    def of_records(self) -> dict[str, Any]:
        """Return what is known of the best test; not collective."""
        return self.best.state()

    def load(self, checkpoint: mpikfac.checkpoint.Checkpoint) -> None:
        """Load a `state`; numbers that options name follow the options."""
        items: Mapping[str, Any] = checkpoint  # an item's name tells the type of the item
        carried.check_momentum(self.options, items)
        numbers = decays_and_momenta(self.trainer.optimizer)
        self.trainer.load_state_dict(checkpoint)
        follow_options(self.trainer.optimizer, numbers)
        self.training.load(items)
        if self.average and AVERAGED in items:
            self.average.load(items)
        elif self.average:
            log.info("the checkpoint has no average of the weights; the average begins now")
        if self.options.resume == "auto":
            self.best.load(items)

    def restore(self, checkpoint: mpikfac.checkpoint.Checkpoint | None) -> tuple[int, str]:
        """Restore the state, and say what another preconditioner takes over; see `Loop.restore`."""
        kept = super().restore(checkpoint)
        if checkpoint is not None and isinstance(self.trainer, mpikfac.KFAC):
            before = settings.saved_run(checkpoint).get("settings", {})
            now = settings.about_run(self.options, self.comm.size)["settings"]
            if before.get(settings.PRECONDITIONER, ...) not in (..., now[settings.PRECONDITIONER]):
                parts = carried.carried(self.comm, self.trainer, checkpoint)
                log.info(
                    "another preconditioner: goes on: %s; starts anew: %s; left out: %s", *parts
                )
        return kept
