"""The roles, layouts and messages of all ranks, as a pure function of shapes and choices.

Every rank computes the same plan without communication, and sends exactly the plan's messages.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property

from mpikfac.plan import extensions, names, stages
from mpikfac.plan.choices import (
    SHARDED,
    SPLIT,
    Choice,
    Choices,
    Sharding,
    Split,
    Strategy,
    check,
    one_of,
)
from mpikfac.plan.layout import Shape
from mpikfac.plan.messages import Message
from mpikfac.plan.of_rank import Itemsizes, RankPlan
from mpikfac.plan.roles import (
    Factor,
    Placed,
    PlannedLayer,
    RankGrid,
    deal,
    place,
    spread,
    with_roles,
)
from mpikfac.plan.shapes import Form, LayerShape, check_layers, forward_only


@dataclass(frozen=True)
class Plan:
    """The communication plan of all ranks; `of` returns the plan of one rank.

    Attributes:
        layers: covered layers in model order.
        uncovered: names and shapes of uncovered tensors that are sent with the gradients.
        means: the names of those tensors in `uncovered` that are always averaged over ranks:
            running statistics and votes.
        forms: descriptions of the run's preconditioner, and then of those that layers name.
        itemsize: bytes per value, except in running averages and decompositions.
        columns_of: the column of ranks that owns each layer.
        owners: the rank that decomposes each factor ("conv1.A").
        updaters: the rank that updates each layer or uncovered parameter, if the optimizer is
            sharded.
        turns_of: the slot of every layer in a refresh, from 0 to `stagger` - 1.
        split: which layers are split over groups of ranks, and how.
        sharding: the parameters of which each rank holds a shard.
    """

    layers: tuple[LayerShape, ...]
    uncovered: tuple[tuple[str, Shape], ...]
    means: tuple[str, ...]
    ranks: int
    strategy: Strategy
    forms: tuple[Form, ...]
    itemsize: int
    factor_itemsize: int
    basis_itemsize: int
    columns_of: dict[str, int]
    owners: dict[str, int]
    updaters: dict[str, int]
    turns_of: dict[str, int]
    split: Split
    sharding: Sharding

    def of(self, rank: int) -> RankPlan:
        """Return the roles and layouts of a rank, which are created in the first call."""
        if rank not in self._of_ranks:
            of_rank = RankPlan(
                rank=rank,
                grid=self.grid,
                strategy=self.strategy,
                layers=self.covered,
                uncovered=self.uncovered,
                means=self.means,
                updaters=self.updaters,
                itemsizes=Itemsizes(self.itemsize, self.factor_itemsize, self.basis_itemsize),
                preconditioners=self.all_preconditioners,
                split=self.split,
                sharding=self.sharding,
            )
            self._of_ranks[rank] = replace(of_rank, replaced=extensions.replaced(of_rank))
        return self._of_ranks[rank]

    @cached_property
    def _of_ranks(self) -> dict[int, RankPlan]:
        """The plans created so far, by rank."""
        return {}

    def digest(self) -> str:
        """Return a hash of the plan's values, which differs between ranks whose plans differ."""
        return hashlib.sha256(repr(_values(self)).encode()).hexdigest()[:16]

    # -- who does what ---------------------------------------------------------------------------

    @cached_property
    def covered(self) -> tuple[PlannedLayer, ...]:
        """The covered layers in model order, with the roles of layers and factors."""
        placed = Placed(self.columns_of, self.owners)
        turns_of, updaters = self.turns_of, self.updaters
        forms = _forms_of(self.layers, self.forms)
        return with_roles(self.layers, forms, self.strategy, placed, turns_of, updaters)

    @cached_property
    def factors(self) -> dict[str, Factor]:
        """All factors by name, in model order."""
        return {factor.name: factor for layer in self.covered for factor in layer.factors}

    @property
    def preconditioner(self) -> str:
        """The name of the run's preconditioner; "" if the plan has no preconditioner."""
        return self.forms[0].name if self.forms else ""

    @property
    def all_preconditioners(self) -> str:
        """The run's preconditioner, then layers with a different one, such as "eigen, fc: eva"."""
        run = self.forms[0].kept if self.forms else ""
        kept = ((layer.name, layer.preconditioner.kept) for layer in self.covered)
        return ", ".join([run, *(f"{name}: {form}" for name, form in kept if form != run)])

    @cached_property
    def grid(self) -> RankGrid:
        """The grid of ranks in rows and columns, and the distribution of ranks over nodes."""
        strategy = self.strategy
        per_node, curvature = strategy.transport.ranks_per_node, strategy.refresh.servers
        split = self.split.tp_plan
        workers = strategy.assignment.workers(self.ranks)
        return RankGrid(self.ranks, workers, per_node, curvature, split)

    def load(self, rank: int) -> int:
        """Return the work of `rank` in a refresh: the sum of n^p over its factors of order n.

        The exponent p is the preconditioner's `Form.work`. If p is 3 and only a few eigenvectors of
        a factor are kept, the operations of the iteration that computes them are counted. A vector
        is not decomposed, so it needs no work.
        """
        factors = self.of(rank).decomposed()
        return sum(f.work(f.preconditioner.work) for f in factors if not f.preconditioner.vector)

    # -- what is sent and kept -------------------------------------------------------------------

    def memory(self, rank: int) -> dict[str, int]:
        """Return the bytes of every arena on `rank`, including the values of a batch's parts."""
        of_rank = self.of(rank)
        sizes = of_rank.memory() | extensions.memory(of_rank)
        return dict(sorted(sizes.items(), key=lambda kind: names.MEMORY.index(kind[0])))

    def messages(
        self,
        rank: int,
        statistics: bool,
        refresh: bool,
        clip: bool = True,
        turn: int | None = None,
    ) -> list[Message]:
        """Return the messages of a step in order, from the point of view of `rank`.

        A refresh counts as part of the step, even if decompositions are published later.

        Args:
            statistics: whether the step computes new factors (`factor_update_steps`).
            refresh: whether the step decomposes factors (`inv_update_steps`).
            clip: whether the step is clipped; this needs a message if no rank has all directions.
            turn: the slot of a staggered refresh, which covers some of the layers; None for all
                layers.
        """
        return step_messages(self.of(rank), statistics, refresh, clip, turn)


