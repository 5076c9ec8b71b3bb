"""Roles: records of all factors and layers, with their owners, columns and slots.

Ranks form a grid of `rows` x `columns`. A column owns a group of layers, and the ranks in the
column are the gradient workers of these layers; a row crosses all columns. `rows` is the number of
workers per layer: all ranks in COMM-OPT, 1 rank in MEM-OPT [Pauloski et al., TPDS22].

Factors and layers are placed by decreasing load, each on the rank with the lowest load so far. All
functions are pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpikfac.plan.choices import Strategy, TensorParallelPlan, Transport
from mpikfac.plan.layout import Shape
from mpikfac.plan.messages import IN_NODE, Seat, seat
from mpikfac.plan.shapes import FactorShape, Form, LayerShape, count_of

FIRST_BUCKET, BUCKET = 2**18, 25 * 2**18  # elements: 1 and 25 MiB of float32


class Block(NamedTuple):
    """A block of a factor's decomposition.

    Attributes:
        name: the block's name, such as "conv1.A.vectors".
        kind: a key of `Form.blocks`, such as "vectors".
        shape: the shape of the block.
    """

    name: str
    kind: str
    shape: Shape


@dataclass(frozen=True, kw_only=True, eq=False)
class Factor(FactorShape):
    """A factor and its roles in the plan; compared by name and shape.

    Attributes:
        layer: the layer's name.
        side: "A" or "G".
        groups: the number of groups of the layer.
        preconditioner: the description of the factor's preconditioner.
        column: the layer's column.
        owner: the rank that decomposes the factor for the column.
        turn: the layer's slot in a refresh.
        fused: the index of the layer's message in a stage.
        replicated: whether every worker of the layer decomposes the factor, so nothing is sent.
        packed: the shape in which the factor is recorded, kept and sent.
        blocks: the decomposition's blocks; gradients are multiplied by the first one.
        counted: the name of the block that holds the number of examples in the factor's sum.
        added: the name of the factor's damping, or of its flag, in a request to a curvature server.
    """

    layer: str
    side: str
    groups: int
    preconditioner: Form
    column: int
    owner: int
    turn: int
    fused: int
    replicated: bool
    packed: Shape
    blocks: tuple[Block, ...]
    counted: str
    added: str

    @property
    def damping(self) -> Shape:
        """The shape of the factor's damping: `[]`, or `[groups]` if its layer has groups."""
        return () if self.groups == 1 else (self.groups,)


@dataclass(frozen=True)
class PlannedLayer:
    """A covered layer and its roles in the plan.

    Attributes:
        preconditioner: the description of the layer's preconditioner.
        column: the column of ranks that precondition the layer.
        updater: the rank that updates the layer if the optimizer is sharded.
        turn: the layer's slot in a refresh, from 0 to `stagger` - 1.
        fused: the index of the layer's message in a stage.
        factors: the layer's factors, those of A before those of G.
    """

    shape: LayerShape
    preconditioner: Form
    column: int
    updater: int
    turn: int
    fused: int
    factors: tuple[Factor, ...]

    @property
    def name(self) -> str:
        """The module's name in the model."""
        return self.shape.name

    @property
    def rescaled(self) -> bool:
        """Whether the layer has scales: eigenvalues estimated from per-example gradients."""
        return self.preconditioner.rescaled and self.shape.rescaled

    @property
    def form(self) -> Hashable:
        """A key that layers of equal shape and preconditioner share, wherever they are placed."""
        blocks = [(factor.side, *(b[1:] for b in factor.blocks)) for factor in self.factors]
        return self.preconditioner.name, self.rescaled, self.shape.gradient, tuple(blocks)

    @property
    def kind(self) -> Hashable:
        """A key that layers must have in common to be preconditioned as one stack."""
        owners = [(factor.owner, factor.replicated) for factor in self.factors]
        return self.fused, self.turn, self.form, tuple(owners)

    def side(self, side: str) -> tuple[Factor, ...]:
        """Return the factors of A or of G; none if this side is the identity."""
        return tuple(factor for factor in self.factors if factor.side == side)


