"""The network of a run: its initial weights, its optimizer, and its frozen and split layers."""

from __future__ import annotations

import mpikfac
from mpikfac_apps.problems import airbench
from mpikfac_apps.training.parts import trainers
from mpikfac_apps.training.parts.problem import Problem


class PreparedModel:
    """The network of a run, before it is passed to a trainer.

    Attributes:
        model: the network.
        optimizer: updates the network's weights.
        trace: times the stages of a step, including those of split layers.
    """

    def __init__(self, problem: Problem, starts: bool, epoch: int) -> None:
        """Create the network, and freeze the layers that are frozen in the given epoch.

        Collective over: problem.comm.

        Args:
            starts: whether the run starts at step 0; otherwise, weights come from a checkpoint.
        """
        self.trace = mpikfac.Trace()
        self.model, self.optimizer = trainers.make_model(problem, starts)
        self._frozen = trainers.frozen_layers(self.model, problem.options)
        self.begin_epoch(epoch)
        self._split = trainers.split_layers(problem, self.model, self.trace)

    def begin_epoch(self, epoch: int) -> None:
        """Freeze or unfreeze layers for an epoch; the change takes effect in the next step."""
        if isinstance(self.model, airbench.Airbench):
            self.model.begin_epoch(epoch)
        if self._frozen:
            self._frozen.begin_epoch(epoch)

    def detach(self) -> None:
        """Replace split layers by the original layers."""
        if self._split:
            self._split.detach()
