"""Access to the inner parts of trainers, for tests and benchmarks; no other test file imports them.

If a part moves, only this file changes; `tests/test_house.py` enforces this. Tests should prefer
the public interface: states, messages, plans, errors.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeAlias

from pytest import MonkeyPatch
from torch import Tensor, nn

from mpikfac import KFAC, FirstOrderTrainer, trainer
from mpikfac.comm import Grid
from mpikfac.comm.messages import overlap
from mpikfac.comm.messages.outbox import Outbox, Piece
from mpikfac.engine import Bases, Directions, Gradients, Nonfinite
from mpikfac.engine.curvature import capture, distributed
from mpikfac.engine.curvature import scales as scales_of_examples
from mpikfac.engine.curvature.directions import clip_scale
from mpikfac.engine.curvature.recording import DeferredMoments, Moments, deferred
from mpikfac.engine.curvature.recording.retained import RetainedGradients
from mpikfac.engine.curvature.scales import Scales
from mpikfac.engine.nonfinite import TOLERATED
from mpikfac.lab import AsyncSGD
from mpikfac.lab.curvature import memory as planned_memory
from mpikfac.lab.curvature import records
from mpikfac.lab.curvature_servers import decomposer
from mpikfac.lab.local_sgd.replicas import Copies, of_copies
from mpikfac.layers import Layer
from mpikfac.numerics import Arena
from mpikfac.plan import PlannedLayer
from mpikfac.preconditioners import Held, Preconditioner
from mpikfac.settings import Estimator, Settings
from mpikfac.trainer import COMPARE_EVERY

__all__ = [
    "COMPARE_EVERY",
    "MOMENTS",
    "PLACES",
    "TOLERATED",
    "Nonfinite",
    "RetainedGradients",
    "bases",
    "clip_scale",
    "compare_every",
    "damping",
    "decompositions",
    "directions",
    "due",
    "elements_at_a_time",
    "examples_of_parts",
    "factors",
    "gradients",
    "grid",
    "held",
    "layers",
    "let_wait",
    "live_parts",
    "look",
    "memory",
    "of_copies",
    "predicted_change",
    "record",
    "records_scales",
    "replicas",
    "scale_sums",
    "scale_weights",
    "scales",
    "sent_on_arrival",
    "settings",
    "settle",
    "settled",
    "statistics",
    "waiting",
    "weights",
    "whole_factors",
]

Trainer: TypeAlias = KFAC | FirstOrderTrainer | AsyncSGD

# Where a function or a value can be replaced, as in `monkeypatch.setattr(*PLACES[...], other)`:
# the owner and the name of the attribute. Replacing a method affects all trainers.
PLACES: dict[str, tuple[Any, str]] = {
    "reduce gradients": (Gradients, "average"),
    "decompose": (Bases, "decompose"),
    "decompose for others": (decomposer, "_answer"),  # on curvature servers
    "let curvature servers go": (decomposer, "leave"),
    "restart scales": (Scales, "restart"),
    "publish gradients": (Directions, "publish"),
    "examples at a time": (scales_of_examples, "CHUNK"),
    "records": (capture, "RECORDS"),
}


# -- tensors that the parts hold: changing one changes the part ------------------------------------


def factors(kfac: KFAC) -> Arena:
    """Return this rank's running averages of factors by name, as packed triangles or vectors."""
    return kfac.preconditioner.factors.averages


def weights(kfac: KFAC) -> dict[str, Tensor]:
    """Return the weights of this rank's running averages by factor name, each `[1]`."""
    return kfac.preconditioner.factors.weights


def statistics(kfac: KFAC) -> Arena:
    """Return the sums over the passes since the last step by factor name, with counts."""
    return kfac.preconditioner.factors.statistics


def bases(kfac: KFAC) -> Arena:
    """Return the decompositions that this rank uses, by their names in the state."""
    return kfac.preconditioner.bases.arena


def scales(kfac: KFAC) -> Arena:
    """Return the averages of EKFAC's scales, by layer."""
    return _scales(kfac).averages


def scale_weights(kfac: KFAC) -> dict[str, Tensor]:
    """Return the weights of the averages of EKFAC's scales, each `[1]`, by layer."""
    return _scales(kfac).weights


def scale_sums(kfac: KFAC) -> Arena:
    """Return the sums of squares over the passes since the last step, by layer, with counts."""
    return _scales(kfac).sums


