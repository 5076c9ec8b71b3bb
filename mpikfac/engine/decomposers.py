"""Ranks that do not train but decompose for those that do, while these go on [LBANN].

A curvature rank is a background thread on another rank: an owner sends it factors, goes on, and
takes what comes back on a fixed day, as it does with a thread of its own. Nothing else depends on
who decomposes, so the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from mpikfac.comm import Team, arrivals, begin_receive, begin_send, leave, tell, told
from mpikfac.numerics import Arena
from mpikfac.plan import Layout, Plan, added_to
from mpikfac.solvers import decompositions
from mpikfac.trace import Trace

CPU = torch.device("cpu")


def check_joins(curvature: Any, ranks: int) -> None:
    """Returns if `curvature` joins this rank to so many curvature ranks, or is None for none.

    Raises:
        ValueError: it does not.
    """
    joined = curvature.remote_size if curvature else 0
    if joined != ranks:
        raise ValueError(
            f"curvature_ranks={ranks}, but curvature joins {joined}; "
            f"give it what mpikfac.split(comm, {ranks}) returned"
        )


class Curvature:
    """What decomposes one training rank's factors on a curvature rank, one request at a time.

    Collective over: curvature.

    Args:
        curvature: what joins training and curvature ranks, of `split`.
    """

    def __init__(self, plan: Plan, rank: int, curvature: Any, trace: Trace) -> None:
        self.plan, self.rank, self.trace = plan, rank, trace
        self._curvature = curvature
        self._finish: Callable[[], object] = _nothing
        tell(curvature, plan)

    def start(
        self,
        factors: Mapping[str, Tensor],
        added: Mapping[str, Tensor],
        share: int | None,
    ) -> Callable[[], list[tuple[str, Tensor]]]:
        """Sends what `decompositions` takes; returns what waits for what it makes.

        Collective over: none.
        """
        self._finish()  # a request that nobody waited for
        if not factors:
            return list
        request = _on_host(self.plan, self.plan.request(self.rank, share))
        with self.trace.stage("send factors", "curvature", request.flat.nbytes):
            for name, number in added.items():
                request[added_to(name)].copy_(number)
            for name, factor in factors.items():
                request[name].copy_(factor)
            reply = _on_host(self.plan, self.plan.reply(self.rank, share))
            route = self.plan.curvature_rank(self.rank), self.plan.shares.index(share)
            sent = begin_send(self._curvature, request.flat, *route)
            received = begin_receive(self._curvature, reply.flat, *route)

        def finish() -> None:
            sent()
            received()
            self._finish = _nothing

        def take() -> list[tuple[str, Tensor]]:
            with self.trace.stage("receive bases", "curvature"):
                finish()
            return list(reply.items())

        self._finish = finish
        return take

    def close(self) -> None:
        """Lets the curvature ranks go, once all training ranks have called this.

        Collective over: none.
        """
        self._finish()
        leave(self._curvature)


def serve(team: Team, device: torch.device = CPU, trace: Trace | None = None) -> None:
    """Decompose on this curvature rank for the training ranks, until all of them close.

    First come, first served; a rank has one request at a time, so none can crowd out another.

    Collective over: curvature.

    Args:
        team: of `split`.
        device: where to decompose; the same numbers come of the same kind as the training ranks'.
        trace: takes seconds and bytes of its stages.
    """
    if (curvature := team.link) is None:
        raise ValueError("serve() needs a team with curvature ranks; see mpikfac.split")
    plan, trace = told(curvature), trace or Trace()
    sending: dict[int, Callable[[], object]] = {}
    for owner, tag in arrivals(curvature):
        share = plan.shares[tag]
        request = _on_host(plan, plan.request(owner, share))
        reply = _on_host(plan, plan.reply(owner, share))
        with trace.stage("receive factors", "curvature"):
            begin_receive(curvature, request.flat, owner, tag)()
        with trace.stage("decompose"):
            _answer(plan, request, plan.decomposed(owner, share), reply, device)
        with trace.stage("send bases", "curvature", reply.flat.nbytes):
            # To wait here would let other owners wait, too, for one that computes.
            sending.pop(owner, _nothing)()
            sending[owner] = begin_send(curvature, reply.flat, owner, tag)
    for wait in sending.values():
        wait()


def _answer(
    plan: Plan, request: Arena, names: list[str], reply: Arena, device: torch.device
) -> None:
    factors = {name: request[name].to(device) for name in names}
    added = {name: request[added_to(name)].to(device) for name in plan.inverted(names)}
    made = decompositions(factors, added, plan.solvers(names), plan.low_ranks(names))
    for name, block in made:
        reply[name].copy_(block)


def _on_host(plan: Plan, layout: Layout) -> Arena:
    return Arena(layout, torch.float64 if plan.itemsize == 8 else torch.float32, CPU)


def _nothing() -> None:
    pass


Item = TypeVar("Item")


class Background:
    """One thread that does one thing after the other."""

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, "mpikfac")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, items: Iterable[Item]) -> Callable[[], list[Item]]:
        """Starts to make `items`; returns what waits for them, and raises what they raised.

        Tensors that they are made of must not change meanwhile.
        """
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return self._thread.submit(self._make, items).result

    def _make(self, items: Iterable[Item]) -> list[Item]:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            made = list(items)
            if self._stream:
                self._stream.synchronize()
            return made
