"""Parts of a step with a state: a part lists its items once, and the rest follows from the list.

The state of a run is the union of the shares of all ranks. From the list of items follow what a
rank saves, which names a complete state has, what a rank needs of a state, and what a rank takes
over from the ranks of a run before.

Two methods undo, here and in all other classes of a step: `abort_batch` drops a batch that no step
takes, and `reset` restores the initial state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from mpikfac.comm import Comm, handed_over
from mpikfac.engine.site import Site
from mpikfac.layers import Layer
from mpikfac.plan.names import OF_KFAC


class Item(NamedTuple):
    """A tensor of the state of all ranks.

    Attributes:
        name: as in the state, without the part's `PREFIX`.
        tensor: the rank's tensor; None if only other ranks have the tensor.
        saved: whether the rank saves and loads its tensor.
    """

    name: str
    tensor: Tensor | None
    saved: bool = True


class Part:
    """A part of a step on a rank. A part without a state inherits everything.

    Attributes:
        PREFIX: of the names of the part's items in a state.
        MARK: the item that tells whether a state has the part; "" if all states have the part.
    """

    PREFIX = OF_KFAC
    MARK = ""

    def __init__(self, site: Site) -> None:
        self.site, self.plan = site, site.plan

    def reset(self) -> None:
        """Restore the initial state, as before the load of a state, without a batch under way."""

    def abort_batch(self) -> None:
        """Drop the passes since the last step.

        Collective over: world with `overlap`, to finish the batch's messages; else none.
        """

    # -- what a part declares --------------------------------------------------------------------

    def items(self) -> Iterable[Item]:
        """Return the tensors of the state of all ranks, in the same order on all ranks."""
        return ()

    def marks(self) -> dict[str, Any]:
        """Return the numbers and texts that the state has beside the items."""
        return {}

    def in_state(self, names: Collection[str]) -> Iterable[Item]:
        """Return the items to load from a state with `names`.

        Raises:
            ValueError: the state lacks an item that no run can start anew.
        """
        return self.items() if not self.MARK or self.MARK in names else ()

    # -- what follows ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the rank's share of the state, by name."""
        marks = self.marks()
        if self.MARK and self.MARK not in marks:
            return {}
        return marks | _saved(self.items())

    def complete(self, names: Collection[str]) -> set[str]:
        """Return the names of a complete state of all ranks, as far as `names` tell."""
        if self.MARK and self.MARK not in names:
            return set()
        return {item.name for item in self.items()}

    def needed(self, names: Collection[str]) -> dict[str, Any]:
        """Return the items to load from a state with `names`, with values of the expected kind."""
        return _saved(self.in_state(names))

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Load the `needed` items of a state, after `reset`.

        Args:
            state: the needed items by name.
            names: names of all items of the state.
        """
        for name, tensor in _saved(self.in_state(names)).items():
            tensor.copy_(state[name])

    def take_over(self, before: Any) -> set[str]:
        """Copy tensors that keep name and shape from the part of the model before a change.

        Returns:
            The names of the items that the rank has taken over.

        Collective over: world.
        """
        return handed_on(self.site.grid.world, _held(before.items()), _held(self.items()))


class PreconditionerPart(Part):
    """What a preconditioner keeps of a batch beside factors; `Preconditioner.part` names the class.

    A part is made with the `Bases`.
    """

    def record(self, layer: Layer, x: Tensor, g: Tensor, weight: float) -> None:
        """Add a call of a layer to the batch's sums.

        Collective over: none.

        Args:
            x: inputs, as the sums of factors have them.
            g: gradients at the layer's outputs.
            weight: of the call.
        """
        raise NotImplementedError

    def drop_layer(self, name: str) -> None:
        """Drop the batch's sums of a layer."""
        raise NotImplementedError

    def unscale(self, scale: float) -> bool:
        """Take a loss's scale out of a batch's sums; return whether all sums are finite."""
        raise NotImplementedError

    def reduce(self, statistics: Mapping[str, Tensor], of_loss: bool, weight: float) -> None:
        """Add up a batch's sums over ranks, before the factors'.

        Collective over: world.

        Args:
            statistics: the rank's sums of factors, beside numbers of examples.
            of_loss: gradients are those of the loss, a mean over the batch.
            weight: of the rank's examples.
        """
        raise NotImplementedError

    def merge(self, decay: float, step: int) -> None:
        """Take a batch's sums over ranks into the averages, after the factors."""
        raise NotImplementedError

    def restart(self, weights: Mapping[str, Tensor], turn: int | None) -> None:
        """Start anew where bases are new: in all layers, or in those of a `turn` of a refresh.

        Args:
            weights: of the factors' averages.
        """
        raise NotImplementedError


def handed_on(comm: Comm, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    """Copy tensors that keep name and shape, also from other ranks; return the names.

    Collective over: comm.
    """
    tensors = dict(before) | handed_over(comm, before, after.keys() - before.keys())
    same = {n for n, tensor in after.items() if n in tensors and tensors[n].shape == tensor.shape}
    for name in same:
        after[name].copy_(tensors[name])
    return same


def _held(items: Iterable[Item]) -> dict[str, Tensor]:
    return {item.name: item.tensor for item in items if item.tensor is not None}


def _saved(items: Iterable[Item]) -> dict[str, Tensor]:
    return {i.name: i.tensor for i in items if i.tensor is not None and i.saved}
