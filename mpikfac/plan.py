"""Who computes what, in which order, and where every number lies: a pure function of few numbers.

Ranks form a grid of `rows` x `columns`. A column owns a group of layers and its ranks are the
gradient workers of those layers; a row crosses all columns. `rows` is the number of workers of a
layer: all ranks in COMM-OPT, one in MEM-OPT [Pauloski et al., TPDS22].

Every rank makes the same plan without talking.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mpikfac.layout import Layout, Shape, lay_out, triangle_shape

Solver = Literal["eigen", "inverse", "unsplit-inverse"]


@dataclass(frozen=True)
class LayerShape:
    """The orders of a layer's two Kronecker factors.

    Attributes:
        name: the module's name in the model.
        inputs: order of the input factor A; counts the bias coordinate.
        outputs: order of the output factor G.
    """

    name: str
    inputs: int
    outputs: int

    @property
    def factors(self) -> tuple[tuple[str, int], ...]:
        """Names and orders of both factors."""
        return (f"{self.name}.A", self.inputs), (f"{self.name}.G", self.outputs)


@dataclass(frozen=True)
class Strategy:
    """How K-FAC is distributed over ranks, as a value.

    Attributes:
        workers: ranks that precondition a layer (gradient workers); must divide the ranks.
        reduction: where factors are averaged. "everyone": on all ranks (Allreduce). "owners": on
            the rank that decomposes (Reduce_scatter); the others keep no factors. "none": an owner
            uses its own batch only, a different estimator [DP-KFAC, Zhang et al. 2022].
        update: "everyone": each rank steps the whole model. "owner": gradients are reduced to a
            layer's owner, which preconditions and steps, and weights are gathered.
        balance: what placement evens out: "compute" (n^3 of a factor) or "memory" (n^2).
        colocate: A and G of a layer on one owner; otherwise they may have two.
        parts: a batch is dealt out in so many parts, whose gradients and statistics are added one
            after the other: the same to the last bit on every number of ranks that divides it.
            None: as MPI adds them.
    """

    workers: int = 1
    reduction: Literal["everyone", "owners", "none"] = "everyone"
    update: Literal["everyone", "owner"] = "everyone"
    balance: Literal["compute", "memory"] = "compute"
    colocate: bool = True
    parts: int | None = None

    def __post_init__(self) -> None:
        one_of("reduction", self.reduction, ("everyone", "owners", "none"))
        one_of("update", self.update, ("everyone", "owner"))
        one_of("balance", self.balance, ("compute", "memory"))
        one_of("colocate", self.colocate, (True, False))
        if type(self.workers) is not int or self.workers < 1:
            raise ValueError(f"workers={self.workers!r} must be a whole number of at least 1")
        if self.parts is not None and (self.reduction, self.update) != ("everyone", "everyone"):
            raise ValueError(
                f"parts={self.parts} needs reduction='everyone' and update='everyone', "
                f"not {self.reduction!r} and {self.update!r}"
            )

    @classmethod
    def comm_opt(cls, ranks: int, **choices: Any) -> Strategy:
        """Every rank preconditions every layer: K-FAC-opt of SC20, COMM-OPT of KAISA."""
        return cls(workers=ranks, **choices)

    @classmethod
    def mem_opt(cls, **choices: Any) -> Strategy:
        """One rank preconditions a layer: K-FAC-lw of SC20, MEM-OPT of KAISA."""
        return cls(workers=1, **choices)

    @classmethod
    def hybrid(
        cls, ranks: int, workers: int | None = None, fraction: float | None = None, **choices: Any
    ) -> Strategy:
        """A count (`workers`) or a `fraction` of the ranks precondition a layer: HYBRID-OPT.

        Raises:
            ValueError: unless exactly one of both is given and the count divides the ranks.
        """
        if (workers is None) == (fraction is None):
            raise ValueError(f"give either workers ({workers}) or fraction ({fraction})")
        count = workers if workers is not None else round(ranks * (fraction or 0.0))
        if fraction is not None and not math.isclose(count, ranks * fraction):
            raise ValueError(
                f"fraction={fraction} of {ranks} ranks is no whole number of workers; "
                f"try one of {[d / ranks for d in divisors(ranks)]}"
            )
        _check_divides(count, ranks)
        return cls(workers=count, **choices)


@dataclass(frozen=True)
class Message:
    """One collective of a step as one rank sees it.

    Attributes:
        stage: the stage of `KFAC.step` that sends it.
        primitive: the MPI collective.
        over: "world", "column" or "row".
        size: bytes of the whole buffer, from which or into which the members' parts are taken.
        bytes: of these, what this rank hands to MPI.
        wire: bytes that this rank sends if the collective is a ring.
    """

    stage: str
    primitive: str
    over: str
    size: int
    bytes: int
    wire: int


@dataclass(frozen=True)
class Plan:
    """The communication plan: placement, layouts and messages of every rank.

    Attributes:
        layers: covered layers in model order.
        others: names and shapes of what no layer covers but travels with the gradients.
        columns_of: column of each layer.
        owners: rank that decomposes each factor ("conv1.A").
        updaters: rank that steps each layer or other parameter when `update="owner"`.
    """

    layers: tuple[LayerShape, ...]
    others: tuple[tuple[str, Shape], ...]
    ranks: int
    strategy: Strategy
    solver: Solver
    itemsize: int
    columns_of: dict[str, int]
    owners: dict[str, int]
    updaters: dict[str, int]
    orders: dict[str, int] = field(repr=False)

    @property
    def rows(self) -> int:
        """Ranks in a column: the gradient workers of a layer."""
        return self.strategy.workers

    @property
    def columns(self) -> int:
        """Layer groups."""
        return self.ranks // self.rows

    def position(self, rank: int) -> tuple[int, int]:
        """Row and column of a rank."""
        return divmod(rank, self.columns)

    def digest(self) -> str:
        """A hash that two ranks share only if they hold the same plan."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    # -- who does what ---------------------------------------------------------------------------

    def owned(self, rank: int) -> list[str]:
        """Factors that `rank` decomposes, in model order."""
        return [name for name, owner in self.owners.items() if owner == rank]

    def decompositions(self, rank: int) -> list[tuple[str, Shape]]:
        """Names and shapes of what `rank` decomposes its factors into."""
        blocks: list[tuple[str, Shape]] = []
        for name in self.owned(rank):
            order = self.orders[name]
            if self.solver == "eigen":
                blocks += [(f"{name}.vectors", (order, order)), (f"{name}.values", (order,))]
            else:
                blocks.append((f"{name}.inverse", (order, order)))
        return blocks

    @property
    def parts_per_rank(self) -> int:
        """Parts of a batch that a rank takes one by one; 0 if it takes its share as a whole."""
        return (self.strategy.parts or 0) // self.ranks

    def recorded(self, rank: int) -> list[str]:
        """Factors of which `rank` records statistics of its own batch."""
        return self.owned(rank) if self.strategy.reduction == "none" else list(self.owners)

    def preconditioned(self, rank: int) -> list[str]:
        """Layers that `rank` preconditions, in model order."""
        if self.strategy.update == "owner":
            return [layer.name for layer in self.layers if self.updaters[layer.name] == rank]
        column = self.position(rank)[1]
        return [layer.name for layer in self.layers if self.columns_of[layer.name] == column]

    @property
    def publishes_bases(self) -> bool:
        """Whether a layer's bases are needed by a rank that did not compute them."""
        alone = self.strategy.update == "owner" and self.strategy.colocate
        return self.rows > 1 and not alone

    # -- where numbers lie -----------------------------------------------------------------------

    def statistics(self, rank: int) -> Layout:
        """Triangles of a batch's factors: model order, or owner by owner if owners reduce."""
        if self.strategy.reduction == "owners":
            return lay_out(self._by_rank(self._triangles(self.owners), self.owners))
        return lay_out([self._triangles(self.recorded(rank))])

    def averages(self, rank: int) -> Layout:
        """Triangles of the running averages that `rank` keeps."""
        everyone = self.strategy.reduction == "everyone"
        return lay_out([self._triangles(list(self.owners) if everyone else self.owned(rank))])

    def bases(self, rank: int) -> Layout:
        """Decompositions that `rank` holds, one segment for each row of its column."""
        if not self.publishes_bases:
            return lay_out([self.decompositions(rank)])
        column = self.position(rank)[1]
        mates = [row * self.columns + column for row in range(self.rows)]
        return lay_out(self.decompositions(mate) for mate in mates)

    def denominators(self, rank: int) -> Layout:
        """Damped eigenvalues of each layer that `rank` preconditions; empty for inverses."""
        names = self.preconditioned(rank) if self.solver == "eigen" else []
        return lay_out([self._matrices(names)])

    def gradients(self) -> Layout:
        """All gradients: model order, or updater by updater if owners update."""
        blocks = [*self._matrices(layer.name for layer in self.layers), *self.others]
        if self.strategy.update == "everyone":
            return lay_out([blocks])
        return lay_out(self._by_rank(blocks, self.updaters))

    def directions(self, rank: int) -> Layout:
        """Preconditioned gradients: column by column, or `rank`'s own if owners update."""
        if self.strategy.update == "owner":
            return lay_out([self._matrices(self.preconditioned(rank))])
        return lay_out(self._matrices(self.preconditioned(c)) for c in range(self.columns))

    def memory(self, rank: int) -> dict[str, int]:
        """Bytes of each arena that `rank` keeps, and of what they held for parts of a batch."""
        arenas = {
            "statistics": self.statistics(rank),
            "averages": self.averages(rank),
            "bases": self.bases(rank),
            "denominators": self.denominators(rank),
            "gradients": self.gradients(),
            "directions": self.directions(rank),
        }
        sizes = {name: layout.size * self.itemsize for name, layout in arenas.items()}
        if count := self.parts_per_rank:
            sizes["parts"] = count * (sizes["statistics"] + sizes["gradients"])
        return sizes

    # -- what travels ----------------------------------------------------------------------------

    def messages(
        self, rank: int, statistics: bool, refresh: bool, clip: bool = True
    ) -> list[Message]:
        """Collectives of one step in order, as `rank` sees them.

        Args:
            statistics: the step reduces new factors (`factor_every`).
            refresh: the step decomposes them (`basis_every`).
            clip: the step is KL-clipped; a message only where no rank holds all directions.
        """
        row, column = self.position(rank)
        owner_updates = self.strategy.update == "owner"
        found = []
        if statistics and self.strategy.reduction != "none":
            found += self._reduce("reduce statistics", self.statistics(rank))
        if refresh and self.publishes_bases:
            found += self._gather("publish bases", "column", self.bases(rank), row)
        found += self._reduce("reduce gradients", self.gradients())
        if owner_updates:
            if clip and self.layers and self.ranks > 1:
                wire = 2 * self.itemsize * (self.ranks - 1) // self.ranks
                found.append(Message("clip", "Allreduce", "world", self.itemsize, self.itemsize, wire))
            found += self._gather("publish weights", "world", self.gradients(), rank)
        elif self.columns > 1:
            found += self._gather("publish gradients", "row", self.directions(rank), column)
        return found

    def load(self, rank: int) -> int:
        """Work of `rank` in a refresh, as the sum of n^3 over the factors that it decomposes."""
        return sum(self.orders[name] ** 3 for name in self.owned(rank))

    def _by_rank(
        self, blocks: Iterable[tuple[str, Shape]], ranks: dict[str, int]
    ) -> list[list[tuple[str, Shape]]]:
        segments: list[list[tuple[str, Shape]]] = [[] for _ in range(self.ranks)]
        for name, shape in blocks:
            segments[ranks[name]].append((name, shape))
        return segments

    def _triangles(self, names: Iterable[str]) -> list[tuple[str, Shape]]:
        return [(name, triangle_shape(self.orders[name])) for name in names]

    def _matrices(self, names: Iterable[str]) -> list[tuple[str, Shape]]:
        orders = self.orders
        return [(name, (orders[f"{name}.G"], orders[f"{name}.A"])) for name in names]

    def _reduce(self, stage: str, layout: Layout) -> list[Message]:
        size = layout.size * self.itemsize
        if self.ranks == 1 or size == 0:
            return []
        if self.parts_per_rank:
            return [Message(stage, "Send, Bcast", "world", size, size, size)]
        to_owners = len(layout.bounds) > 2
        ring = size * (self.ranks - 1) // self.ranks
        primitive, wire = ("Reduce_scatter", ring) if to_owners else ("Allreduce", 2 * ring)
        return [Message(stage, primitive, "world", size, size, wire)]

    def _gather(self, stage: str, over: str, layout: Layout, segment: int) -> list[Message]:
        members = len(layout.bounds) - 1
        size = layout.size * self.itemsize
        if members == 1 or size == 0:
            return []
        own = layout.counts()[segment] * self.itemsize
        wire = size * (members - 1) // members
        return [Message(stage, "Allgatherv", over, size, own, wire)]


