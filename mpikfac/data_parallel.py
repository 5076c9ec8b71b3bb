"""Data parallelism: ranks start from one model, average gradients, and step the model alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from mpikfac.comm import Comm, Grid, agree, broadcast, together
from mpikfac.engine import (
    Gradients,
    Nonfinite,
    Site,
    common_type,
    describe,
    load_model_state,
    missing_state,
    model_state,
    needed_state,
)
from mpikfac.layers import Votes, find_uncovered
from mpikfac.plan import Strategy, plan_for
from mpikfac.trace import Trace


class DataParallel:
    """First-order training: average gradients over ranks and step the optimizer.

    The baseline for comparisons with K-FAC, with the same arena and collectives.

    Args:
        parts: see `Strategy`.

    Collective over: world. The model becomes rank 0's.

    Raises:
        UserError: ranks disagree on the model.

    Attributes:
        steps: completed steps.
        votes: see `KFAC`.
        nonfinite: see `KFAC`.
        intact: see `KFAC`.
        trace: seconds and bytes of every stage.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        comm: Comm,
        parts: int | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.trace = trace or Trace()
        self.steps, self.intact = 0, True
        self.nonfinite = Nonfinite(comm.rank)
        blocks = find_uncovered(model)
        dtype, device = common_type(blocks)
        blocks.append(votes := Votes(dtype, device))
        self.votes = votes.tensor
        shapes = [(block.name, tuple(block.tensor.shape)) for block in blocks]
        strategy = Strategy.mem_opt(parts=parts)
        self.plan = plan_for([], comm.size, strategy, shapes, itemsize=dtype.itemsize)
        agree(comm, describe(model, optimizer) | {"plan": self.plan.digest()})
        broadcast(comm, [*model.parameters(), *model.buffers()])
        grid = Grid(comm, 1, self.trace)
        site = Site(self.plan.of(comm.rank), grid, self.trace, dtype, device, self.nonfinite)
        self.gradients = Gradients(site, [], blocks)
        self._stepped = self.gradients.stepped(model)

    def step(self, scaler: GradScaler | None = None) -> None:
        """Go from local gradients to identical new weights on every rank.

        Collective over: world.

        Args:
            scaler: see `KFAC.step`.

        Raises:
            ValueError: see `KFAC.step`.
        """
        scaler = self.gradients.checked(scaler)
        if not self.gradients.parts:
            self.gradients.read()
        if scaler is None:
            self.gradients.reduce()
        elif not self.gradients.reduce_scaled(scaler):
            self.gradients.skip()
            self.steps += 1
            return
        self.gradients.check(self.steps)
        self.gradients.write(self.gradients.slots)
        self.intact = False
        self.gradients.update(self.optimizer)
        self.steps, self.intact = self.steps + 1, True

    def collect(self) -> None:
        """Take a part of the rank's share of a batch; see `KFAC.collect`."""
        self.gradients.collect()

    def discard(self) -> None:
        """Forget the passes since the last step, of a batch without a step."""
        self.gradients.discard()

    @property
    def communicators(self) -> list[Comm]:
        """All communicators that steps use."""
        return self.gradients.grid.communicators

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's share of the state, by name: model, optimizer and number of steps."""
        state = model_state(self.model, self.optimizer, self._stepped)
        return state | {"trainer/steps": self.steps}

    def missing(self, names: Collection[str]) -> set[str]:
        """Return the names of a complete state that `names` lack."""
        return missing_state(self.model, names)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the rank's part of `state`; on all ranks, or on none.

        Collective over: world.

        Raises:
            UserError: see `KFAC.load_state_dict`.
        """
        with together(self.gradients.grid.world, "loading state", untrusted=True):
            found = needed_state(self.model, self.optimizer, self._stepped, state)
        load_model_state(self.model, self.optimizer, self._stepped, found)
        self.gradients.keep()
        self.gradients.discard()
        self.steps, self.intact = int(found["trainer/steps"]), True