def gradients(trainer: Trainer) -> Arena:
    """Return the gradients of the last step, averaged over ranks, by block."""
    return trainer.built.gradients.arena


def directions(kfac: KFAC) -> Arena:
    """Return the directions of the last step that this rank holds, by layer."""
    return kfac.preconditioner.directions.arena


def predicted_change(kfac: KFAC) -> Tensor:
    """Return the change of the loss that the quadratic model predicts for the last step, `[1]`."""
    return kfac.preconditioner.directions.expected


def memory_of_grafting(kfac: KFAC) -> dict[str, int]:
    """Return the bytes kept for grafting, by the names in `plan.memory_of_grafting`."""
    graft: Any = kfac.grafting
    further = [*getattr(graft, "_sizes", ()), *getattr(graft, "_squares", {}).values()]
    flats = {x.untyped_storage().data_ptr(): x for x in [*graft._adam._averages, *further]}
    averages = sum(x.untyped_storage().nbytes() for x in flats.values())
    momenta = graft._momenta.flat.nbytes + graft._means.flat.nbytes
    return {"lengths": averages, "momenta": momenta}


def memory(trainer: Trainer) -> dict[str, int]:
    """Return the bytes of all buffers, by the names in `plan.memory`.

    "parts" and "wires" are present only if something is kept for parts of a batch or for encodings.
    """
    built = trainer.built
    rule = getattr(built.exchange, "rule", None)
    arenas = [arena for value in vars(rule).values() for arena in _arenas(value)] if rule else []
    sizes = {"gradients": built.gradients.arena.flat.nbytes, "copies": _bytes(arenas)}
    parts = built.gradients.sender.nbytes
    losses = sum(residuals.nbytes for residuals in built.grid.encoded.memory.values())
    before = getattr(built.update, "_before", None)
    losses += 0 if before is None else before.flat.nbytes
    if isinstance(trainer, KFAC):
        made = trainer.preconditioner
        squares = getattr(made.factors.sender, "_statistics", None)
        of_kfac = {
            "statistics": made.factors.statistics,
            "averages": made.factors.averages,
            "bases": made.bases.arena,
            "denominators": made.bases.denominators,
            "scales": made.bases.scales,
            "directions": made.directions.arena,
        }
        sizes |= {name: arena.flat.nbytes for name, arena in of_kfac.items()}
        sizes["squares"] = 0 if squares is None else made.factors.sender.arena.flat.nbytes
        sizes["scale sums"] = sum(part.sums.flat.nbytes for part in made.of_preconditioner)
        parts += made.factors.sender.nbytes
    optional = {"parts": parts, "wires": losses}
    return sizes | {name: size for name, size in optional.items() if size}


def _scales(kfac: KFAC) -> Scales:
    """Return the part that keeps EKFAC's scales."""
    (scales,) = kfac.preconditioner.of_preconditioner
    return scales


def _arenas(value: object) -> list[Arena]:
    """Return the arenas of an attribute, which is an arena or a list of arenas."""
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, Arena)]


def _bytes(arenas: Sequence[Arena]) -> int:
    return sum(arena.flat.nbytes for arena in arenas)


# -- parts, and what they do -----------------------------------------------------------------------


def grid(trainer: Trainer) -> Grid:
    """Return the grid of ranks with its communicators."""
    return trainer.grid


def layers(kfac: KFAC) -> Sequence[Layer]:
    """Return the covered layers in the order of the plan."""
    return kfac.layers


def settings(kfac: KFAC) -> Settings:
    """Return the settings of K-FAC: `damping`, `grafting`, `clip` and others."""
    return kfac.settings


def estimator(kfac: KFAC) -> Estimator:
    """Return the estimator of factors."""
    return kfac.estimator


def damping(kfac: KFAC, step: int) -> float:
    """Return the damping used at a step."""
    return kfac.settings.at(step).damping


def due(kfac: KFAC, step: int) -> tuple[bool, bool, int | None]:
    """Return whether a step updates factors, whether it refreshes, and which group (None: all)."""
    stagger = kfac.plan.strategy.refresh.stagger
    numbers = kfac.settings.at(step, stagger)
    due = kfac.settings.due("factor_update_steps", step)
    return due, step == 0 or numbers.refreshes, None if step == 0 else numbers.turn


