"""The memory of robust rules, which depend on the ranks' earlier steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mpikfac.engine import Item, Part, Site
from mpikfac.plan import robust
from mpikfac.plan.names import OF_RULE


class RuleMemory(Part):
    """The memory of a rank's robust rules, which aggregate its shard of every rank's vector."""

    PREFIX = ""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._combiner = site.grid.combiner
        self._combiner.prepare(robust.dealt(site.plan), site.plan.rank, site.dtype)

    def reset(self) -> None:
        """Discard the memory of earlier steps."""
        self._combiner.reset()

    def items(self) -> Iterator[Item]:
        """Yield the items of all ranks' memories; only this rank's items have tensors."""
        ranks = self.plan.grid.count
        for rank in range(ranks):
            for stage, rule in self._combiner.rules.items():
                for name, tensor in rule.memory.items():
                    of_rank = tensor if rank == self.plan.rank else None
                    yield Item(f"{OF_RULE.format(rank, ranks)}{stage}/{name}", of_rank)

    def complete(self, names: Collection[str]) -> set[str]:
        """Return the names of all items if `names` contains one of them; otherwise, none."""
        complete = super().complete(names)
        return complete if complete & set(names) else set()

    def in_state(self, names: Collection[str]) -> list[Item]:
        """Return all items if `names` contains all; otherwise none, so rules start from scratch."""
        items = list(self.items())
        return items if all(item.name in names for item in items) else []
