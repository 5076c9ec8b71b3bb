"""How K-FAC is distributed over ranks and over time, as a value.

Three kinds of choices stay apart: the estimator (which data enter a factor), the placement (who
decomposes, preconditions and updates), the transport (when numbers travel, and in which messages).
Placement and transport do not change the numbers of an estimator, but compressed messages round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

from mpikfac.plan.choices.checks import (
    check_count,
    check_divides,
    check_fraction,
    check_positive,
    check_size,
    divisors,
    make_plain,
    one_of,
)
from mpikfac.plan.choices.combinations import STRATEGY, check
from mpikfac.plan.choices.exchange import Exchange

Wire = Literal["bfloat16", "int8"]
GRADIENT_WIRES = ("bfloat16", "int8", "top-k", "power-sgd")
Value = TypeVar("Value")

MOST_TURNS = 1000
"""The largest `stagger`: a plan lists the turns."""


@dataclass(frozen=True)
class Wires:
    """How many bits numbers have in messages.

    None leaves numbers as they are.

    Attributes:
        factor_wire: the form of factors in messages. "bfloat16": rounded to 16 bits; "int8": 8 bits
            a number, and a common exponent for 16 numbers.
        basis_wire: the form of decompositions in messages, with the values of `factor_wire`.
        gradient_wire: the form in messages of the gradients of covered layers, of preconditioned
            gradients, and with update="owner" of changes of weights. The values are the values of
            `factor_wire`, and "top-k": only the largest numbers are sent. "power-sgd": sums of
            matrices become sums of thin matrices [PowerSGD, Vogels et al. 2019], and what is not
            added up travels as it is.
        top_share: the share of the numbers that gradient_wire="top-k" sends.
        top_momentum: the momentum of gradients that wait for their turn in gradient_wire="top-k"
            [DGC, Lin et al. 2018]; the optimizer has none.
        top_warmup: the steps of the warm-up of gradient_wire="top-k". In four stages, sums of
            gradients send more numbers: `top_share` to the power of 1/5, 2/5, 3/5 and 4/5.
        top_clip: the bound of the norm of a gradient with gradient_wire="top-k". Of N ranks, each
            bounds its part of the mean by `top_clip / sqrt(N)`. Without a number, no bound.
        power_rank: the columns of the thin matrices of gradient_wire="power-sgd".
    """

    factor_wire: Wire | None = None
    basis_wire: Wire | None = None
    gradient_wire: Wire | Literal["top-k", "power-sgd"] | None = None
    top_share: float = 0.01
    top_momentum: float = 0.0
    top_warmup: int = 0
    top_clip: float | None = None
    power_rank: int = 2

    def __post_init__(self) -> None:
        make_plain(self)
        one_of("factor_wire", self.factor_wire, (None, "bfloat16", "int8"))
        one_of("basis_wire", self.basis_wire, (None, "bfloat16", "int8"))
        one_of("gradient_wire", self.gradient_wire, (None, *GRADIENT_WIRES))
        check_positive("top_share", self.top_share)
        if self.top_share > 1:
            raise ValueError(f"top_share={self.top_share} must be above 0 and at most 1")
        check_fraction("top_momentum", self.top_momentum)
        check_count("top_warmup", self.top_warmup, 0)
        if self.top_clip is not None:
            check_positive("top_clip", self.top_clip)
        check_count("power_rank", self.power_rank, 1)

    @property
    def gentle(self) -> bool:
        """Whether sums of gradients have a warm-up or a bound."""
        return self.top_warmup > 0 or self.top_clip is not None


@dataclass(frozen=True)
class Transport:
    """When numbers travel, and in which messages.

    Attributes:
        reduce_at: when ranks average factors. "factors": at each step with new statistics; "bases":
            only before a decomposition, and until then each rank keeps running averages of its own
            share of the data. Averages over time and over ranks commute.
        packing: the form in which a factor travels: a folded "triangle", or the full "square".
        fusion: the number of layers whose factors, bases or preconditioned gradients share a
            message, or a list with the number of layers of each message in turn. Without a number,
            a single message holds all layers.
        overlap: sums are overlapped with the backward pass: a thread sends each message with
            gradients or factors as soon as the backward pass has passed the message's layers,
            gradients before factors. Factors may travel until a factor is needed. A step must have
            a single backward pass.
        sums: who adds up a sum for an owner: MPI ("reduce"), or the owner itself, in the order of
            the ranks ("alltoall").
        shards: sums to owners and gathers from owners pass through equal shards of all ranks, which
            no MPI slows down: always, never, or (None) where the largest owner has more than twice
            the mean, and numbers are many.
        ranks_per_node: the number of consecutive ranks that share a node: messages have two levels,
            inside nodes and between nodes. Without a number, messages have one level.
        parts: the number of parts of a batch. Gradients and statistics of the parts are added in
            order, so all numbers of ranks that divide the number of parts give the same bits.
            Without a number, MPI adds.
        wires: how many bits numbers have in messages.
    """

    reduce_at: Literal["factors", "bases"] = "factors"
    packing: Literal["triangle", "square"] = "triangle"
    fusion: int | tuple[int, ...] | None = None
    overlap: bool = False
    sums: Literal["reduce", "alltoall"] = "reduce"
    shards: bool | None = None
    ranks_per_node: int | None = None
    parts: int | None = None
    wires: Wires = field(default_factory=Wires)

    def __post_init__(self) -> None:
        make_plain(self)
        one_of("reduce_at", self.reduce_at, ("factors", "bases"))
        one_of("packing", self.packing, ("triangle", "square"))
        one_of("overlap", self.overlap, (True, False))
        one_of("sums", self.sums, ("reduce", "alltoall"))
        one_of("shards", self.shards, (None, True, False))
        several = self.fusion if isinstance(self.fusion, tuple) and self.fusion else (self.fusion,)
        for number in several if self.fusion is not None else ():
            check_count("fusion", number, 1)
        if self.ranks_per_node is not None:
            check_count("ranks_per_node", self.ranks_per_node, 1)
        if self.parts is not None:
            check_count("parts", self.parts, 1)


@dataclass(frozen=True)
class Refresh:
    """When factors are decomposed, and by whom.

    Attributes:
        delay: the number of steps from the factors to the use of their decomposition, or fewer if
            the next refresh begins before. The decomposition runs in the background. Results do not
            depend on timing: a decomposition that is ready early waits. 0: steps wait for the
            decomposition.
        stagger: the number of steps that share a refresh; each of the steps decomposes a share of
            the layers.
        tolerance: the relative error up to which a refresh keeps the last decomposition of a
            factor. The error of eigenvectors is the norm off the diagonal, the error of inverses is
            the error of typical directions. Eigenvalues are always renewed, and eigenvectors by
            `Eigen(iterations=1)`. The owner decides; messages stay the same. 0: every factor is
            decomposed.
        curvature_servers: the number of ranks that do not train, and decompose for the ranks that
            train [LBANN]. 0: each rank decomposes in its own background, with the same numbers.
    """

    delay: int = 0
    stagger: int = 1
    tolerance: float = 0.0
    curvature_servers: int = 0

    def __post_init__(self) -> None:
        make_plain(self)
        check_count("delay", self.delay, 0)
        check_count("stagger", self.stagger, 1)
        if self.stagger > MOST_TURNS:
            raise ValueError(f"stagger={self.stagger} must be at most {MOST_TURNS}")
        check_size("tolerance", self.tolerance)
        check_count("curvature_servers", self.curvature_servers, 0)


@dataclass(frozen=True)
class Strategy:
    """How K-FAC is distributed over ranks and over time.

    `changed` and the constructors below take the names of all fields, also of the fields inside of
    `refresh`, `transport` and `exchange`: `Strategy.comm_opt(ranks, delay=1, overlap=True)`.

    Attributes:
        workers: the number of ranks that precondition a layer, the gradient workers of the layer;
            must divide the number of ranks.
        reduction: where factors are averaged. "everyone": on all ranks (Allreduce). "owners": on
            the rank that decomposes the factor, the owner (Reduce_scatter); further ranks keep no
            factors. "none": nowhere; an owner uses its own batch only, a different estimator
            [DP-KFAC, Zhang et al. 2022].
        update: who steps the weights. "everyone": each rank steps the whole model. "owner":
            gradients are reduced to the owner of a layer, who preconditions and steps the layer;
            then weights are gathered.
        balance: the load that the placement of factors of order n evens out over ranks: "compute"
            (n^3) or "memory" (n^2).
        colocate_factors: a single rank owns both factors of a layer, A and G; otherwise the factors
            may have two owners.
        replicate_below: the order below which every worker of a layer decomposes a factor for
            itself, so no decomposition is sent [SPD-KFAC, Shi et al. 2021]; 0 for no factors.
        refresh: when factors are decomposed, and by whom.
        transport: when numbers travel, and in which messages.
        exchange: what ranks exchange to train one model, and when.
    """

    workers: int = 1
    reduction: Literal["everyone", "owners", "none"] = "everyone"
    update: Literal["everyone", "owner"] = "everyone"
    balance: Literal["compute", "memory"] = "compute"
    colocate_factors: bool = True
    replicate_below: int = 0
    refresh: Refresh = field(default_factory=Refresh)
    transport: Transport = field(default_factory=Transport)
    exchange: Exchange = field(default_factory=Exchange)

    def __post_init__(self) -> None:
        make_plain(self)
        check_count("workers", self.workers, 1)
        one_of("reduction", self.reduction, ("everyone", "owners", "none"))
        one_of("update", self.update, ("everyone", "owner"))
        one_of("balance", self.balance, ("compute", "memory"))
        one_of("colocate_factors", self.colocate_factors, (True, False))
        check_count("replicate_below", self.replicate_below, 0)
        check(STRATEGY, self.choices())

    def choices(self) -> dict[str, Any]:
        """Return all choices by name, without `refresh`, `transport` and `wires` around them."""
        return _leaves(self)

    def changed(self, **choices: Any) -> Strategy:
        """Return the strategy with other choices.

        Raises:
            ValueError: no choice has that name, or the choices do not fit together.
        """
        unknown = choices.keys() - self.choices().keys()
        if unknown:
            raise ValueError(
                f"{min(unknown)} is no choice of a strategy; the choices are "
                f"{', '.join(self.choices())}"
            )
        return _changed(self, choices)

    def first_order(self) -> Strategy:
        """Return the strategy of training without K-FAC.

        Choices about factors and decompositions become the usual choices.
        """
        transport = replace(self.transport, reduce_at="factors", packing="triangle")
        if self.update == "everyone":  # then no owner adds up
            transport = replace(transport, sums="reduce", shards=None)
        return Strategy(update=self.update, transport=transport, exchange=self.exchange)

    def check_ranks(self, ranks: int) -> None:
        """Return if so many ranks fall into columns and nodes, and share out the parts.

        Raises:
            ValueError: the ranks do not.
        """
        check_divides("workers", self.workers, ranks)
        self.exchange.robust.check_ranks(ranks)
        check_divides("client_ranks", self.exchange.asynchrony.client_ranks, ranks)
        if self.transport.ranks_per_node is not None:
            check_divides("ranks_per_node", self.transport.ranks_per_node, ranks)
        if (parts := self.transport.parts) is not None and parts % ranks:
            raise ValueError(f"parts={parts} must be a multiple of the number of ranks ({ranks})")

    @classmethod
    def comm_opt(cls, ranks: int, **choices: Any) -> Strategy:
        """Return K-FAC-opt of SC20, COMM-OPT of KAISA: every rank preconditions every layer."""
        return cls().changed(workers=ranks, **choices)

    @classmethod
    def mem_opt(cls, **choices: Any) -> Strategy:
        """Return K-FAC-lw of SC20, MEM-OPT of KAISA: one rank preconditions a layer."""
        return cls().changed(**choices)

    @classmethod
    def hybrid(
        cls, ranks: int, workers: int | None = None, fraction: float | None = None, **choices: Any
    ) -> Strategy:
        """Return HYBRID-OPT: a count (`workers`) or a `fraction` of the ranks precondition a layer.

        Raises:
            ValueError: unless exactly one of both is given and the count divides the ranks.
        """
        if (workers is None) == (fraction is None):
            possible = divisors(ranks)
            raise ValueError(
                f"workers={workers} and fraction={fraction}: hybrid needs one of both, for example "
                f"workers={possible[len(possible) // 2]}"
            )
        count = workers if workers is not None else round(ranks * (fraction or 0.0))
        if fraction is not None and not math.isclose(count, ranks * fraction):
            raise ValueError(
                f"fraction={fraction} of {ranks} ranks is no whole number of workers; "
                f"try one of {[d / ranks for d in divisors(ranks)]}"
            )
        check_divides("workers", count, ranks)
        return cls().changed(workers=count, **choices)


def _leaves(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, and in the place of a dataclass its own fields."""
    parts = {field.name: getattr(value, field.name) for field in fields(value)}
    inner = {name: _leaves(part) for name, part in parts.items() if is_dataclass(part)}
    flat = {name: part for name, part in parts.items() if name not in inner}
    return flat | {name: leaf for leaves in inner.values() for name, leaf in leaves.items()}


def _changed(value: Value, choices: dict[str, Any]) -> Value:
    """Return a dataclass with other fields, also of the dataclasses in it."""
    parts = {field.name: getattr(value, field.name) for field in fields(value)}  # type: ignore[arg-type]
    inner = {n: _changed(part, choices) for n, part in parts.items() if is_dataclass(part)}
    leaves = {name: choice for name, choice in choices.items() if name in parts}
    return replace(value, **inner | leaves)  # type: ignore[type-var]
