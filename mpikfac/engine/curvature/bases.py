"""Decompositions of factors: computed by owners, sent to workers, applied to gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from mpikfac.engine.curvature.decomposers import (
    AtOnce,
    Decomposed,
    Decomposition,
    FactorRequest,
    Ready,
)
from mpikfac.engine.curvature.rounding import COARSE, HARMLESS, Warn, damping_added, errors_of
from mpikfac.engine.part import Item, Part
from mpikfac.engine.site import Site
from mpikfac.numerics import Arena, copy_all, together
from mpikfac.plan import Factor, PlannedLayer, scales, stages
from mpikfac.plan.names import BASES, DECOMPOSITIONS, DUE, DUE_LAYERS, PRECONDITIONER
from mpikfac.preconditioners import Held, Preconditioner

Decomposer = Callable[[Site, Arena, Mapping[str, str]], AtOnce]


class Bases(Part):
    """Hold the decompositions that this rank computes or uses to precondition gradients.

    Attributes:
        preconditioners: the layers' preconditioners by name, with the run's preconditioner first.
        arena: the blocks of decompositions, with one segment for each worker in the column.
        scales: estimates of the products of eigenvalues `[outputs, inputs]`, by layer; only the
            part `Scales` writes them.
        stacks: the layers that this rank preconditions, with their decompositions; on a GPU,
            layers of the same kind and shape form one stack.
        ready: whether the rank has decompositions.
        turn: the slot whose decompositions are published next; None for all layers.
        decomposer: decomposes the rank's factors.
    """

    MARK = PRECONDITIONER

    def __init__(
        self,
        site: Site,
        preconditioners: Mapping[str, Preconditioner],
        relative: bool = False,
        decomposer: Decomposer = AtOnce,
    ) -> None:
        """Allocate zeroed arenas; decompositions are computed in the dtype of the statistics.

        Args:
            relative: whether the damping is relative to mean eigenvalues.
            decomposer: creates the decomposer of the rank's factors.
        """
        super().__init__(site)
        self.preconditioners, self.relative = preconditioners, relative
        layouts, run = self.plan.layouts, next(iter(preconditioners.values()), None)
        self.arena = site.arena(layouts.bases, run.dtype if run else None)
        self.denominators = site.arena(layouts.denominators)
        self.scales = site.arena(scales.layout(self.plan))
        self._decompositions = [self._decomposition_of(factor) for factor in self.plan.decomposed()]
        self._factor_of = {
            block.name: d.factor.name for d in self._decompositions for block in d.factor.blocks
        }
        self.stacks = [(layers, self.hold(layers)) for layers in self._alike()]
        self._messages = {turn: stages.publish_bases(self.plan, turn) for turn in self.plan.turns}
        self.decomposer = decomposer(site, self.arena, self._factor_of)
        self.ready = False
        self.turn: int | None = None
        self._pending: Ready | None = None
        self._due = 0
        self._due_layers: set[str] = set()  # layers whose factors all have pending decompositions
        self._damping = math.nan  # not equal to any damping

    def _decomposition_of(self, factor: Factor) -> Decomposition:
        (layer,) = (layer for layer in self.plan.layers if layer.name == factor.layer)
        blocks = {block.kind: self.arena[block.name] for block in factor.blocks}
        side, opposite = layer.side(factor.side), layer.side("G" if factor.side == "A" else "A")
        return Decomposition(
            factor, self.preconditioners[factor.preconditioner.name], blocks, side, opposite
        )

    def _alike(self) -> list[list[PlannedLayer]]:
        """Return lists of equal layers to precondition together; on a CPU, one layer per list.

        Stacks save time on a GPU, where launching a small kernel takes as long as running it.
        """
        kinds: dict[Hashable, list[PlannedLayer]] = {}
        for layer in self.plan.preconditioned:
            key = layer.name if self.site.device.type == "cpu" else layer.kind
            kinds.setdefault(key, []).append(layer)
        return list(kinds.values())

    def hold(self, layers: Sequence[PlannedLayer]) -> Held:
        """Return the decompositions of one of the rank's layers, or of equal layers as a stack."""
        names, kinds = [layer.name for layer in layers], layers[0].preconditioner.blocks
        a, g = ({kind: self._side(layers, side, kind) for kind in kinds} for side in "AG")
        denominators, scales = (
            together(room, names) if names[0] in room else None
            for room in (self.denominators, self.scales)
        )
        return Held(a, g, denominators, scales)

    def _side(self, layers: Sequence[PlannedLayer], side: str, kind: str) -> list[Tensor]:
        """Return a side's blocks of a kind, one per factor; blocks of equal layers form a stack."""
        of_layers = [
            [b.name for f in layer.side(side) for b in f.blocks if b.kind == kind]
            for layer in layers
        ]
        blocks = [together(self.arena, names) for names in zip(*of_layers)]
        if side in layers[0].shape.diagonal:
            several = [len(layers)] if len(layers) > 1 else []
            return [b.view(*several, *layers[0].shape.gradient[:-2], -1) for b in blocks]
        return blocks

    def reset(self) -> None:
        """Discard all decompositions, including unfinished ones."""
        self.ready, self.turn = False, None
        self._pending, self._due = None, 0
        self._due_layers = set()
        self._damping = math.nan

    # -- from factors to decompositions ----------------------------------------------------------

    def decompose(
        self,
        factors: Mapping[str, Tensor],
        step: int,
        damping: float,
        turn: int | None = None,
        warn: Warn = list,
    ) -> None:
        """Start decomposing the rank's factors: all of them, or those of one slot of the refresh.

        Args:
            factors: the packed factors, by name.
            warn: called with the layers whose factors have rounding errors that are large relative
                to the damping.
        """
        self.turn = turn
        self._due = step + (self.plan.strategy.refresh.staleness if self.ready else 0)
        layers = (layer.name for layer in self.plan.layers if turn in (None, layer.turn))
        # With a tolerance, a factor that keeps its decomposition has no pending decomposition.
        self._due_layers = set() if self.plan.strategy.refresh.tolerance else set(layers)
        decompositions = [d for d in self._decompositions if turn in (None, d.factor.turn)]
        forms = {d.factor.name: d.factor.preconditioner for d in decompositions}
        plain = [
            d
            for d in decompositions
            if not (d.factor.preconditioner.damped or d.factor.preconditioner.vector)
        ]
        arguments = factors, damping, self.relative, self.site.dtype
        errors = errors_of(plain, *arguments)
        precise = {f.name: not error <= HARMLESS for f, error in errors.items()}  # also if NaN
        warn([factor.layer for factor, error in errors.items() if error > COARSE])
        damped = [d for d in decompositions if d.factor.preconditioner.damped]
        added = damping_added(damped, *arguments, self.site.flags, warn)
        packed = {name: factors[name] for name in forms}
        request = FactorRequest(decompositions, packed, added, precise, turn, first=not self.ready)
        self._pending = self.decomposer.start(request)

    @property
    def pending(self) -> bool:
        """Whether decompositions are unfinished, or finished but not yet in use."""
        return self._pending is not None

    def due(self, step: int) -> bool:
        """Return whether the pending decompositions should be used from `step` on."""
        return self.pending and step >= self._due

    def take(self, step: int) -> int:
        """Put the rank's own decompositions into the arena, once they are finished.

        Factors that were not decomposed, or could not be, keep their previous decomposition.
        If the first decomposition of a factor fails, its blocks are NaN, and its layer is not
        preconditioned until a later decomposition succeeds.

        Returns:
            The number of factors that were decomposed.

        Raises:
            UserError: the decomposition of a factor has failed too many times in a row.
        """
        pending, self._pending = self._pending, None
        blocks, failed = pending() if pending else Decomposed({}, ())
        factor_of = self._factor_of
        instead = "the previous one is used" if self.ready else "its layer is not preconditioned"
        tried = [factor_of[name] for name in blocks]
        self.site.nonfinite.note("decomposition", failed, step, instead, tried)
        sound = {n: b for n, b in blocks.items() if not self.ready or factor_of[n] not in failed}
        copy_all((self.arena[name], block) for name, block in sound.items())
        # A factor is counted if its first block is new; other blocks can change without a
        # decomposition.
        factors = [d.factor for d in self._decompositions]
        first = {factor.blocks[0].name for factor in factors if not factor.preconditioner.vector}
        return sum(name in first and factor_of[name] not in failed for name in blocks)

    def publish(self) -> None:
        """Send the decompositions to the workers of their layers, and start using all of them.

        Collective over: column.
        """
        self.site.grid.exchange(self._messages[self.turn], self.arena.flat)
        self.refresh()

    def refresh(self) -> None:
        """Start using the new content of the arena."""
        self.ready = True
        self.rescaled()

    def rescaled(self) -> None:
        """Make `damp` prepare directions again, because decompositions or scales have changed."""
        self._damping = math.nan

    # -- from gradients to directions ------------------------------------------------------------

    def damp(self, damping: float) -> None:
        """Prepare all directions for a damping, if it or the decompositions have changed."""
        if damping == self._damping:
            return
        damped: dict[Preconditioner, list[Held]] = {}
        for layers, held in self.stacks:
            held.damping = damping
            if held.denominators is not None:
                damped.setdefault(self.preconditioners[layers[0].preconditioner.name], []).append(
                    held
                )
        for preconditioner, of_preconditioner in damped.items():
            preconditioner.damp(of_preconditioner, damping, self.relative)
        self._damping = damping

    def sides(self, name: str, kind: str) -> tuple[list[Tensor], list[Tensor]]:
        """Return a layer's blocks of a kind, for A and for G, in the dtype of the statistics."""
        (layer,) = (layer for layer in self.plan.layers if layer.name == name)
        a, g = ([b.to(self.site.dtype) for b in self._side([layer], s, kind)] for s in "AG")
        return a, g

    # -- state -----------------------------------------------------------------------------------

    def items(self) -> Iterator[Item]:
        """Return the blocks of all decompositions in use."""
        for factor in self.plan.factors:
            for block in factor.blocks:
                yield Item(BASES + block.name, self.arena.get(block.name))

    def marks(self) -> dict[str, Any]:
        """Return the preconditioners if the rank has decompositions."""
        return {PRECONDITIONER: self.plan.preconditioners} if self.ready else {}

    def state_dict(self) -> dict[str, Any]:
        """Wait for pending decompositions; return them and the decompositions in use, by name."""
        state = super().state_dict()
        if self._pending is not None:
            finished = self._pending()
            self._pending = lambda: finished
            state |= {DECOMPOSITIONS + name: block for name, block in finished.blocks.items()}
            state[DUE] = self._due
            state |= {DUE_LAYERS + name: 1 for name in self._due_layers}
        return state

    def complete(self, names: Collection[str]) -> set[str]:
        """Return the names required for a complete state, given the `names` in the state."""
        complete = super().complete(names)
        if complete and DUE in names:  # all blocks of the slot, including those that were kept
            turns = {DECOMPOSITIONS + b.name: f.turn for f in self.plan.factors for b in f.blocks}
            begun = {turns[name] for name in names if name in turns}
            turn = begun.pop() if len(begun) == 1 else None
            complete |= {name for name, of_factor in turns.items() if turn in (None, of_factor)}
        return complete

    def needed(self, names: Collection[str]) -> dict[str, Any]:
        """Return the items to load from a state with `names`, with expected types and shapes."""
        if PRECONDITIONER not in names:
            return {}
        needed = super().needed(names)
        for d in self._decompositions:
            due = DUE_LAYERS + d.factor.layer in names
            pending = {DECOMPOSITIONS + b.name: self.arena[b.name] for b in d.factor.blocks}
            needed |= {name: block for name, block in pending.items() if due or name in names}
        return needed | {PRECONDITIONER: ""} | ({DUE: 0} if DUE in names else {})

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Load the `needed` items of a state, after `reset`.

        Pending decompositions are published together with all others, because layers can belong to
        different slots than in the saved run.
        """
        if PRECONDITIONER not in names:
            return
        super().load_state_dict(state, names)
        self.refresh()
        if DUE in state:  # blocks for which no decomposition was started are missing
            begun = (name for name in self._factor_of if DECOMPOSITIONS + name in state)
            finished = self.decomposer.checked({n: state[DECOMPOSITIONS + n] for n in begun})
            self._pending = lambda: finished
            self._due = int(state[DUE])
            self._due_layers = {x.name for x in self.plan.layers if DUE_LAYERS + x.name in names}
