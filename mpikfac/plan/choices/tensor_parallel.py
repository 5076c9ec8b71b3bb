"""How layers are split over groups of ranks, as plain data.

The ranks form a grid of groups: a split layer is divided among the `tp_size` ranks of a group, and
the groups process different data. Ranks at the same position in their groups hold the same slices;
they are called peers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mpikfac.plan.choices.checks import check_count, divisors, make_plain, one_of
from mpikfac.plan.choices.combinations import Combination, OneOf
from mpikfac.plan.layout import Layout, Shape, lay_out

Channels = Literal["outputs", "inputs"]
CHANNELS: tuple[Channels, ...] = ("outputs", "inputs")


@dataclass(frozen=True)
class TensorParallelPlan:
    """How layers are split over groups of ranks.

    Attributes:
        tp_size: the number of ranks in a group.
        layers: which channels of a split layer are divided among the ranks of a group, by the
            layer's name. Layers without an entry are data-parallel.
        strided: whether the ranks of a group are `P / tp_size` ranks apart; if not, they are
            neighbours.
    """

    tp_size: int = 1
    layers: Mapping[str, Channels] = field(default_factory=dict, hash=False)
    strided: bool = False

    def __post_init__(self) -> None:
        make_plain(self)
        check_count("tp_size", self.tp_size, 1)
        for name, axis in self.layers.items():
            one_of(f"layer {name!r}: channels", axis, CHANNELS)
        if self.layers and self.tp_size == 1:
            raise ValueError("tp_size=1 splits no layer; use tp_size >= 2, or pass no layers")

    def check_ranks(self, ranks: int) -> None:
        """Check that all groups have the same size.

        Raises:
            ValueError: `tp_size` does not divide the number of ranks.
        """
        if ranks % self.tp_size:
            possible = ", ".join(map(str, divisors(ranks)))
            raise ValueError(
                f"tp_size={self.tp_size} must divide the {ranks} ranks; try one of {possible}"
            )

    def group(self, rank: int, ranks: int) -> range:
        """Return the ranks of the group of `rank`."""
        if self.strided:
            return range(rank % (ranks // self.tp_size), ranks, ranks // self.tp_size)
        first = rank - rank % self.tp_size
        return range(first, first + self.tp_size)

    def peers(self, rank: int, ranks: int) -> range:
        """Return the ranks at the same position in their groups as `rank`."""
        if self.strided:
            first = rank - rank % (ranks // self.tp_size)
            return range(first, first + ranks // self.tp_size)
        return range(rank % self.tp_size, ranks, self.tp_size)


@dataclass(frozen=True)
class Sliced:
    """A parameter of a split layer: each member of a group computes the gradient of a slice.

    Attributes:
        name: the name of the parameter.
        block: the block of gradients that contains it.
        dim: the dimension that is split.
    """

    name: str
    block: str
    shape: Shape
    dim: int

    def span(self, member: int, tp_size: int) -> tuple[int, int]:
        """Return the start and stop index of a member's slice."""
        return span(self.shape[self.dim], member, tp_size)

    def slice_of(self, member: int, tp_size: int) -> tuple[str, Shape]:
        """Return the name and the shape of a member's slice."""
        start, stop = self.span(member, tp_size)
        shape = (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])
        return slice_name(self.name, member), shape


@dataclass(frozen=True)
class Split:
    """The split layers of a model, as a plan needs them.

    Attributes:
        parameters: the trained parameters of split layers.
        handed_on: the layers whose outputs stay in slices for the next split layer.
    """

    tp_plan: TensorParallelPlan = field(default_factory=TensorParallelPlan)
    parameters: tuple[Sliced, ...] = ()
    handed_on: tuple[str, ...] = ()

    @property
    def blocks(self) -> set[str]:
        """The blocks of gradients that are computed in slices."""
        return {parameter.block for parameter in self.parameters}

    def layout(self) -> Layout:
        """Return the layout of all gradients of split layers, slice by slice."""
        tp_size = self.tp_plan.tp_size
        slices = (
            [p.slice_of(member, tp_size) for p in self.parameters] for member in range(tp_size)
        )
        return lay_out(slices if self.parameters else [])


def span(count: int, member: int, tp_size: int) -> tuple[int, int]:
    """Return the start and stop of a group member's slice of `count` channels."""
    return count * member // tp_size, count * (member + 1) // tp_size


def slice_name(name: str, member: int) -> str:
    """Return the name of a member's slice of a parameter."""
    return f"{name}[{member}]"


SPLIT: tuple[Combination, ...] = (
    Combination(
        "tp_size",
        None,
        {"sync.aggregation": "mean"},
        "a rank has only a slice of the gradient, so ranks cannot be compared",
        default=1,
    ),
    Combination(
        "tp_size",
        None,
        {"sync.local_steps": False, "sync.waits_for_all": True},
        "the ranks of a group compute with slices of the same weights",
        default=1,
    ),
    Combination(
        "tp_size",
        None,
        {"compression.gradients.clip_norm": None},
        "a rank has only a slice of the gradient, but the norm of the whole gradient is needed",
        default=1,
    ),
    Combination(
        "handed_on",
        (True,),
        {"assignment.factor_reduction": OneOf(("allreduce", "reduce_scatter"))},
        "all ranks of a group exchange the inputs of consecutive split layers for statistics",
    ),
)
"""What split layers require of other choices."""