def plan_for(
    layers: Sequence[LayerShape],
    ranks: int,
    strategy: Strategy,
    uncovered: Iterable[tuple[str, Shape]] = (),
    forms: Sequence[Form] = (),
    itemsize: int = 4,
    factor_itemsize: int | None = None,
    basis_itemsize: int | None = None,
    means: Iterable[str] = (),
    split: Split | None = None,
    sharding: Sharding | None = None,
) -> Plan:
    """Return the plan for `layers` on `ranks` ranks; it is the same on every rank.

    Args:
        uncovered: names and shapes of uncovered parameters and buffers.
        forms: descriptions of the run's preconditioner, and then of those that layers can name.
        itemsize: bytes per element, except in running averages and decompositions.
        factor_itemsize: bytes per element of running averages; `itemsize` if None.
        basis_itemsize: bytes per element of decompositions; `itemsize` if None.
        means: the names of those tensors in `uncovered` that are always averaged over ranks.
        split: which layers are split over groups of ranks, and how; None for no split layers.
        sharding: the parameters of which each rank holds a shard; None if there are none.

    Raises:
        ValueError: a choice is not supported; the message states its requirements.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    strategy.check_ranks(ranks)
    _check_layers(layers, ranks, strategy, forms)
    split, sharding = split or Split(), sharding or Sharding()
    of_split = {"tp_size": split.tp_plan.tp_size, "handed_on": bool(layers and split.handed_on)}
    choices = Choices(strategy, {**of_split, "fully_shard": bool(sharding)})
    check(SPLIT + SHARDED, choices)
    of_layers = _forms_of(layers, forms)
    layers = [_with_factors(layer, of_layers[layer.name]) for layer in layers]
    turns_of = deal(layers, of_layers, strategy.refresh.stagger)
    placed = place(layers, of_layers, ranks, strategy, turns_of)
    updaters = {layer.name: placed.owners[layer.owned[0]] for layer in layers}
    stepped = Counter[int]()
    for layer in layers:
        stepped[updaters[layer.name]] += math.prod(layer.gradient)
    uncovered = tuple((name, tuple(shape)) for name, shape in uncovered)
    updaters |= spread(uncovered, ranks, stepped)
    used = dict.fromkeys(form.name for form in (*forms[:1], *of_layers.values()))
    return Plan(
        layers=tuple(layers),
        uncovered=uncovered,
        means=tuple(means),
        ranks=ranks,
        strategy=strategy,
        forms=tuple(form for form in forms if form.name in used),
        itemsize=itemsize,
        factor_itemsize=factor_itemsize or itemsize,
        basis_itemsize=basis_itemsize or itemsize,
        columns_of=placed.columns_of,
        owners=placed.owners,
        updaters=updaters,
        turns_of=turns_of,
        split=split,
        sharding=sharding.owned_by(updaters),
    )


def step_messages(
    rank: RankPlan, statistics: bool, refresh: bool, clip: bool = True, turn: int | None = None
) -> list[Message]:
    """Return a rank's messages in a step, including those of extensions; see `Plan.messages`."""
    default = stages.messages(rank, statistics, refresh, clip, turn)
    extended = extensions.messages(rank, statistics, refresh, turn)
    return sorted(default + extended, key=lambda message: names.IN_STEP.index(message.stage))


