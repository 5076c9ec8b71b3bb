"""The length of a step: a bound, the length by grafting, or the minimum of a quadratic model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpikfac.plan import BY_ADAM, check_fraction, check_positive, make_plain, one_of
from mpikfac.settings.schedule import Schedule, in_force
from mpikfac.settings.usual import TRUST

Source = Literal["orthogonal", "rows", "rotated", "adam", "sgd", "own", "quadratic"]
Precision = Literal["float32", "tf32", "bfloat16"]
SOURCES: tuple[Source, ...] = (*BY_ADAM, "sgd", "own", "quadratic")
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bfloat16")


@dataclass(frozen=True)
class Length:
    """The length of a step, and the precision of directions.

    `source` gives the length of each layer's direction; a bound may then shorten the directions of
    all layers together. A bound is a number, or a schedule (a function of the step). At most one of
    the bounds is given. A bound on the direction leaves the learning rate its meaning: half the
    rate is half the step. While the KL clip binds, the learning rate cancels, and a falling rate
    does not shorten steps.

    Args:
        source: where the length of each layer's direction comes from. "adam": the length of Adam's
            step without momentum, so that rates of Adam are right; uncovered parameters then take
            Adam's step itself. "orthogonal": the same, after all singular values of the direction
            have been made about equal, as Muon does with the gradient [Muon]. "rows": as
            "orthogonal", after the rows of the direction have been made about as long as each
            other, by an average over steps [NorMuon]. "rotated": Adam's step with momentum in
            eigenbases, for the solver "soap" [SOAP]. "sgd": the length of the layer's gradient
            [Agarwal et al. 2020]. "own": the length that preconditioning gives. "quadratic": length
            and momentum together minimise a quadratic model of the loss, with the Gauss-Newton
            matrix of the batch and the damping [Martens & Grosse 2015, 6.4 and 7], in the place of
            a learning rate, a momentum and a bound. None: "own" if a bound is given, else
            "orthogonal".
        fisher: the bound on the Fisher norm of the direction, `sqrt(sum <direction, gradient>)`;
            None for no bound.
        kl: the KL clip: the bound on the squared Fisher norm of a step [SC20, eq. 18]; None for no
            bound.
        norm: the bound on the norm of the direction; None for no bound.
        momentum: Nesterov's momentum of the gradients, before gradients are preconditioned, in the
            place of the optimizer's momentum, which has to be 0; a number, a schedule, or 0 for
            none. Lengths of layers' directions do not depend on the momentum, except those of
            "rotated". Needs a source of "orthogonal", "rows", "rotated" or "adam".
        trust: the largest length of a layer's direction, in units of the norm of the layer's
            weights, for the lengths of "orthogonal", "rows", "rotated" and "adam": a step then
            changes weights by at most the share `lr * trust`, as in [LARS; LAMB]. `math.inf` for no
            limit. Weights that are all 0 have no limit.
        capture: whether directions are recorded as a CUDA graph, and their kernels then started by
            one call, in steps whose numbers are those of the step before. Needs a GPU of NVIDIA,
            and has not run on one yet.
        precision: how products round that precondition gradients and make directions orthogonal.
            "float32": not at all; on a GPU, as torch's settings say. "tf32": operands to 10 bits of
            mantissa. "bfloat16": operands to 7 bits. Sums are in float32, and models in float64
            round nothing. Tensor cores of an NVIDIA GPU multiply so; other devices round, and save
            no time. None: "tf32" on an NVIDIA GPU without staleness, else "float32".

    Raises:
        ValueError: a bound that is not positive at step 0, two bounds, a momentum outside of 0 to
            1, a momentum beside another source or a bound, a trust that is not positive, an
            unknown precision, or a capture that is no bool.
    """

    source: Source | None = None
    fisher: float | Schedule | None = None
    kl: float | Schedule | None = None
    norm: float | Schedule | None = None
    momentum: float | Schedule = 0.0
    trust: float = TRUST
    capture: bool = False
    precision: Precision | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        bounds = {name: bound for name, bound in self.bounds.items() if bound is not None}
        for name, bound in bounds.items():
            in_force(name, bound, 0)
        if len(bounds) > 1:
            text = " and ".join(f"{name}={bound!r}" for name, bound in bounds.items())
            raise ValueError(f"{text} both bound the step; leave one of them out")
        one_of("length", self.source, (None, *SOURCES))
        if self.source is None:
            object.__setattr__(self, "source", "own" if bounds else "orthogonal")
        if self.source == "quadratic" and bounds:
            raise ValueError(
                f"length='quadratic' needs no bound, and {self.bound}={bounds[self.bound]!r} is one"
            )
        self._check_momentum()
        check_positive("trust", self.trust)
        one_of("precision", self.precision, (None, *PRECISIONS))
        one_of("capture", self.capture, (False, True))

    def _check_momentum(self) -> None:
        if callable(self.momentum):
            in_force("momentum", self.momentum, 0, below=1.0)
        else:
            check_fraction("momentum", self.momentum)
        if self.momentum and not self.by_adam:
            raise ValueError(
                f"momentum={self.momentum!r} of gradients needs length="
                f"{' or '.join(map(repr, BY_ADAM))}, not {self.source!r}"
            )
        if self.momentum and self.bound:
            raise ValueError(
                f"momentum={self.momentum!r} of gradients needs no {self.bound}: the direction is "
                f"not of the step's gradient alone"
            )

    @property
    def grafted(self) -> bool:
        """Whether a first-order method gives the lengths."""
        return self.source in (*BY_ADAM, "sgd")

    @property
    def by_adam(self) -> bool:
        """Whether Adam's steps give the lengths."""
        return self.source in BY_ADAM

    @property
    def orthogonal(self) -> bool:
        """Whether directions are made orthogonal."""
        return self.source in ("orthogonal", "rows")

    @property
    def bounds(self) -> dict[str, float | Schedule | None]:
        """The bounds by name; None for no bound."""
        return {"fisher_clip": self.fisher, "kl_clip": self.kl, "norm_clip": self.norm}

    @property
    def bound(self) -> str:
        """The name of the bound that is given, as in `bounds`, or "" for no bound."""
        return next((name for name, bound in self.bounds.items() if bound is not None), "")
