"""Decomposers: where factors are decomposed, and when the decompositions are ready.

The numbers do not depend on the decomposer. The choices of a refresh select the decomposer:
at once, on a thread of the rank, or on ranks that do not train.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from mpikfac.engine.site import Site
from mpikfac.numerics import Arena, alike, each_finite, not_finite, unfold_triangle
from mpikfac.plan import Factor
from mpikfac.solvers import Solver, decomposed, decomposed_together

Blocks = dict[str, Tensor]


@dataclass(frozen=True)
class Decomposition:
    """A factor to decompose on the rank.

    Attributes:
        blocks: the decomposition in use, by kind: views of the arena.
        side: all factors of the same side of the layer, A or G.
        opposite: all factors of the opposite side.
    """

    factor: Factor
    solver: Solver
    blocks: Mapping[str, Tensor]
    side: tuple[Factor, ...]
    opposite: tuple[Factor, ...]


class FactorRequest(NamedTuple):
    """Factors to decompose, as the factors are now.

    Attributes:
        packed: the factors, by name.
        added: the damping that is part of decompositions, by name of factors that have one.
        precise: whether a factor is decomposed in float64, by name.
        turn: of a refresh; None for all layers.
        first: whether no decomposition is in use yet.
    """

    decompositions: Sequence[Decomposition]
    packed: Mapping[str, Tensor]
    added: Mapping[str, Tensor]
    precise: Mapping[str, bool]
    turn: int | None
    first: bool


class Decomposed(NamedTuple):
    """Decompositions that are complete.

    Attributes:
        blocks: the changed blocks of the arena, by name; NaN where a factor failed.
        failed: names of factors that cannot be decomposed.
    """

    blocks: Blocks
    failed: Collection[str]


Ready = Callable[[], Decomposed]
"""Waits for decompositions, and returns the decompositions."""


class AtOnce:
    """Decompose on the rank, when the decompositions are taken.

    Args:
        arena: of all decompositions on the rank.
        factor_of: the names of the factors of blocks that the rank decomposes.
    """

    def __init__(self, site: Site, arena: Arena, factor_of: Mapping[str, str]) -> None:
        self.site, self._arena, self._factor_of = site, arena, factor_of
        self._tolerance = site.plan.strategy.refresh.tolerance

    def start(self, request: FactorRequest) -> Ready:
        """Begin to decompose; return a function to wait for the blocks.

        Collective over: none.
        """
        return lambda: self.decomposed(request)

    def close(self) -> None:
        """End the work for this rank.

        Collective over: none.
        """

    def check_same_model(self) -> None:
        """Return if other parameters of the model may be trained from now on."""

    def decomposed(self, request: FactorRequest) -> Decomposed:
        """Return the changed blocks of the arena."""
        sums = self.site.dtype
        dtypes = {n: torch.float64 if request.precise.get(n) else sums for n in request.packed}
        blocks, sound = self._in_stacks(request, dtypes)
        singles: Blocks = {}
        for decomposition in request.decompositions:
            name = decomposition.factor.name
            if name not in sound:
                packed = request.packed[name].to(dtypes[name])
                singles |= self._single(decomposition, packed, request)
        return Decomposed(blocks | singles, self.checked(singles).failed)

    def checked(self, blocks: Blocks) -> Decomposed:
        """Return decompositions with the names of the factors that failed."""
        failed = dict.fromkeys(self._factor_of[name] for name in not_finite(blocks))
        return Decomposed(blocks, list(failed))

    def _in_stacks(
        self, request: FactorRequest, dtypes: Mapping[str, torch.dtype]
    ) -> tuple[Blocks, set[str]]:
        """Return blocks of factors on a GPU, by a call for each order, and the finite factors."""
        if self.site.device.type == "cpu" or (self._tolerance and not request.first):
            return {}, set()
        blocks: Blocks = {}
        tried: list[str] = []
        sums: list[Tensor] = []
        of = {d.factor.name: d for d in request.decompositions if not d.factor.solver.vector}
        packed, dtype = request.packed, self._arena.flat.dtype
        for names in alike({name: packed[name] for name in of}):
            for stacked in _of_one_kind([of[name] for name in names], dtypes):
                factors = [decomposition.factor for decomposition in stacked]
                stacked_names = [factor.name for factor in factors]
                added = (
                    torch.stack([request.added[n] for n in stacked_names])
                    if stacked_names[0] in request.added
                    else None
                )
                stack = torch.stack([packed[name] for name in stacked_names])
                arguments = stacked[0].solver, stack.to(dtypes[stacked_names[0]]), added, dtype
                if of_stack := decomposed_together(factors, *arguments):
                    blocks |= of_stack
                    tried += stacked_names
                    sums.append(stack.flatten(1).sum(1, dtype=dtype))
        if not blocks:
            return {}, set()
        names = [*(self._factor_of[name] for name in blocks), *tried]
        finite = each_finite([*blocks.values(), *torch.cat(sums)]).tolist()
        doubtful = {name for name, sound in zip(names, finite) if not sound}
        return blocks, set(tried) - doubtful

    def _single(
        self, decomposition: Decomposition, packed: Tensor, request: FactorRequest
    ) -> Blocks:
        """Return the changed blocks of a factor: all, or few if the older blocks still fit."""
        factor, solver = decomposition.factor, decomposition.solver
        added = request.added.get(factor.name)
        if self._tolerance and not request.first:
            older = {kind: block.to(packed.dtype) for kind, block in decomposition.blocks.items()}
            renewed, misfit = solver.renew(unfold_triangle(packed), older, added)
            if misfit <= self._tolerance:  # not if the misfit is NaN
                return {b.name: renewed[b.kind] for b in factor.blocks if b.kind in renewed}
        return decomposed(factor, solver, packed, added)


class InBackground(AtOnce):
    """Decompose on a thread of the rank, beside the steps; the first time at once."""

    def __init__(self, site: Site, arena: Arena, factor_of: Mapping[str, str]) -> None:
        super().__init__(site, arena, factor_of)
        self._thread = Background(site.device)

    def start(self, request: FactorRequest) -> Ready:
        """Begin to decompose copies of the factors; return a function to wait for the blocks."""
        if request.first:
            return super().start(request)
        copies = {name: factor.clone() for name, factor in request.packed.items()}
        return self._thread.start(lambda: self.decomposed(request._replace(packed=copies)))


Result = TypeVar("Result")


class Background:
    """A thread that runs functions in turn, with as many threads of torch as its maker has."""

    def __init__(self, device: torch.device) -> None:
        threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "mpikfac", torch.set_num_threads, (threads,))
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def start(self, function: Callable[[], Result]) -> Callable[[], Result]:
        """Run `function` on the thread; return a function to wait for the result or the error.

        Tensors used by `function` must not change meanwhile.
        """
        if self._stream:
            self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        return self._thread.submit(self._run, function).result

    def _run(self, function: Callable[[], Result]) -> Result:
        with self._stream or nullcontext():
            result = function()
            if self._stream:
                self._stream.synchronize()
            return result


def _of_one_kind(
    decompositions: Sequence[Decomposition], dtypes: Mapping[str, torch.dtype]
) -> list[list[Decomposition]]:
    """Return decompositions of one order in lists that a single call can make."""
    kinds: dict[object, list[Decomposition]] = {}
    for decomposition in decompositions:
        factor = decomposition.factor
        kind = decomposition.solver, factor.rank, factor.groups, dtypes[factor.name]
        kinds.setdefault(kind, []).append(decomposition)
    return list(kinds.values())
