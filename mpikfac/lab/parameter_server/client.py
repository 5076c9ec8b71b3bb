"""Asynchronous training: clients send updates to servers, without waiting for each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from mpikfac.comm import (
    FETCH,
    GIVE,
    HOLD,
    LEAVING,
    LOAD,
    MEET,
    PUSH,
    SAVE,
    Answer,
    Comm,
    Request,
    SplitComm,
    agree,
    ask,
    broadcast,
    joined,
    receive_items,
    send_items,
    together,
)
from mpikfac.engine import Everyone, Gradients, Method, MethodFactory, OneModel, Site
from mpikfac.errors import UserError
from mpikfac.lab.parameter_server.config import ParameterServer
from mpikfac.lab.parameter_server.server import on_host, spans
from mpikfac.model import (
    check_loaded_momentum,
    check_optimizer,
    describe,
    group_settings,
    load_model_state,
    model_state,
    needed_state,
)
from mpikfac.numerics import Arena, copy_all
from mpikfac.plan import Plan, Strategy, Synchronous, lay_out
from mpikfac.plan.names import EXCHANGE_UPDATES, STEPS, VERSION
from mpikfac.settings import Numbers
from mpikfac.trace import Trace
from mpikfac.trainer import Trainer


class AsyncSGD(Trainer):
    """Asynchronous SGD on a client's ranks [Dean et al. 2012, Paine et al. 2013].

    A client pushes an update (the gradient of a batch, or the sum over several batches) and fetches
    the weights. Servers apply each update, in order of arrival, with a step of an optimizer. An
    update is stale if other clients have changed the weights since the client fetched them. Results
    depend on timing.

        sync = mpikfac.lab.ParameterServer(servers=1)
        team = mpikfac.split_comm(comm, sync.servers)
        if team.comm is None:
            mpikfac.lab.run_parameter_server(model, optimizer, team)
        else:
            strategy = mpikfac.Strategy(sync=sync)
            trainer = mpikfac.lab.AsyncSGD(model, optimizer, team, strategy)
            ...
            trainer.close()

    A client's ranks average gradients as with `FirstOrderTrainer`, which documents the rest of the
    interface. All ranks of a client must take the same number of steps; different clients can take
    different numbers of steps.

    Args:
        optimizer: must match the servers' optimizer, which takes the steps. The client's optimizer
            only provides hyperparameters such as the learning rate. If the program changes one, the
            new value is sent with the next update, and applies from then on.
        team: the result of `split_comm`.
        strategy: a strategy with a `ParameterServer` as `sync`; the other fields determine how a
            client's ranks exchange gradients.

    Collective over: the team's intercommunicator. All ranks get the model of the first client's
    first rank.

    Raises:
        ValueError: `strategy.sync` is not a `ParameterServer`; or the team, the number of ranks or
            the optimizer does not match it.
        UserError: ranks disagree on the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        team: SplitComm,
        strategy: Strategy,
        trace: Trace | None = None,
    ) -> None:
        choices = _check(team, strategy, optimizer)
        check_optimizer(optimizer, model)
        self._ranks = team.trains
        self._link: Any = team.intercomm
        client = self._ranks.rank // choices.ranks_per_client
        self._client_comm = cast(Comm, self._ranks.Split(client, self._ranks.rank))
        synchronous = replace(strategy, sync=Synchronous()).first_order()
        factory = ClientFactory(model, optimizer, self._client_comm, team, strategy)
        comm = SplitComm(self._client_comm)
        super().__init__(model, optimizer, comm, synchronous, factory, trace)
        self.nonfinite.rank = self._ranks.rank
        self._client.join()

    @property
    def _client(self) -> Client:
        return cast(Client, self.built.exchange)

    @property
    def client_ranks(self) -> int:
        """The number of ranks per client."""
        return self._client.choices.ranks_per_client

    @property
    def combined(self) -> bool:
        """Whether all clients have met since the last step, and therefore have the same model.

        If so, the votes of this step include all clients. Otherwise, they are the votes that each
        client has sent most recently.
        """
        return self._client.heard

    @property
    def staleness(self) -> Counter[int]:
        """The number of the client's updates for each value of staleness.

        The staleness of an update is the number of other clients' updates that were applied between
        the client's last fetch of weights and this update.
        """
        return self._client.staleness

    @property
    def version(self) -> int:
        """The number of updates that the servers had applied when they last answered."""
        return self._client.version

    def call(self) -> None:
        """Request that all clients meet after one of the following steps; see `combined`.

        All clients meet after the same step, counted from each client's first step. To stop, or to
        save states, after the same step on all clients, cast a vote that states the reason, and
        call this method.
        """
        self._client.wish = True

    def average_replicas(self) -> None:
        """Push the pending update, wait for all clients, and fetch the weights.

        All clients must call this method, for example before an evaluation or a checkpoint. The
        first client's call ends the warm-up.

        Collective over: all clients.
        """
        self._client.average_replicas()

    def close(self) -> None:
        """Disconnect from the servers, and free the communicators; no more steps are possible.

        `run_parameter_server` returns once all clients have left. Later calls have no effect.

        Collective over: the client's ranks.
        """
        if not self._client_comm:
            return  # already closed
        if self._client_comm.rank == 0:
            for server in range(self._link.remote_size):
                self._link.send(None, dest=server, tag=LEAVING)
        super().close()
        self._client_comm.Free()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state by name; the first rank's includes the servers'.

        A synchronous run can load this state, and vice versa. Staleness counts are not stored.

        Raises:
            ValueError: clients have not met since the last step.
        """
        self._client.check_combined()
        self.built.grid.reset()
        state = model_state(self.model, self.optimizer, {}) | {STEPS: self.steps}
        for server in range(self._link.remote_size if self._ranks.rank == 0 else 0):
            self._link.send(None, dest=server, tag=SAVE)
            state |= receive_items(self._link, server, SAVE)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state on all clients and servers or, if this fails on any client, on none.

        Collective over: all clients.

        Raises:
            UserError: see `FirstOrderTrainer.load_state_dict`.
        """
        built = self.built
        with together(self._ranks, "loading state", untrusted=True):
            items = needed_state(self.model, self.optimizer, built.stepped, state)
            check_loaded_momentum(items, state, self._strategy)
            steps = int(items[STEPS])
            version = items[VERSION] = int(state.get(VERSION, steps))
        built.gradients.abort_batch()
        load_model_state(self.model, self.optimizer, {}, items)
        built.gradients.keep()
        for server in range(self._link.remote_size if self._ranks.rank == 0 else 0):
            send_items(self._link, items, server, LOAD)
            self._link.recv(source=server, tag=LOAD)
        self._ranks.Barrier()  # a push before the servers have loaded the state would be lost
        built.grid.reset()
        self._client.begin(steps, version)
        self._begin_batch(steps)


