"""The options that small training programs share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from mpikfac import CommOpt, HybridOpt
from mpikfac.plan import Assignment
from mpikfac.settings import MOMENTUM
from mpikfac_apps.options.fields import bounded, choice
from mpikfac_apps.options.run import RunOptions

RATES = {"kfac": 0.003, "sgd": 0.1, "adamw": 0.001}


@dataclass(frozen=True)
class Kfac:
    """The settings of K-FAC.

    Args:
        damping: the damping of a layer, relative to the mean eigenvalue of its curvature.
        factor_update_steps: the number of steps from one update of the factors to the next.
        inv_update_steps: the number of steps from one decomposition of the factors to the next.
        grad_workers: the number of ranks that precondition a layer; null for all ranks.
        largest: the maximum order of a factor; larger factors are cut into equal blocks. null for
            no limit.
        skip: the names of modules that are trained without K-FAC, such as backbone.
    """

    damping: float = bounded(0.1, "> 0")
    factor_update_steps: int = bounded(1, ">= 1")
    inv_update_steps: int = bounded(10, ">= 1")
    grad_workers: int | None = bounded(None, ">= 1")
    largest: int | None = bounded(None, ">= 1")
    skip: list[str] = field(default_factory=list)

    @property
    def assignment(self) -> Assignment:
        """The assignment of each layer to the ranks that precondition it."""
        return HybridOpt(grad_workers=self.grad_workers) if self.grad_workers else CommOpt()


@dataclass(frozen=True)
class ProgramLearning:
    """How a small program trains.

    Args:
        optimizer: "kfac", "sgd" or "adamw"; K-FAC and SGD use momentum.
        epochs: the number of passes over the data.
        lr: the learning rate after the warm-up; it decays linearly to 0. null for the default of
            the optimizer.
        warmup: the number of steps in which the learning rate rises.
        momentum: the momentum of K-FAC and SGD, or beta1 of AdamW.
        weight_decay: the weight decay.
        seed: the seed of initial weights and data.
        kfac: the settings of K-FAC.
    """

    rates: ClassVar[Mapping[str, float]] = RATES

    optimizer: str = choice("kfac", RATES)
    epochs: int = bounded(5, ">= 1")
    lr: float | None = bounded(None, "> 0")
    warmup: int = bounded(10, ">= 0")
    momentum: float = bounded(MOMENTUM, ">= 0", "< 1")
    weight_decay: float = bounded(0.0001, ">= 0")
    seed: int = bounded(0, ">= 0", "< 4294967296")
    kfac: Kfac = field(default_factory=Kfac)

    @property
    def rate(self) -> float:
        """The learning rate after the warm-up."""
        return self.lr or self.rates[self.optimizer]

    def rate_of(self, step: int, steps: int) -> float:
        """Return the learning rate in step `step`, counted from 0, of a run of `steps` steps."""
        return self.rate * min((step + 1) / (self.warmup + 1), 1 - step / steps)


@dataclass(frozen=True)
class ProgramOptions(RunOptions, ProgramLearning):
    """The options shared by the small programs; each program adds its own fields."""
