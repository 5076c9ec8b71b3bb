"""Decompositions of factors: made by their owners, sent to other workers, applied to gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpikfac.engine.decomposers import Background, Curvature
from mpikfac.engine.nonfinite import Troubles
from mpikfac.numerics import Arena, Side, not_finite, triangle_trace, unfold_triangle
from mpikfac.plan import BLOCKS, FactorShape, LayerShape, Plan, parent
from mpikfac.solvers import (
    damp,
    damped_denominators,
    damping_unit,
    decompositions,
    error_of_inverse,
    mean_eigenvalues,
    precondition,
    precondition_by_inverse,
    precondition_by_vectors,
    relatively_damped_denominators,
    tikhonov_share,
    values_in_basis,
)

Blocks = Iterable[tuple[str, Tensor]]


class Bases:
    """The decompositions that one rank makes and holds, and what it preconditions with.

    Attributes:
        arena: eigenvalues and eigenvectors, damped inverses, or vectors as they are; a segment for
            each worker.
        ready: whether there are any.
        scales: of some layers, what stands for the products of eigenvalues `[outputs, inputs]`.
        share: the share of the layers to be published next; None for all.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        dtype: torch.dtype,
        kept_in: torch.dtype,
        device: torch.device,
        troubles: Troubles,
        curvature: Curvature | None,
        relative: bool = False,
    ) -> None:
        """Decomposes in `dtype`. See `KFAC` for `kept_in`, its `basis_dtype`, and `relative`."""
        self.plan, self.dtype = plan, dtype
        self.rank = rank
        self.delay = plan.strategy.refresh.delay
        self._factors = plan.decomposed(rank)
        self.troubles = troubles
        self.relative = relative
        self.arena = Arena(plan.bases(rank), kept_in, device)
        self.denominators = Arena(plan.denominators(rank), dtype, device)
        self.scales: Mapping[str, Tensor] = {}
        self._curvature = curvature
        self._background = Background(device)
        self.forget()

    def forget(self) -> None:
        """No decompositions, and none on their way."""
        self.ready = False
        self.share: int | None = None
        self._made: Callable[[], Blocks] | None = None
        self._due = 0
        self._damping = math.nan  # equal to none

    # -- from factors to decompositions ----------------------------------------------------------

    def decompose(
        self, factors: Mapping[str, Tensor], step: int, damping: float, share: int | None = None
    ) -> None:
        """Starts to decompose the factors of this rank: triangles, by name; all or a `share`."""
        self.share = share
        at_once = self.delay == 0 or not self.ready
        self._due = step if at_once else step + self.delay
        names = self.plan.decomposed(self.rank, share)
        chosen = {name: factors[name] for name in names}
        added = {name: self._added(name, factors, damping) for name in self.plan.inverted(names)}
        self._made = self._start(chosen, added, at_once)

    @property
    def pending(self) -> bool:
        """Whether decompositions are on their way."""
        return self._made is not None

    def due(self, step: int) -> bool:
        """Whether decompositions are on their way that are to be used from `step` on."""
        return self.pending and step >= self._due

    def take(self, step: int) -> int:
        """Puts this rank's own decompositions into the arena, waiting for them if need be.

        What was not made stays as it was, as does what could not be made; at the first time that
        is NaN, and so are directions.

        Returns:
            How many factors were decomposed.

        Raises:
            UserError: a factor could not be decomposed too many times in a row.
        """
        made, self._made = self._made, None
        blocks = dict(made()) if made else {}
        failed = list(dict.fromkeys(map(parent, not_finite(blocks))))
        instead = "the one before is used" if self.ready else "its layer is not preconditioned"
        tried = list(map(parent, blocks))
        self.troubles.note("decomposition", failed, step, instead, tried)
        for name, block in blocks.items():
            if not self.ready or parent(name) not in failed:
                self.arena[name].copy_(block)
        # Values may be renewed alone, and a vector is taken as it is.
        anew = (n for n in blocks if n.endswith((".vectors", ".inverse")))
        return sum(parent(name) not in failed for name in anew)

    def refresh(self) -> None:
        """Derives what preconditioning takes from an arena with new content."""
        self.ready = True
        self.rescaled()

    def rescaled(self) -> None:
        """Has denominators made anew, of eigenvalues or scales with new content."""
        self._damping = math.nan

    def _start(
        self,
        factors: Mapping[str, Tensor],
        added: Mapping[str, Tensor],
        at_once: bool,
    ) -> Callable[[], Blocks]:
        """Has these factors decomposed, here or elsewhere; returns what waits for that."""
        if self._curvature:
            return self._curvature.start(factors, added, self.share)
        if at_once:
            return lambda: self._blocks(factors, added)
        kept = {name: factor.clone() for name, factor in factors.items()}
        return self._background.start(self._blocks(kept, added))

    def _blocks(
        self, factors: Mapping[str, Tensor], added: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """The arena's blocks that change, by name, of one factor after the other."""
        tolerance = self.plan.strategy.refresh.tolerance
        for name, kept_packed in factors.items():
            packed = kept_packed.to(self.dtype)
            if tolerance and self.ready:
                renewed, misfit = self._renewed(name, packed, added.get(name))
                if misfit <= tolerance:  # not so if it is NaN
                    yield from renewed.items()
                    continue
            solvers, ranks = self.plan.solvers([name]), self.plan.low_ranks([name])
            yield from decompositions({name: packed}, added, solvers, ranks)

    def _renewed(
        self, name: str, packed: Tensor, added: Tensor | None
    ) -> tuple[dict[str, Tensor], float]:
        """What changes if a factor is not decomposed anew, and how badly the rest fits.

        `added` is the damping in its inverse, if it is inverted.
        """
        factor = unfold_triangle(packed)
        if added is None:
            vectors = self.arena[f"{name}.vectors"].to(self.dtype)
            values, misfit = values_in_basis(factor, vectors)
            return {f"{name}.values": values}, misfit
        inverse = self.arena[f"{name}.inverse"].to(self.dtype)
        return {}, error_of_inverse(damp(factor, added), inverse)

    def _added(self, name: str, factors: Mapping[str, Tensor], damping: float) -> Tensor:
        """What is added to a factor before it is inverted, `[]` or `[groups]`."""
        layer, splits = self.plan.shapes[parent(name)], self.plan.splits(parent(name))
        if not splits and not self.relative:
            shape, device = self.plan.inverted([name])[name], self.arena.flat.device
            return torch.full(shape, damping, dtype=self.dtype, device=device)
        if self.relative:
            own = self._mean_eigenvalue(layer, [self.plan.factors[name]], factors)
            return damping_unit(own) * (math.sqrt(damping) if splits else damping)
        a, g = (self._mean_eigenvalue(layer, layer.side(side), factors) for side in "AG")
        of_a = name in [factor.name for factor in layer.side("A")]
        return tikhonov_share(a / g if of_a else g / a, damping)

    def _mean_eigenvalue(
        self, layer: LayerShape, found: Sequence[FactorShape], factors: Mapping[str, Tensor]
    ) -> Tensor:
        """The mean eigenvalue of some factors of a layer, `[]`, or `[groups]` if it has several."""
        precise = [factors[factor.name].to(self.dtype) for factor in found]
        traces = torch.cat([triangle_trace(one).view(layer.groups, -1) for one in precise], 1)
        means = traces.sum(1) * layer.groups / sum(factor.size for factor in found)
        return means if layer.groups > 1 else means[0]

    # -- from gradients to directions ------------------------------------------------------------

    def damp(self, damping: float) -> None:
        """Makes `damping` the one to precondition with, where it is not part of an inverse."""
        if damping == self._damping:
            return
        for name, denominators in self.denominators.items():
            values, scales = self.sides(name, "values"), self.scales.get(name)
            if not self.relative:
                damped_denominators(*values, damping, denominators, scales)
                continue
            a, g = map(mean_eigenvalues, values, self.sides(name, "vectors"))
            relatively_damped_denominators(*values, a, g, damping, denominators, scales)
        self._damping = damping

    def sides(self, name: str, block: str) -> tuple[Side, Side]:
        """A and G of a layer in the form of that block of their factors' decompositions.

        In the dtype of sums.
        """
        a, g = ([b.to(self.dtype) for b in self._side(name, side, block)] for side in "AG")
        return a, g

    def precondition(self, name: str, gradient: Tensor) -> Tensor:
        """The direction of a layer `[outputs, inputs]` for its gradient."""
        applied = next(iter(BLOCKS[self.plan.solver_of(name)]))
        a, g = (self._side(name, side, applied) for side in "AG")
        if name in self.plan.eigenbases:
            return precondition(gradient, a, g, self.denominators[name])
        if name in self.plan.vectors:
            return precondition_by_vectors(gradient, a, g, self._damping)
        return precondition_by_inverse(gradient, a, g)

    def _side(self, layer: str, side: str, block: str) -> list[Tensor]:
        """That block of each factor that stands for A or for G of a layer."""
        shape = self.plan.shapes[layer]
        found = [self.arena[f"{factor.name}.{block}"] for factor in shape.side(side)]
        if side in shape.diagonal:
            return [one.view(*shape.gradient[:-2], -1) for one in found]
        return found

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The arena and what is on its way, by name; waits for that."""
        state: dict[str, Any] = {}
        if self.ready:
            state |= {f"bases/{name}": block for name, block in self.arena.items()}
            state["solver"] = self.plan.all_solvers
        if self._made is not None:
            made = list(self._made())
            self._made = lambda: made
            state |= {f"decompositions/{name}": block for name, block in made}
            state["due"] = self._due
        return state

    def complete(self, names: Collection[str]) -> set[str]:
        """Names of what all ranks together have in a state of `names`."""
        if "solver" not in names:
            return set()
        owners = map(self.plan.decomposed, range(self.plan.ranks))
        factors = [name for owned in owners for name in owned]
        made = [name for name, _ in self.plan.decompositions(factors)]
        whole = {f"bases/{name}" for name in made}
        if "due" in names:  # of one share; with a tolerance, also what may have stayed as it was
            layer_of = {f"decompositions/{name}": parent(parent(name)) for name in made}
            begun = {self.plan.shares_of[layer_of[name]] for name in names if name in layer_of}
            share = begun.pop() if len(begun) == 1 else None
            whole |= {n for n, x in layer_of.items() if share in (None, self.plan.shares_of[x])}
        return whole

    def needed(self, names: Collection[str]) -> dict[str, Any]:
        """What this rank takes from a state of `names`; each with a value of its kind."""
        if "solver" not in names:
            return {}
        needed = {f"bases/{name}": block for name, block in self.arena.items()}
        made = [name for name, _ in self.plan.decompositions(self._factors)]
        on_their_way = {f"decompositions/{name}": self.arena[name] for name in made}
        needed |= {name: block for name, block in on_their_way.items() if name in names}
        return needed | {"solver": ""} | ({"due": 0} if "due" in names else {})

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Takes what is `needed` from the state of all, after `forget`.

        What is on its way is published with all the rest, as shares may have been dealt otherwise.
        """
        if "solver" not in names:
            return
        for name, block in self.arena.items():
            block.copy_(state[f"bases/{name}"])
        self.refresh()
        if "due" in state:
            blocks = [name for name, _ in self.plan.decompositions(self._factors)]
            prefix = "decompositions/"  # those that nothing was made of are missing
            made = [(n, state[prefix + n]) for n in blocks if prefix + n in state]
            self._made = lambda: made
            self._due = int(state["due"])
