"""Decompose factors while the training goes on: on a thread of the rank, or on curvature ranks.

A curvature rank does not train but decomposes for training ranks [LBANN]. A curvature rank acts as
a background thread: an owner sends factors, goes on, and takes decompositions at a fixed step. The
numbers do not depend on where factors are decomposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from mpikfac.comm import Team, arrivals, begin_receive, begin_send, leave, tell, told
from mpikfac.engine.site import Site
from mpikfac.numerics import Arena
from mpikfac.plan import Factor, Layout, Plan, RankPlan
from mpikfac.solvers import Solver, decomposed
from mpikfac.trace import Trace

CPU = torch.device("cpu")


def check_joins(curvature: Any, ranks: int) -> None:
    """Return if `curvature` joins the rank to `ranks` curvature ranks; None joins to 0.

    Raises:
        ValueError: the number of curvature ranks differs.
    """
    joined = curvature.remote_size if curvature else 0
    if joined != ranks:
        raise ValueError(
            f"curvature_ranks={ranks}, but curvature joins {joined}; "
            f"give it what mpikfac.split(comm, {ranks}) returned"
        )


class Curvature:
    """Send a training rank's factors to a curvature rank, request by request.

    Collective over: curvature.

    Args:
        plan: the plan of all ranks.
        curvature: joins training and curvature ranks, from `split`.
        solvers: the solvers of layers by name.
    """

    def __init__(
        self, plan: Plan, site: Site, curvature: Any, solvers: Mapping[str, Solver]
    ) -> None:
        self.plan, self.trace = site.plan, site.trace
        self._curvature = curvature
        self._finish: Callable[[], object] = _nothing
        tell(curvature, (plan, solvers))

    def start(
        self,
        factors: Mapping[str, Tensor],
        added: Mapping[str, Tensor],
        share: int | None,
    ) -> Callable[[], dict[str, Tensor]]:
        """Send packed factors and damping; return a function to wait for the blocks.

        Collective over: none.
        """
        self._finish()  # a request that nobody waited for
        if not factors:
            return dict
        plan = self.plan
        request, reply = _on_host(plan, plan.request(share)), _on_host(plan, plan.reply(share))
        with self.trace.stage("send factors", "curvature", request.flat.nbytes):
            for factor in plan.decomposed(share):
                request[factor.name].copy_(factors[factor.name])
                if factor.name in added:
                    request[factor.added].copy_(added[factor.name])
            route = plan.grid.curvature_rank(plan.rank), plan.shares.index(share)
            sent = begin_send(self._curvature, request.flat, *route)
            received = begin_receive(self._curvature, reply.flat, *route)

        def finish() -> None:
            sent()
            received()
            self._finish = _nothing

        def take() -> dict[str, Tensor]:
            with self.trace.stage("receive bases", "curvature"):
                finish()
            return dict(reply)

        self._finish = finish
        return take

    def close(self) -> None:
        """Let the curvature ranks go, once all training ranks have called `close`.

        Collective over: none.
        """
        self._finish()
        leave(self._curvature)


def serve(team: Team, device: torch.device = CPU, trace: Trace | None = None) -> None:
    """Decompose on a curvature rank for the training ranks, until all training ranks close.

    First come, first served; a rank has at most 1 request open, so no rank is crowded out.

    Collective over: curvature.

    Args:
        team: from `split`.
        device: where to decompose; a device of the training ranks' kind gives the same numbers.
        trace: takes seconds and bytes of the stages.
    """
    if (curvature := team.link) is None:
        raise ValueError("serve() needs a team with curvature ranks; see mpikfac.split")
    (plan, solvers), trace = told(curvature), trace or Trace()
    sending: dict[int, Callable[[], object]] = {}
    for owner, tag in arrivals(curvature):
        of_owner = plan.of(owner)
        share = of_owner.shares[tag]
        request = _on_host(of_owner, of_owner.request(share))
        reply = _on_host(of_owner, of_owner.reply(share))
        with trace.stage("receive factors", "curvature"):
            begin_receive(curvature, request.flat, owner, tag)()
        with trace.stage("decompose"):
            for factor in of_owner.decomposed(share):
                made = _answer(factor, solvers[factor.solver.name], request, device)
                for name, block in made.items():
                    reply[name].copy_(block)
        with trace.stage("send bases", "curvature", reply.flat.nbytes):
            # Waiting here would make other owners wait, too, for an owner that computes.
            sending.pop(owner, _nothing)()
            sending[owner] = begin_send(curvature, reply.flat, owner, tag)
    for wait in sending.values():
        wait()


def _answer(
    factor: Factor, solver: Solver, request: Arena, device: torch.device
) -> dict[str, Tensor]:
    packed = request[factor.name].to(device)
    added = request[factor.added].to(device) if factor.solver.damped else None
    if factor.added in request and added is None and request[factor.added].any():
        packed = packed.double()
    return decomposed(factor, solver, packed, added)


def _on_host(plan: RankPlan, layout: Layout) -> Arena:
    return Arena(layout, torch.float64 if plan.itemsizes.numbers == 8 else torch.float32, CPU)


def _nothing() -> None:
    pass


Result = TypeVar("Result")


class Background:
    """A thread that runs functions in turn."""

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, "mpikfac")
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def start(self, make: Callable[[], Result]) -> Callable[[], Result]:
        """Run `make` on the thread; return a function to wait for the result or the error.

        Tensors used by `make` must not change meanwhile.
        """
        if self._stream:
            self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        return self._thread.submit(self._run, make).result

    def _run(self, make: Callable[[], Result]) -> Result:
        with self._stream or nullcontext():
            made = make()
            if self._stream:
                self._stream.synchronize()
            return made