def _values(value: object) -> object:
    """Return a record as a tuple of values, ignoring the names of classes and fields."""
    if is_dataclass(value):
        method = (value.name,) if isinstance(value, Choice) else ()
        of_fields = (_values(getattr(value, field.name)) for field in fields(value) if field.repr)
        return *method, *of_fields
    if isinstance(value, Mapping):
        return tuple((key, _values(content)) for key, content in value.items())
    return tuple(map(_values, value)) if isinstance(value, tuple) else value


def _with_factors(layer: LayerShape, form: Form) -> LayerShape:
    """Return the layer with only the sides for which the preconditioner uses factors."""
    if not form.blocks:
        return replace(layer, sides="")
    return forward_only(layer) if form.sides == "A" else layer


def _forms_of(layers: Iterable[LayerShape], forms: Sequence[Form]) -> dict[str, Form]:
    """Return the description of every layer's preconditioner, by the layer's name."""
    by_name = {form.name: form for form in forms}
    return {x.name: by_name[x.preconditioner] if x.preconditioner else forms[0] for x in layers}


def _check_layers(
    layers: Sequence[LayerShape], ranks: int, strategy: Strategy, forms: Sequence[Form]
) -> None:
    """Check the preconditioner of each layer, and the number of eigenvectors that it keeps.

    Raises:
        ValueError: a preconditioner or a number of eigenvectors is invalid, or incompatible with
            the strategy.
    """
    names = tuple(form.name for form in forms)
    for layer in layers:
        one_of(f"layer {layer.name!r}: preconditioner", layer.preconditioner, (None, *names))
        if layer.rank is not None and layer.rank < 1:
            raise ValueError(
                f"rank={layer.rank} of layer {layer.name!r} must be at least 1, or None"
            )
    sources = {form.name: form.of for form in forms}
    for layer in layers:
        preconditioner = layer.preconditioner or names[0]
        if preconditioner and sources[preconditioner] != sources[names[0]]:
            raise ValueError(
                f"layer {layer.name!r}: preconditioner={preconditioner!r} needs a run with factors "
                f"of the {sources[preconditioner]}, but those of preconditioner={names[0]!r} come "
                f"from the {sources[names[0]]}"
            )
    settings = {"ranks": ranks, "grad_workers": strategy.assignment.workers(ranks)}
    choices = Choices(strategy, settings | {"preconditioner": names[0] if names else ""})
    check_layers([need for form in forms for need in form.needs], layers, choices)
