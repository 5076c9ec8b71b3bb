"""Decompositions of factors: made by their owners, sent to other workers, applied to gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mpikfac import decompose, kron
from mpikfac.arena import Arena
from mpikfac.background import Background
from mpikfac.plan import Plan


class Bases:
    """The decompositions that one rank makes and holds, and what it preconditions with.

    Attributes:
        arena: eigenvalues and eigenvectors, or damped inverses; a segment for each worker.
        ready: whether there are any.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        rounded_to: torch.dtype | None,
        delay: int,
    ) -> None:
        """See `KFAC` for `delay` and for `rounded_to`, its `precondition_dtype`."""
        self.plan = plan
        self.rank = rank
        self.delay = delay
        self.arena = Arena(plan.bases(rank), dtype, device)
        self.rounded = Arena(plan.bases(rank), rounded_to, device) if rounded_to else self.arena
        self.denominators = Arena(plan.denominators(rank), dtype, device)
        self._background = Background(device)
        self.forget()

    def forget(self) -> None:
        """No decompositions, and none on their way."""
        self.ready = False
        self._made: Callable[[], Iterable[tuple[str, Tensor]]] | None = None
        self._due = 0
        self._damping: float | None = None

    # -- from factors to decompositions ----------------------------------------------------------

    def decompose(self, factors: Mapping[str, Tensor], step: int, damping: float) -> None:
        """Starts to decompose the factors that this rank owns: triangles, by name."""
        if self.delay == 0 or not self.ready:
            self._due = step
            blocks = self._blocks(factors, step, damping)
            self._made = lambda: blocks
        else:
            self._due = step + self.delay
            layers = {_layer(name) for name in self.plan.owned(self.rank)}
            kept = {n: factor.clone() for n, factor in factors.items() if _layer(n) in layers}
            self._made = self._background.start(self._blocks(kept, step, damping))

    @property
    def pending(self) -> bool:
        """Whether decompositions are on their way."""
        return self._made is not None

    def due(self, step: int) -> bool:
        """Whether decompositions are on their way that are to be used from `step` on."""
        return self.pending and step >= self._due

    def take(self) -> None:
        """Puts this rank's own decompositions into the arena, waiting for them if need be.

        Raises:
            ArithmeticError: a factor cannot be decomposed.
        """
        made, self._made = self._made, None
        for name, block in made() if made else ():
            self.arena[name].copy_(block)

    def refresh(self) -> None:
        """Derives what preconditioning takes from an arena with new content."""
        self.ready = True
        self._damping = None
        if self.rounded is not self.arena:
            self.rounded.flat.copy_(self.arena.flat)

    def _blocks(
        self, factors: Mapping[str, Tensor], step: int, damping: float
    ) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the arena's blocks that this rank makes, one by one."""
        for name in self.plan.owned(self.rank):
            try:
                if self.plan.solver == "eigen":
                    values, vectors = decompose.eigenbasis(kron.unfold_triangle(factors[name]))
                    yield f"{name}.values", values
                    yield f"{name}.vectors", vectors
                else:
                    yield f"{name}.inverse", self._damped_inverse(name, factors, damping)
            except ArithmeticError as error:
                raise ArithmeticError(
                    f"factor {name!r} at step {step}: {error}; if the loss has diverged, "
                    f"try a smaller learning rate or a larger damping"
                ) from None

    def _damped_inverse(self, name: str, factors: Mapping[str, Tensor], damping: float) -> Tensor:
        factor = kron.unfold_triangle(factors[name])
        if self.plan.solver == "unsplit-inverse":
            return decompose.damped_inverse(factor, damping)
        other = f"{_layer(name)}.{'G' if name.endswith('.A') else 'A'}"
        means = kron.mean_eigenvalue(factors[name]), kron.mean_eigenvalue(factors[other])
        return decompose.damped_inverse(factor, decompose.tikhonov_share(*means, damping))

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
        kind = "vectors" if self.plan.solver == "eigen" else "inverse"
        a, g = self.rounded[f"{name}.A.{kind}"], self.rounded[f"{name}.G.{kind}"]
        if self.plan.solver == "eigen":
            return kron.precondition(gradient, a, g, self.denominators[name])
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
            state["due"] = self._due
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what this rank holds from the state of all; nothing from another solver's."""
        self.forget()
        if state.get("solver") != self.plan.solver:
            return
        for name, block in self.arena.items():
            block.copy_(state[f"bases/{name}"])
        self.refresh()
        if "due" in state:
            names = dict(self.plan.decompositions(self.rank))
            made = [(name, state[f"decompositions/{name}"]) for name in names]
            self._made = lambda: made
            self._due = int(state["due"])


def _layer(factor: str) -> str:
    """Name of the layer that a factor belongs to."""
    return factor.rpartition(".")[0]
