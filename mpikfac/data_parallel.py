"""Data parallelism: ranks start from one model, average gradients, and step the model alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from mpikfac.comm import Comm, Grid, Team, agree, broadcast, together
from mpikfac.engine import (
    Flags,
    Gradients,
    Nonfinite,
    Replicas,
    Site,
    check_loaded_momentum,
    check_momentum,
    check_optimizer,
    check_synchronous,
    common_type,
    describe,
    fitting,
    group_settings,
    hand_over_state,
    load_model_state,
    missing_state,
    model_state,
    needed_state,
    of_copies,
    reduce_scaled,
    taking_up,
    usable_scaler,
)
from mpikfac.hybrid import split_of
from mpikfac.layers import Other, Votes, find_uncovered, take_model
from mpikfac.plan import Strategy, plan_for
from mpikfac.trace import Trace


class DataParallel:
    """First-order training: average gradients over ranks and step the optimizer.

    The baseline for comparisons with K-FAC, with the same arena and collectives.

    Args:
        strategy: what ranks exchange, and how: `exchange`, `transport` and `update` of a strategy;
            choices about factors and decompositions have no effect. None: ranks average gradients
            by a single sum.

    Collective over: world. The model becomes rank 0's.

    Raises:
        UserError: ranks disagree on the model.

    Attributes:
        steps: completed steps.
        combined: see `KFAC`.
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
        strategy: Strategy | None = None,
        trace: Trace | None = None,
    ) -> None:
        check_optimizer(optimizer, model)
        if strategy is not None:
            check_synchronous(strategy)
        self.model, self._optimizer = model, optimizer
        self.trace = trace or Trace()
        self.steps, self.intact = 0, True
        self._comm, self._strategy = Team(comm).trains, (strategy or Strategy()).first_order()
        self.nonfinite = Nonfinite(comm.rank)
        self._votes: Votes | None = None
        self._connect(*self._prepare())
        take_model(model, self)

    def _prepare(self) -> tuple[list[Other], torch.dtype, torch.device]:
        """Make the plan; return what is trained, the dtype to compute in, and the device.

        Raises:
            ValueError: a choice or a parameter cannot work.
        """
        model, comm = self.model, self._comm
        blocks = find_uncovered(model)
        dtype, device = common_type(blocks)
        self._votes = self._votes or Votes(dtype, device)
        blocks.append(self._votes)
        self.votes = self._votes.tensor
        shapes = [(block.name, tuple(block.tensor.shape)) for block in blocks]
        means = [block.name for block in blocks if not block.parameters]
        size = dtype.itemsize
        split = split_of(model, blocks, comm.size)
        self.plan = plan_for(
            [], comm.size, self._strategy, shapes, itemsize=size, means=means, split=split
        )
        check_momentum(self.optimizer, self._strategy)
        return blocks, dtype, device

    def _connect(self, blocks: list[Other], dtype: torch.dtype, device: torch.device) -> None:
        """Compare ranks, make the communicators, and build the parts of a step.

        Collective over: world.

        Raises:
            UserError: ranks disagree.
        """
        model, comm = self.model, self._comm
        agree(comm, describe(model, self.optimizer) | {"plan": self.plan.digest()})
        broadcast(comm, [*model.parameters(), *model.buffers()])
        per_node = self._strategy.transport.ranks_per_node
        self.grid = Grid(comm, 1, self.trace, per_node, self.plan.split.distribution)
        site = Site(
            self.plan.of(comm.rank), self.grid, self.trace, dtype, device, self.nonfinite, Flags()
        )
        self.gradients = Gradients(site, model, [], blocks)
        self.replicas = Replicas(site, self.gradients)
        self._stepped = self.gradients.stepped(model)

    @property
    def combined(self) -> bool:
        """Whether votes are of all ranks; see `KFAC`."""
        return self.replicas.heard

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that was given; another optimizer needs another `DataParallel`."""
        return self._optimizer

    def step(
        self,
        scaler: GradScaler | None = None,
        *,
        max_norm: float | None = None,
        examples: int | None = None,
        mean_loss: float | Tensor | None = None,
    ) -> None:
        """Go from local gradients to identical new weights on every rank.

        Changes of the trained parameters are taken up as by `KFAC.step`.

        Collective over: world.

        Args:
            scaler: see `KFAC.step`.
            max_norm: see `KFAC.step`.
            examples: see `KFAC.step`.
            mean_loss: see `KFAC.step`.

        Raises:
            ValueError: see `KFAC.step`.
            UserError: see `KFAC.step`.
        """
        check_momentum(self.optimizer, self._strategy)
        self.gradients.grid.check_open()
        scaler = usable_scaler(self.gradients, scaler, self.optimizer)
        alone = self.replicas.begin_step(self.steps, mean_loss)
        if not self.gradients.parts:
            self.gradients.look(self._in_force())
            self.gradients.read()
        if examples is not None:
            self.gradients.weigh(examples)
        if scaler is None:
            self.gradients.reduce(alone)
        elif not reduce_scaled(self.gradients, scaler, alone=alone):
            self._skip()
            self._end()
            return
        self.gradients.check(self.steps)
        if max_norm is not None:
            self.gradients.clip(max_norm)
        self.intact = False
        self._update()
        self._end()

    def _update(self) -> None:
        """Step the model by the averaged gradients."""
        self.gradients.write(self.gradients.slots)
        self.replicas.before_update(self.steps)
        self.gradients.update(self.optimizer)

    def _skip(self) -> None:
        """Leave the model as before a batch whose gradients are not finite."""
        self.gradients.skip()

    def _end(self) -> None:
        """End the step, and follow votes if the votes are of all ranks."""
        self.replicas.end_step(self.steps)
        self.steps, self.intact = self.steps + 1, True
        if self.combined:
            self._follow_votes()

    def combine(self) -> None:
        """Combine the copies of the model now, if copies may differ; see `KFAC.combine`."""
        self.replicas.combine()

    def _in_force(self) -> dict[str, object]:
        """Return the numbers of the step, which are equal on all ranks."""
        return {"steps": self.steps, "optimizer": list(group_settings(self.optimizer))}

    def _follow_votes(self) -> None:
        """Take up a change of the model on any rank; see `KFAC.step`."""
        changed, alike = self.gradients.votes.read()
        if not alike:
            agree(self._comm, self._in_force())
        if changed:
            self._take_up_change()

    def _take_up_change(self) -> None:
        """Take up other trained parameters of the model."""
        self.combine()
        replicas, stepped = self.replicas, self._stepped
        with taking_up():
            prepared = self._prepare()
        self.detach()
        self.grid.free()
        self._connect(*prepared)
        self.replicas.take_over(replicas)
        hand_over_state(self.grid.world, self.model, self.optimizer, stepped, self._stepped)

    def detach(self) -> None:
        """Remove the hooks; the model is as before, except for the weights."""
        self.gradients.detach()

    def close(self) -> None:
        """Free the communicators, and remove the hooks; no step may follow.

        Collective over: world.
        """
        self.detach()
        self.gradients.grid.free()

    def collect(self) -> None:
        """Take a part of the rank's share of a batch; see `KFAC.collect`."""
        self.gradients.look(self._in_force())
        self.gradients.collect()

    def discard(self) -> None:
        """Forget the passes since the last step; see `KFAC.discard`."""
        self.gradients.check_unsent()
        self.gradients.discard()

    @property
    def communicators(self) -> list[Comm]:
        """All communicators that steps use."""
        return self.gradients.grid.communicators

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's share of the state, by name: model, optimizer and number of steps.

        Losses of encoding are dropped, as in a restart.
        """
        self.replicas.check_combined()
        self.gradients.grid.forget()
        state = model_state(self.model, self.optimizer, self._stepped)
        state |= {"trainer/steps": self.steps} | self.replicas.state_dict()
        return of_copies(state, self._comm.rank) if self._strategy.exchange.of_copies else state

    def missing(self, names: Collection[str]) -> set[str]:
        """Return the names of a complete state that `names` lack."""
        return missing_state(self.model, names) | self.replicas.complete(names).difference(names)

    def _needed(self, state: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Return the state of the rank's copy of the model, and the items of it to load.

        Raises:
            ValueError: an item is missing or has another form, or the momentum is not the run's.
        """
        state = self.replicas.copy_in(state)
        found = needed_state(self.model, self.optimizer, self._stepped, state)
        check_loaded_momentum(found, state, self._strategy)
        return state, found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the rank's part of `state`; on all ranks, or on none.

        Collective over: world.

        Raises:
            UserError: see `KFAC.load_state_dict`.
        """
        with together(self.gradients.grid.world, "loading state", untrusted=True):
            state, found = self._needed(state)
            kept = fitting(state, self.replicas.needed(state.keys()), rounded=True)
        self.gradients.recall()
        load_model_state(self.model, self.optimizer, self._stepped, found)
        self.gradients.keep()
        self.gradients.discard()
        self.gradients.grid.forget()
        self.replicas.forget()
        self.replicas.load_state_dict(kept, kept.keys())
        self.steps, self.intact = int(found["trainer/steps"]), True
