"""Train once: build the parts, loop over the steps, write records and checkpoints."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mpikfac
from mpikfac_apps.guard.guard import Guard
from mpikfac_apps.options.conflicts import check_pairs
from mpikfac_apps.options.documents import flattened
from mpikfac_apps.options.options import Options
from mpikfac_apps.options.parse import resolved
from mpikfac_apps.options.strategy import learning_rate
from mpikfac_apps.place import RankPlace, environment
from mpikfac_apps.problems import airbench
from mpikfac_apps.text import key_of, measured
from mpikfac_apps.tracking.start import Start
from mpikfac_apps.tracking.tracker import Trackers
from mpikfac_apps.training import batches, checkpoints, run_directory, settings
from mpikfac_apps.training.augmentation.mixes import Mixes
from mpikfac_apps.training.metrics import Meter, Speed
from mpikfac_apps.training.parts import trainers
from mpikfac_apps.training.parts.optimizers import (
    AVERAGED,
    Average,
    decays_and_momenta,
    follow_options,
)
from mpikfac_apps.training.parts.problem import Problem, words_of
from mpikfac_apps.training.testing import best
from mpikfac_apps.training.traced_steps import Recording
from mpikfac_apps.training.votes import StepVotes

GROWTH = 1000.0  # times the first loss: the training diverges

log = logging.getLogger("mpikfac.train")


class Run:
    """A training run: the problem, the training, the loop over the steps, and the checkpoints.

    Collective over: world, as are all methods.

    Attributes:
        origin: the first start of the run.
        problem: the data, the loss and the test.
        frozen: the layers that are frozen in the first epochs, if the options name epochs.
        split: the layers that groups of ranks share, if the options say so.
        lr: returns the learning rate of a step.
        training: the trainer, and what the run asks of the kind of trainer.
        trainer: the trainer of `training`.
        average: the average of the network's weights, if tests take averages.
        record: the run directory, on rank 0.
    """

    def __init__(
        self,
        comm: mpikfac.comm.Comm,
        team: mpikfac.comm.Team,
        options: Options,
        guard: Guard,
        place: RankPlace,
    ) -> None:
        self.comm, self.team, self.guard = comm, team, guard
        early_log = run_directory.start_log() if comm.rank == 0 else None
        checkpoint = checkpoints.open_checkpoint(comm, options)
        self.origin, options = settings.origin_of(comm, options, checkpoint)
        self.options = options = dataclasses.replace(options, batch_per_rank=None)
        self.problem = problem = Problem(comm, options, place.device, self.origin.images)
        with mpikfac.comm.together(comm, "options"):
            check_pairs(options, comm.size)  # a restart may have another number of ranks
        self.mixes = Mixes.of(options.data, problem.classes, options.seed)
        self.model, self.optimizer = trainers.make_model(problem, starts=checkpoint is None)
        self.frozen = trainers.frozen_layers(self.model, options)
        done = 0 if checkpoint is None else checkpoint.step
        self._begin_epoch(problem.calendar.place(max(0, done - 1))[0])  # as at the last step
        trace = mpikfac.Trace()
        self.split = trainers.split_layers(problem, self.model, trace)
        rate = learning_rate(options, problem.calendar.at(0).steps, self.origin.ranks)
        self.lr: Callable[[int], float] = lambda step: rate(problem.calendar.clock(step))
        self.training = trainers.make_training(problem, team, self.model, self.optimizer, trace)
        self.trainer = self.training.trainer
        trainers.give_feedback(problem, self.trainer)
        self.average = Average(self.model, options.average) if options.average else None
        guard.stage = lambda: self.trainer.trace.current
        self.saver = checkpoints.Saver(comm, checkpoints.root(options), guard)
        if restarts := os.environ.get("SLURM_RESTART_COUNT"):
            log.info("restart %s of job %s", restarts, os.environ.get("SLURM_JOB_ID"))
        self.steps = problem.calendar.first(options.epochs)
        if options.max_steps:
            self.steps = min(self.steps, options.max_steps)
        self.meter = Meter(comm, place.device, self.training.alone)
        self.speed = Speed(self.trainer.trace)
        self.best = best.Best(problem.task)
        self._first_loss = math.nan  # of this rank, since this start
        self.votes = StepVotes(comm, options, guard, self.saver, self.training)
        metrics = self._restore(checkpoint) if checkpoint is not None else (0, "")
        self.record = self._open_record(early_log, place, *metrics)

    def _open_record(
        self, early_log: MemoryHandler | None, place: RankPlace, kept_bytes: int, waiting: str
    ) -> run_directory.Record | None:
        """Open the run directory on rank 0; see `Record`."""
        comm, options = self.comm, self.options
        with mpikfac.comm.together(comm, f"run_dir={options.run_dir}"):
            if early_log is None:
                return None
            config, about = resolved(options, comm.size), environment(place.hosts, place.device)
            start = Start(Path(options.run_dir), self.trainer.steps, flattened(config))
            trackers = Trackers(options.trackers, start)
            return run_directory.Record(
                options, config, about, early_log, trackers, kept_bytes, waiting
            )

    def _begin_epoch(self, epoch: int) -> None:
        """Freeze or unfreeze layers for an epoch; the trainer takes up changes at the next step."""
        if isinstance(self.model, airbench.Airbench):
            self.model.begin_epoch(epoch)
        if self.frozen:
            self.frozen.begin_epoch(epoch)

    # -- training --------------------------------------------------------------------------------

    def train(self) -> int:
        """Take all remaining steps, or fewer after a request to stop; return the exit code."""
        first, calendar = self.trainer.steps, self.problem.calendar
        log.info("%s", self._summary())
        recording = Recording(self.comm, self.options, self.training, self.steps)
        progress = None
        if self.record:
            progress = run_directory.RunProgress(first, self.steps, calendar.epochs)
        stop = False
        for step in range(first, first if self.impatient else self.steps):
            epoch, index = calendar.place(step)
            span = calendar.at(epoch)
            ends, tests = index + 1 == span.steps, self._test_due(step + 1)
            self._begin_epoch(epoch)
            self.guard.enter("step", step)
            self.votes.cast()
            with self.speed.step(span.batch), recording.step(step):
                with self.trainer.trace.stage("data"):
                    images, labels = self.problem.batches.get(epoch, index)
                    if self.mixes:
                        images, labels = self.mixes(epoch, index, images, labels)
                self.step(step, images, labels)
                if ends or tests or self._meets(step + 1):
                    self.trainer.combine()  # a test is of one model, and so is a checkpoint
            if step + 1 == recording.chosen.stop:
                recording.write()
            if progress:
                progress.advance(self._describe)
            if (step + 1) % self.options.log_every == 0:
                self._report()
            if ends or tests:
                self.guard.enter("evaluation", step)
                if ends:
                    self._end_epoch(epoch + 1)
                else:
                    self._test(f"step {step + 1}:")
            if (stop := self.votes.follow(self._save)) or self.impatient:
                break
        recording.write()  # if the run stopped before the last traced step
        if progress:
            progress.close()
        return self._end(stop)

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
                self.optimizer.zero_grad()
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

    def set_rate(self, step: int) -> None:
        """Set the learning rate of a step in the optimizer."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr(step)

    def _pass(self, images: Tensor, labels: Tensor, share: float) -> Tensor:
        """Return the mean loss after a forward and backward pass; gradients take the share."""
        problem, stage = self.problem, self.trainer.trace.stage
        with stage("forward"):
            outputs, targets = problem.outputs(self.model, images, labels)
            loss = problem.loss(outputs, targets)
        with stage("backward"):
            self.training.record(outputs)
            (loss * share).backward()
        with torch.no_grad():
            self.meter.add(loss, problem.task.measured(outputs, targets), len(outputs))
        return loss.detach()

    def _meets(self, steps: int) -> bool:
        """Return whether asynchronous clients meet after so many steps, for a checkpoint."""
        interval = self.options.checkpoint_every
        return interval is not None and steps % interval == 0 and self.training.alone

    def _test_due(self, steps: int) -> bool:
        """Return whether the options ask for a test after so many steps, also within an epoch."""
        interval = self.options.eval_steps
        return interval is not None and steps % interval == 0

    def _end(self, stopped: bool) -> int:
        """Write the last checkpoint, and return the exit code."""
        self.trainer.combine()
        steps, seconds = self.trainer.steps, self.speed.seconds
        stopped = stopped and steps < self.steps
        if not stopped and self.votes.troubled():
            raise mpikfac.UserError(
                f"a number of step {steps}, the last step, was not finite, so no checkpoint is "
                f"written; try a smaller lr={self.options.rate}"
            )
        self.guard.requests.ignore_signals()
        self._save(last=True)
        self.guard.enter("end", steps)
        self.saver.close()
        self.training.log_end(self.comm)
        self.trainer.close()
        if self.split:
            self.split.detach()
        if self.comm.rank == 0:
            mpikfac.checkpoint.note_end(checkpoints.root(self.options))
        if self.record:
            self.record.close()
        self.comm.Barrier()  # while the watchdog runs: MPI would wait for a stuck rank for ever
        if not stopped:
            log.info("complete after %d steps, %.1f s", steps, seconds)
            return 0
        why = self.guard.requests.reason or "another rank was asked to"
        code = self.options.stop_code
        # Open MPI reports every code but 0 as a failure.
        note = f"; code {code} is wanted, whatever the launcher says below" if code else ""
        log.info("stopped after %d steps (%s); --resume auto goes on%s", steps, why, note)
        return code

    # -- records ---------------------------------------------------------------------------------

    def _report(self) -> None:
        loss = self.meter.recent()
        self._compare_with_first(loss)
        speed, communication = self.speed.rates()
        self.speed.mark()
        numbers = self.training.numbers()
        if self.votes.troubles:
            numbers["troubles"] = self.votes.troubles
        # Without a tolerance, the options say how many.
        if self.trainer.plan.strategy.refresh.tolerance and self.trainer.combined:
            numbers["decompositions"] = self.votes.decompositions()
        self._row(loss=loss, images_per_second=speed, communication=communication, **numbers)

    def _end_epoch(self, epoch: int) -> None:
        measure = self.problem.task.measure
        loss, value = self.meter.everything()
        self._compare_with_first(loss)
        numbers = {"train_loss": loss, f"train_{key_of(measure)}": value}
        text = f"epoch {epoch}: loss {loss:.4f}, train {measure} {measured(measure, value)},"
        if epoch % self.options.eval_every == 0 or epoch == self.options.epochs:
            self._test(text, **numbers)
        else:
            self._row(**numbers)
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
        self._row(**numbers, **{f"test_{key_of(name)}": value for name, value in results.items()})
        words = f"test {words_of(results, measure)}"
        log.info(f"{text} {words}, {self.speed.seconds:.1f} s")
        if self.best.follow(results[measure]) and self.options.keep_best and self.record:
            words += f" after step {self.trainer.steps}, the best so far"
            best.keep(model, Path(self.options.run_dir), words)
        if self.impatient:
            log.info("%d tests in a row are no better: the run ends early", self.best.since)

    @property
    def impatient(self) -> bool:
        """Whether so many tests in a row were no better that the run ends early."""
        patience = self.options.patience
        return patience is not None and self.best.since >= patience

    def _row(self, **values: float) -> None:
        if self.record:
            done = self.trainer.steps
            epoch, lr = self.problem.calendar.epochs(done), self.lr(done - 1)
            self.record.row(done, epoch=epoch, seconds=self.speed.seconds, lr=lr, **values)

    def _compare_with_first(self, loss: float) -> None:
        """Warn once of a loss that has grown. The rules of a run need no interval of the log."""
        if self.record and loss > GROWTH * self._first_loss > 0:
            log.warning(
                "the loss is %s after step %d, and was %s at first; try a smaller lr=%s",
                *(f"{loss:.3g}", self.trainer.steps),
                *(f"{self._first_loss:.3g}", self.options.rate),
            )
            self._first_loss = math.inf  # one warning is enough

    def _describe(self) -> str:
        speed, communication = self.speed.rates()
        loss = "" if math.isnan(self.meter.loss) else f"loss {self.meter.loss:.4f}, "
        return f"{loss}{speed:,.0f} images/s, {communication:.0%} communication"

    def _summary(self) -> str:
        options = self.options
        link = self.team.link
        tensors = self.training.tensors_per_weight + (self.average is not None)
        size = checkpoints.megabytes(self.trainer.plan, tensors)
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

    def _save(self, last: bool = False) -> None:
        self.guard.enter("checkpoint", self.trainer.steps)
        self.trainer.combine()  # a checkpoint is of one model
        items = self.state() | self.meter.state()
        self.saver.save(items | self.about(), self.trainer.steps, last)

    def state(self) -> dict[str, Any]:
        """Return the rank's share of the trainer's state, and the averaged weights."""
        return self.trainer.state_dict() | (self.average.state() if self.average else {})

    def about(self) -> dict[str, Any]:
        """Return rank 0's own items for a checkpoint."""
        if self.comm.rank != 0:
            return {}
        lost = run_directory.state_of_a_lost_rank
        metrics = self.record.state() if self.record else lost(self.options.run_dir)
        about = settings.about_run(self.options, self.comm.size)
        about |= {"ranks": self.origin.ranks, "threads": torch.get_num_threads()}
        about |= self.problem.checksums
        return {
            "run/data": json.dumps(about),
            "run/seconds": self.speed.seconds,
            **self.best.state(),
            **metrics,
        }

    def _restore(self, checkpoint: mpikfac.checkpoint.Checkpoint) -> tuple[int, str]:
        """Restore the state from the checkpoint, and return what to keep of metrics.jsonl."""
        metrics = 0, ""
        items: Mapping[str, Any] = checkpoint  # an item's name tells the type of the item
        doing = f"reading checkpoint {checkpoint.path}"
        with mpikfac.comm.together(self.comm, doing, untrusted=True):
            checkpoints.check_momentum(self.options, items)
            numbers = decays_and_momenta(self.optimizer)
            self.trainer.load_state_dict(checkpoint)
            follow_options(self.optimizer, numbers)
            limit = "max_steps" if self.steps == self.options.max_steps else "epochs"
            checkpoints.check_steps(self.trainer.steps, checkpoint.step, self.steps, limit)
            if self.average and AVERAGED in items:
                self.average.load(items)
            elif self.average:
                log.info("the checkpoint has no average of the weights; the average begins now")
            self.meter.load(items["run/counted"], items["run/reported"])
            self.speed.seconds, size, waiting = checkpoints.records(checkpoint)
            self.speed.mark()
            if self.options.resume == "auto":
                metrics = size, waiting
                self.best.load(items)
                self.saver.step = checkpoint.step
                if self.comm.rank == 0:
                    mpikfac.checkpoint.note_start(checkpoint)
        log.info("going on from %s", checkpoint.path)
        before = settings.saved_run(checkpoint).get("settings", {}).get("kfac.solver")
        if isinstance(self.trainer, mpikfac.KFAC) and before != self.trainer.plan.solver:
            parts = checkpoints.carried(self.comm, self.trainer, items)
            log.info("another solver: goes on: %s; starts anew: %s; left out: %s", *parts)
        return metrics
