"""The training run of `mpikfac train`: its parts, its steps on images, its tests and its state."""

from __future__ import annotations

import logging
import math
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
from mpikfac_apps.place import RankPlace
from mpikfac_apps.running import run_directory
from mpikfac_apps.running.loop import Loop
from mpikfac_apps.running.metrics import Meter
from mpikfac_apps.text import key_of, measured
from mpikfac_apps.training import batches, carried, settings
from mpikfac_apps.training.augmentation.mixes import Mixes
from mpikfac_apps.training.parts import groups, trainers
from mpikfac_apps.training.parts.model import PreparedModel
from mpikfac_apps.training.parts.optimizers import (
    AVERAGED,
    Average,
    decays_and_momenta,
    follow_options,
)
from mpikfac_apps.training.parts.problem import Problem, words_of
from mpikfac_apps.training.restart import find_restart
from mpikfac_apps.training.testing import best
from mpikfac_apps.training.timetable import Timetable
from mpikfac_apps.training.traced_steps import Recording

GROWTH = 1000.0  # multiple of the first loss above which training is considered diverging

log = logging.getLogger("mpikfac.train")


class Run(Loop):
    """A training run: the problem, the training, the steps on images, and the state.

    Collective over: world, as are all methods.

    Args:
        world: the ranks of all groups; each group trains its own network.
        team: the ranks that train one network together.

    Attributes:
        begun_on: the number of ranks at the run's first start.
        problem: the data, the loss and the test.
        timetable: determines what is due after each step.
        prepared: the network, with its optimizer, and its frozen and split layers.
        model: the network alone.
        training: the trainer, and methods that depend on the kind of training.
        average: the average of the network's weights, if tests use it; otherwise None.
        best: the best test result so far.
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
        restart = find_restart(world, comm, options)  # not stored: it holds the checkpoint's bytes
        options, self.begun_on = restart.options, restart.ranks
        self.team = team
        self.problem = problem = Problem(comm, options, place.device, restart.images)
        with mpikfac.comm.together(comm, "options"):
            check_pairs(options, comm.size)  # a restart can have a different number of ranks
        self.mixes = Mixes.of(options.data, problem.classes, options.seed)
        self.timetable = Timetable(problem.calendar, options, self.begun_on)
        epoch, _ = self.timetable.place(restart.last_step)
        self.prepared = PreparedModel(problem, restart.checkpoint is None, epoch)
        self.model = self.prepared.model
        made = self.model, self.prepared.optimizer, self.prepared.trace
        self.training = trainers.make_training(problem, team, world, *made)
        trainers.give_feedback(problem, self.training.trainer)
        self.average = Average(self.model, options.ema_decay) if options.ema_decay else None
        self.best = best.Best(problem.task)
        self._first_loss = math.nan  # this rank's first loss after this start
        numbers = problem.task.numbers(problem.classes)  # values from which the metric is computed
        super().__init__(
            *(comm, options, guard, self.training.trainer),
            steps=self.timetable.steps,
            meter=Meter(comm, place.device, self.training.alone, numbers),
            lr=self.timetable.rate,
            rate=options.rate,
        )
        kept = self.restore(restart.checkpoint)
        restart.report_carried(comm, self.trainer)
        self.open_record(early_log, place, resolved(options, comm.size), *kept)
        self.recording = Recording(comm, options, self.training, self.steps)

    # -- training --------------------------------------------------------------------------------

    def take(self, step: int) -> None:
        """Take a step; average the replicas if a test or a meeting of clients is due after it."""
        epoch, index = self.timetable.place(step)
        self.prepared.begin_epoch(epoch)
        with self.speed.step(self.timetable.batch(step)), self.recording.step(step):
            with self.trainer.trace.stage("data"):
                images, labels = self.problem.batches.get(epoch, index)
                if self.mixes:
                    images, labels = self.mixes(epoch, index, images, labels)
            self.step(step, images, labels)
            meets = self.training.alone and self.timetable.meeting_due(step + 1)
            if meets or self.test_due(step + 1):
                self.trainer.average_replicas()  # tests and checkpoints need a single model
        if step + 1 == self.recording.chosen.stop:
            self.recording.write()

    def step(self, step: int, images: Tensor, labels: Tensor) -> None:
        """Take a training step on the rank's shard, in several passes if the options request it."""
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
                self.trainer.accumulate()
        mean_loss = torch.stack(losses).mean()
        if math.isnan(self._first_loss):
            self._first_loss = mean_loss.item()
        self.training.step(images, labels, mean_loss)
        self.votes.note(mean_loss)
        if self.average:
            self.average.add(self.model)
        self.training.adapt(mean_loss, lambda: self._loss_after(step, first, parts))

    def _loss_after(self, step: int, first: int, parts: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Return the loss on a step's images after the step, without changing the buffers."""
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
        """Set torch's seed for part `number` of a batch; checkpoints need no generator state."""
        torch.manual_seed(batches.mixed(self.options.seed, step, number))

    def _pass(self, images: Tensor, labels: Tensor, share: float) -> Tensor:
        """Run a forward and a backward pass; return the mean loss. `share` scales the objective."""
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

    def epochs(self, steps: int) -> float:
        """Return the number of epochs after `steps` steps; not collective."""
        return self.timetable.epochs(steps)

    def call_meeting(self) -> None:
        """Send this rank's votes to all clients; not collective."""
        self.training.call_meeting()

    def asked(self, votes: list[int]) -> list[int]:
        """Return `votes`, the sums over this group's ranks, summed over all groups."""
        return self.training.asked(votes)

    @property
    def shows_progress(self) -> bool:
        """Whether this rank shows the progress of the run; only rank 0 of the first group does."""
        return self.training.everyone.rank == 0

    def close(self) -> None:
        """Write recorded steps that are not written yet; release the trainer and split layers."""
        self.recording.write()
        self.training.log_end(self.comm)
        super().close()
        self.prepared.detach()

    # -- records ---------------------------------------------------------------------------------

    def report(self) -> None:
        """Write metrics of the steps since the last report; warn if the loss has grown."""
        super().report()
        self._compare_with_first(self.meter.loss)

    def numbers(self) -> dict[str, float]:
        """Return values for metrics.jsonl that depend on the kind of training; not collective.

        Include the number of non-finite values, if any, and the number of decompositions, if they
        depend on a tolerance.
        """
        numbers = self.training.numbers()
        if self.votes.troubles:
            numbers["troubles"] = self.votes.troubles
        # Without a tolerance, the number of decompositions follows from the options.
        if self.trainer.plan.strategy.refresh.tolerance and self.trainer.combined:
            numbers["decompositions"] = self.votes.decompositions()
        return numbers

    def test_due(self, steps: int) -> bool:
        """Return whether an epoch ends after `steps` steps, or the options request a test."""
        return self.timetable.test_due(steps)

    def test_after(self, steps: int) -> None:
        """Test the network at the end of an epoch, or within an epoch."""
        epochs = self.timetable.ended_epoch(steps)
        if epochs is None:
            self._test(f"step {steps}:")
        else:
            self._end_epoch(epochs)

    def _end_epoch(self, epoch: int) -> None:
        measure = self.problem.task.measure
        loss, *means = self.meter.everything()
        value = self.problem.task.value(means)
        self._compare_with_first(loss)
        numbers = {"train_loss": loss, f"train_{key_of(measure)}": value}
        text = f"epoch {epoch}: loss {loss:.4f}, train {measure} {measured(measure, value)},"
        if self.timetable.test_of_epoch_due(epoch):
            self._test(text, **numbers)
        else:
            self.row(**numbers)
            log.info(f"{text} {self.speed.seconds:.1f} s")
        self.problem.batches.share_broken(self.comm)

    def _test(self, text: str, **numbers: float) -> None:
        """Test the network, write results to metrics.jsonl and the log; keep the best weights."""
        problem, model = self.problem, self.model
        if self.average:
            model = problem.averaged_model(self.average)
        results, measure = problem.evaluate(model), problem.task.measure
        if not math.isfinite(results["loss"]):
            log.warning(
                "the test loss is %s after step %d; check the test data, or try an lr below %s",
                *(results["loss"], self.trainer.steps, self.options.rate),
            )
        self.row(**numbers, **{f"test_{key_of(name)}": value for name, value in results.items()})
        words = f"test {words_of(results, measure)}"
        log.info(f"{text} {words}, {self.speed.seconds:.1f} s")
        if self.best.follow(results[measure]) and self.options.keep_best and self.record:
            words += f" after step {self.trainer.steps}, the best so far"
            best.keep(model, Path(self.options.run_dir), words)
        if self.over:
            log.info(
                "%d tests in a row brought no improvement: the run ends early", self.best.since
            )

    @property
    def over(self) -> bool:
        """Whether the run ends early, because `patience` tests in a row brought no improvement."""
        patience = self.options.patience
        return patience is not None and self.best.since >= patience

    def _compare_with_first(self, loss: float) -> None:
        """Warn once if the loss is more than `GROWTH` times the first loss."""
        if self.record and loss > GROWTH * self._first_loss > 0:
            log.warning(
                "the loss is %s after step %d, but was %s at first; try an lr below %s",
                *(f"{loss:.3g}", self.trainer.steps),
                *(f"{self._first_loss:.3g}", self.options.rate),
            )
            self._first_loss = math.inf  # one warning is enough

    def summary(self) -> str:
        """Return a line that describes the network, the ranks and the steps; not collective."""
        options = self.options
        link = self.team.intercomm
        tensors = self.training.tensors_per_weight + (self.average is not None)
        size = carried.megabytes(self.trainer.plan, tensors)
        use = "as servers" if self.training.alone else "for curvature"
        spared = f" and {link.remote_size} {use}" if link else ""
        return (
            f"{options.model} on {options.data.name} with {options.optimizer}; "
            f"ranks {self.comm.size}{spared}, batch {options.batch}, "
            f"steps {self.trainer.steps} to {self.steps}, {self.timetable.words()} per epoch; "
            f"a checkpoint takes about {size:,.1f} MB"
        )

    # -- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return this rank's items of a checkpoint, including any averaged weights."""
        average = self.average.state() if self.average else {}
        return super().state() | self.training.state() | average

    def about(self) -> dict[str, Any]:
        """Return the options, the ranks of the first start, the threads, and image checksums."""
        about = settings.about_run(self.options, self.comm.size)
        about |= {"ranks": self.begun_on, "threads": torch.get_num_threads()}
        return about | self.problem.checksums

    def of_records(self) -> dict[str, Any]:
        """Return the items of a checkpoint about the best test; not collective."""
        return self.best.state()

    def load(self, checkpoint: mpikfac.checkpoint.Checkpoint) -> None:
        """Load the result of `state`, but keep the weight decay and momentum of the options."""
        items: Mapping[str, Any] = checkpoint  # an item's name determines its type
        carried.check_momentum(self.options, items)
        numbers = decays_and_momenta(self.trainer.optimizer)
        self.trainer.load_state_dict(checkpoint)
        follow_options(self.trainer.optimizer, numbers)
        self.training.load(items)
        if self.average and AVERAGED in items:
            self.average.load(items)
        elif self.average:
            log.info("the checkpoint has no averaged weights; averaging starts now")
        if self.options.resume == "auto":
            self.best.load(items)
