"""Decompositions of factors: made by their owners, sent to other workers, applied to gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mpikfac import decompose, kron
from mpikfac.arena import Arena
from mpikfac.background import Background
from mpikfac.plan import Plan
from mpikfac.troubles import Troubles, all_finite

# How a factor is decomposed, until it works: in its own dtype or another, and damped how much more.
ATTEMPTS = ((None, 1.0), (torch.float64, 1.0), (torch.float64, 10.0))


class Bases:
    """The decompositions that one rank makes and holds, and what it preconditions with.

    Attributes:
        arena: eigenvalues and eigenvectors, damped inverses, or vectors as they are; a segment for
            each worker.
        ready: whether there are any.
        share: the share of the layers whose factors were decomposed last; None for all.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        rounded_to: torch.dtype | None,
        troubles: Troubles,
    ) -> None:
        """See `KFAC` for `rounded_to`, its `precondition_dtype`."""
        self.plan = plan
        self.rank = rank
        self.delay = plan.strategy.delay
        self._factors = plan.decomposed(rank)
        self.troubles = troubles
        self.arena = Arena(plan.bases(rank), dtype, device)
        self.rounded = Arena(plan.bases(rank), rounded_to, device) if rounded_to else self.arena
        self.denominators = Arena(plan.denominators(rank), dtype, device)
        self._background = Background(device)
        self.forget()

    def forget(self) -> None:
        """No decompositions, and none on their way."""
        self.ready = False
        self.share: int | None = None
        self._made: Callable[[], Iterable[tuple[str, Tensor]]] | None = None
        self._due = 0
        self._damping = math.nan  # equal to none

    # -- from factors to decompositions ----------------------------------------------------------

    def decompose(
        self, factors: Mapping[str, Tensor], step: int, damping: float, share: int | None = None
    ) -> None:
        """Starts to decompose the factors of this rank: triangles, by name; all or a `share`."""
        self.share = share
        names = [name for name in self._factors if self.plan.in_share(name, share)]
        if self.delay == 0 or not self.ready:
            self._due = step
            blocks = self._blocks(names, factors, step, damping)
            self._made = lambda: blocks
        else:
            self._due = step + self.delay
            layers = {_layer(name) for name in names}
            kept = {n: factor.clone() for n, factor in factors.items() if _layer(n) in layers}
            self._made = self._background.start(self._blocks(names, kept, step, damping))

    @property
    def pending(self) -> bool:
        """Whether decompositions are on their way."""
        return self._made is not None

    def due(self, step: int) -> bool:
        """Whether decompositions are on their way that are to be used from `step` on."""
        return self.pending and step >= self._due

    def take(self) -> int:
        """Puts this rank's own decompositions into the arena, waiting for them if need be.

        What was not made stays as it was; at the first time it is NaN, and so are directions.

        Returns:
            How many factors were decomposed.

        Raises:
            UserError: a factor could not be decomposed too many times in a row.
        """
        made, self._made = self._made, None
        blocks = dict(made()) if made else {}
        for name, _ in self.plan.decompositions(self._factors):
            if name in blocks:
                self.arena[name].copy_(blocks[name])
            elif not self.ready:
                self.arena[name].fill_(torch.nan)
        return sum(name.endswith((".vectors", ".inverse")) for name in blocks)

    def refresh(self) -> None:
        """Derives what preconditioning takes from an arena with new content."""
        self.ready = True
        self._damping = math.nan
        if self.rounded is not self.arena:
            self.rounded.flat.copy_(self.arena.flat)

    def _blocks(
        self, names: Iterable[str], factors: Mapping[str, Tensor], step: int, damping: float
    ) -> Iterator[tuple[str, Tensor]]:
        """The arena's blocks that change, by name, of one factor after the other."""
        failed = []
        tolerance = self.plan.strategy.tolerance if self.ready else 0.0
        for name in names:
            if tolerance:
                renewed, misfit = self._renewed(name, factors, damping)
                if misfit <= tolerance:  # not so if it is NaN
                    yield from renewed.items()
                    continue
            for dtype, more in ATTEMPTS:
                try:
                    made = self._decomposition(name, factors, damping * more, dtype)
                except ArithmeticError:
                    continue
                yield from made.items()
                break
            else:
                failed.append(name)
        instead = "the one before is used" if self.ready else "its layer is not preconditioned"
        self.troubles.note("decomposition", failed, step, instead)

    def _decomposition(
        self, name: str, factors: Mapping[str, Tensor], damping: float, dtype: torch.dtype | None
    ) -> dict[str, Tensor]:
        """The arena's blocks for a factor, computed in `dtype`, or the factor's own if None.

        Raises:
            ArithmeticError: they are not finite, or the damped factor is not positive definite.
        """
        packed = factors[name].to(dtype or factors[name].dtype)
        if self.plan.vectors:
            made = {f"{name}.vector": packed}
        elif self.plan.solver == "eigen":
            values, vectors = decompose.eigenbasis(kron.unfold_triangle(packed))
            made = {f"{name}.values": values, f"{name}.vectors": vectors}
        else:
            share = self._share_of_damping(name, factors, damping)
            inverse = decompose.damped_inverse(kron.unfold_triangle(packed), share)
            made = {f"{name}.inverse": inverse}
        made = {key: block.to(factors[name].dtype) for key, block in made.items()}
        if not all(map(all_finite, made.values())):
            raise ArithmeticError("the decomposition is not finite")
        return made

    def _renewed(
        self, name: str, factors: Mapping[str, Tensor], damping: float
    ) -> tuple[dict[str, Tensor], float]:
        """What changes if a factor is not decomposed anew, and how badly the rest fits."""
        factor = kron.unfold_triangle(factors[name])
        if self.plan.solver == "eigen":
            vectors = self.arena[f"{name}.vectors"]
            values, misfit = decompose.values_in_basis(factor, vectors)
            return {f"{name}.values": values}, misfit
        factor.diagonal().add_(self._share_of_damping(name, factors, damping))
        return {}, decompose.error_of_inverse(factor, self.arena[f"{name}.inverse"])

    def _share_of_damping(
        self, name: str, factors: Mapping[str, Tensor], damping: float
    ) -> float | Tensor:
        """What is added to a factor before it is inverted."""
        if self.plan.solver == "unsplit-inverse":
            return damping
        other = f"{_layer(name)}.{'G' if name.endswith('.A') else 'A'}"
        means = kron.mean_eigenvalue(factors[name]), kron.mean_eigenvalue(factors[other])
        return decompose.tikhonov_share(*means, damping)

    # -- from gradients to directions ------------------------------------------------------------

    def damp(self, damping: float) -> None:
        """Makes `damping` the one to precondition with, where it is not part of an inverse."""
        if damping == self._damping:
            return
        for name, denominators in self.denominators.items():
            a_values, g_values = self.arena[f"{name}.A.values"], self.arena[f"{name}.G.values"]
            kron.damped_denominators(a_values, g_values, damping, denominators)
        self._damping = damping

    def precondition(self, name: str, gradient: Tensor) -> Tensor:
        """The direction of a layer `[outputs, inputs]` for its gradient."""
        kind = {"eigen": "vectors", "rank-one": "vector"}.get(self.plan.solver, "inverse")
        a, g = self.rounded[f"{name}.A.{kind}"], self.rounded[f"{name}.G.{kind}"]
        if self.plan.solver == "eigen":
            return kron.precondition(gradient, a, g, self.denominators[name])
        if self.plan.vectors:
            return kron.precondition_by_vectors(gradient, a, g, self._damping)
        return kron.precondition_by_inverse(gradient, a, g)

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The arena and what is on its way, by name; waits for that."""
        state: dict[str, Any] = {}
        if self.ready:
            state |= {f"bases/{name}": block for name, block in self.arena.items()}
            state["solver"] = self.plan.solver
        if self._made is not None:
            made = list(self._made())
            self._made = lambda: made
            state |= {f"decompositions/{name}": block for name, block in made}
            state |= {"due": self._due} | ({} if self.share is None else {"share": self.share})
        return state

    def needed(self, names: Collection[str]) -> dict[str, Any]:
        """What `load_state_dict` takes from items of these names; each with a value of its kind."""
        needed = {f"bases/{name}": block for name, block in self.arena.items()}
        made = [name for name, _ in self.plan.decompositions(self._factors)]
        on_their_way = {f"decompositions/{name}": self.arena[name] for name in made}
        needed |= {name: block for name, block in on_their_way.items() if name in names}
        return needed | {"solver": ""} | {name: 0 for name in ("due", "share") if name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what this rank holds from the state of all; nothing from another solver's."""
        self.forget()
        if state.get("solver") != self.plan.solver:
            return
        for name, block in self.arena.items():
            block.copy_(state[f"bases/{name}"])
        self.refresh()
        if "due" in state:
            names = [name for name, _ in self.plan.decompositions(self._factors)]
            prefix = "decompositions/"  # those that could not be made are missing
            made = [(n, state[prefix + n]) for n in names if prefix + n in state]
            self._made = lambda: made
            self._due = int(state["due"])
            self.share = state.get("share")


def _layer(factor: str) -> str:
    """Name of the layer that a factor belongs to."""
    return factor.rpartition(".")[0]
