"""Parameters of which each rank holds a shard, as distributed by torch's `fully_shard`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from mpikfac.plan.choices.checks import check_divides
from mpikfac.plan.choices.combinations import Combination, OneOf


@dataclass(frozen=True)
class ShardedParameter:
    """A trained parameter whose rows are distributed over ranks.

    Attributes:
        block: the layer or uncovered parameter that it belongs to.
        elements: the number of elements of every rank's shard, which can be 0.
        owner: the rank that computes the direction of the block, once a plan has chosen it.
    """

    block: str
    elements: tuple[int, ...]
    owner: int = 0


def shard_sizes(shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """Return the number of elements of every shard: rows are distributed as by `torch.chunk`."""
    rows, of_row = shape[0], math.prod(shape[1:])
    each = -(-rows // shards)
    return tuple(of_row * max(0, min(each, rows - each * shard)) for shard in range(shards))


@dataclass(frozen=True)
class Sharding:
    """The trained parameters of a sharded model; none if every rank holds whole parameters.

    Attributes:
        shards: the number of shards of each parameter. If there are several replicas of the shards,
            each replica is held by this many consecutive ranks.
    """

    parameters: tuple[ShardedParameter, ...] = ()
    shards: int = 1

    @staticmethod
    def of(
        parameters: Iterable[tuple[str, tuple[int, ...]]], ranks: int, replicas: int = 1
    ) -> Sharding:
        """Return the shards that `fully_shard` creates from parameters.

        Args:
            parameters: the block and the shape of every trained parameter, in the model's order.
            replicas: the number of replicas of the shards.

        Raises:
            ValueError: `replicas` does not divide `ranks`, or a parameter has no dimensions.
        """
        check_divides("replicas", replicas, ranks)
        shards, planned = ranks // replicas, list[ShardedParameter]()
        for block, shape in parameters:
            if not shape:
                raise ValueError(f"{block} is a scalar, but fully_shard needs rows: use shape (1,)")
            planned.append(ShardedParameter(block, shard_sizes(shape, shards) * replicas))
        return Sharding(tuple(planned), shards)

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def sends(self, rank: int, owner: int) -> bool:
        """Return whether a rank sends gradients to an owner, which must be in the same replica."""
        return rank // self.shards == owner // self.shards

    def owned_by(self, owners: Mapping[str, int]) -> Sharding:
        """Return the same shards, with the owner of every block."""
        owned = (replace(each, owner=owners[each.block]) for each in self.parameters)
        return replace(self, parameters=tuple(owned))

    @cached_property
    def gathered(self) -> list[list[int]]:
        """How many values each rank sends to each owner: the elements and one value per shard."""
        by_owner = list(zip(*self.scattered))
        ranks = range(len(by_owner))
        return [[by_owner[r][owner] * self.sends(r, owner) for owner in ranks] for r in ranks]

    @cached_property
    def scattered(self) -> list[list[int]]:
        """How many values each owner sends to each rank: the elements and one value per shard."""
        ranks = range(len(self.parameters[0].elements))
        of_owner = [[p for p in self.parameters if p.owner == owner] for owner in ranks]
        return [[sum(p.elements[rank] + 1 for p in own) for rank in ranks] for own in of_owner]


SHARDED: tuple[Combination, ...] = (
    Combination(
        "fully_shard",
        (True,),
        {"assignment.shard_optimizer": True, "assignment.colocate_factors": True},
        "the owner of a layer receives its gradient from all shards, and sends its direction back",
    ),
    Combination(
        "fully_shard",
        (True,),
        {"transport.overlap": False, "transport.ranks_per_node": None, "refresh.servers": 0},
        "shards are sent to owners in a single message after the backward pass",
    ),
    Combination(
        "fully_shard",
        (True,),
        {"compression.gradients": None},
        "fully_shard has already averaged the gradients",
    ),
    Combination(
        "fully_shard",
        (True,),
        {"tp_size": 1},
        "each rank of a group holds a whole slice of a split layer's weights",
    ),
    Combination(
        "fully_shard",
        (True,),
        {"fisher_type": OneOf(("empirical", "forward-only"))},
        "fully_shard reduces the gradients of one backward pass, that of the loss",
    ),
)
"""What a sharded model requires of other choices, in addition to what `shard_optimizer` needs."""
