"""What a small program trains: the trainer, a step, a test and the state."""

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
    """A step that a rank has taken.

    Attributes:
        loss: the mean loss of the rank's examples before the step.
        examples: the number of the rank's examples.
        sums: each measure, summed over the examples, `[measures]`.
    """

    loss: Tensor
    examples: int
    sums: Tensor = NONE


class Work(ABC):
    """What a small program trains.

    The data of a step depend only on its number and the seed, so a restart needs no data state.

    Collective over: world, as are all methods.

    Attributes:
        trainer: the trainer.
        steps_per_epoch: the number of steps in an epoch.
        examples_per_step: the number of examples in a step, on all ranks together.
        measures: the names of the measures in `Taken.sums`.
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
        """Return the rank's part of the state."""
        return self.trainer.state_dict()

    def load(self, checkpoint: mpikfac.checkpoint.Checkpoint) -> None:
        """Load a `state`, on any number of ranks.

        Raises:
            ValueError: an item is missing or invalid.
        """
        self.trainer.load_state_dict(checkpoint)