@dataclass(frozen=True)
class RankGrid:
    """The grid of ranks in rows and columns, and the distribution of ranks over nodes.

    Attributes:
        count: the number of training ranks.
        workers: the number of rows, which is also the number of gradient workers of a layer.
        per_node: the number of ranks per node; None if messages are not split into two levels,
            within nodes and between nodes.
        curvature: the number of curvature servers, which decompose factors for the training ranks.
        distribution: the groups of ranks over which layers are split.
    """

    count: int
    workers: int
    per_node: int | None = None
    curvature: int = 0
    distribution: TensorParallelPlan = field(default_factory=TensorParallelPlan)

    @property
    def columns(self) -> int:
        """The number of columns, each of which owns a group of layers."""
        return self.count // self.workers

    def position(self, rank: int) -> tuple[int, int]:
        """Return the row and the column of a rank."""
        return divmod(rank, self.columns)

    def team(self, rank: int, over: str) -> range:
        """Return the ranks that take part in a message of `rank` over the communicator `over`.

        Curvature servers are numbered after the training ranks.
        """
        if over == "curvature":
            peer = self.count + self.curvature_server(rank)
            return range(rank, peer + 1, peer - rank)
        if over == "group":
            return self.distribution.group(rank, self.count)
        if over == "peers":
            return self.distribution.peers(rank, self.count)
        row, column = self.position(rank)
        kind, _, level = over.partition(" ")
        team = {
            "world": range(self.count),
            "column": range(column, self.count, self.columns),
            "row": range(row * self.columns, (row + 1) * self.columns),
        }[kind]
        seat = self.seat(team, rank)
        if seat is None or not level:
            return team
        first = seat.node * seat.places
        inside, between = team[first : first + seat.places], team[seat.place :: seat.places]
        return inside if over == IN_NODE.format(kind) else between

    def seat(self, team: range, rank: int) -> Seat | None:
        """Return the seat of `rank` in a team that sends at two levels; None if it sends at one."""
        return None if self.per_node is None else seat(team, rank, self.per_node)

    def curvature_server(self, rank: int) -> int:
        """Return the index of owner `rank`'s curvature server; owners are assigned round-robin."""
        return rank % self.curvature


class Placed(NamedTuple):
    """The columns of layers and the owners of factors, by name.

    Attributes:
        columns_of: the column of every layer.
        owners: the rank that decomposes a factor ("conv1.A"), or preconditions a layer without
            factors.
    """

    columns_of: dict[str, int]
    owners: dict[str, int]


def with_roles(
    layers: Sequence[LayerShape],
    forms: Mapping[str, Form],
    strategy: Strategy,
    placed: Placed,
    turns_of: Mapping[str, int],
    updaters: Mapping[str, int],
) -> tuple[PlannedLayer, ...]:
    """Return the layers with the roles of layers and factors, which follow from their placement.

    Args:
        forms: descriptions of the layers' preconditioners, by the layer's name.
    """
    fused = in_messages([_sent(layer) for layer in layers], strategy.transport)

    def planned(layer: LayerShape, number: int) -> PlannedLayer:
        form, column = forms[layer.name], placed.columns_of[layer.name]
        turn = turns_of[layer.name]
        when = turn, number
        factors = tuple(
            _factor(shape, side, layer, form, column, placed.owners[shape.name], when, strategy)
            for side in layer.sides
            for shape in layer.side(side)
        )
        return PlannedLayer(layer, form, column, updaters[layer.name], turn, number, factors)

    return tuple(map(planned, layers, fused))


def _factor(
    shape: FactorShape,
    side: str,
    layer: LayerShape,
    form: Form,
    column: int,
    owner: int,
    when: tuple[int, int],
    strategy: Strategy,
) -> Factor:
    name = shape.name
    blocks = (Block(f"{name}.{kind}", kind, shape.part(n)) for kind, n in form.blocks.items())
    assignment = strategy.assignment
    everywhere = assignment.factor_reduction == "allreduce" and not assignment.shard_optimizer
    # A vector is used without a decomposition: if all ranks have it, nothing needs to be sent.
    replicated = (form.vector and everywhere) or shape.order < assignment.replicate_below
    return Factor(
        name=name,
        order=shape.order,
        count=shape.count,
        rank=shape.rank,
        layer=layer.name,
        side=side,
        groups=layer.groups,
        preconditioner=form,
        column=column,
        owner=owner,
        turn=when[0],
        fused=when[1],
        replicated=replicated,
        packed=shape.block(1) if form.vector else shape.triangle,
        blocks=tuple(blocks),
        counted=count_of(name),
        added=f"{name}+",
    )


