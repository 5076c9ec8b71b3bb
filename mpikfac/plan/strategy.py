"""How K-FAC is distributed over ranks and over time, as a value.

Three kinds of choices stay apart: the estimator (what enters a factor), the placement (who
decomposes, preconditions and updates), the transport (what travels when, and in which messages).
Choices of placement and transport give the same numbers for one estimator, but for wires, which
round what travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Wire = Literal["bfloat16", "int8"]


@dataclass(frozen=True)
class Strategy:
    """How K-FAC is distributed over ranks and over time.

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
        replicate_below: factors of a smaller order are decomposed by every worker of their layer,
            which sends nothing [SPD-KFAC, Shi et al. 2021]; 0 for none.
        reduce_at: when factors are averaged over ranks: at each step that takes statistics
            ("factors"), or, as averages over time and over ranks commute, only before they are
            decomposed ("bases"); until then each rank keeps the running averages of its own share.
        packing: factors travel as a folded "triangle" or as the full "square".
        fusion: layers whose factors, bases or preconditioned gradients share a message: a number,
            or that of each message in turn; None for one message for all.
        overlap: sums of gradients and factors are sent beside the backward pass, each message as
            soon as its layers have been through it, and factors beside what follows until they are
            needed: by a thread that sends gradients before factors. `fusion` says which layers
            share a message; a step has one backward pass then.
        sums: how a sum is made on one rank: "reduce" as MPI does, or "alltoall": every rank sends
            owners their parts, which these add in order of ranks.
        ranks_per_node: ranks r // ranks_per_node share a node, whose ranks first add up what leaves
            it, and hand on to each other what comes to it once; None for one level.
        delay: steps after which decompositions are used, or fewer where the next refresh begins
            before. They are made in the background meanwhile, and used no earlier where they are
            done before: results do not depend on timing.
        stagger: a refresh is spread over so many steps, each with a share of the layers.
        tolerance: a refresh decomposes a factor only if what there is of it is off by more than
            this, relative: eigenvectors by the norm of what they leave off the diagonal, inverses
            by the error of typical directions. Eigenvalues are renewed all the same. Its owner
            decides; what travels stays the same. 0: every factor is decomposed.
        factor_wire: how factors travel: None, as they are; "bfloat16"; or "int8", 16 numbers with a
            common exponent.
        basis_wire: the same of decompositions.
        gradient_wire: the same of covered layers' gradients, of preconditioned ones, and with
            update="owner" of weights' changes; or "top-k", the largest of them only.
        top_share: of the numbers, those that travel with "top-k".
        curvature_ranks: ranks beside those that train, which decompose for them [LBANN]; 0 where
            each rank decomposes in its own background. The numbers are the same.
    """

    workers: int = 1
    reduction: Literal["everyone", "owners", "none"] = "everyone"
    update: Literal["everyone", "owner"] = "everyone"
    balance: Literal["compute", "memory"] = "compute"
    colocate: bool = True
    parts: int | None = None
    replicate_below: int = 0
    reduce_at: Literal["factors", "bases"] = "factors"
    packing: Literal["triangle", "square"] = "triangle"
    fusion: int | tuple[int, ...] | None = None
    overlap: bool = False
    sums: Literal["reduce", "alltoall"] = "reduce"
    ranks_per_node: int | None = None
    delay: int = 0
    stagger: int = 1
    tolerance: float = 0.0
    factor_wire: Wire | None = None
    basis_wire: Wire | None = None
    gradient_wire: Wire | Literal["top-k"] | None = None
    top_share: float = 0.01
    curvature_ranks: int = 0

    def __post_init__(self) -> None:
        one_of("reduction", self.reduction, ("everyone", "owners", "none"))
        one_of("update", self.update, ("everyone", "owner"))
        one_of("balance", self.balance, ("compute", "memory"))
        one_of("colocate", self.colocate, (True, False))
        one_of("reduce_at", self.reduce_at, ("factors", "bases"))
        one_of("overlap", self.overlap, (True, False))
        one_of("packing", self.packing, ("triangle", "square"))
        one_of("sums", self.sums, ("reduce", "alltoall"))
        one_of("factor_wire", self.factor_wire, (None, "bfloat16", "int8"))
        one_of("basis_wire", self.basis_wire, (None, "bfloat16", "int8"))
        one_of("gradient_wire", self.gradient_wire, (None, "bfloat16", "int8", "top-k"))
        if not 0 < self.top_share <= 1:
            raise ValueError(f"top_share={self.top_share} must be above 0 and at most 1")
        check_count("workers", self.workers, 1)
        check_count("stagger", self.stagger, 1)
        several = self.fusion if isinstance(self.fusion, tuple) and self.fusion else (self.fusion,)
        for number in several if self.fusion is not None else ():
            check_count("fusion", number, 1)
        if self.ranks_per_node is not None:
            check_count("ranks_per_node", self.ranks_per_node, 1)
        for name in ("replicate_below", "delay", "curvature_ranks"):
            check_count(name, getattr(self, name), 0)
        _check_size("tolerance", self.tolerance)
        self._check_combinations()

    def _check_combinations(self) -> None:
        everywhere = (self.reduction, self.update) == ("everyone", "everyone")
        for name, asked in (
            ("parts", self.parts is not None),
            ("replicate_below", self.replicate_below > 0),
        ):
            if asked and not everywhere:
                raise ValueError(
                    f"{name}={getattr(self, name)} needs reduction='everyone' and "
                    f"update='everyone', not {self.reduction!r} and {self.update!r}"
                )
        if self.parts is not None and self.packing == "square":
            raise ValueError(f"parts={self.parts} needs packing='triangle', not 'square'")
        if self.overlap and (self.parts is not None or self.packing == "square"):
            raise ValueError(
                f"overlap=True needs parts=None and packing='triangle', "
                f"not parts={self.parts} and packing={self.packing!r}"
            )
        if self.ranks_per_node is not None and (self.parts is not None or self.overlap):
            raise ValueError(
                f"ranks_per_node={self.ranks_per_node} needs parts=None and overlap=False, "
                f"not parts={self.parts} and overlap={self.overlap}"
            )
        to_owners = self.reduction == "owners" or self.update == "owner"
        whole = self.fusion is None and not self.overlap
        if self.sums == "alltoall" and not (to_owners and whole):
            raise ValueError(
                f"sums='alltoall' needs reduction='owners' or update='owner', fusion=None and "
                f"overlap=False, not {self.reduction!r}, {self.update!r}, {self.fusion} and "
                f"{self.overlap}"
            )
        if self.reduce_at == "bases" and (self.parts is not None or self.reduction == "none"):
            raise ValueError(
                f"reduce_at='bases' needs parts=None and a reduction over ranks, "
                f"not parts={self.parts} and reduction={self.reduction!r}"
            )
        if self.curvature_ranks and (self.delay == 0 or self.replicate_below or self.tolerance):
            raise ValueError(
                f"curvature_ranks={self.curvature_ranks} needs a delay of at least 1, "
                f"replicate_below=0 and tolerance=0, not {self.delay}, {self.replicate_below} and "
                f"{self.tolerance}"
            )
        self._check_wires()

    def _check_wires(self) -> None:
        plain = (self.parts, self.overlap, self.ranks_per_node, self.sums)
        for wire in ("factor_wire", "basis_wire", "gradient_wire"):
            if getattr(self, wire) is not None and plain != (None, False, None, "reduce"):
                raise ValueError(
                    f"{wire}={getattr(self, wire)!r} needs parts=None, overlap=False, "
                    f"ranks_per_node=None and sums='reduce', not {self.parts}, {self.overlap}, "
                    f"{self.ranks_per_node} and {self.sums!r}"
                )

    def check_ranks(self, ranks: int) -> None:
        """Returns if so many ranks fall into columns and nodes.

        Raises:
            ValueError: they do not.
        """
        check_divides("workers", self.workers, ranks)
        if self.ranks_per_node is not None:
            check_divides("ranks_per_node", self.ranks_per_node, ranks)

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
        check_divides("workers", count, ranks)
        return cls(workers=count, **choices)


def divisors(number: int) -> list[int]:
    """All divisors of a number, ascending: the worker counts that fit so many ranks."""
    return [d for d in range(1, number + 1) if number % d == 0]


def check_divides(name: str, count: int, ranks: int) -> None:
    """Returns if the ranks fall into groups of so many.

    Raises:
        ValueError: they do not; the text calls the count `name`.
    """
    if count < 1 or ranks % count:
        raise ValueError(
            f"{name}={count} must divide the number of ranks ({ranks}); "
            f"try one of {divisors(ranks)}"
        )


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Returns if `value` is allowed.

    Raises:
        ValueError: it is not; the text calls it `name` and lists what is.
    """
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")


def check_count(name: str, value: object, least: int) -> None:
    """Returns if `value` is a whole number of at least `least`.

    Raises:
        ValueError: it is not; the text calls it `name`.
    """
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")


def _check_size(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r} must be a finite number of at least 0")
