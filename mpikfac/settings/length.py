"""The length of a step: a bound, the length by grafting, or the minimum of a quadratic model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpikfac.plan import one_of
from mpikfac.settings.schedule import Schedule, in_force

Graft = Literal["sgd", "adam"]
DECAY, EPSILON = 0.999, 1e-8  # of Adam, as both are usually set


@dataclass(frozen=True)
class Clip:
    """The length of a step.

    A bound is a number, or a schedule (a function of the step). At most one of the bounds is given.

    Args:
        kl: the KL clip: the bound on the squared Fisher norm of a step; None for no bound.
        norm: the bound on the norm of the directions of all layers, if the KL clip is None; None
            for no bound.
        graft: the source of the length of each layer's direction, before any bound. "sgd": the
            length of the layer's gradient [Agarwal et al. 2020]; "adam": the length of Adam's step
            without momentum; None: the length of the direction itself.
        quadratic: length and momentum together minimise a quadratic model of the loss, with the
            Gauss-Newton matrix of the batch and the damping [Martens & Grosse 2015, 6.4 and 7], in
            the place of a bound, a learning rate and a momentum.

    Raises:
        ValueError: a bound that is not positive at step 0, or two bounds.
    """

    kl: float | Schedule | None = 0.001
    norm: float | Schedule | None = None
    graft: Graft | None = None
    quadratic: bool = False

    def __post_init__(self) -> None:
        for name, bound in (("kl_clip", self.kl), ("norm_clip", self.norm)):
            if bound is not None:
                in_force(name, bound, 0)
        if self.kl is not None and self.norm is not None:
            raise ValueError(
                f"kl={self.kl!r} and norm={self.norm!r} both bound the step; make one of them None"
            )
        one_of("graft", self.graft, (None, "sgd", "adam"))
        one_of("quadratic", self.quadratic, (False, True))
        if self.quadratic and (self.kl, self.norm, self.graft) != (None, None, None):
            raise ValueError(
                f"quadratic=True gives the length of a step; kl={self.kl!r}, norm={self.norm!r} "
                f"and graft={self.graft!r} must be None"
            )
