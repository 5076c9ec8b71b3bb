"""Send gradients from the shards of `fully_shard` to owners, and directions back to the shards.

Each rank holds some rows of every parameter and of its gradient, which `fully_shard` has already
averaged. The owner of a layer computes the direction of the whole layer. Two all-to-alls per step
carry the rows, and one number with the rows of each parameter: on the way to the owner, the norm of
the rank's rows of the weight; on the way back, 1, or 0 if the parameter is not to be stepped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpikfac.comm import Sender
from mpikfac.engine.readers import Block, Reader, Slot
from mpikfac.engine.site import Site
from mpikfac.layers import Layer
from mpikfac.model import check_averaged, fully_sharded
from mpikfac.numerics import Copies, copy_all, local
from mpikfac.plan import Message, ShardedParameter, sharding


class Held(NamedTuple):
    """A parameter of which the rank holds a shard."""

    planned: ShardedParameter
    block: Block
    parameter: Tensor


class Owned(NamedTuple):
    """A parameter whose direction the rank computes; `part` is its gradient in the arena."""

    planned: ShardedParameter
    block: Block
    parameter: Tensor
    part: Tensor


class ShardReader(Reader):
    """Move gradients and directions between the shards of all ranks and the owners of layers."""

    def __init__(
        self,
        slots: Sequence[Slot],
        sender: Sender,
        site: Site,
        blocks: Sequence[Block],
        model: nn.Module,
    ) -> None:
        super().__init__([slot for slot in slots if not slot.block.parameters], sender)
        self._modules = fully_sharded(model)
        self._site, self._rank = site, site.plan.rank
        self._to_owners = sharding.gather_gradients(site.plan)
        self._to_shards = sharding.scatter_directions(site.plan)
        planned = site.plan.sharding.parameters
        pairs = [(block, parameter) for block in blocks for parameter in block.parameters]
        held = [Held(each, *pair) for each, pair in zip(planned, pairs, strict=True)]
        self._held = sorted(held, key=lambda each: each.planned.owner)
        parts = {id(p): part for s in slots for p, part in zip(s.block.parameters, s.parts)}
        self._owned = [
            Owned(*each, parts[id(each.parameter)])
            for each in self._held
            if each.planned.owner == self._rank
        ]
        of_replicas = site.plan.sharding.sends
        self._ranks = range(len(planned[0].elements))
        self._sources = [rank for rank in self._ranks if of_replicas(rank, self._rank)]
        self._sent = [x for x in self._held if of_replicas(self._rank, x.planned.owner)]
        self._sizes = [n for each in self._held for n in (each.planned.elements[self._rank], 1)]
        self._sizes_owned = [
            n
            for rank in self._sources
            for each in self._owned
            for n in (each.planned.elements[rank], 1)
        ]
        # The norms of all ranks' shards of a weight, at addresses that never change.
        like = sender.arena.flat
        self._norms = {
            id(each.parameter): like.new_zeros(len(self._sources)) for each in self._owned
        }
        self._directions: dict[int, Tensor] = {}  # of the step, by the parameter's id

    @property
    def stepped(self) -> list[Tensor]:
        """All parameters: the rank's optimizer steps its shards."""
        return [each.parameter for each in self._held]

    def begin_step(self) -> None:
        """Reshard the model, which has whole weights after a forward pass without a backward pass.

        Raises:
            ValueError: the gradients are not means over all ranks.
        """
        self._directions.clear()  # of a step that was interrupted
        for module in self._modules:
            check_averaged(module)
            module.reshard()

    # -- gradients to owners ---------------------------------------------------------------------

    def nonzero(self, layer: Layer) -> bool:
        """Return whether the rank's shards of a layer's gradient have elements other than 0."""
        gradients = [p.grad for p in layer.parameters if p.grad is not None]
        return any(bool(local(gradient).any()) for gradient in gradients)

    @torch.no_grad()
    def complete(self) -> None:
        """Send the shards of gradients to owners, which join them in the arena.

        Collective over: world.
        """
        like, sent = self.sender.arena.flat, list[Tensor]()
        weights = [local(each.parameter) for each in self._sent]
        norms = torch._foreach_norm(weights) if weights else []  # a replica may send nothing
        for weight, norm, each in zip(weights, norms, self._sent):
            gradient = each.parameter.grad
            rows = weight.new_zeros(weight.shape) if gradient is None else local(gradient)
            sent += [rows.flatten().to(like.dtype), norm.to(like.dtype).view(1)]
        pieces = self._passed(self._to_owners, sent, self._sizes_owned)
        copies = list[tuple[Tensor, Tensor]]()
        for each, rows, norms in zip(self._owned, *self._by_parameter(pieces)):
            whole = torch.cat(rows).view(each.parameter.shape)
            copies += [(each.part, each.block.arranged(whole))]
            copies += [(self._norms[id(each.parameter)], torch.cat(norms))]
        copy_all(copies)

    def _by_parameter(self, pieces: Sequence[Tensor]) -> tuple[list[list[Tensor]], ...]:
        """Return the rows and the norms of all shards, for each of this owner's parameters."""
        count = 2 * len(self._owned)
        rows = [list(pieces[place::count]) for place in range(0, count, 2)]
        return rows, [list(pieces[place::count]) for place in range(1, count, 2)]

    def weights(self, layer: Layer) -> list[Tensor]:
        """Return, for each weight, the norms of its shards.

        The norm of these norms is the norm of the weight.
        """
        return [self._norms[id(parameter)] for parameter in layer.parameters]

    # -- directions to shards --------------------------------------------------------------------

    def write(self, slot: Slot) -> Copies:
        """Return the copies that store directions, arranged like the weights, until `publish`."""
        if not slot.block.parameters:
            yield from super().write(slot)
        for parameter, part in zip(slot.block.parameters, slot.parts):
            direction = self._directions[id(parameter)] = part.new_empty(parameter.shape)
            yield slot.block.arranged(direction), part

    @torch.no_grad()
    def publish(self) -> None:
        """Send the directions to the shards, whose gradients they replace.

        Parameters without a direction get no gradient, so that no optimizer steps them.

        Collective over: world.
        """
        sent = [piece for rank in self._ranks for piece in self._for_rank(rank)]
        self._directions.clear()
        pieces = self._passed(self._to_shards, sent, self._sizes)
        steps = self._site.flags.read(*pieces[1::2])
        for each, rows, step in zip(self._held, pieces[::2], steps):
            parameter = each.parameter
            if not step or not all(p.requires_grad for p in each.block.parameters):
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            gradient = local(parameter.grad)
            gradient.copy_(rows.view(gradient.shape))

    def _for_rank(self, rank: int) -> Iterator[Tensor]:
        """Yield each direction's rows for `rank`, and 1; both are 0 if there is no direction."""
        like, shards = self.sender.arena.flat, self._site.plan.sharding.shards
        for each in self._owned:
            elements = each.planned.elements
            direction = self._directions.get(id(each.parameter))
            if direction is None:
                yield from (like.new_zeros(elements[rank]), like.new_zeros(1))
            else:
                yield from (
                    direction.flatten().split(elements[:shards])[rank % shards],
                    like.new_ones(1),
                )

    def _passed(
        self, messages: Sequence[Message], sent: list[Tensor], sizes: list[int]
    ) -> list[Tensor]:
        """Send pieces to all ranks, and return the received ones, of the given sizes."""
        flat = torch.cat([self.sender.arena.flat[:0], *sent])
        received = flat.new_empty(sum(sizes)) if messages else flat
        for message in messages:
            self._site.grid.pass_rows(message, flat, received)
        return list(received.split(sizes))
