"""Average the gradients of split layers, of which each rank of a group computes a slice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from mpikfac.comm import Sender
from mpikfac.engine import Gradients, Part, Site, Slot
from mpikfac.numerics import copy_all
from mpikfac.plan import names, split_layers


@dataclass(frozen=True)
class Cut:
    """A slice of a split layer's gradient, in the arena of slices and in that of gradients.

    Attributes:
        member: the group member that computes the slice.
        packed: the slice in the arena of slices.
        whole: the slice in the arena of gradients.
    """

    member: int
    packed: Tensor
    whole: Tensor


class SlicedSender(Sender):
    """Average gradients, sending only slices for split layers."""

    def __init__(self, sender: Sender, site: Site, model: nn.Module, slots: Iterable[Slot]) -> None:
        super().__init__(sender.grid, sender.arena, sender.messages, sender.divided)
        self._site, self._slices = site, site.arena(split_layers.layout(site.plan))
        self._of_slices = split_layers.reduce_slices(site.plan)
        self._cuts = list(self._cuts_of(model, slots))

    def add_up(self, turn: int | None = None) -> None:
        """Average the arena over ranks, and write all members' averaged slices to it.

        Collective over: world.
        """
        super().add_up(turn)
        if not self._of_slices:
            return
        stage, member = names.REDUCE_GRADIENTS, split_layers.member(self._site.plan)
        with self._site.trace.stage(stage):
            copy_all((cut.packed, cut.whole) for cut in self._cuts if cut.member == member)
        self._site.grid.exchange(self._of_slices, self._slices.flat)
        with self._site.trace.stage(stage):
            copy_all((cut.whole, cut.packed) for cut in self._cuts)

    def _cuts_of(self, model: nn.Module, slots: Iterable[Slot]) -> Iterator[Cut]:
        split = split_layers.in_slices(self._site.plan)
        tp_size = split.tp_plan.tp_size
        sliced = {parameter.name: parameter for parameter in split.parameters}
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        for slot in slots:
            for part, parameter in zip(slot.parts, slot.block.parameters):
                if (cut := sliced.get(name_of.get(id(parameter), ""))) is None:
                    continue
                for member in range(tp_size):
                    (start, stop), (name, _) = (
                        cut.span(member, tp_size),
                        cut.slice_of(member, tp_size),
                    )
                    slice_of_part = part.narrow(cut.dim, start, stop - start)
                    yield Cut(member, self._slices[name], slice_of_part)


class SlicedGradients(Part):
    """Send the gradients of split layers as slices, one computed by each rank of a group."""

    def __init__(self, site: Site, gradients: Gradients, model: nn.Module) -> None:
        super().__init__(site)
        gradients.sender = SlicedSender(gradients.sender, site, model, gradients.slots)
