"""The length of a step: the bound on it, and the length that grafting gives."""

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

    Args:
        kl: the bound on the squared Fisher norm of a step, a number or a schedule; None for no
            bound.
        norm: the bound on the norm of the directions of all layers, in the place of `kl`; None for
            no bound.
        graft: the length of the direction of each layer, before any bound. "sgd": the length of
            its gradient [Agarwal et al. 2020]; "adam": the length of Adam's step without momentum;
            None: its own length.

    Raises:
        ValueError: a bound that is not positive at step 0, or two bounds.
    """

    kl: float | Schedule | None = 0.001
    norm: float | Schedule | None = None
    graft: Graft | None = None

    def __post_init__(self) -> None:
        for name, bound in (("kl_clip", self.kl), ("norm_clip", self.norm)):
            if bound is not None:
                in_force(name, bound, 0)
        if self.kl is not None and self.norm is not None:
            raise ValueError(
                f"kl={self.kl!r} and norm={self.norm!r} both bound the step; make one of them None"
            )
        one_of("graft", self.graft, (None, "sgd", "adam"))
