"""The kinds of training, each with the methods that a run calls around its trainer's steps.

A run calls the same methods for all kinds. Where a kind has nothing to do, it inherits a method
that does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

import mpikfac
from mpikfac.lab import LSGD
from mpikfac.trace import Event
from mpikfac_apps.running.metrics import mean_staleness, staleness_line, staleness_of_all
from mpikfac_apps.running.votes import AnyTrainer
from mpikfac_apps.training.parts.problem import Problem

log = logging.getLogger("mpikfac.train")


class Training:
    """Training with averaged gradients and a first-order optimizer; the base class of all kinds.

    Collective over: world, unless a docstring says otherwise.

    Args:
        problem: the data, the loss and the options of the run.

    Attributes:
        trainer: the trainer of this rank's network.
        everyone: the ranks of the run, in all groups.
        alone: whether this rank's client steps independently of other clients.
        tensors_per_weight: the number of values that a checkpoint stores per weight, such as the
            weight and its momentum.
    """

    alone = False
    tensors_per_weight = 2

    def __init__(self, problem: Problem, trainer: AnyTrainer) -> None:
        self.problem, self.trainer, self.everyone = problem, trainer, problem.comm
        self._hears_loss = isinstance(trainer.plan.strategy.sync, LSGD)

    def record(self, outputs: Tensor) -> None:
        """Process the outputs of a forward pass before the backward pass; not collective."""

    def objective(
        self,
        images: Tensor,
        outputs: Tensor,
        loss: Tensor,
    ) -> Tensor:
        """Return the objective whose gradient a step uses, given the loss; not collective."""
        return loss

    def step(self, images: Tensor, labels: Tensor, mean_loss: Tensor) -> None:
        """Step the trainer after all forward and backward passes.

        Args:
            images: the rank's shard of the batch, not normalised, as `Batches.get` returns it.
            mean_loss: the mean of the losses of all passes.
        """
        if self._hears_loss:
            self.trainer.exchange.report_loss(mean_loss)
        self.trainer.step()

    def adapt(self, loss: Tensor, loss_after: Callable[[], float]) -> None:
        """Adapt the damping to the change of the loss in the step, if an adaptation is due.

        Args:
            loss: the mean loss before the step.
            loss_after: returns the mean loss after the step, on the same images.
        """

    def numbers(self) -> dict[str, float]:
        """Return the metrics of this kind of training, for metrics.jsonl; not collective."""
        return {}

    def asked(self, votes: list[int]) -> list[int]:
        """Return the votes summed over all ranks of the run.

        Args:
            votes: the votes summed over the ranks that train one model together.
        """
        return votes

    def call_meeting(self) -> None:
        """Send this rank's votes to all clients; not collective."""

    def events(self) -> list[Event]:
        """Return the recorded events, with the run's names of communicators; not collective."""
        return self.trainer.trace.events

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores in addition to the trainer's state; not collective."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state` from the items of a checkpoint."""

    def log_end(self, comm: mpikfac.comm.Comm) -> None:
        """Log metrics of the whole run that only this kind of training has.

        Collective over: comm.
        """


class KfacTraining(Training):
    """Training with K-FAC."""

    trainer: mpikfac.KFAC

    def __init__(self, problem: Problem, trainer: mpikfac.KFAC) -> None:
        super().__init__(problem, trainer)
        # Grafting to Adam's step length also stores averages of squared gradients.
        self.tensors_per_weight = Training.tensors_per_weight + trainer.settings.grafting.by_adam

    def record(self, outputs: Tensor) -> None:
        """Pass the outputs to the trainer, which estimates the factors from them."""
        self.trainer.record(outputs, self.problem.task.loss_name)

    def adapt(self, loss: Tensor, loss_after: Callable[[], float]) -> None:
        """Adapt the damping with the Levenberg-Marquardt rule, every `damping_adapt` steps."""
        every_steps = self.problem.options.kfac.damping_adapt
        if every_steps and self.trainer.steps % every_steps == 0:
            after = loss_after()
            self.trainer.update_damping(loss.item(), after)

    def numbers(self) -> dict[str, float]:
        """Return the factor by which the KL clip scaled the directions of the last step."""
        return {"kl_scale": self.trainer.kl_scale.item()}


class QuadraticTraining(KfacTraining):
    """Training with K-FAC, where a quadratic model of the loss sets step length and momentum."""

    def step(self, images: Tensor, labels: Tensor, mean_loss: Tensor) -> None:
        """Step the trainer; the quadratic model uses the same images as the factors."""
        problem = self.problem
        subsample = problem.options.kfac.estimator.subsample or 1
        inputs = problem.normalise(images[::subsample])
        targets = problem.task.targets(inputs, labels[::subsample])
        self.trainer.grafting.set_batch(inputs, lambda outputs: problem.loss(outputs, targets))
        super().step(images, labels, mean_loss)


class ClientTraining(Training):
    """Training by clients that send updates to parameter servers."""

    trainer: mpikfac.lab.AsyncSGD
    alone = True

    def numbers(self) -> dict[str, float]:
        """Return the mean staleness of the client's updates."""
        return {"staleness": mean_staleness(self.trainer.staleness)}

    def call_meeting(self) -> None:
        """Request that all clients meet after one of the following steps."""
        self.trainer.call()

    def events(self) -> list[Event]:
        """Return the recorded events, with "world" renamed to "row".

        A client's ranks form one row of the grid of the run's ranks.
        """
        events = self.trainer.trace.events
        return [event._replace(over=event.over.replace("world", "row", 1)) for event in events]

    def log_end(self, comm: mpikfac.comm.Comm) -> None:
        """Log the staleness of each client's updates."""
        log.info("%s", staleness_line(staleness_of_all(self.trainer, comm)))


class GroupTraining(Training):
    """Training in groups of ranks that learn from each other's predictions.

    Args:
        training: the training of this rank's group.
        codistillation: how the groups learn from each other.
        everyone: the ranks of all groups.
    """

    def __init__(
        self,
        training: Training,
        codistillation: mpikfac.lab.Codistillation,
        everyone: mpikfac.comm.Comm,
    ) -> None:
        super().__init__(training.problem, training.trainer)
        self.training, self.codistillation, self.everyone = training, codistillation, everyone
        self.tensors_per_weight = training.tensors_per_weight

    def record(self, outputs: Tensor) -> None:
        """Pass the outputs to the training of this rank's group."""
        self.training.record(outputs)

    def objective(self, images: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
        """Return the loss plus the codistillation term for the other groups' predictions."""
        return loss + self.codistillation.term(self.problem.normalise(images), outputs)

    def step(self, images: Tensor, labels: Tensor, mean_loss: Tensor) -> None:
        """Step the trainer of this group; swap weights with the other groups if a swap is due."""
        self.training.step(images, labels, mean_loss)
        self.codistillation.end_step()

    def numbers(self) -> dict[str, float]:
        """Return the metrics of the training of this rank's group."""
        return self.training.numbers()

    def asked(self, votes: list[int]) -> list[int]:
        """Return the votes summed over all groups, because groups stop and save together."""
        return [round(vote) for vote in mpikfac.comm.summed(self.everyone, votes)]

    def state(self) -> dict[str, Any]:
        """Return the weights of the other groups at the last swap."""
        return self.codistillation.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the weights that the other groups had at the last swap."""
        self.codistillation.load_state_dict(state)
