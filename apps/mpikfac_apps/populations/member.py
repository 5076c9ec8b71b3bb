"""A member of a population: a network, its trainer, and its hyperparameters."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import mpikfac
from mpikfac_apps.options.strategy import learning_rate
from mpikfac_apps.populations.options import PopulationOptions
from mpikfac_apps.training import batches
from mpikfac_apps.training.parts import trainers
from mpikfac_apps.training.parts.problem import Problem

NUMBER = "number/"
LOST = "lost"

log = logging.getLogger("mpikfac.train")


class Searched:
    """A hyperparameter that the search changes; for the library, it is a schedule over steps."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, step: int) -> float:
        return self.value

    def __repr__(self) -> str:
        """Format the current value briefly."""
        return f"{self.value:g}"


def searched(options: PopulationOptions) -> dict[str, float]:
    """Return the initial values of the hyperparameters that the population searches, by name."""
    train, names = options.train, options.population.numbers
    values = {"lr": train.rate}
    if train.optimizer == "kfac":
        values["damping"] = float(train.kfac.damping.number)  # type: ignore[arg-type]
    return {name: value for name, value in values.items() if names is None or name in names}


def in_words(numbers: Mapping[str, float]) -> str:
    """Format the values of hyperparameters, such as "lr 0.01, damping 0.1"."""
    return ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())


class Member:
    """A network that trains with its own hyperparameters.

    Collective over: the ranks of the member, as are all methods.

    Args:
        problem: the data, the loss and the test; all members share the data.
        number: the number of the member; the seed of the initial weights is `seed + number`.
        numbers: the initial values of the searched hyperparameters.

    Attributes:
        lost: whether the training of this member has failed since the last selection.
        model: the network.
    """

    def __init__(
        self, problem: Problem, number: int, numbers: Mapping[str, float], trace: mpikfac.Trace
    ) -> None:
        self.comm = problem.comm
        self.problem = copy.copy(problem)
        self.lost = False
        self._numbers = {name: Searched(value) for name, value in numbers.items()}
        options, self.seed = problem.options, problem.options.seed + number
        options = dataclasses.replace(options, lr=numbers.get("lr", options.rate))
        if "damping" in numbers:
            kind = "relative" if options.kfac.damping.is_relative else "value"
            damping = mpikfac.Damping(**{kind: self._numbers["damping"]})
            options = dataclasses.replace(
                options, kfac=dataclasses.replace(options.kfac, damping=damping)
            )
        self.problem.options = dataclasses.replace(options, seed=self.seed)
        self.model, optimizer = trainers.make_model(self.problem, starts=True)
        team = mpikfac.comm.SplitComm(self.comm)
        made = trainers.training_of_group(self.problem, team, self.model, optimizer, trace)
        self.training, self.trainer = made, made.trainer
        self._rate = learning_rate(options, problem.calendar.at(0).steps, self.comm.size)

    @property
    def numbers(self) -> dict[str, float]:
        """The searched hyperparameters by name; not collective."""
        return {name: number.value for name, number in self._numbers.items()}

    @property
    def layers(self) -> list[str]:
        """The names of the modules with parameters; not collective."""
        modules = self.model.named_modules()
        return [
            name for name, module in modules if next(module.parameters(False), None) is not None
        ]

    def lr(self, step: int) -> float:
        """Return the learning rate in a step: the schedule, scaled by the searched `lr`."""
        rate, first = self._rate(self.problem.calendar.clock(step)), self.problem.options.rate
        return rate * self.numbers.get("lr", first) / first

    def step(self, step: int, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Take a step, unless the member is lost; return the loss and the sum of the metric.

        A member is lost if its loss is not finite, or its trainer fails.
        """
        problem, trainer = self.problem, self.trainer
        for group in trainer.optimizer.param_groups:
            group["lr"] = self.lr(step)
        torch.manual_seed(batches.mixed(self.seed, step, self.comm.rank))
        trainer.optimizer.zero_grad()
        outputs, targets = problem.outputs(self.model, images, labels)
        loss = problem.loss(outputs, targets)
        self.lost = self.lost or not all(self.comm.allgather(bool(loss.isfinite())))
        if not self.lost:
            self.training.record(outputs)
            loss.backward()
            try:
                self.training.step(images, labels, loss.detach())
            except mpikfac.UserError as error:
                if self.comm.size > 1:  # others may be blocked in a collective
                    raise
                log.warning(
                    "a member has stopped training; the next selection replaces it: %s", error
                )
                self.lost = True
        with torch.no_grad():
            return loss.detach(), problem.task.measured(outputs, targets)

    def fitness(self) -> dict[str, float]:
        """Return loss and metrics on the held-out images; a lost member's loss is infinite."""
        results = self.problem.evaluate(self.model)
        return results | ({"loss": torch.inf} if self.lost else {})

    def weights(self) -> Tensor:
        """Return all parameters of the network as one vector; not collective."""
        return torch.cat([each.detach().flatten() for each in self.model.parameters()])

    def state(self) -> dict[str, Any]:
        """Return this rank's part of the state of this member; not collective."""
        numbers = {NUMBER + name: value for name, value in self.numbers.items()}
        return self.trainer.state_dict() | numbers | {LOST: int(self.lost)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state`, on any number of ranks.

        Raises:
            UserError: an item is missing or invalid.
        """
        self.trainer.load_state_dict(state)
        self.follow({name: state[NUMBER + name] for name in self._numbers})
        self.lost = bool(state[LOST])

    def follow(self, numbers: Mapping[str, float]) -> None:
        """Use the hyperparameters `numbers` from the next step on; not collective."""
        for name, value in numbers.items():
            self._numbers[name].value = value
