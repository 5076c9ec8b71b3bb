"""The lengths of directions, and bounds on steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mpikfac.plan.choices.checks import (
    check_fraction,
    check_positive,
    check_size,
    make_plain,
    one_of,
    plain,
)
from mpikfac.plan.choices.choice import Choice

Number = float | Callable[[int], float]
"""A number, or a schedule: a function of the step."""
TRUST = 8.0  # the recommended `max_trust_ratio`


@dataclass(frozen=True, kw_only=True, repr=False)
class Grafting(Choice):
    """Determine the length of each layer's direction [Agarwal et al. 2020].

    Attributes:
        by_adam: whether Adam's steps set the lengths; uncovered parameters then take Adam's step
            itself.
        in_eigenbases: whether Adam's steps are taken in eigenbases.
        prescribes: whether the grafting replaces the length of the damped direction.
        needs_batch: whether `set_batch(inputs, loss)` must be called before each step, with an
            optimizer that subtracts the gradients unchanged.
    """

    by_adam: ClassVar[bool] = False
    prescribes: ClassVar[bool] = True
    needs_batch: ClassVar[bool] = False
    in_eigenbases: ClassVar[bool] = False

    @property
    def orthogonalize(self) -> bool:
        """Whether all singular values of a direction are first made approximately equal."""
        return False

    @property
    def normalize_rows(self) -> bool:
        """Whether the rows of a direction are first scaled to approximately equal lengths."""
        return False

    @property
    def momentum(self) -> Number:
        """The momentum that is applied to gradients before they are preconditioned."""
        return 0.0

    def with_momentum(self, momentum: Number) -> Grafting:
        """Return the grafting with the given momentum of the gradients.

        Raises:
            ValueError: the grafting does not support momentum, or the value is out of bounds.
        """
        if "momentum" in self.__dataclass_fields__:
            return replace(self, momentum=momentum)  # type: ignore[call-arg]
        if momentum:
            raise ValueError(
                f"gradient momentum (momentum={momentum!r}) needs grafting=AdamGrafting(...), "
                f"not {self!r}; otherwise, set momentum=0"
            )
        return self

    def attach(self, *parts: Any) -> Any:
        """Return the object that sets the lengths of directions: a `mpikfac.engine.Graft`.

        Args:
            parts: the arguments of `Graft` after the first one.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, repr=False)
class NoGrafting(Grafting):
    """Keep the length of the preconditioned gradient."""

    name: ClassVar[str] = "none"
    prescribes: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, repr=False)
class SGDGrafting(Grafting):
    """Use the length of the layer's gradient."""

    name: ClassVar[str] = "sgd"


@dataclass(frozen=True, kw_only=True, repr=False)
class AdamGrafting(Grafting):
    """Use the length of Adam's step without momentum, so Adam's learning rates are suitable.

    Uncovered parameters take Adam's step itself.

    Attributes:
        orthogonalize: whether to first make all singular values of a direction approximately equal,
            as Muon does with the gradient [Muon].
        normalize_rows: whether to then make the lengths of the direction's rows approximately
            equal, using an average over steps [NorMuon].
        momentum: Nesterov momentum of the gradients, before they are preconditioned. It replaces
            the optimizer's momentum, which must be 0. A number, a schedule, or 0 for none. Lengths
            do not depend on it.
        max_trust_ratio: the maximum length of a layer's direction, relative to the norm of the
            layer's weights: a step changes weights by at most the fraction `lr * max_trust_ratio`
            [LARS; LAMB]. `math.inf` for no limit. Weights that are all 0 have no limit.
    """

    name: ClassVar[str] = "adam"
    by_adam: ClassVar[bool] = True

    orthogonalize: bool = True
    normalize_rows: bool = False
    momentum: Number = 0.0
    max_trust_ratio: float = TRUST

    def __post_init__(self) -> None:
        make_plain(self)
        one_of("orthogonalize", self.orthogonalize, (True, False))
        one_of("normalize_rows", self.normalize_rows, (True, False))
        if self.normalize_rows and not self.orthogonalize:
            raise ValueError("normalize_rows=True needs orthogonalize=True, not False")
        check_fraction("momentum", _at_start(self.momentum))
        check_positive("max_trust_ratio", self.max_trust_ratio)


