"""The base of preconditioners: from factor to decomposition, and from gradient to direction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from mpikfac.plan import AdamGrafting, Choice, Clip, Form, Grafting, NoGrafting, one_of
from mpikfac.settings import (
    Budget,
    Damping,
    Estimator,
    Precision,
    Schedule,
    usual_intervals,
)

if TYPE_CHECKING:  # programs print help from these types, and the import of torch takes seconds
    import torch
    from torch import Tensor

    from mpikfac.numerics import Side


class Means(NamedTuple):
    """Mean eigenvalues, each `[]`, or `[groups]` for a layer with groups.

    Attributes:
        factor: the mean of the factor to decompose.
        ratio: the mean of all factors of the same side, A or G, by the mean of the other side's
            factors; None if the other side is the identity, or the form does not ask for `both`.
    """

    factor: Tensor
    ratio: Tensor | None = None


@dataclass
class Held:
    """A layer's decompositions as views of the arena, bound once for all directions.

    Attributes:
        a: the blocks that stand for A, by kind ("vectors").
        g: the blocks that stand for G, by kind.
        denominators: room for the damped products of eigenvalues, `[outputs, inputs]`; None if the
            preconditioner keeps no products.
        scales: estimates of the products of eigenvalues `[outputs, inputs]`; None if the layer has
            no estimates.
        damping: the damping in force.
    """

    a: Mapping[str, Side]
    g: Mapping[str, Side]
    denominators: Tensor | None = None
    scales: Tensor | None = None
    damping: float = 0.0

    def sides(self, kind: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Return the blocks of a kind of A and of G, in that dtype."""
        return [b.to(dtype) for b in self.a[kind]], [b.to(dtype) for b in self.g[kind]]


@dataclass(frozen=True)
class Defaults:
    """The settings that `KFAC` takes where none are given; it says what they mean.

    An interval of None is the usual one, which a budget stretches.
    """

    damping: Damping = field(default_factory=Damping)
    grafting: Grafting = field(default_factory=AdamGrafting)
    estimator: Estimator = field(default_factory=Estimator)
    factor_update_steps: int | Schedule | None = None
    inv_update_steps: int | Schedule | None = None
    matmul_precision: Precision | None = None

    def override(self, clip: Clip | None = None, **given: Any) -> Defaults:
        """Return these settings with the given ones in their place; None is not given.

        Args:
            clip: bounds the lengths of directions, so grafting has to be given with it.
        """
        if clip is not None and given.get("grafting") is None:
            given["grafting"] = NoGrafting()
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def intervals(self, budget: Budget, stagger: int) -> tuple[float | Schedule, float | Schedule]:
        """Return both intervals, with the usual one, stretched by the budget, for None."""
        usual = budget.stretched(usual_intervals(stagger))
        factors, bases = self.factor_update_steps, self.inv_update_steps
        return (
            usual.factor_update_steps if factors is None else factors,
            usual.inv_update_steps if bases is None else bases,
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Preconditioner(Choice):
    """From a factor to a decomposition, and from a gradient to a direction.

    An own preconditioner derives from this class, sets `form`, defines `decompose` and `direction`,
    and is given to `KFAC(preconditioner=...)`. A preconditioner is a frozen dataclass, whose fields
    are its settings: ranks compare preconditioners by `repr`.

    Attributes:
        defaults: what `KFAC` takes for settings that are not given.
    """

    defaults: ClassVar[Defaults] = Defaults()

    def __post_init__(self) -> None:
        if self.dtype is not None:
            import torch

            one_of("dtype", self.dtype, (None, torch.bfloat16))

    @property
    def form(self) -> Form:
        """What the plan knows of the preconditioner; a class attribute will do."""
        raise NotImplementedError(f"{type(self).__name__} does not set form")

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype in which decompositions are kept, sent and multiplied; None: the model's."""
        return None

    def attach(self, bases: Any) -> Iterable[Any]:
        """Return parts of the trainer that keep a state of the preconditioner's own.

        Args:
            bases: the rank's `mpikfac.engine.Bases`.
        """
        return ()

    def added(self, means: Means, damping: float, relative: bool) -> Tensor:
        """Return the damping that is part of a factor's decomposition, `[]` or `[groups]`.

        Only a preconditioner whose form is `damped` is asked.

        Args:
            relative: damping is relative to mean eigenvalues.
        """
        raise NotImplementedError(
            f"preconditioner {self.form.name!r} is damped but does not define added()"
        )

    def squared(self, gradient: Tensor, held: Held | None) -> tuple[Tensor, Tensor]:
        """Return X and Y of a layer's averaged gradient: A is the mean of `X^T X`, G of `Y Y^T`.

        Only a preconditioner whose form is `of` the gradient is asked.

        Args:
            gradient: `[outputs, inputs]`, or `[groups, outputs, inputs]`, as X and Y.
            held: the decompositions in use; None before the first.
        """
        return gradient, gradient

    def decompose(
        self, factor: Tensor, damping: float | Tensor, rank: int | None
    ) -> dict[str, Tensor]:
        """Return the blocks of a factor's decomposition, by kind.

        Args:
            factor: `[n, n]`, or `[count, n, n]` for several of one order; for a form that keeps
                vectors, the vector `[n]`.
            damping: the result of `added`, or 0.
            rank: number of eigenvectors to keep; None for all.

        Raises:
            ArithmeticError: the factor cannot be decomposed.
        """
        raise NotImplementedError(f"preconditioner {self.form.name!r} does not define decompose()")

    def renew(
        self, factor: Tensor, blocks: Mapping[str, Tensor], damping: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return blocks that change without a new decomposition, and the misfit `[]` of all blocks.

        The misfit is relative; a preconditioner without a cheap misfit returns NaN, which fits
        nothing.

        Args:
            factor: `[n, n]`, or `[count, n, n]`, with misfits `[count]`.
            blocks: the older decomposition, by kind.
            damping: the result of `added`; None for a form that is not damped.
        """
        return {}, factor.new_full(factor.shape[:-2], float("nan"))

    def damp(self, held: Sequence[Held], damping: float, relative: bool) -> None:
        """Write damped products of eigenvalues of all its layers to `denominators`.

        Only a preconditioner whose form has `denominators` is asked, when damping or decompositions
        change.
        """
        raise NotImplementedError(
            f"preconditioner {self.form.name!r} has denominators but no damp()"
        )

    def direction(self, gradient: Tensor, held: Held) -> Tensor:
        """Return the direction of a layer `[outputs, inputs]` for the layer's gradient."""
        raise NotImplementedError(f"preconditioner {self.form.name!r} does not define direction()")
