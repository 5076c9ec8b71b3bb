"""The base class of preconditioners, which decompose factors and compute directions."""

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

if TYPE_CHECKING:  # programs use these types to print help, and importing torch takes seconds
    import torch
    from torch import Tensor

    from mpikfac.numerics import Side


class Means(NamedTuple):
    """Mean eigenvalues, each `[]`, or `[groups]` for a layer with groups.

    Attributes:
        factor: the mean eigenvalue of the factor to decompose.
        ratio: the mean over all factors of the same side, A or G, divided by the mean of the other
            side; None if the other side is the identity, or if the damping of A does not depend on
            G, nor that of G on A (`Form.both`).
    """

    factor: Tensor
    ratio: Tensor | None = None


@dataclass
class Held:
    """A layer's decompositions, as views of an arena, created once and used for all directions.

    Attributes:
        a: the blocks of A, by kind ("vectors").
        g: the blocks of G, by kind.
        denominators: storage for the damped products of eigenvalues, `[outputs, inputs]`; None if
            the preconditioner keeps no products.
        scales: estimates of the products of eigenvalues `[outputs, inputs]`; None if the layer has
            none.
        damping: the current damping.
    """

    a: Mapping[str, Side]
    g: Mapping[str, Side]
    denominators: Tensor | None = None
    scales: Tensor | None = None
    damping: float = 0.0

    def sides(self, kind: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Return the blocks of one kind, of A and of G, in the given dtype."""
        return [b.to(dtype) for b in self.a[kind]], [b.to(dtype) for b in self.g[kind]]


@dataclass(frozen=True)
class Defaults:
    """The settings that `KFAC` uses where none are given; see `KFAC` for their meaning.

    An interval of None stands for the default interval, which a budget can lengthen.
    """

    damping: Damping = field(default_factory=Damping)
    grafting: Grafting = field(default_factory=AdamGrafting)
    estimator: Estimator = field(default_factory=Estimator)
    factor_update_steps: int | Schedule | None = None
    inv_update_steps: int | Schedule | None = None
    matmul_precision: Precision | None = None

    def override(self, clip: Clip | None = None, **given: Any) -> Defaults:
        """Return a copy of these settings with the given values, except where they are None.

        Args:
            clip: bounds the lengths of directions; with a clip, the default grafting is
                `NoGrafting()`.
        """
        if clip is not None and given.get("grafting") is None:
            given["grafting"] = NoGrafting()
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def intervals(self, budget: Budget, stagger: int) -> tuple[float | Schedule, float | Schedule]:
        """Return the intervals between updates of factors, and between decompositions.

        The default interval, lengthened by the budget, replaces None.
        """
        usual = budget.stretched(usual_intervals(stagger))
        factors, bases = self.factor_update_steps, self.inv_update_steps
        return (
            usual.factor_update_steps if factors is None else factors,
            usual.inv_update_steps if bases is None else bases,
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Preconditioner(Choice):
    """Turn factors into decompositions, and gradients into directions.

    To define a preconditioner, derive from this class, set `form`, define `decompose` and
    `direction`, and pass an instance as `KFAC(preconditioner=...)`. A preconditioner is a frozen
    dataclass whose fields are its settings; ranks compare preconditioners by their `repr`.

    Attributes:
        defaults: the values for settings of `KFAC` that are not given.
    """

    defaults: ClassVar[Defaults] = Defaults()

    def __post_init__(self) -> None:
        if self.dtype is not None:
            import torch

            one_of("dtype", self.dtype, (None, torch.bfloat16))

    @property
    def form(self) -> Form:
        """The plan's description of the preconditioner; usually a class attribute."""
        raise NotImplementedError(f"{type(self).__name__} does not set form")

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype in which decompositions are kept, sent and multiplied; None for the model's."""
        return None

    def attach(self, bases: Any) -> Iterable[Any]:
        """Return the parts of the trainer that keep the preconditioner's own state.

        Args:
            bases: the rank's `mpikfac.engine.Bases`.
        """
        return ()

    def added(self, means: Means, damping: float, relative: bool) -> Tensor:
        """Return the damping that is part of a factor's decomposition, `[]` or `[groups]`.

        Called only if the form is `damped`.

        Args:
            relative: whether the damping is relative to mean eigenvalues.
        """
        raise NotImplementedError(
            f"preconditioner {self.form.name!r} is damped but does not define added()"
        )

    def squared(self, gradient: Tensor, held: Held | None) -> tuple[Tensor, Tensor]:
        """Return X and Y for a layer's averaged gradient; A and G are means of `X^T X` and `Y Y^T`.

        Called only if the form has `of="gradient"`.

        Args:
            gradient: `[outputs, inputs]`, or `[groups, outputs, inputs]`; X and Y have the same
                shape.
            held: the decompositions in use; None before the first decomposition.
        """
        return gradient, gradient

    def decompose(
        self, factor: Tensor, damping: float | Tensor, rank: int | None
    ) -> dict[str, Tensor]:
        """Return the blocks of a factor's decomposition, by kind.

        Args:
            factor: `[n, n]`, or `[count, n, n]` for several factors of the same order; the vector
                `[n]` if the form keeps vectors.
            damping: the result of `added`, or 0.
            rank: the number of eigenvectors to keep; None for all.

        Raises:
            ArithmeticError: the factor cannot be decomposed.
        """
        raise NotImplementedError(f"preconditioner {self.form.name!r} does not define decompose()")

    def renew(
        self, factor: Tensor, blocks: Mapping[str, Tensor], damping: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the blocks that can change without a new decomposition, and the total misfit `[]`.

        The misfit is a relative error. A preconditioner that cannot compute it cheaply returns NaN,
        which counts as above every tolerance.

        Args:
            factor: `[n, n]`, or `[count, n, n]`, with misfits `[count]`.
            blocks: the older decomposition, by kind.
            damping: the result of `added`; None if the form is not damped.
        """
        return {}, factor.new_full(factor.shape[:-2], float("nan"))

    def damp(self, held: Sequence[Held], damping: float, relative: bool) -> None:
        """Write the damped products of eigenvalues to the `denominators` of all layers in `held`.

        Called only if the form has `denominators`, when damping or decompositions have changed.
        """
        raise NotImplementedError(
            f"preconditioner {self.form.name!r} has denominators but no damp()"
        )

    def direction(self, gradient: Tensor, held: Held) -> Tensor:
        """Return the direction for a layer's gradient, `[outputs, inputs]`."""
        raise NotImplementedError(f"preconditioner {self.form.name!r} does not define direction()")
