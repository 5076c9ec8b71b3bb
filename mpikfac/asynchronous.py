"""Asynchronous training: clients send updates to servers, and nobody waits for a second client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from mpikfac.comm import (
    HOLD,
    LEAVING,
    LOAD,
    MEET,
    PUSH,
    SAVE,
    Answer,
    Comm,
    Request,
    Team,
    agree,
    ask,
    broadcast,
    joined,
    receive_items,
    send_items,
    together,
)
from mpikfac.data_parallel import DataParallel
from mpikfac.engine import (
    VERSION,
    describe,
    group_settings,
    load_model_state,
    model_state,
    on_host,
    spans,
)
from mpikfac.errors import UserError
from mpikfac.numerics import Arena, copy_all
from mpikfac.plan import Exchange, Strategy, lay_out
from mpikfac.trace import Trace


class Asynchronous(DataParallel):
    """Asynchronous SGD on a client's ranks [Dean et al. 2012, Paine et al. 2013].

    A client pushes an update, the gradients of one batch or the sum of several, and fetches the
    weights. Servers apply updates in order of arrival, by the steps of an optimizer. In the
    meantime other clients change the weights: the update is stale. Results depend on timing.

        strategy = mpikfac.Strategy.mem_opt(exchanged="updates")
        team = mpikfac.split(comm, strategy.exchange.asynchrony.servers)
        if team.comm is None:
            mpikfac.serve_updates(model, optimizer, team)
        else:
            trainer = mpikfac.Asynchronous(model, optimizer, team, strategy)
            ...
            trainer.close()

    The ranks of a client average gradients like `DataParallel`, which explains the rest of the
    interface. All ranks of a client take the same steps; clients may take any number of steps.

    Args:
        optimizer: as on the servers, which step it; here it names numbers such as the learning
            rate. A change of a number travels with the next update, and holds for all updates from
            then on.
        team: from `split`.
        strategy: `exchanged="updates"` and the choices of `Asynchrony`; what the ranks of a client
            exchange.

    Collective over: the team's link. The model becomes that of the first client's first rank.

    Raises:
        ValueError: choices or ranks do not fit.
        UserError: ranks disagree on the model.

    Attributes:
        combined: whether all clients have met since the last step: all hold the same model, and
            votes are of all clients. Otherwise votes are the latest of each client.
        staleness: how many of the client's updates were of a staleness, the number of updates of
            other clients between the weights of an update and the update.
        version: the number of updates in the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        team: Team,
        strategy: Strategy,
        trace: Trace | None = None,
    ) -> None:
        self._asked = strategy.exchange.asynchrony
        _check(team, strategy, optimizer)
        self._ranks = team.trains
        self._link: Any = team.link
        own = self._ranks.rank // self._asked.client_ranks
        column = cast(Comm, self._ranks.Split(own, self._ranks.rank))
        super().__init__(model, optimizer, column, replace(strategy, exchange=Exchange()), trace)
        self.nonfinite.rank = self._ranks.rank
        self.staleness = Counter[int]()
        self.version = self._taken = 0
        self._wish, self._waits = False, own > 0
        flat, layout = self.gradients.arena.flat, self.gradients.arena.layout
        nothing = lay_out([])
        several = layout if self._asked.push_every > 1 else nothing
        self._sums = Arena(several, flat.dtype, flat.device)
        self._trained = [s for s in self.gradients.slots if s.block.parameters]
        self._outgoing, self._incoming = on_host(flat), torch.empty_like(flat, device="cpu")
        self._spans = [slice(*span) for span in spans(layout, self._asked.servers)]
        self._keep_numbers()
        self._join()

    def _join(self) -> None:
        """Take the weights of the first client.

        Collective over: the team's link.
        """
        comm = joined(self._link, serves=False)
        comm.bcast((self.gradients.arena.layout, self._asked))
        agree(comm, describe(self.model, self.optimizer))
        broadcast(comm, [*self.model.parameters(), *self.model.buffers()])
        comm.Free()
        self.gradients.keep()

    @property
    def client_ranks(self) -> int:
        """The number of ranks of a client."""
        return self._asked.client_ranks

    def _keep_numbers(self) -> None:
        """Keep the present numbers of the optimizer: servers hear of changes only.

        An optimizer may count steps in a group, and only the servers' optimizers take steps.
        """
        self._numbers = dict(group_settings(self.optimizer))
        self._changed: set[str] = set()

    # -- steps -----------------------------------------------------------------------------------

    def _update(self) -> None:
        """Add the gradients to the update; push a whole update, else step the copy by SGD."""
        whole = self._taken + 1 == self._asked.push_every
        arena, sums = self.gradients.arena, self._sums
        for slot in self._trained if sums else ():
            name = slot.block.name
            if name not in self.gradients.broken:
                sums[name] += arena[name]
        if not whole:
            self._step_alone()
        self._count()

    def _step_alone(self) -> None:
        """Step the client's copy of the weights by plain SGD."""
        rates = {id(p): g["lr"] for g in self.optimizer.param_groups for p in g["params"]}
        for slot in self._trained:
            parameter = slot.block.parameters[0]
            if slot.block.name not in self.gradients.broken and id(parameter) in rates:
                with torch.no_grad():
                    parameter.sub_(slot.parts[0], alpha=rates[id(parameter)])

    def _skip(self) -> None:
        """Leave the model; servers leave blocks with NaN as they are."""
        super()._skip()
        self._count()

    def _count(self) -> None:
        self.replicas.part()
        self._taken += 1
        if self._taken == self._asked.push_every:
            self._push()

    def _end(self) -> None:
        """End the step, and follow the votes of the client's ranks."""
        self.steps, self.intact = self.steps + 1, True
        self._follow_votes()

    def _push(self) -> None:
        """Push the update, fetch the weights, and meet if the servers say so."""
        arena, self._taken = self.gradients.arena, 0
        if self._sums:
            copy_all([(arena[s.block.name], self._sums[s.block.name]) for s in self._trained])
            self._sums.flat.zero_()
        hold = self._waits and self.version < self._asked.warm_updates
        self._waits = False
        words = self._ask(HOLD if hold else PUSH)
        if words.staleness is not None:
            self.staleness[words.staleness] += 1
        if words.meet_at is not None and words.meet_at <= self.steps:
            self._meet()

    def _ask(self, tag: int) -> Answer:
        """Ask the servers, and take the weights of the answer.

        Collective over: the client's ranks.
        """
        arena, comm, votes = self.gradients.arena, self._comm, self.gradients.votes.name
        update, weights = ([f[s] for s in self._spans] for f in (self._outgoing, self._incoming))
        pushes = tag == PUSH
        if self._outgoing is not arena.flat and pushes:
            self._outgoing.copy_(arena.flat)
        sent = self._outgoing.nbytes if pushes and comm.rank == 0 else 0
        with self.trace.stage("exchange updates", "servers", sent):
            words = None
            if comm.rank == 0:
                request = Request(
                    self.steps, self._wish, arena[votes].tolist(), self._new_numbers()
                )
                words = ask(self._link, tag, request, update if pushes else [], weights)
            words = comm.bcast(words)
            if comm.size > 1:
                broadcast(comm, [self._incoming])
        arena.flat.copy_(self._incoming)
        arena[votes].copy_(torch.tensor(words.votes))
        copy_all(one for s in self.gradients.slots for one in s.block.values_from(s.parts))
        self.version = words.version
        return words

    def _new_numbers(self) -> dict[str, float]:
        """Return the numbers of the optimizer that the program has ever changed."""
        present = dict(group_settings(self.optimizer))
        self._changed |= {n for n, value in present.items() if value != self._numbers.get(n)}
        return {name: present[name] for name in self._changed}

    def _take_up_change(self) -> None:
        raise UserError(
            "the trained parameters of the model have changed; asynchronous training needs the "
            "same parameters from the first step to the last"
        )

    # -- meetings --------------------------------------------------------------------------------

    def call(self) -> None:
        """Ask all clients to meet after one of the next steps; `combined` tells the step.

        All clients meet after the same step, counted from each client's first. Clients that stop,
        or save a state, have to do so together: vote for the reason, and `call`.
        """
        self._wish = True

    def combine(self) -> None:
        """Wait for all clients: push what waits to be pushed, and fetch the weights.

        All clients must call `combine`, for example before a test of the model and before a
        checkpoint. The first client's `combine` ends the warm start.

        Collective over: all clients.
        """
        if self._taken:
            self._push()
        if not self.combined:
            self._meet()

    def _meet(self) -> None:
        self._ask(MEET)
        self._wish = self._waits = False
        self.replicas.keep()

    def close(self) -> None:
        """Leave the servers, and free the communicators; no step may follow.

        `serve_updates` returns once all clients have left. A second call does nothing.

        Collective over: the client's ranks.
        """
        if not self._comm:
            return  # closed before
        if self._comm.rank == 0:
            for server in range(self._link.remote_size):
                self._link.send(None, dest=server, tag=LEAVING)
        super().close()
        self._comm.Free()

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's share of the state, by name; the first rank asks the servers.

        A synchronous run takes such a state, too, and the other way round. Numbers of staleness are
        not kept.

        Raises:
            ValueError: clients have not met since the last step.
        """
        self.replicas.check_combined()
        self.gradients.grid.forget()
        state = model_state(self.model, self.optimizer, {}) | {"trainer/steps": self.steps}
        for server in range(self._link.remote_size if self._ranks.rank == 0 else 0):
            self._link.send(None, dest=server, tag=SAVE)
            state |= receive_items(self._link, server, SAVE)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, on all clients and servers; on all, or on none.

        Collective over: all clients.

        Raises:
            UserError: see `KFAC.load_state_dict`.
        """
        with together(self._ranks, "loading state", untrusted=True):
            state, found = self._needed(state)
            steps = int(found["trainer/steps"])
            version = found[VERSION] = int(state.get(VERSION, steps))
        load_model_state(self.model, self.optimizer, {}, found)
        for server in range(self._link.remote_size if self._ranks.rank == 0 else 0):
            send_items(self._link, found, server, LOAD)
            self._link.recv(source=server, tag=LOAD)
        self._ranks.Barrier()  # a push before the servers have loaded the state would be lost
        self.steps, self.version, self._taken, self.intact = steps, version, 0, True
        self._sums.flat.zero_()
        self._keep_numbers()
        self.gradients.keep()
        self.gradients.discard()
        self.gradients.grid.forget()
        self.replicas.keep()


def _check(team: Team, strategy: Strategy, optimizer: Optimizer) -> None:
    """Return if the team and the optimizer suit the strategy.

    Raises:
        ValueError: choices, ranks or the optimizer do not fit.
    """
    asked = strategy.exchange.asynchrony
    if not strategy.exchange.asynchronous:
        raise ValueError(
            f"exchanged={strategy.exchange.exchanged!r} must be 'updates' for Asynchronous"
        )
    servers = team.link.remote_size if team.link else 0
    if servers != asked.servers:
        raise ValueError(
            f"servers={asked.servers}, but the team has {servers}; give the trainer what "
            f"mpikfac.split(comm, {asked.servers}) returned"
        )
    strategy.check_ranks(team.trains.size)
    if asked.push_every > 1 and not isinstance(optimizer, SGD):
        raise ValueError(
            f"push_every={asked.push_every} needs the optimizer SGD, not "
            f"{type(optimizer).__name__}: between two updates, a client takes steps of SGD"
        )
