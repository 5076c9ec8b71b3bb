"""Gradients of split layers, of which each rank of a group makes a slice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from mpikfac.engine.gradients.slots import Slot
from mpikfac.engine.site import Site
from mpikfac.numerics import copy_all


@dataclass(frozen=True)
class Cut:
    """A slice of the gradient of a split layer, in both arenas.

    Attributes:
        member: the member of a group that makes the slice.
        packed: the slice in the arena of slices.
        whole: the slice in the arena of gradients.
    """

    member: int
    packed: Tensor
    whole: Tensor


class Slices:
    """The slices of gradients, in an arena in which only the slices travel."""

    def __init__(self, site: Site, model: nn.Module, slots: Iterable[Slot]) -> None:
        self.site = site
        self.arena = site.arena(site.plan.layouts.slices)
        self._to_reduce = site.plan.reduce_slices()
        self._cuts = list(self._found_cuts(model, slots))

    def reduce(self) -> None:
        """Average the slices, and put the slices of all ranks into the arena of gradients.

        Collective over: world.
        """
        if not self._to_reduce:
            return
        stage, own = "reduce gradients", self.site.plan.member
        with self.site.trace.stage(stage):
            copy_all((cut.packed, cut.whole) for cut in self._cuts if cut.member == own)
        self.site.grid.exchange(self._to_reduce, self.arena.flat)
        with self.site.trace.stage(stage):
            copy_all((cut.whole, cut.packed) for cut in self._cuts)

    def _found_cuts(self, model: nn.Module, slots: Iterable[Slot]) -> Iterator[Cut]:
        split = self.site.plan.in_slices
        ways = split.distribution.ways
        sliced = {parameter.name: parameter for parameter in split.parameters}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for slot in slots:
            for part, parameter in zip(slot.parts, slot.block.parameters):
                if (one := sliced.get(names.get(id(parameter), ""))) is None:
                    continue
                for member in range(ways):
                    (start, stop), (name, _) = one.span(member, ways), one.slice_of(member, ways)
                    whole = part.narrow(one.dim, start, stop - start)
                    yield Cut(member, self.arena[name], whole)
