"""Decide where factors are decomposed and when the results are ready.

The settings of the refresh determine whether factors are decomposed immediately, in a thread of the
rank, or on ranks that do not train. The results are the same in all three cases.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from mpikfac.engine.site import Site
from mpikfac.numerics import Arena, alike, each_finite, not_finite
from mpikfac.plan import Factor
from mpikfac.preconditioners import (
    Preconditioner,
    decomposed,
    decomposed_together,
    renewed_together,
)

Blocks = dict[str, Tensor]


@dataclass(frozen=True)
class Decomposition:
    """A factor to decompose on this rank.

    Attributes:
        blocks: the blocks of the decomposition in use, by kind, as views of the arena.
        side: all factors of the same side of the layer, A or G.
        opposite: all factors of the opposite side.
    """

    factor: Factor
    preconditioner: Preconditioner
    blocks: Mapping[str, Tensor]
    side: tuple[Factor, ...]
    opposite: tuple[Factor, ...]


class FactorRequest(NamedTuple):
    """Factors to decompose, with their current values.

    Attributes:
        packed: the packed factors, by name.
        added: the damping to add to a factor before its decomposition, by the factor's name; only
            for factors whose preconditioner needs this.
        precise: whether a factor is decomposed in float64, by the factor's name.
        turn: the slot of the refresh; None for all layers.
        first: whether no decomposition is in use yet.
    """

    decompositions: Sequence[Decomposition]
    packed: Mapping[str, Tensor]
    added: Mapping[str, Tensor]
    precise: Mapping[str, bool]
    turn: int | None
    first: bool


class Decomposed(NamedTuple):
    """Completed decompositions.

    Attributes:
        blocks: the changed blocks of the arena, by name; NaN where a decomposition failed.
        failed: the names of factors that could not be decomposed.
    """

    blocks: Blocks
    failed: Collection[str]


Ready = Callable[[], Decomposed]
"""Waits for decompositions, and returns them."""


class AtOnce:
    """Decompose factors in the calling thread, when the results are requested.

    Args:
        arena: holds all decompositions on the rank.
        factor_of: the name of the factor to which each of the rank's blocks belongs.
    """

    def __init__(self, site: Site, arena: Arena, factor_of: Mapping[str, str]) -> None:
        self.site, self._arena, self._factor_of = site, arena, factor_of
        self._tolerance = site.plan.strategy.refresh.tolerance

    def start(self, request: FactorRequest) -> Ready:
        """Start decomposing the factors, and return a function that waits for the decompositions.

        Collective over: none.
        """
        return lambda: self.decomposed(request)

    def close(self) -> None:
        """Release the decomposer's resources on this rank.

        Collective over: none.
        """

    def check_same_model(self) -> None:
        """Raise an error if the set of trained parameters must not change."""

    def decomposed(self, request: FactorRequest) -> Decomposed:
        """Decompose the requested factors, and return the changed blocks of the arena."""
        sums = self.site.dtype
        dtypes = {n: torch.float64 if request.precise.get(n) else sums for n in request.packed}
        renewed, fitting = self._renewed(request, dtypes)
        blocks, sound = self._in_stacks(request, dtypes, fitting)
        singles: Blocks = {}
        for decomposition in request.decompositions:
            factor, preconditioner = decomposition.factor, decomposition.preconditioner
            if factor.name not in fitting | sound:
                packed = request.packed[factor.name].to(dtypes[factor.name])
                singles |= decomposed(
                    factor, preconditioner, packed, request.added.get(factor.name)
                )
        return Decomposed(renewed | blocks | singles, self.checked(singles).failed)

    def checked(self, blocks: Blocks) -> Decomposed:
        """Return decompositions together with the names of the factors that failed."""
        failed = dict.fromkeys(self._factor_of[name] for name in not_finite(blocks))
        return Decomposed(blocks, list(failed))

    def _renewed(
        self, request: FactorRequest, dtypes: Mapping[str, torch.dtype]
    ) -> tuple[Blocks, set[str]]:
        """Return updated blocks, and the names of factors that do not need a new decomposition."""
        if request.first or not self._tolerance:
            return {}, set()
        blocks: Blocks = {}
        tried: list[str] = []
        misfits: list[Tensor] = []
        for stack in _stacks(request, dtypes):
            older = [decomposition.blocks for decomposition in stack.decompositions]
            of_stack, misfit = renewed_together(
                stack.factors, stack.preconditioner, stack.packed, older, stack.added
            )
            blocks |= of_stack
            tried += [factor.name for factor in stack.factors]
            misfits.append(misfit.double())
        found = zip(tried, torch.cat(misfits).tolist() if misfits else [])
        return blocks, {name for name, misfit in found if misfit <= self._tolerance}  # False if NaN

    def _in_stacks(
        self, request: FactorRequest, dtypes: Mapping[str, torch.dtype], fitting: Collection[str]
    ) -> tuple[Blocks, set[str]]:
        """Decompose the requested factors, except those in `fitting`, with one call per stack.

        On a CPU, nothing is decomposed here.

        Returns:
            The blocks, and the names of the factors that are finite and have only finite blocks.
        """
        if self.site.device.type == "cpu":
            return {}, set()
        blocks: Blocks = {}
        tried: list[str] = []
        sums: list[Tensor] = []
        dtype = self._arena.flat.dtype
        for stack in _stacks(request, dtypes, fitting):
            arguments = stack.factors, stack.preconditioner, stack.packed, stack.added, dtype
            if of_stack := decomposed_together(*arguments):
                blocks |= of_stack
                tried += [factor.name for factor in stack.factors]
                sums.append(stack.packed.flatten(1).sum(1, dtype=dtype))
        if not blocks:
            return {}, set()
        names = [*(self._factor_of[name] for name in blocks), *tried]
        finite = each_finite([*blocks.values(), *torch.cat(sums)]).tolist()
        doubtful = {name for name, sound in zip(names, finite) if not sound}
        return blocks, set(tried) - doubtful


class InBackground(AtOnce):
    """Decompose factors in a thread of the rank during the steps, except the first time."""

    def __init__(self, site: Site, arena: Arena, factor_of: Mapping[str, str]) -> None:
        super().__init__(site, arena, factor_of)
        self._thread = Background(site.device)

    def start(self, request: FactorRequest) -> Ready:
        """Start decomposing copies of the factors; return a function that waits for the result."""
        if request.first:
            return super().start(request)
        copies = {name: factor.clone() for name, factor in request.packed.items()}
        return self._thread.start(lambda: self.decomposed(request._replace(packed=copies)))


Result = TypeVar("Result")


class Background:
    """Run functions one by one in a thread, with the creating thread's number of torch threads."""

    def __init__(self, device: torch.device) -> None:
        threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "mpikfac", torch.set_num_threads, (threads,))
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def start(self, function: Callable[[], Result]) -> Callable[[], Result]:
        """Run `function` in the thread; return a function that waits for its result or error.

        Tensors that `function` uses must not change until it has returned.
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


class FactorStack(NamedTuple):
    """Factors of one preconditioner and order, decomposed in one call; on a CPU, a single factor.

    Attributes:
        packed: the factors, `[factors, ...]`, in the dtype in which they are decomposed.
        added: the damping that is part of the decompositions, `[factors, ...]`, or None.
    """

    decompositions: Sequence[Decomposition]
    packed: Tensor
    added: Tensor | None

    @property
    def factors(self) -> list[Factor]:
        """The factors, in the order of `packed`."""
        return [decomposition.factor for decomposition in self.decompositions]

    @property
    def preconditioner(self) -> Preconditioner:
        """The preconditioner of all factors."""
        return self.decompositions[0].preconditioner


def _stacks(
    request: FactorRequest, dtypes: Mapping[str, torch.dtype], without: Collection[str] = ()
) -> Iterator[FactorStack]:
    """Yield the requested factors in stacks, except vectors and the factors named in `without`."""
    of = {d.factor.name: d for d in request.decompositions if not d.factor.preconditioner.vector}
    packed = {name: request.packed[name] for name in of if name not in without}
    for equal in alike(packed):
        kinds: dict[object, list[str]] = {}
        for name in equal:
            factor = of[name].factor
            kind = of[name].preconditioner, factor.rank, factor.groups, dtypes[name]
            kinds.setdefault(kind, []).append(name)
        for names in kinds.values():
            stack = torch.stack([packed[name] for name in names]).to(dtypes[names[0]])
            added = [request.added[name] for name in names if name in request.added]
            of_names = [of[name] for name in names]
            yield FactorStack(of_names, stack, torch.stack(added) if added else None)
