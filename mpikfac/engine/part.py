"""Parts of a step that have a state; each lists the items of which its state consists.

The state of a run consists of the items of all ranks. A part's list of items determines what a rank
saves, which names a complete state has, what a rank needs from a state, and what it adopts when the
model changes.

Two methods undo work, here and in all other classes that take part in a step: `abort_batch` drops a
batch that no step will use, and `reset` restores the initial state.
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
    """A tensor of the global state.

    Attributes:
        name: the name in the state, without the part's `PREFIX`.
        tensor: the rank's tensor; None if only other ranks have it.
        saved: whether the rank saves and loads its tensor.
    """

    name: str
    tensor: Tensor | None
    saved: bool = True


class Part:
    """A part of a step on one rank. A part without state need not override anything.

    Attributes:
        PREFIX: the prefix of the part's items in a state.
        MARK: the item whose presence shows that a state includes the part; "" if all states do.
    """

    PREFIX = OF_KFAC
    MARK = ""

    def __init__(self, site: Site) -> None:
        self.site, self.plan = site, site.plan

    def reset(self) -> None:
        """Restore the initial state and drop the current batch, as before loading a state."""

    def abort_batch(self) -> None:
        """Drop the passes since the last step.

        Collective over: world with `overlap`, to complete the batch's messages; otherwise none.
        """

    # -- what a part declares --------------------------------------------------------------------

    def items(self) -> Iterable[Item]:
        """Return the tensors of the global state, in the same order on all ranks."""
        return ()

    def marks(self) -> dict[str, Any]:
        """Return the plain values that the state contains in addition to the items."""
        return {}

    def in_state(self, names: Collection[str]) -> Iterable[Item]:
        """Return the items to load from a state that contains `names`.

        Raises:
            ValueError: the state lacks an item that cannot start from scratch.
        """
        return self.items() if not self.MARK or self.MARK in names else ()

    # -- what follows from the items -------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the rank's part of the state, by name."""
        marks = self.marks()
        if self.MARK and self.MARK not in marks:
            return {}
        return marks | _saved(self.items())

    def complete(self, names: Collection[str]) -> set[str]:
        """Return the names required for a complete state, given the `names` in the state."""
        if self.MARK and self.MARK not in names:
            return set()
        return {item.name for item in self.items()}

    def needed(self, names: Collection[str]) -> dict[str, Any]:
        """Return the items to load from a state with `names`, with expected types and shapes."""
        return _saved(self.in_state(names))

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Load the `needed` items of a state, after `reset`.

        Args:
            state: the needed items, by name.
            names: the names of all items of the state.
        """
        for name, tensor in _saved(self.in_state(names)).items():
            tensor.copy_(state[name])

    def take_over(self, before: Any) -> set[str]:
        """Copy the tensors of unchanged name and shape from `before`, which this part replaces.

        Returns:
            The names of the items that were copied on this rank.

        Collective over: world.
        """
        return handed_on(self.site.grid.world, _held(before.items()), _held(self.items()))


class PreconditionerPart(Part):
    """A part that records more about a batch than factors contain, for a preconditioner.

    `Preconditioner.attach` creates it from the `Bases`.
    """

    def record(self, layer: Layer, x: Tensor, g: Tensor, weight: float) -> None:
        """Add a call of a layer to the batch's sums.

        Collective over: none.

        Args:
            x: the inputs, after `Layer.prepared`, as for the sums of factors.
            g: the gradients with respect to the layer's outputs.
            weight: the weight of the call in the sums.
        """
        raise NotImplementedError

    def drop_layer(self, name: str) -> None:
        """Drop the sums that the current batch has accumulated for a layer."""
        raise NotImplementedError

    def unscale(self, scale: float) -> bool:
        """Divide a batch's sums by the loss scale; return whether all sums are finite."""
        raise NotImplementedError

    def reduce(self, statistics: Mapping[str, Tensor], of_loss: bool, weight: float) -> None:
        """Reduce a batch's sums over ranks, before the sums of the factors are reduced.

        Collective over: world.

        Args:
            statistics: the rank's sums for factors, and their numbers of examples.
            of_loss: whether the gradients are gradients of the loss, which is a mean over the
                batch.
            weight: the weight of the rank's examples.
        """
        raise NotImplementedError

    def merge(self, decay: float, step: int) -> None:
        """Merge a batch's reduced sums into the averages, after the sums of the factors."""
        raise NotImplementedError

    def restart(self, weights: Mapping[str, Tensor], turn: int | None) -> None:
        """Restart the averages of layers with new bases.

        Args:
            weights: the weights of the factors' averages, by factor.
            turn: the slot of the refresh whose layers have new bases; None for all layers.
        """
        raise NotImplementedError


def handed_on(comm: Comm, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    """Copy tensors of unchanged name and shape, within and between ranks; return their names.

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
