"""The hyperparameters of K-FAC, constant or scheduled, and their values for a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from mpikfac.plan import AdamGrafting, Clip, Grafting, make_plain, one_of, plain
from mpikfac.settings.budget import Budget
from mpikfac.settings.damping import Damping
from mpikfac.settings.schedule import Schedule, evaluate, every, in_force


@dataclass(frozen=True)
class Numbers:
    """The values of the hyperparameters for a step; for a first-order step, only `step` is set.

    Attributes:
        step: the number of steps completed before this one.
        damping: the damping of directions and decompositions.
        decay: the decay of running averages.
        bound: the bound of the clip; None for no clip.
        momentum: the momentum of gradients, before they are preconditioned.
        refreshes: whether a refresh of decompositions, or one slot of it, begins.
        turn: the slot of the refresh that `step` belongs to; None without slots.
        factor_update_steps: the interval between updates of factors, as of the next step.
        inv_update_steps: the interval between decompositions, as of the next step.
    """

    step: int
    damping: float = math.nan
    decay: float = math.nan
    bound: float | None = None
    momentum: float = 0.0
    refreshes: bool = False
    turn: int | None = None
    factor_update_steps: int = 0
    inv_update_steps: int = 0


Precision = Literal["float32", "tf32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
GOLDEN_RATIO = (5**0.5 - 1) / 2  # its multiples, modulo 1, are spread evenly between 0 and 1


@dataclass(frozen=True)
class Settings:
    """The hyperparameters of K-FAC, constant or scheduled; see `KFAC` for their meaning.

    Their values at step 0 are checked on construction, later ones when a step evaluates them.

    Raises:
        ValueError: a value is out of bounds, or gradient momentum is combined with a clip; the
            message names the setting.
    """

    damping: Damping
    factor_update_steps: float | Schedule
    inv_update_steps: float | Schedule
    decay: float | Schedule
    grafting: Grafting = field(default_factory=AdamGrafting)
    clip: Clip | None = None
    matmul_precision: Precision | None = None
    cuda_graph: bool = False
    budget: Budget = field(default_factory=lambda: Budget(None))

    def __post_init__(self) -> None:
        make_plain(self)
        one_of("matmul_precision", self.matmul_precision, (None, *PRECISIONS))
        one_of("cuda_graph", self.cuda_graph, (False, True))
        if self.grafting.momentum and self.clip is not None:
            raise ValueError(
                f"gradient momentum (momentum={self.grafting.momentum!r}) needs clip=None, not "
                f"{self.clip!r}: with momentum, the direction also depends on earlier "
                "gradients"
            )
        for name in ("factor_update_steps", "inv_update_steps"):
            self.due(name, 0)

    def at(self, step: int, stagger: int = 1) -> Numbers:
        """Return the values of the hyperparameters at `step`, with refreshes in `stagger` slots.

        Raises:
            ValueError: a value is out of bounds.
        """
        bound = self.bound
        return Numbers(
            step,
            self._in_force("damping", step),
            self._in_force("factor_decay", step, below=1.0),
            self._in_force(bound, step) if bound else None,
            self._in_force("momentum", step, below=1.0),
            self.due("inv_update_steps", step, stagger),
            self._turn(step, stagger) if stagger > 1 else None,
            self._between("factor_update_steps", step + 1, 1),
            self._between("inv_update_steps", step + 1, 1),
        )

    @property
    def bound(self) -> str:
        """The name of the clip's bound, such as "kl_clip"; "" without a clip."""
        return "" if self.clip is None else f"{self.clip.name}_clip"

    def _in_force(self, name: str, step: int, below: float = math.inf) -> float:
        setting = self._numbers()[name]
        assert setting is not None, f"nothing sets {name}"
        return in_force(name, setting, step, below)

    def due(self, name: str, step: int, turns: int = 1) -> bool:
        """Return whether the interval `name`, or one of its `turns` slots, begins at `step`.

        Raises:
            ValueError: the interval is not a multiple of `turns`.
        """
        if turns == 1:
            return every(getattr(self, name), step, name)
        return step % self._between(name, step, turns) == 0

    def begin(self, step: int) -> float:
        """Return the offset of an update's first example, in distances between examples, in [0, 1).

        The offsets of consecutive updates are spread evenly, for any interval between them.
        Otherwise, some positions could be skipped forever in batches whose examples are frames or
        windows of a few images.
        """
        interval = self._between("factor_update_steps", step, 1)
        return (step // interval * GOLDEN_RATIO + (interval - 1) * 2**0.5) % 1

    def _turn(self, step: int, turns: int) -> int:
        """Return the index of the refresh slot that `step` belongs to."""
        return step // self._between("inv_update_steps", step, turns) % turns

    def _between(self, name: str, step: int, turns: int) -> int:
        """Return the number of steps from one of the `turns` slots of an interval to the next."""
        interval = evaluate(getattr(self, name), step, name)
        if interval % turns:
            raise ValueError(f"{name}={interval!r} must be a multiple of stagger={turns}")
        return int(interval) // turns

    def described(self) -> dict[str, object]:
        """Return the settings by name, for ranks to compare; schedules by their value at step 0."""
        numbers = self._numbers().items()
        values = {n: ("scheduled", plain(v(0))) if callable(v) else v for n, v in numbers}
        return values | {
            "relative": self.damping.is_relative,
            "adapted": self.damping.adapted,
            **{"grafting": self.grafting.name, "clip": self.clip and self.clip.name},
            "grafting.prescribes": self.grafting.prescribes,
            "grafting.orthogonalize": self.grafting.orthogonalize,
            "grafting.normalize_rows": self.grafting.normalize_rows,
            "max_trust_ratio": getattr(self.grafting, "max_trust_ratio", None),
            "matmul_precision": self.matmul_precision,
            "budget": self.budget.share,
        }

    def _numbers(self) -> dict[str, float | Schedule | None]:
        return {
            **{"damping": self.damping.number, "factor_update_steps": self.factor_update_steps},
            **{"inv_update_steps": self.inv_update_steps, "factor_decay": self.decay},
            **{"momentum": self.grafting.momentum},
            **({} if self.clip is None else {self.bound: self.clip.bound}),
        }
