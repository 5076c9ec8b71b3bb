"""A rank's replica of the model: when replicas differ or are merged, and what is saved."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

from torch import Tensor

from mpikfac.comm import Sender
from mpikfac.engine import Gradients, Item, OneModel, Site
from mpikfac.lab.local_sgd.config import Replicas
from mpikfac.lab.local_sgd.messages import PlannedCopies
from mpikfac.plan.names import (
    OF_COPY,
    OF_EXCHANGE,
    OF_KFAC,
    OF_LENGTHS,
    OF_OPTIMIZER_STATE,
    OWN_MOMENTUM,
    STEPS,
)

# State items that differ between replicas.
APART = (
    OF_OPTIMIZER_STATE,
    OF_EXCHANGE + OWN_MOMENTUM,
    *(OF_KFAC + kind for kind in OF_LENGTHS),
)


class OfCopy(Sender):
    """Average the gradients of the ranks that train the same replica, or of all ranks."""

    def __init__(self, sender: Sender, site: Site) -> None:
        super().__init__(sender.grid, sender.arena, sender.messages, sender.divided)
        copies = PlannedCopies(site.plan)
        self._in_node, self._node = copies.reduce_in_node(), copies.node

    def add_up(self, turn: int | None = None) -> None:
        """Average gradients over this replica's ranks in independent steps, else over all ranks.

        Collective over: the ranks of this replica, or world.
        """
        if not self.alone:
            super().add_up(turn)
        elif self._in_node:
            self.arena.flat /= self._node
            self.grid.exchange(self._in_node, self.arena.flat)


class Copies(OneModel):
    """Replicas of the model, which ranks train independently and merge every few steps.

    Running statistics and votes are averaged at each exchange.

    Attributes:
        differ: whether replicas can differ between ranks.
        heard: whether the latest votes come from all ranks.
    """

    def __init__(self, site: Site, gradients: Gradients) -> None:
        """Store the current weights, which are equal on all ranks, as an exchange's result."""
        super().__init__(site, gradients)
        self._sync = cast(Replicas, site.plan.strategy.sync)
        self._sender = gradients.sender = OfCopy(gradients.sender, site)
        self._votes = gradients.votes
        self.rule = self._sync.merge(site, gradients)
        self.differ = False
        self.keep()

    def keep(self) -> None:
        """Store the current weights, which are equal on all ranks, as an exchange's result."""
        self.rule.keep()
        self.differ, self.heard = False, True

    def report_loss(self, loss: float | Tensor) -> None:
        """Store the mean loss of the rank's shard of the batch, before the step."""
        self.rule.report_loss(loss)

    def begin_step(self, step: int) -> None:
        """Determine whether the rank takes the step independently.

        Raises:
            ValueError: the exchange rule needs a loss, but none was reported.
        """
        self._sender.alone = self._sync.alone(step)
        self.rule.begin_step(self._sender.alone)

    def before_update(self, step: int) -> None:
        """Modify the gradients of an independent step before the optimizer uses them."""
        if self._sync.alone(step):
            self.rule.before_step()

    def end_step(self, step: int) -> None:
        """Merge the replicas if an exchange is due right after `step`.

        Collective over: world if an exchange is due, otherwise none.

        Raises:
            UserError: a rank's weights are not finite.
        """
        if not self._sync.alone(step):
            self.keep()
            return
        self.differ, self.heard = True, self.rule.end_step(step)
        if self.heard:
            self._votes.heard = []  # these votes came from this rank alone
            self.differ = not self.rule.unites

    def check_combined(self) -> None:
        """Check that all ranks have the same model.

        Raises:
            ValueError: replicas can differ, so no replica is the state of the run.
        """
        if self.differ:
            raise ValueError(
                "ranks hold different replicas; call average_replicas() before state_dict()"
            )

    def average_replicas(self) -> None:
        """Make all replicas equal if they can differ.

        Collective over: world.

        Raises:
            UserError: a rank's weights are not finite.
        """
        if self.differ:
            self.rule.unite()
            self._votes.heard = []
            self.differ, self.heard = False, True

    # -- state -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Discard the state that is kept between exchanges."""
        self.rule.reset()

    def items(self) -> Iterator[Item]:
        """Yield the state kept between exchanges; only momentum differs between ranks."""
        for name, tensors in self.rule.kept.items():
            for block, tensor in tensors.items():
                yield Item(f"{OF_EXCHANGE}{name}/{block}", tensor)

    def complete(self, names: Collection[str]) -> set[str]:
        """Return the names of all items if `names` contains one of them; otherwise, none."""
        complete = super().complete(names)
        return complete if complete & set(names) else set()

    def in_state(self, names: Collection[str]) -> list[Item]:
        """Return the items whose names are in `names`."""
        return [item for item in self.items() if item.name in names]

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Load the items after `reset`; the current weights count as an exchange's result."""
        super().load_state_dict(state, names)
        self.keep()

    def shared(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the rank's part of the state, with per-rank names where replicas differ."""
        return of_copies(state, self.plan.rank)

    def of_rank(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state of this rank's replica, or of rank 0's replica if all are equal.

        A replica's state is that of the first rank that trains it, even if the saved run used a
        different number of ranks per node.
        """
        steps = state.get(STEPS)
        alone = isinstance(steps, int) and self._sync.alone(steps)
        return of_rank(state, PlannedCopies(self.plan).first if alone else 0)


class _Renamed(Mapping[str, Any]):
    """A view of a state under different names; like the state, it reads items on first access."""

    def __init__(self, state: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self._state, self._names = state, names

    def __getitem__(self, name: str) -> Any:
        return self._state[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def of_copies(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return a rank's part of the state; items that differ between replicas get per-rank names.

    Rank 0's items keep their names, and form the state of a single model.
    """
    prefix = OF_COPY.format(rank) if rank else ""
    return {prefix * name.startswith(APART) + name: value for name, value in state.items()}


def of_rank(state: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """Return the state of a rank's replica; rank 0's items replace items that are missing."""
    prefix = OF_COPY.format(rank)
    names = {name: name for name in state if not name.startswith(OF_COPY.partition("{")[0])}
    names |= {name.removeprefix(prefix): name for name in state if name.startswith(prefix)}
    return _Renamed(state, names)