@dataclass(frozen=True, kw_only=True, repr=False)
class AdamInEigenbases(Grafting):
    """Take Adam's step with momentum in the eigenbases of `SOAP`, and rotate it back [SOAP].

    Attributes:
        momentum: the momentum of the gradients, which replaces that of the optimizer.
        max_trust_ratio: see `AdamGrafting`.
    """

    name: ClassVar[str] = "adam-in-eigenbases"
    by_adam: ClassVar[bool] = True
    in_eigenbases: ClassVar[bool] = True

    momentum: Number = 0.95
    max_trust_ratio: float = TRUST

    def __post_init__(self) -> None:
        make_plain(self)
        check_fraction("momentum", _at_start(self.momentum))
        check_positive("max_trust_ratio", self.max_trust_ratio)


@dataclass(frozen=True, kw_only=True, repr=False)
class Clip(Choice):
    """A bound on the directions of all layers together.

    A bound on the direction preserves the meaning of the learning rate: half the rate gives half
    the step. While the KL clip binds, the learning rate cancels out, and decaying it does not
    shorten steps.

    Attributes:
        of_step: whether the bound is on the step, which includes the learning rate, rather than on
            the direction.
        of_norm: whether the norm is the Euclidean norm rather than the Fisher norm.
        squared: whether the bound is on the square of the norm.
    """

    of_step: ClassVar[bool] = False
    of_norm: ClassVar[bool] = False
    squared: ClassVar[bool] = False

    @property
    def bound(self) -> Number:
        """The bound: a number or a schedule."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, repr=False)
class KLClip(Clip):
    """A bound on the squared Fisher norm of a step [SC20, eq. 18].

    Attributes:
        kl_clip: the bound; a number or a schedule.
    """

    name: ClassVar[str] = "kl"
    of_step: ClassVar[bool] = True
    squared: ClassVar[bool] = True

    kl_clip: Number = 0.001

    def __post_init__(self) -> None:
        make_plain(self)
        _check_bound("kl_clip", self.kl_clip)

    @property
    def bound(self) -> Number:
        """The bound: a number or a schedule."""
        return self.kl_clip


@dataclass(frozen=True, kw_only=True, repr=False)
class _OfDirection(Clip):
    """Base class for bounds on a norm of the direction.

    Attributes:
        max_norm: the bound; a number or a schedule.
    """

    max_norm: Number

    def __post_init__(self) -> None:
        make_plain(self)
        _check_bound("max_norm", self.max_norm)

    @property
    def bound(self) -> Number:
        """The bound: a number or a schedule."""
        return self.max_norm


@dataclass(frozen=True, kw_only=True, repr=False)
class FisherClip(_OfDirection):
    """A bound on the Fisher norm of the direction, `sqrt(sum <direction, gradient>)`.

    Attributes:
        max_norm: the bound; a number or a schedule.
    """

    name: ClassVar[str] = "fisher"


@dataclass(frozen=True, kw_only=True, repr=False)
class NormClip(_OfDirection):
    """A bound on the Euclidean norm of the direction.

    Attributes:
        max_norm: the bound; a number or a schedule.
    """

    name: ClassVar[str] = "norm"
    of_norm: ClassVar[bool] = True


def _check_bound(name: str, bound: Number) -> None:
    if not check_size(name, _at_start(bound)) > 0:
        raise ValueError(f"{name}={_at_start(bound)!r} must be positive")


def _at_start(number: Number) -> Any:
    """Return the number, or the value of a schedule at step 0."""
    return plain(number(0)) if callable(number) else number