class Client(OneModel):
    """A rank's client, which sends updates to servers, receives weights, and meets other clients.

    Attributes:
        choices: the strategy's `ParameterServer`.
        staleness: see `AsyncSGD`.
        version: see `AsyncSGD`.
        wish: whether the client requests a meeting of all clients.
    """

    def __init__(
        self,
        site: Site,
        gradients: Gradients,
        model: nn.Module,
        optimizer: Optimizer,
        column: Comm,
        team: SplitComm,
        strategy: Strategy,
    ) -> None:
        super().__init__(site, gradients)
        self.choices = cast(ParameterServer, strategy.sync)
        self.model, self.optimizer = model, optimizer
        self._link: Any = team.intercomm
        self._client_comm = column
        self.staleness = Counter[int]()
        self.version, self.wish = 0, False
        self._steps = 0  # completed steps
        self._taken = self._old = 0  # steps in the current update, and since the last fetch
        self._waits = team.trains.rank >= self.choices.ranks_per_client
        flat, layout = gradients.arena.flat, gradients.arena.layout
        several = layout if self.choices.push_interval > 1 else lay_out([])
        self._sums = Arena(several, flat.dtype, flat.device)
        self._trained = [s for s in gradients.slots if s.block.parameters]
        self._outgoing, self._incoming = on_host(flat), torch.empty_like(flat, device="cpu")
        self._spans = [slice(*span) for span in spans(layout, self.choices.servers)]
        # Send only hyperparameters that the program changes: an optimizer may count its steps in a
        # parameter group, and only the servers' optimizers take steps.
        self._numbers = dict(group_settings(optimizer))
        self._changed: set[str] = set()

    @property
    def follows(self) -> bool:
        """Whether the client's ranks act on the votes of the step, which they always do."""
        return True

    def join(self) -> None:
        """Receive the weights of the first client.

        Collective over: the team's intercommunicator.
        """
        comm = joined(self._link, serves=False)
        comm.bcast((self.gradients.arena.layout, self.choices))
        agree(comm, describe(self.model, self.optimizer))
        broadcast(comm, [*self.model.parameters(), *self.model.buffers()])
        comm.Free()
        self.gradients.keep()

    def begin(self, steps: int, version: int) -> None:
        """Restart after `steps` steps, with the same model on all clients."""
        self._steps, self.version, self._taken, self._old = steps, version, 0, 0
        self._sums.flat.zero_()
        self._numbers, self._changed = dict(group_settings(self.optimizer)), set()
        self._note_meeting()

    def _note_meeting(self) -> None:
        """Record that all clients have the same model, and that votes include all clients."""
        self.heard = True

    # -- steps -----------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Begin a step."""
        self._steps = step

    def add(self) -> None:
        """Add the gradients to the update; take an SGD step unless new weights are due."""
        arena, sums = self.gradients.arena, self._sums
        for slot in self._trained if sums else ():
            name = slot.block.name
            if name not in self.gradients.broken:
                sums[name] += arena[name]
        if self._old + 1 < self.choices.fetches:
            self._step_alone()

    def _step_alone(self) -> None:
        """Update the client's replica of the weights with a plain SGD step."""
        rates = {id(p): g["lr"] for g in self.optimizer.param_groups for p in g["params"]}
        for slot in self._trained:
            parameter = slot.block.parameters[0]
            if slot.block.name not in self.gradients.broken and id(parameter) in rates:
                with torch.no_grad():
                    parameter.sub_(slot.parts[0], alpha=float(rates[id(parameter)]))

    def end_step(self, step: int) -> None:
        """Count the step; push the update if it is complete. Servers ignore blocks with NaN."""
        self.heard = False
        self._taken, self._old = self._taken + 1, self._old + 1
        fetches = self._old == self.choices.fetches
        if self._taken == self.choices.push_interval:
            self._push(PUSH if fetches else GIVE)
        elif fetches:
            self._ask(FETCH)
        self._steps = step + 1

    def _push(self, tag: int = PUSH) -> None:
        """Push the update, and meet the other clients if the servers request it."""
        arena, self._taken = self.gradients.arena, 0
        if self._sums:
            copy_all([(arena[s.block.name], self._sums[s.block.name]) for s in self._trained])
            self._sums.flat.zero_()
        hold = self._waits and self.version < self.choices.warmup_updates
        self._waits = False
        words = self._ask(HOLD if hold else tag)
        if words.staleness is not None:
            self.staleness[words.staleness] += 1
        if words.meet_at is not None and words.meet_at <= self._steps:
            self._meet()

    def _ask(self, tag: int) -> Answer:
        """Send a request to the servers, and load the weights in their answers.

        Collective over: the client's ranks.
        """
        arena, comm, votes = self.gradients.arena, self._client_comm, self.gradients.votes.name
        pushes, fetches = tag in (PUSH, GIVE), tag != GIVE
        update = [self._outgoing[span] for span in self._spans if pushes]
        weights = [self._incoming[span] for span in self._spans if fetches]
        if self._outgoing is not arena.flat and pushes:
            self._outgoing.copy_(arena.flat)
        sent = self._outgoing.nbytes if pushes and comm.rank == 0 else 0
        with self.site.trace.stage(EXCHANGE_UPDATES, "servers", sent):
            words: Any = None
            if comm.rank == 0:
                numbers = self._new_numbers()
                request = Request(self._steps, self.wish, arena[votes].tolist(), numbers)
                words = ask(self._link, tag, request, update, weights)
            words = comm.bcast(words)
            if comm.size > 1 and fetches:
                broadcast(comm, [self._incoming])
        self.version = words.version
        if fetches:
            self._take(words)
        return cast(Answer, words)

    def _take(self, words: Answer) -> None:
        """Load the received weights, and the votes of all clients."""
        arena, slots, self._old = self.gradients.arena, self.gradients.slots, 0
        arena.flat.copy_(self._incoming)
        arena[self.gradients.votes.name].copy_(torch.tensor(words.votes))
        copy_all(copy for slot in slots for copy in slot.block.values_from(slot.parts))

    def _new_numbers(self) -> dict[str, float]:
        """Return the optimizer's hyperparameters that the program has changed so far."""
        present = dict(group_settings(self.optimizer))
        self._changed |= {n for n, value in present.items() if value != self._numbers.get(n)}
        return {name: present[name] for name in self._changed}

    # -- meetings --------------------------------------------------------------------------------

    def average_replicas(self) -> None:
        """Wait for all clients; see `AsyncSGD.average_replicas`."""
        if self._taken:
            self._push()
        if not self.heard:
            self._meet()

    def check_combined(self) -> None:
        """Check that all clients have the same model.

        Raises:
            ValueError: clients have taken steps since they last met.
        """
        if not self.heard:
            raise ValueError(
                "ranks hold different replicas; call average_replicas() before state_dict()"
            )

    def _meet(self) -> None:
        self._ask(MEET)
        self.wish = self._waits = False
        self._note_meeting()


