"""A small program: fit a line."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from mpikfac_apps.options.fields import bounded
from mpikfac_apps.programs.draws import generator
from mpikfac_apps.programs.options import ProgramOptions
from mpikfac_apps.programs.run import main
from mpikfac_apps.programs.trainer import trainer_of
from mpikfac_apps.programs.work import Taken, Work


@dataclass(frozen=True)
class LineOptions(ProgramOptions):
    """Fit a line.

    Args:
        points: the number of points of a step, over all ranks.
    """

    points: int = bounded(4, ">= 1")


class Line(Work):
    """Fit `y = 2 x - 1` by a linear layer, in two steps an epoch."""

    measures = ("error",)
    steps_per_epoch = 2

    def __init__(self, comm, options, device):
        self.comm, self.options = comm, options
        self.model = torch.nn.Linear(1, 1).to(device)
        with torch.no_grad():
            self.model.weight.fill_(0.5)
            self.model.bias.zero_()
        self.trainer = trainer_of(comm, self.model, options)
        self.examples_per_step = options.points

    def step(self, step):
        """Take a step on the rank's share of the points."""
        points = drawn(self.options.seed, step, self.options.points)
        inputs = torch.from_numpy(points).float()[self.comm.rank :: self.comm.size, None]
        self.trainer.optimizer.zero_grad()
        errors = self.model(inputs) - (2 * inputs - 1)
        loss = errors.square().mean()
        loss.backward()
        self.trainer.step()
        return Taken(loss.detach(), len(inputs), errors.detach().abs().sum()[None])

    def test(self):
        """Return the weight."""
        return {"weight": self.model.weight.item()}

    def summary(self):
        """Return a name."""
        return "a line"


def drawn(seed, step, count):
    """Return the points of a step."""
    return torch.rand(count, generator=generator(seed, step)).double().numpy()


if __name__ == "__main__":
    sys.exit(main("line.py", LineOptions, Line))
