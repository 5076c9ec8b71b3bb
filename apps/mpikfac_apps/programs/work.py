"""The base class of a small program's training: its trainer, step, test and state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mpikfac
from mpikfac_apps.programs.trainer import Trainer

NONE = torch.zeros(0)


class Taken(NamedTuple):
    """The results of a training step on one rank.

    Attributes:
        loss: the mean loss of the rank's examples before the step.
        examples: the number of the rank's examples.
        sums: each metric, summed over the rank's examples, `[measures]`.
    """

    loss: Tensor
    examples: int
    sums: Tensor = NONE


class Work(ABC):
    """The base class of a small program's training.

    The data of a step depend only on the step's number and the seed, so checkpoints contain no
    state of the data.

    Collective over: world, as are all methods.

    Attributes:
        trainer: the trainer of the network.
        steps_per_epoch: the number of steps in an epoch.
        examples_per_step: the number of examples in a step, across all ranks.
        measures: the names of the metrics in `Taken.sums`.
    """

    trainer: Trainer
    steps_per_epoch: int
    examples_per_step: int
    measures: Sequence[str] = ()

    @abstractmethod
    def step(self, step: int) -> Taken:
        """Compute gradients on the rank's examples, and step the trainer."""

    @abstractmethod
    def test(self) -> dict[str, float]:
        """Return the results of a test by name, the same on all ranks."""

    @abstractmethod
    def summary(self) -> str:
        """Summarise the network and the data; not collective."""

    def state(self) -> dict[str, Any]:
        """Return this rank's part of the state for a checkpoint; by default, the trainer's."""
        return self.trainer.state_dict()

    def load(self, checkpoint: mpikfac.checkpoint.Checkpoint) -> None:
        """Load the result of `state` from a checkpoint, on any number of ranks.

        Raises:
            ValueError: an item is missing or invalid.
        """
        self.trainer.load_state_dict(checkpoint)