class Accumulated(Everyone):
    """Add a client's gradients to an update instead of taking an optimizer step."""

    def __init__(self, gradients: Gradients, client: Client) -> None:
        super().__init__(gradients)
        self._client = client

    def step(self, optimizer: Optimizer) -> None:
        """Add the gradients to the client's update."""
        self._client.add()


class ClientMethod(Method):
    """Leave averaged gradients in the arena, from which the client pushes them."""

    def direct(self, numbers: Numbers) -> None:
        """Leave the model's gradients unchanged."""
        self.is_consistent = False

    def prepare_change(self) -> None:
        """Raise an error, because servers do not support changes to the set of trained parameters.

        Raises:
            UserError: always.
        """
        raise UserError(
            "the model's set of trained parameters has changed; asynchronous training needs the "
            "same parameters from the first step to the last"
        )


class ClientFactory(MethodFactory):
    """Create the objects that a client's ranks need."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        column: Comm,
        team: SplitComm,
        strategy: Strategy,
    ) -> None:
        self._given = model, optimizer, column, team, strategy

    def build(
        self,
        gradients: Gradients,
        model: nn.Module,
        optimizer: Optimizer,
        team: SplitComm,
        plan: Plan,
    ) -> ClientMethod:
        """Return the method of a client."""
        return ClientMethod(gradients)

    def exchange(self, site: Site, gradients: Gradients) -> Client:
        """Return the client."""
        return Client(site, gradients, *self._given)

    def update(self, gradients: Gradients, exchange: OneModel) -> Accumulated:
        """Return the object that adds gradients to the update that the client pushes."""
        return Accumulated(gradients, cast(Client, exchange))


def _check(team: SplitComm, strategy: Strategy, optimizer: Optimizer) -> ParameterServer:
    """Return the strategy's `sync`, after checking that team and optimizer match it.

    Raises:
        ValueError: `strategy.sync` is not a `ParameterServer`; or the team, the number of ranks or
            the optimizer does not match it.
    """
    choices = strategy.sync
    if not isinstance(choices, ParameterServer):
        raise ValueError(f"sync={choices!r} must be a mpikfac.lab.ParameterServer for AsyncSGD")
    servers = team.intercomm.remote_size if team.intercomm else 0
    if servers != choices.servers:
        raise ValueError(
            f"servers={choices.servers}, but the team has {servers}; pass the result of "
            f"mpikfac.split_comm(comm, {choices.servers}) to the trainer"
        )
    strategy.check_ranks(team.trains.size)
    if choices.fetches > 1 and not isinstance(optimizer, SGD):
        name = "push_interval" if choices.fetch_interval is None else "fetch_interval"
        raise ValueError(
            f"{name}={choices.fetches} needs the optimizer SGD, not {type(optimizer).__name__}, "
            f"because a client takes SGD steps between two fetches"
        )
    return choices
