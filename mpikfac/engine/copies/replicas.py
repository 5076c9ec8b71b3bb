"""The rank's copy of the model: when copies differ, when they are merged, and what is saved."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from mpikfac.engine.copies.merges import merge_of
from mpikfac.engine.gradients import Gradients
from mpikfac.engine.site import Part, Site, take_over

KEPT = "exchange/"
RULE = "exchange/rule/{} of {}/"  # a rank, all ranks
OWN = "copies/{}/"  # of a rank
# Items that differ between the copies of ranks.
APART = ("optimizer/state/", "kfac/graft/", "kfac/momentum/")


class Replicas(Part):
    """The copies of the model, which ranks step alone and merge every few steps.

    Running statistics and votes become means at each exchange.

    Attributes:
        differ: whether copies may differ between ranks.
        heard: whether votes are of all ranks.
    """

    differ = False
    heard = True

    def __init__(self, site: Site, gradients: Gradients) -> None:
        """Take the present weights, equal on all ranks, as the weights of the last exchange."""
        self.site, self.exchange = site, site.plan.strategy.exchange
        self.rule = merge_of(site, gradients)
        self._votes = gradients.votes
        self._combiner, rank = site.grid.combiner, site.plan.rank
        self._combiner.prepare(site.plan.combined, rank, site.dtype)
        self.keep()

    def keep(self) -> None:
        """Keep the present weights, equal on all ranks, as the weights of the last exchange."""
        if self.exchange.of_copies:
            self.rule.keep()
        self.differ, self.heard = False, True

    def part(self) -> None:
        """Note that the rank's copy and votes are of this rank alone from now on."""
        self.differ, self.heard = True, False

    def begin_step(self, step: int, loss: float | Tensor | None) -> bool:
        """Take the mean loss of a step; return whether the rank takes the step alone.

        Raises:
            ValueError: the rule needs a loss.
        """
        alone = self.exchange.alone(step)
        if alone:
            self.rule.hear(loss)
        return alone

    def before_update(self, step: int) -> None:
        """Change the gradients of a step that the rank takes alone, before the optimizer."""
        if self.exchange.alone(step):
            self.rule.before_step()

    def end_step(self, step: int) -> None:
        """Merge the copies if an exchange is due right after `step`.

        Collective over: world if due, else none.

        Raises:
            UserError: a rank's weights are not finite.
        """
        if not self.exchange.of_copies:
            return
        if not self.exchange.alone(step):
            self.keep()
            return
        self.differ, self.heard = True, self.rule.end_step(step)
        if self.heard:
            self._votes.heard = []  # heard of the rank alone
            self.differ = not self.rule.unites

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
        """Make all copies equal, if copies may differ.

        Collective over: world.

        Raises:
            UserError: a rank's weights are not finite.
        """
        if self.differ:
            self.rule.unite()
            self._votes.heard = []
            self.differ, self.heard = False, True

    def take_over(self, older: Replicas) -> None:
        """Take what exchanges keep of blocks that keep name and shape.

        Collective over: world.
        """
        for name, arena in self.rule.kept.items():
            take_over(older.rule.kept[name], arena, self.site.grid)

    # -- state -----------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget what exchanges keep, and the memory of a robust rule."""
        self.rule.forget()
        self._combiner.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return what exchanges keep, and the rank's memory of a robust rule."""
        return self._kept() | self._memory(self.site.plan.rank)

    def _kept(self) -> dict[str, Any]:
        """Return what exchanges keep, alike on all ranks."""
        kept = self.rule.kept.items()
        return {f"{KEPT}{name}/{n}": block for name, arena in kept for n, block in arena.items()}

    def _memory(self, rank: int) -> dict[str, Any]:
        """Return the memory of a robust rule, with the names of a rank."""
        own = RULE.format(rank, self.site.plan.grid.count)
        return {
            f"{own}{stage}/{name}": kept
            for stage, rule in self._combiner.rules.items()
            for name, kept in rule.kept.items()
        }

    def complete(self, names: Collection[str]) -> set[str]:
        """Return all names of what is kept, or of the memory, of which `names` hold a part."""
        ranks = range(self.site.plan.grid.count)
        memory = {name for rank in ranks for name in self._memory(rank)}
        wholes = [whole for whole in (self._kept().keys(), memory) if whole & set(names)]
        return set().union(*wholes)

    def copy_in(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state of the rank's copy of the model; of rank 0's copy if copies are alike.

        The state of a copy is the state of the first of the ranks that step the copy, also after a
        run with other nodes.
        """
        steps = state.get("trainer/steps")
        alone = isinstance(steps, int) and self.exchange.alone(steps)
        return of_rank(state, self.site.plan.first if alone else 0)

    def needed(self, names: Collection[str]) -> dict[str, Any]:
        """Return the items among `names`."""
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