def make_plan(
    layers: Sequence[LayerShape],
    ranks: int,
    strategy: Strategy,
    others: Iterable[tuple[str, Shape]] = (),
    solver: Solver = "inverse",
    itemsize: int = 4,
) -> Plan:
    """The plan for `layers` on `ranks` ranks; the same on every rank.

    Args:
        others: names and shapes of parameters (and buffers) that no layer covers.
        solver: one of the damped inverses, or "eigen" (eigenvectors and eigenvalues).
        itemsize: bytes of one element.

    Raises:
        ValueError: a choice that cannot work, with what would.
    """
    one_of("solver", solver, ("eigen", "inverse", "unsplit-inverse"))
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    _check_divides(strategy.workers, ranks)
    if solver == "inverse" and not strategy.colocate and strategy.reduction != "everyone":
        raise ValueError(
            f"solver='inverse' balances the damping of A and G by both traces, so with "
            f"reduction='{strategy.reduction}' both need one owner; use colocate=True or "
            f"solver='eigen'"
        )
    if strategy.parts is not None and (strategy.parts < 1 or strategy.parts % ranks):
        raise ValueError(
            f"parts={strategy.parts} must be a multiple of the number of ranks ({ranks})"
        )
    owners, columns_of = _place(layers, ranks, strategy)
    updaters = {layer.name: owners[f"{layer.name}.A"] for layer in layers}
    others = tuple((name, tuple(shape)) for name, shape in others)
    updaters |= _spread(others, ranks)
    orders = {name: order for layer in layers for name, order in layer.factors}
    given = (tuple(layers), others, ranks, strategy, solver, itemsize)
    return Plan(*given, columns_of, owners, updaters, orders)


