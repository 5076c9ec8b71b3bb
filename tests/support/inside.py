"""The parts of trainers, for tests and benchmarks: no other file of tests knows the parts.

A part that moves changes this file alone. `tests/test_house.py` holds this. Tests ask the public
interface first: states, messages, plans, refusals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from mpikfac import KFAC, Asynchronous, DataParallel
from mpikfac.comm import Grid
from mpikfac.engine import (
    Bases,
    Directions,
    Gradients,
    Nonfinite,
    Replicas,
    Scales,
    decomposers,
    of_copies,
)
from mpikfac.engine.directions import clip_scale
from mpikfac.engine.nonfinite import TOLERATED
from mpikfac.engine.statistics import scales as scales_of_examples
from mpikfac.layers import Layer
from mpikfac.numerics import Arena
from mpikfac.settings import Settings

__all__ = [
    "PLACES",
    "TOLERATED",
    "Nonfinite",
    "bases",
    "clip_scale",
    "damping",
    "decompositions",
    "directions",
    "due",
    "factors",
    "gradients",
    "grid",
    "layers",
    "look",
    "memory",
    "of_copies",
    "predicted_change",
    "records_scales",
    "replicas",
    "scale_sums",
    "scale_weights",
    "scales",
    "settings",
    "settle",
    "settled",
    "statistics",
    "weights",
    "whole_factors",
]

Trainer: TypeAlias = KFAC | DataParallel | Asynchronous

# Where a function or a number can be replaced, as in `monkeypatch.setattr(*PLACES[...], other)`:
# the owner and the name. A method is replaced for all trainers.
PLACES: dict[str, tuple[Any, str]] = {
    "reduce gradients": (Gradients, "reduce"),
    "decompose": (Bases, "decompose"),
    "decompose for others": (decomposers, "_answer"),  # on curvature ranks
    "let curvature ranks go": (decomposers, "leave"),
    "restart scales": (Scales, "restart"),
    "publish gradients": (Directions, "publish"),
    "examples at a time": (scales_of_examples, "CHUNK"),
}


# -- numbers as the parts hold them: changes of tensors change the parts ---------------------------


def factors(kfac: KFAC) -> Arena:
    """Return the rank's running averages of factors by name, as packed triangles or vectors."""
    return kfac.factors.averages


def weights(kfac: KFAC) -> dict[str, Tensor]:
    """Return the weights of the rank's running averages, each `[1]`, by the factor's name."""
    return kfac.factors.weights


def statistics(kfac: KFAC) -> Arena:
    """Return the sums of the passes since the last step, by the factor's name, with counts."""
    return kfac.factors.statistics


def bases(kfac: KFAC) -> Arena:
    """Return the rank's decompositions in use, by the names of the state."""
    return kfac.bases.arena


def scales(kfac: KFAC) -> Arena:
    """Return the averages of EKFAC's scales, by layer."""
    return kfac.scales.averages


def scale_weights(kfac: KFAC) -> dict[str, Tensor]:
    """Return the weights of the averages of EKFAC's scales, each `[1]`, by layer."""
    return kfac.scales.weights


def scale_sums(kfac: KFAC) -> Arena:
    """Return the sums of squares of the passes since the last step, by layer, with counts."""
    return kfac.scales.sums


def gradients(trainer: Trainer) -> Arena:
    """Return the gradients of the last step, averaged over ranks, by block."""
    return trainer.gradients.arena


def directions(kfac: KFAC) -> Arena:
    """Return the directions of the last step that the rank holds, by layer."""
    return kfac.directions.arena


def predicted_change(kfac: KFAC) -> Tensor:
    """Return the change of the loss that the quadratic model predicts of the last step, `[1]`."""
    return kfac.directions.expected


def memory(trainer: Trainer) -> dict[str, int]:
    """Return the bytes of all buffers, by the names of `plan.memory`.

    "parts" and "wires" are there if something is kept for parts of a batch and for encodings.
    """
    rule = [arena for kept in vars(trainer.replicas.rule).values() for arena in _arenas(kept)]
    found = {"gradients": trainer.gradients.arena.flat.nbytes, "copies": _bytes(rule)}
    parts = trainer.gradients.parts.nbytes
    kept = [*trainer.grid.encoded.memory.values(), trainer.gradients._before.flat]
    if isinstance(trainer, KFAC):
        of_kfac = {
            "statistics": trainer.factors.statistics,
            "squares": trainer.factors._squares,
            "averages": trainer.factors.averages,
            "bases": trainer.bases.arena,
            "denominators": trainer.bases.denominators,
            "scales": trainer.scales.averages,
            "scale sums": trainer.scales.sums,
            "directions": trainer.directions.arena,
        }
        found |= {name: arena.flat.nbytes for name, arena in of_kfac.items()}
        parts += trainer.factors.parts.nbytes
    optional = {"parts": parts, "wires": sum(losses.nbytes for losses in kept)}
    return found | {name: size for name, size in optional.items() if size}


def _arenas(kept: object) -> list[Arena]:
    """Return the arenas of an attribute: an arena, or arenas in a list."""
    return [one for one in (kept if isinstance(kept, list) else [kept]) if isinstance(one, Arena)]


def _bytes(arenas: Sequence[Arena]) -> int:
    return sum(arena.flat.nbytes for arena in arenas)


# -- parts, and what parts do ----------------------------------------------------------------------


def grid(trainer: Trainer) -> Grid:
    """Return the grid of ranks, with its communicators."""
    return trainer.grid


def layers(kfac: KFAC) -> Sequence[Layer]:
    """Return the covered layers, in the order of the plan."""
    return kfac.layers


def settings(kfac: KFAC) -> Settings:
    """Return the choices of K-FAC: `damping` and `length`."""
    return kfac.settings


def damping(kfac: KFAC, step: int) -> float:
    """Return the damping in force at a step."""
    return kfac.settings.at("damping", step)


def due(kfac: KFAC, step: int) -> tuple[bool, bool, int | None]:
    """Return whether a step makes new factors and decompositions, and of which share; None: all."""
    stagger = kfac.plan.strategy.refresh.stagger
    refresh = step == 0 or kfac.settings.due("basis_every", step, stagger)
    share = None if step == 0 or stagger == 1 else kfac.settings.turn("basis_every", step, stagger)
    return kfac.settings.due("factor_every", step), refresh, share


def records_scales(kfac: KFAC) -> bool:
    """Return whether the hooks of layers record EKFAC's scales."""
    return kfac.recorder.after_call is not None


def decompositions(kfac: KFAC) -> Bases:
    """Return the part that decomposes: `held`, `solver_of`, `sides` and `decompose`."""
    return kfac.bases


def replicas(trainer: Trainer) -> Replicas:
    """Return the part that keeps copies of the model, with the `rule` that merges copies."""
    return trainer.replicas


def whole_factors(kfac: KFAC) -> Mapping[str, Tensor]:
    """Return the factors to decompose by name, packed; with `reduce_at="bases"`, reduced now."""
    return kfac.factors.whole(None)


def settle(kfac: KFAC) -> None:
    """Wait for statistics that are on their way, and average them.

    Collective over: world with `overlap`, else none.
    """
    kfac.factors.settle()


def settled(kfac: KFAC) -> bool:
    """Return whether no statistics are on their way."""
    return kfac.factors.settled


def look(trainer: Trainer) -> None:
    """Compare the trained parameters of the model with those of the last step."""
    trainer.gradients.look(trainer._in_force())
