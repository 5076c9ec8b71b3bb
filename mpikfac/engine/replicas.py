"""The rank's copy of the model, and the step that combines the copies of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from mpikfac.engine.gradients import Gradients, share_out, slots_in
from mpikfac.engine.site import Part, Site, take_over
from mpikfac.errors import UserError
from mpikfac.numerics import Arena, all_finite, copy_all, nesterov
from mpikfac.plan import lay_out

MOMENTUM = "exchange/momentum/"
RULE = "exchange/rule/{} of {}/"  # a rank, all ranks
OWN = "copies/{}/"  # of a rank
APART = ("optimizer/state/", "kfac/graft/")  # items that differ between the copies of ranks


class Replicas(Part):
    """The copies of the model, which ranks step alone and combine every few steps.

    The mean of all copies takes the place of every copy; with an outer step, the mean change since
    the last exchange is the gradient of the step. Running statistics and votes become means.

    Attributes:
        differ: whether copies may differ between ranks.
    """

    differ = False

    def __init__(self, site: Site, gradients: Gradients) -> None:
        """Take the present weights, equal on all ranks, as the weights of the last exchange."""
        self.site, self.exchange = site, site.plan.strategy.exchange
        self.outer = self.exchange.outer
        layout, nothing = site.plan.layouts.copies, lay_out([])
        self.arena = site.arena(layout)
        self._before = site.arena(layout if site.plan.exchanges_changes else nothing)
        self._momentum = site.arena(layout if self.outer.outer_momentum else nothing)
        self._slots = slots_in(self.arena, gradients.blocks, site)
        trained = [slot.block for slot in self._slots if slot.block.parameters]
        self._trained = [block.name for block in trained]
        self._last = slots_in(self._before, trained, site)
        self._messages = site.plan.exchange_weights()
        self._votes = gradients.votes
        self._combiner, rank = site.grid.combiner, site.plan.rank
        self._combiner.prepare(site.plan.combined, rank, site.dtype)
        self.keep()

    def keep(self) -> None:
        """Keep the present weights as the weights of the last exchange."""
        copy_all(one for s in self._last for one in s.block.values_to(s.parts))
        self.differ = False

    def end_step(self, step: int) -> None:
        """Combine the copies if an exchange is due right after `step`.

        Collective over: world if due, else none.

        Raises:
            UserError: a rank's weights are not finite.
        """
        if not self.exchange.of_copies:
            return
        self.differ |= self.exchange.alone(step)
        if self.exchange.due(step):
            self.combine()
        elif not self.differ:
            self.keep()

    def check_combined(self) -> None:
        """Return if all ranks hold the same model.

        Raises:
            ValueError: copies may differ, and no copy is the state of the run.
        """
        if self.differ:
            raise ValueError(
                "ranks hold different copies of the model; call combine() before state_dict()"
            )

    def combine(self) -> None:
        """Combine the copies of all ranks, if copies may differ.

        Collective over: world.

        Raises:
            UserError: a rank's weights are not finite.
        """
        if not self.differ:
            return
        flat = self.arena.flat
        copy_all(one for s in self._slots for one in s.block.values_to(s.parts))
        if self._before:
            flat -= self._before.flat
        share_out(self.arena, self.site.plan)
        self.site.grid.exchange(self._messages, flat)
        if not all_finite(flat):
            raise UserError(
                "the weights of a rank are not finite; try a smaller learning rate, or exchange "
                "weights more often"
            )
        if self._before:
            self._step_from_before()
        copy_all(one for s in self._slots for one in s.block.values_from(s.parts))
        self._votes.heard = []  # heard of the rank alone
        self.keep()

    def _step_from_before(self) -> None:
        """Turn the mean change into new weights by the outer step."""
        changes = self._of_trained(self.arena)
        if self._momentum:
            nesterov(changes, self._of_trained(self._momentum), self.outer.outer_momentum)
        torch._foreach_mul_(changes, self.outer.outer_lr)
        self.arena.flat += self._before.flat

    def _of_trained(self, arena: Arena) -> list[torch.Tensor]:
        return [arena[name] for name in self._trained]

    def take_over(self, older: Replicas) -> None:
        """Take the momentum of blocks that keep name and shape.

        Collective over: world.
        """
        take_over(older._momentum, self._momentum, self.site.grid)

    # -- state -----------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget the momentum of the outer step, and the memory of a robust rule."""
        self._momentum.flat.zero_()
        self._combiner.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the momentum of the outer step, and the rank's memory of a robust rule."""
        momentum = {MOMENTUM + name: block for name, block in self._momentum.items()}
        return momentum | self._memory(self.site.plan.rank)

    def _memory(self, rank: int) -> dict[str, Any]:
        """Return the memory of a robust rule, with the names of a rank."""
        own = RULE.format(rank, self.site.plan.grid.count)
        return {
            f"{own}{stage}/{name}": kept
            for stage, rule in self._combiner.rules.items()
            for name, kept in rule.kept.items()
        }

    def complete(self, names: Collection[str]) -> set[str]:
        """Return all names of the momentum, or of the memory, of which `names` hold a part."""
        ranks = range(self.site.plan.grid.count)
        momentum = {MOMENTUM + name for name in self._momentum}
        memory = {name for rank in ranks for name in self._memory(rank)}
        wholes = [whole for whole in (momentum, memory) if whole & set(names)]
        return set().union(*wholes)

    def needed(self, names: Collection[str]) -> dict[str, Any]:
        """Return the items of the momentum and of the memory among `names`."""
        found = self.state_dict()
        return {name: block for name, block in found.items() if name in names}

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Load the items, after `forget`; the present weights are those of the last exchange."""
        for name, block in self.state_dict().items():
            if name in state:
                block.copy_(state[name])
        self.keep()


class _Renamed(Mapping[str, Any]):
    """A state under other names; items are read on first access, as in the state."""

    def __init__(self, state: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self._state, self._names = state, names

    def __getitem__(self, name: str) -> Any:
        return self._state[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def of_copies(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return a rank's share of the state, with names of the rank for what differs between copies.

    Items of rank 0 keep their names, and are the items of a state of a single model.
    """
    own = OWN.format(rank) if rank else ""
    return {own * name.startswith(APART) + name: value for name, value in state.items()}


def of_rank(state: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """Return the state of the rank's copy of the model; of rank 0's copy if the rank has none."""
    own = OWN.format(rank)
    names = {name: name for name in state if not name.startswith(OWN.partition("{")[0])}
    names |= {name.removeprefix(own): name for name in state if name.startswith(own)}
    return _Renamed(state, names)