def divisors(number: int) -> list[int]:
    """All divisors of a number, ascending: the worker counts that fit so many ranks."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _place(
    layers: Sequence[LayerShape], ranks: int, strategy: Strategy
) -> tuple[dict[str, int], dict[str, int]]:
    """Owner of each factor and column of each layer: longest first, to the least loaded rank."""
    power = 3 if strategy.balance == "compute" else 2
    columns = ranks // strategy.workers
    jobs: list[tuple[int, LayerShape, list[str]]] = []
    for layer in layers:
        costs = {name: order**power for name, order in layer.factors}
        if strategy.colocate:
            jobs.append((sum(costs.values()), layer, list(costs)))
        else:
            jobs += [(cost, layer, [name]) for name, cost in costs.items()]
    load = [0] * ranks
    placed: dict[str, int] = {}
    columns_of: dict[str, int] = {}
    for cost, layer, names in sorted(jobs, key=lambda job: -job[0]):
        # The first factor to be placed fixes the layer's column; the second stays inside it.
        column = columns_of.get(layer.name)
        candidates = range(ranks) if column is None else range(column, ranks, columns)
        owner = min(candidates, key=lambda rank: (load[rank], rank))
        columns_of[layer.name] = owner % columns
        load[owner] += cost
        placed |= dict.fromkeys(names, owner)
    order = [name for layer in layers for name, _ in layer.factors]
    return {name: placed[name] for name in order}, columns_of


def _spread(others: Iterable[tuple[str, Shape]], ranks: int) -> dict[str, int]:
    """Updater of each uncovered parameter: largest first, to the rank with the fewest elements."""
    load = [0] * ranks
    updaters = {}
    for name, shape in sorted(others, key=lambda other: -math.prod(other[1])):
        updaters[name] = load.index(min(load))
        load[updaters[name]] += math.prod(shape)
    return updaters


def _check_divides(workers: int, ranks: int) -> None:
    if workers < 1 or ranks % workers:
        raise ValueError(
            f"workers={workers} must divide the number of ranks ({ranks}); "
            f"try one of {divisors(ranks)}"
        )


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Returns if `value` is allowed.

    Raises:
        ValueError: it is not; the text calls it `name` and lists what is.
    """
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")