def records_scales(kfac: KFAC) -> bool:
    """Return whether the layers' hooks record EKFAC's scales."""
    return bool(kfac.preconditioner.of_preconditioner)


def decompositions(kfac: KFAC) -> Bases:
    """Return the part that decomposes factors: `sides` and `decompose`."""
    return kfac.preconditioner.bases


def held(kfac: KFAC) -> dict[str, tuple[Preconditioner, Held]]:
    """Return the preconditioner and decompositions of each layer that this rank preconditions."""
    bases = decompositions(kfac)
    layers = bases.plan.preconditioned
    return {x.name: (bases.preconditioners[x.preconditioner.name], bases.hold([x])) for x in layers}


def replicas(trainer: Trainer) -> Copies:
    """Return the part that keeps copies of the model, and the `rule` that merges them."""
    return trainer.built.exchange


def whole_factors(kfac: KFAC) -> Mapping[str, Tensor]:
    """Return the factors to decompose by name, packed.

    With `reduce_factors_at="inverses"`, this reduces them first.
    """
    return kfac.preconditioner.factors.whole(None)


def settle(kfac: KFAC) -> None:
    """Wait for statistics that are still being sent, and average them.

    Collective over: world with `overlap`, else none.
    """
    kfac.preconditioner.factors.settle()


def settled(kfac: KFAC) -> bool:
    """Return whether no statistics are being sent."""
    return kfac.preconditioner.factors.settled


@contextmanager
def sent_on_arrival() -> Iterator[None]:
    """Return a context in which new trainers send overlapped messages in the order of readiness.

    The order must be the same on all ranks, as in a backward pass on a single thread.
    """

    class OnArrival(Outbox):
        arrivals = count()

        def put(self, number: int, urgency: int, pieces: Sequence[Piece]) -> None:
            super().put(number, next(self.arrivals), pieces)

    with MonkeyPatch.context() as patch:
        patch.setattr(overlap, "Outbox", OnArrival)
        yield


def look(trainer: Trainer) -> None:
    """Compare the model's trained parameters with those of the last step."""
    numbers = trainer.built.method.numbers(trainer.steps)
    trainer.built.gradients.look(trainer._compared(numbers))


MOMENTS = {"at once": Moments, "together": DeferredMoments}


def record(monkeypatch: MonkeyPatch, way: str) -> None:
    """Let trainers created from now on compute moments "at once" or "together", also on a CPU."""
    chosen = dict.fromkeys((True, False), MOMENTS[way])
    monkeypatch.setattr(distributed.DistributedPreconditioner, "MOMENTS", chosen)


def stack(monkeypatch: MonkeyPatch) -> None:
    """Make trainers precondition equal layers together, also on a CPU."""

    def alike(bases: Bases) -> list[list[PlannedLayer]]:
        kinds: dict[Hashable, list[PlannedLayer]] = {}
        for layer in bases.plan.preconditioned:
            kinds.setdefault(layer.kind, []).append(layer)
        return list(kinds.values())

    monkeypatch.setattr(Bases, "_alike", alike)


def live_parts() -> int:
    """Return the number of live parts of trainers."""
    gc.collect()
    return sum("mpikfac.engine." in str(type(each)) for each in gc.get_objects())


def let_wait(monkeypatch: MonkeyPatch, most: int) -> None:
    """Let calls of at most `most` bytes wait for the end of a backward pass."""
    monkeypatch.setattr(deferred, "MOST_BYTES", most)


def compare_every(monkeypatch: MonkeyPatch, steps: int) -> None:
    """Let ranks compare weights and buffers every `steps` steps."""
    monkeypatch.setattr(trainer, "COMPARE_EVERY", steps)


def elements_at_a_time(monkeypatch: MonkeyPatch, elements: int) -> None:
    """Let passes over data compute gradients of at most so many elements, or of one example."""
    for module in (records, planned_memory):
        monkeypatch.setattr(module, "ELEMENTS", elements)


def examples_of_parts(
    model: nn.Module, layer: Layer, losses: records.Losses, x: Tensor
) -> list[int]:
    """Return the numbers of examples whose gradients are computed at a time."""
    calls = records.record(model, [layer], losses, x)[layer.name]
    return [len(some[0].g) for _, some in records.parts(layer, calls, len(x))]


def waiting(kfac: KFAC) -> int:
    """Return the number of moments that wait to be computed."""
    return len(getattr(kfac.preconditioner.moments, "_waiting", ()))
