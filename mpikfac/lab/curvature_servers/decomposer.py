"""Curvature servers: ranks that do not train but decompose factors for training ranks [LBANN].

A curvature server works like a background thread: an owner sends factors, continues, and receives
the decompositions in a fixed later step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from mpikfac.comm import SplitComm, announce, announced, arrivals, begin_receive, begin_send, leave
from mpikfac.engine import AtOnce, Decomposed, FactorRequest, Ready, Site
from mpikfac.errors import UserError
from mpikfac.numerics import Arena
from mpikfac.plan import Factor, Layout, Plan, RankPlan, curvature_servers, names
from mpikfac.preconditioners import Preconditioner, decomposed
from mpikfac.trace import Trace

CPU = torch.device("cpu")


class OnCurvatureServers(AtOnce):
    """Send a training rank's factors to a curvature server, and receive the decompositions.

    Collective over: the team's intercommunicator.

    Args:
        plan: the plan of all ranks.
        preconditioners: the layers' preconditioners, by name.
        team: connects training ranks and curvature servers; from `split_comm`.
    """

    def __init__(
        self,
        plan: Plan,
        preconditioners: Mapping[str, Preconditioner],
        team: SplitComm,
        site: Site,
        arena: Arena,
        factor_of: Mapping[str, str],
    ) -> None:
        super().__init__(site, arena, factor_of)
        self._link = cast(Any, team.intercomm)
        self._finish: Callable[[], object] = _nothing
        announce(self._link, (plan, preconditioners))

    def start(self, request: FactorRequest) -> Ready:
        """Send packed factors and damping; return a function that waits for the decompositions.

        Collective over: none.
        """
        self._finish()  # receives the result of the previous request, if it is still open
        if not request.packed:
            return lambda: Decomposed({}, ())
        plan, turn, trace = self.site.plan, request.turn, self.site.trace
        sent = _on_host(plan, curvature_servers.request(plan, turn))
        reply = _on_host(plan, curvature_servers.reply(plan, turn))
        with trace.stage(names.SEND_FACTORS, "curvature", sent.flat.nbytes):
            for factor in plan.decomposed(turn):
                sent[factor.name].copy_(request.packed[factor.name])
                if factor.name in request.added:
                    sent[factor.added].copy_(request.added[factor.name])
                elif factor.name in request.precise:  # a 1 in the same element requests float64
                    sent[factor.added].fill_(float(request.precise[factor.name]))
            route = plan.grid.curvature_server(plan.rank), plan.turns.index(turn)
            wait_sent = begin_send(self._link, sent.flat, *route)
            wait_received = begin_receive(self._link, reply.flat, *route)

        def finish() -> None:
            wait_sent()
            wait_received()
            self._finish = _nothing

        def take() -> Decomposed:
            with trace.stage(names.RECEIVE_BASES, "curvature"):
                finish()
            return self.checked(dict(reply))

        self._finish = finish
        return take

    def check_same_model(self) -> None:
        """Raise an error, because servers cannot change their plan when trained parameters change.

        Raises:
            UserError: always.
        """
        raise UserError(
            "the parameters that require a gradient have changed; with curvature servers, close "
            "K-FAC and construct it again"
        )

    def close(self) -> None:
        """Release the curvature servers once all training ranks have called `close`.

        Later calls have no effect. Collective over: none.
        """
        self._finish()
        link, self._link = self._link, None
        if link is not None:
            leave(link)


def run_curvature_server(
    team: SplitComm, device: torch.device = CPU, trace: Trace | None = None
) -> None:
    """Decompose factors for the training ranks until all of them have called `close`.

    Requests are served in order of arrival. Each rank has at most one open request, so no rank
    starves.

    Collective over: curvature.

    Args:
        team: from `split_comm`.
        device: the device that decomposes factors; the results are the same as on training ranks
            with the same kind of device.
        trace: records the seconds and bytes of the stages.
    """
    if (curvature := team.intercomm) is None:
        raise ValueError(
            "run_curvature_server() needs a team with curvature servers; see mpikfac.split_comm"
        )
    (plan, preconditioners), trace = announced(curvature), trace or Trace()
    sending: dict[int, Callable[[], object]] = {}
    for owner, tag in arrivals(curvature):
        of_owner = plan.of(owner)
        share = of_owner.turns[tag]
        request = _on_host(of_owner, curvature_servers.request(of_owner, share))
        reply = _on_host(of_owner, curvature_servers.reply(of_owner, share))
        with trace.stage(names.RECEIVE_FACTORS, "curvature"):
            begin_receive(curvature, request.flat, owner, tag)()
        with trace.stage(names.DECOMPOSE):
            for factor in of_owner.decomposed(share):
                blocks = _answer(
                    factor, preconditioners[factor.preconditioner.name], request, device
                )
                for name, block in blocks.items():
                    reply[name].copy_(block)
        with trace.stage(names.SEND_BASES, "curvature", reply.flat.nbytes):
            # Waiting for this owner, which may be computing, would make other owners wait, too.
            sending.pop(owner, _nothing)()
            sending[owner] = begin_send(curvature, reply.flat, owner, tag)
    for wait in sending.values():
        wait()


def _answer(
    factor: Factor, preconditioner: Preconditioner, request: Arena, device: torch.device
) -> dict[str, Tensor]:
    packed = request[factor.name].to(device)
    added = request[factor.added].to(device) if factor.preconditioner.damped else None
    if factor.added in request and added is None and request[factor.added].any():
        packed = packed.double()
    return decomposed(factor, preconditioner, packed, added)


def _on_host(plan: RankPlan, layout: Layout) -> Arena:
    return Arena(layout, torch.float64 if plan.itemsizes.numbers == 8 else torch.float32, CPU)


def _nothing() -> None:
    pass
