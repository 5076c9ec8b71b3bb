"""Decompositions of factors: made by owners, sent to workers, applied to gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpikfac.engine.decomposers import Background, Curvature
from mpikfac.engine.site import Part, Site
from mpikfac.numerics import alike, copy_all, each_finite, not_finite, unfold_triangle
from mpikfac.plan import Factor, PlannedLayer
from mpikfac.solvers import (
    Held,
    Means,
    Solver,
    beside,
    decomposed,
    decomposed_together,
    mean_eigenvalues,
)

Blocks = dict[str, Tensor]
# Errors of eigenvalues, relative to the damping.
HARMLESS = 0.01  # in a decomposition
COARSE = 100.0  # in averages: products of traces are far above the errors that matter
COARSE_DAMPED = 0.2  # in averages that are damped before the decomposition


@dataclass(frozen=True)
class Task:
    """A factor to decompose on the rank.

    Attributes:
        blocks: the decomposition in use, by kind: views of the arena.
        side: all factors of the same side of the layer, A or G.
        other: all factors of the opposite side.
    """

    factor: Factor
    solver: Solver
    blocks: Mapping[str, Tensor]
    side: tuple[Factor, ...]
    other: tuple[Factor, ...]


class Made(NamedTuple):
    """Decompositions that are complete.

    Attributes:
        blocks: the changed blocks of the arena, by name; NaN where a factor failed.
        failed: names of factors that cannot be decomposed.
    """

    blocks: Blocks
    failed: Collection[str]


class Bases(Part):
    """The decompositions that the rank makes and holds, to multiply gradients by.

    Attributes:
        solvers: the solvers of layers by name, the run's solver first.
        arena: blocks of decompositions; a segment per worker of the column.
        scales: estimates of the products of eigenvalues `[outputs, inputs]`, by layer; written by
            `Scales` alone.
        held: the decompositions of every layer to precondition on the rank, by layer.
        solver_of: the solver of every layer to precondition on the rank.
        ready: whether the rank has decompositions.
        share: the share of the layers to be published next; None for all.
    """

    def __init__(
        self,
        site: Site,
        solvers: Mapping[str, Solver],
        relative: bool = False,
        curvature: Curvature | None = None,
    ) -> None:
        """Make arenas of zeros; decompositions are computed in the dtype of sums.

        Args:
            relative: damping is relative to mean eigenvalues.
            curvature: decomposes on curvature ranks; None to decompose on the rank itself.
        """
        self.site, self.plan, self.solvers = site, site.plan, solvers
        self.relative = relative
        layouts, run = self.plan.layouts, next(iter(solvers.values()), None)
        self.arena = site.arena(layouts.bases, run.dtype if run else None)
        self.denominators = site.arena(layouts.denominators)
        self.scales = site.arena(layouts.scales)
        self._tasks = [self._task(factor) for factor in self.plan.decomposed()]
        self._factor_of = {b.name: t.factor.name for t in self._tasks for b in t.factor.blocks}
        self.held = {layer.name: self._hold(layer) for layer in self.plan.preconditioned}
        self.solver_of = {x.name: solvers[x.solver.name] for x in self.plan.preconditioned}
        self._curvature = curvature
        self._background = Background(site.device)
        self.forget()

    def _task(self, factor: Factor) -> Task:
        (layer,) = (layer for layer in self.plan.layers if layer.name == factor.layer)
        blocks = {block.kind: self.arena[block.name] for block in factor.blocks}
        own, other = layer.side(factor.side), layer.side("G" if factor.side == "A" else "A")
        return Task(factor, self.solvers[factor.solver.name], blocks, own, other)

    def _hold(self, layer: PlannedLayer) -> Held:
        a, g = ({kind: self._side(layer, s, kind) for kind in layer.solver.blocks} for s in "AG")
        return Held(a, g, self.denominators.get(layer.name), self.scales.get(layer.name))

    def _side(self, layer: PlannedLayer, side: str, kind: str) -> list[Tensor]:
        """Return the block of a kind of every factor of a side."""
        found = [self.arena[b.name] for f in layer.side(side) for b in f.blocks if b.kind == kind]
        if side in layer.shape.diagonal:
            return [one.view(*layer.shape.gradient[:-2], -1) for one in found]
        return found

    def forget(self) -> None:
        """Forget all decompositions, also unfinished decompositions."""
        self.ready = False
        self.share: int | None = None
        self._made: Callable[[], Made] | None = None
        self._due = 0
        self._damping = math.nan  # equal to no damping

    # -- from factors to decompositions ----------------------------------------------------------

    def decompose(
        self,
        factors: Mapping[str, Tensor],
        step: int,
        damping: float,
        share: int | None = None,
        tell: Callable[[Sequence[str]], object] = list,
    ) -> None:
        """Start to decompose the factors of the rank: all, or a `share` of the layers.

        Args:
            factors: packed, by name.
            tell: hears the layers with factors whose rounding the damping does not cover, at the
                latest with the next flags that the host reads.
        """
        self.share = share
        at_once = self.plan.strategy.refresh.delay == 0 or not self.ready
        self._due = step if at_once else step + self.plan.strategy.refresh.delay
        tasks = [task for task in self._tasks if share in (None, task.factor.share)]
        packed = {task.factor.name: factors[task.factor.name] for task in tasks}
        plain = [t for t in tasks if not (t.factor.solver.damped or t.factor.solver.vector)]
        errors = self._errors(plain, factors, damping)
        felt = {f.name: not error <= HARMLESS for f, error in errors.items()}  # also if NaN
        tell([f.layer for f, error in errors.items() if error > COARSE])
        added = self._added([t for t in tasks if t.factor.solver.damped], factors, damping, tell)
        if self._curvature:
            added |= {name: torch.tensor([1.0 * much], device="cpu") for name, much in felt.items()}
            received = self._curvature.start(packed, added, share)
            self._made = lambda: self._looked_through(received())
        elif at_once:
            self._made = lambda: self._blocks(tasks, packed, added, felt)
        else:
            kept = {name: factor.clone() for name, factor in packed.items()}
            self._made = self._background.start(lambda: self._blocks(tasks, kept, added, felt))

    @property
    def pending(self) -> bool:
        """Whether decompositions are unfinished, or finished and not in use yet."""
        return self._made is not None

    def due(self, step: int) -> bool:
        """Return whether pending decompositions are to be used from `step` on."""
        return self.pending and step >= self._due

    def take(self, step: int) -> int:
        """Put the rank's own decompositions into the arena, once the decompositions are finished.

        Factors that were not decomposed, or could not be decomposed, keep the last decomposition.
        Before the first decomposition, blocks and directions are NaN.

        Returns:
            How many factors were decomposed.

        Raises:
            UserError: a factor could not be decomposed too many times in a row.
        """
        (made, failed), self._made = self._made() if self._made else Made({}, ()), None
        factor_of = self._factor_of
        instead = "the one before is used" if self.ready else "its layer is not preconditioned"
        tried = [factor_of[name] for name in made]
        self.site.nonfinite.note("decomposition", failed, step, instead, tried)
        used = {n: b for n, b in made.items() if not self.ready or factor_of[n] not in failed}
        copy_all((self.arena[name], block) for name, block in used.items())
        # The first block is made by a decomposition alone; others may be renewed without one.
        first = {t.factor.blocks[0].name for t in self._tasks if not t.factor.solver.vector}
        return sum(name in first and factor_of[name] not in failed for name in made)

    def refresh(self) -> None:
        """Take an arena with new content into use."""
        self.ready = True
        self.rescaled()

    def rescaled(self) -> None:
        """Have `damp` prepare directions anew, as decompositions or scales have new content."""
        self._damping = math.nan

    def _errors(
        self, tasks: Sequence[Task], packed: Mapping[str, Tensor], damping: float
    ) -> dict[Factor, float]:
        """Return the errors of eigenvalues in the dtype of sums, relative to the damping.

        An error is about `eps` times the largest eigenvalue of `G (x) A`, which the product of the
        traces bounds. Without the other side's factors, the rank cannot tell: NaN.
        """
        if self.site.dtype == torch.float64:
            return dict.fromkeys((task.factor for task in tasks), 0.0)
        sides = {task.factor: [s for s in (task.side, task.other) if s] for task in tasks}
        wanted = [side for some in sides.values() for side in some]
        largest = dict.fromkeys(wanted, 1.0)
        if not self.relative and tasks:
            means = mean_eigenvalues(wanted, packed, self.site.dtype)
            maxima = torch.stack([mean.max() for mean in means.values()]).tolist() if means else []
            largest = dict.fromkeys(wanted, math.nan) | dict(zip(means, maxima))
        eps = torch.finfo(self.site.dtype).eps
        return {
            factor: math.prod((_order(side) * largest[side] for side in some), start=eps / damping)
            if all(one.name in packed for side in some for one in side)
            else math.nan
            for factor, some in sides.items()
        }

    def _added(
        self,
        tasks: Sequence[Task],
        packed: Mapping[str, Tensor],
        damping: float,
        tell: Callable[[Sequence[str]], object],
    ) -> Blocks:
        """Return the damping that is part of factors' decompositions, `[]` or `[groups]`, by name.

        `tell` hears the layers with factors in which `eps` times the trace is much.
        """
        wanted = [side for t in tasks for side in ((t.factor,), t.side, t.other) if side]
        means = mean_eigenvalues(wanted, packed, self.site.dtype)
        added: Blocks = {}
        kinds: dict[tuple[Solver, bool], list[Task]] = {}
        for task in tasks:
            both = task.factor.solver.both and bool(task.other)
            kinds.setdefault((task.solver, both), []).append(task)
        for (_, both), some in kinds.items():
            own = torch.cat([means[t.factor,] for t in some])
            ratio = None
            if both:
                ratio = torch.cat([means[t.side] for t in some])
                ratio = ratio / torch.cat([means[t.other] for t in some])
            found = some[0].solver.added(Means(own, ratio), damping, self.relative)
            groups = [t.factor.groups for t in some]
            for task, values in zip(some, found.split(groups)):
                added[task.factor.name] = values if len(values) > 1 else values[0]
            if self.site.dtype != torch.float64:
                eps = torch.finfo(self.site.dtype).eps
                orders = beside([t.factor.order for t in some], groups, own)
                layers = [t.factor.layer for t in some for _ in range(t.factor.groups)]
                much = eps * orders * own / found > COARSE_DAMPED
                self.site.flags.keep(much, partial(_tell_marked, tell, layers))
        return added

    def _blocks(
        self,
        tasks: Sequence[Task],
        packed: Mapping[str, Tensor],
        added: Mapping[str, Tensor],
        felt: Mapping[str, bool],
    ) -> Made:
        """Return the changed blocks of the arena, by name; in float64 where rounding is `felt`."""
        sums = self.site.dtype
        dtype = {name: torch.float64 if felt.get(name) else sums for name in packed}
        made, sound = self._of_stacks(tasks, packed, added, dtype)
        alone = [task for task in tasks if task.factor.name not in sound]
        of_alone: Blocks = {}
        for task in alone:
            name = task.factor.name
            of_alone |= self._of_factor(task, packed[name].to(dtype[name]), added.get(name))
        return Made(made | of_alone, self._looked_through(of_alone).failed)

    def _looked_through(self, made: Blocks) -> Made:
        """Return the decompositions with the names of the factors that failed."""
        return Made(made, list(dict.fromkeys(self._factor_of[n] for n in not_finite(made))))

    def _of_stacks(
        self,
        tasks: Sequence[Task],
        packed: Mapping[str, Tensor],
        added: Mapping[str, Tensor],
        dtype: Mapping[str, torch.dtype],
    ) -> tuple[Blocks, set[str]]:
        """Return blocks of factors on a GPU, by a call for each order, and the finite factors."""
        if self.site.device.type == "cpu" or (self.plan.strategy.refresh.tolerance and self.ready):
            return {}, set()
        made: Blocks = {}
        tried: list[str] = []
        sums: list[Tensor] = []
        of = {task.factor.name: task for task in tasks if not task.factor.solver.vector}
        for names in alike({name: packed[name] for name in of}):
            kinds: dict[object, list[Task]] = {}
            for task in (of[name] for name in names):
                factor = task.factor
                kind = task.solver, factor.rank, factor.groups, dtype[factor.name]
                kinds.setdefault(kind, []).append(task)
            for some in kinds.values():
                own = [task.factor.name for task in some]
                more = torch.stack([added[n] for n in own]) if own[0] in added else None
                stack = torch.stack([packed[name] for name in own])
                factors, kept = [task.factor for task in some], self.arena.flat.dtype
                given = some[0].solver, stack.to(dtype[own[0]]), more, kept
                if blocks := decomposed_together(factors, *given):
                    made |= blocks
                    tried += own
                    sums.append(stack.flatten(1).sum(1, dtype=kept))
        if not made:
            return {}, set()
        names = [*(self._factor_of[name] for name in made), *tried]
        sound = each_finite([*made.values(), *torch.cat(sums)]).tolist()
        doubtful = {name for name, one in zip(names, sound) if not one}
        return made, set(tried) - doubtful

    def _of_factor(self, task: Task, packed: Tensor, added: Tensor | None) -> Blocks:
        """Return the changed blocks of a factor: all, or few if the older blocks still fit."""
        tolerance = self.plan.strategy.refresh.tolerance
        if tolerance and self.ready:
            blocks = {kind: block.to(packed.dtype) for kind, block in task.blocks.items()}
            renewed, misfit = task.solver.renew(unfold_triangle(packed), blocks, added)
            if misfit <= tolerance:  # not if the misfit is NaN
                return {b.name: renewed[b.kind] for b in task.factor.blocks if b.kind in renewed}
        return decomposed(task.factor, task.solver, packed, added)

    # -- from gradients to directions ------------------------------------------------------------

    def damp(self, damping: float) -> None:
        """Prepare all directions with the damping, if damping or decompositions have changed."""
        if damping == self._damping:
            return
        damped: dict[Solver, list[Held]] = {}
        for name, held in self.held.items():
            held.damping = damping
            if held.denominators is not None:
                damped.setdefault(self.solver_of[name], []).append(held)
        for solver, some in damped.items():
            solver.damp(some, damping, self.relative)
        self._damping = damping

    def sides(self, name: str, kind: str) -> tuple[list[Tensor], list[Tensor]]:
        """Return the blocks of a kind of A and of G of a layer, in the dtype of sums."""
        return self.held[name].sides(kind, self.site.dtype)

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the arena and pending decompositions, by name; wait for pending decompositions."""
        state: dict[str, Any] = {}
        if self.ready:
            state |= {f"bases/{name}": block for name, block in self.arena.items()}
            state["solver"] = self.plan.solvers
        if self._made is not None:
            made = self._made()
            self._made = lambda: made
            state |= {f"decompositions/{name}": block for name, block in made.blocks.items()}
            state["due"] = self._due
        return state

    def complete(self, names: Collection[str]) -> set[str]:
        """Return the names of a complete state of all ranks, as far as `names` tell."""
        if "solver" not in names:
            return set()
        blocks = {b.name: f.share for f in self.plan.factors for b in f.blocks}
        whole = {f"bases/{name}" for name in blocks}
        if "due" in names:  # of one share; with a tolerance, also blocks that may have stayed
            share_of = {f"decompositions/{name}": share for name, share in blocks.items()}
            begun = {share_of[name] for name in names if name in share_of}
            share = begun.pop() if len(begun) == 1 else None
            whole |= {name for name, own in share_of.items() if share in (None, own)}
        return whole

    def needed(self, names: Collection[str]) -> dict[str, Any]:
        """Return the items to load from a state with `names`, with values of the expected kind."""
        if "solver" not in names:
            return {}
        needed: dict[str, Any] = {f"bases/{name}": block for name, block in self.arena.items()}
        pending = {f"decompositions/{name}": self.arena[name] for name in self._factor_of}
        needed |= {name: block for name, block in pending.items() if name in names}
        return needed | {"solver": ""} | ({"due": 0} if "due" in names else {})

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Load the `needed` items of a state, after `forget`.

        Pending decompositions are published together with all decompositions, as the shares of
        layers may differ from the saved run's.
        """
        if "solver" not in names:
            return
        for name, block in self.arena.items():
            block.copy_(state[f"bases/{name}"])
        self.refresh()
        if "due" in state:
            prefix = "decompositions/"  # blocks that no decomposition was made of are missing
            found = (name for name in self._factor_of if prefix + name in state)
            made = self._looked_through({name: state[prefix + name] for name in found})
            self._made = lambda: made
            self._due = int(state["due"])


def _tell_marked(
    tell: Callable[[Sequence[str]], object], names: Sequence[str], marks: Sequence[float]
) -> None:
    tell([name for name, mark in zip(names, marks) if mark])


def _order(side: tuple[Factor, ...]) -> float:
    """Return the order of all factors of a side together, of one group."""
    return sum(factor.size for factor in side) / side[0].groups