def in_messages(sizes: Sequence[int], transport: Transport) -> list[int]:
    """Return the index of every layer's message in a stage, for layers that send `sizes` elements.

    With overlap, layers form buckets, unless the transport sets how many layers share a message.
    """
    layers, fusion = range(len(sizes)), transport.fusion
    if isinstance(fusion, tuple):
        ends = list(itertools.accumulate(fusion[:-1]))
        return [sum(end <= number for end in ends) for number in layers]
    if fusion is None and transport.overlap:
        return _buckets(sizes)
    return [number // (fusion or len(sizes)) for number in layers]


def _buckets(sizes: Sequence[int]) -> list[int]:
    """Return the index of every layer's bucket; buckets are filled as layers become ready.

    The backward pass reaches the last layer first. As in torch's DistributedDataParallel, the first
    bucket is small, so that messages start early.
    """
    buckets: list[int] = []
    bucket, filled, full = 0, 0, FIRST_BUCKET
    for size in reversed(sizes):
        buckets.append(bucket)
        filled += size
        if filled >= full:
            bucket, filled, full = bucket + 1, 0, BUCKET
    return [buckets[-1] - bucket for bucket in reversed(buckets)]


def _sent(layer: LayerShape) -> int:
    """Return the number of elements of a layer's gradient and statistics."""
    factors = sum(math.prod(factor.triangle) for factor in layer.factors)
    return math.prod(layer.gradient) + factors


def place(
    layers: Sequence[LayerShape],
    forms: Mapping[str, Form],
    ranks: int,
    strategy: Strategy,
    turns_of: Mapping[str, int],
) -> Placed:
    """Return the column of every layer and the owner of every factor.

    Loads are compared within a slot of a refresh, because the layers of a slot are decomposed
    together.
    """
    assignment, workers = strategy.assignment, strategy.assignment.workers(ranks)
    power, columns = (3 if assignment.assignment_strategy == "compute" else 2), ranks // workers
    jobs: list[tuple[int, LayerShape, list[str]]] = []
    for layer in layers:
        costs = _costs(layer, forms, power)
        # A factor that every worker decomposes itself loads all workers equally.
        costs |= {f.name: 0 for f in layer.factors if f.order < assignment.replicate_below}
        if assignment.colocate_factors:
            jobs.append((sum(costs.values()), layer, list(costs)))
        else:
            jobs += [(cost, layer, [name]) for name, cost in costs.items()]
    loads = [[0] * ranks for _ in range(strategy.refresh.stagger)]
    ranks_apart = diagonally(workers, columns)
    in_columns: dict[int | None, list[int]] = {None: ranks_apart}
    for rank in ranks_apart:
        in_columns.setdefault(rank % columns, []).append(rank)
    placed: dict[str, int] = {}
    columns_of: dict[str, int] = {}
    for cost, layer, names in sorted(jobs, key=lambda job: -job[0]):
        # The first factor to be placed fixes the layer's column; its other factors stay in it.
        column = columns_of.get(layer.name)
        load = loads[turns_of[layer.name]]
        owner = min(in_columns[column], key=load.__getitem__)
        columns_of[layer.name] = owner % columns
        load[owner] += cost
        placed |= dict.fromkeys(names, owner)
    order = [name for layer in layers for name in layer.owned]
    return Placed(columns_of, {name: placed[name] for name in order})


def spread(
    uncovered: Iterable[tuple[str, Shape]], ranks: int, stepped: Mapping[int, int]
) -> dict[str, int]:
    """Return the updater of every uncovered parameter: a rank that updates layers, if there is one.

    Every updater takes part in all reductions, so no further ranks become updaters. Parameters are
    placed largest first, on the rank that has the fewest elements to update.

    Args:
        stepped: the number of elements in the layers that each rank updates.
    """
    load = dict(stepped) or dict.fromkeys(range(ranks), 0)
    updaters = {}
    for name, shape in sorted(uncovered, key=lambda block: -math.prod(block[1])):
        updaters[name] = min(load, key=load.__getitem__)
        load[updaters[name]] += math.prod(shape)
    return updaters


def diagonally(rows: int, columns: int) -> list[int]:
    """Return the ranks of a grid in an order in which the first ones are far from each other.

    If there are more ranks than owners, each node then has about the same number of owners.
    """
    ways = apart(rows), apart(columns)
    return [
        ways[0][(number + turn) % rows] * columns + column
        for turn in range(rows)
        for number, column in enumerate(ways[1])
    ]


def apart(count: int) -> list[int]:
    """Return the integers below `count` in an order in which neighbours are far from each other.

    It is the order of reversed binary digits [van der Corput 1935]: 0, 4, 2, 6, 1, 5, 3, 7.
    """
    bits = (count - 1).bit_length()
    numbers = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(2**bits))
    return [number for number in numbers if number < count]


def deal(layers: Sequence[LayerShape], forms: Mapping[str, Form], stagger: int) -> dict[str, int]:
    """Assign layers to the slots of a refresh: costliest first, to the slot with the least work.

    Neither the assignment to slots nor, therefore, the results depend on the number of ranks.
    """
    load = [0] * stagger
    turns_of = {}
    works = {layer.name: sum(_costs(layer, forms).values()) for layer in layers}
    for name in sorted(works, key=lambda name: -works[name]):
        turns_of[name] = load.index(min(load))
        load[turns_of[name]] += works[name]
    return {name: turns_of[name] for name in works}


def _costs(layer: LayerShape, forms: Mapping[str, Form], power: int = 3) -> dict[str, int]:
    """Return the load of each factor: `order^power`, or less if its decomposition is cheaper.

    A vector is not decomposed; its load is the number of its elements. The load of a layer without
    factors is the work to make its direction orthogonal, or the size of the direction.
    """
    if not layer.factors:
        works = sum(layer.orthogonalising()) if power == 3 else 0
        return {layer.name: works or math.prod(layer.gradient)}
    power = min(power, forms[layer.name].work)
    return {factor.name: factor.work(power) for factor in layer.factors}
