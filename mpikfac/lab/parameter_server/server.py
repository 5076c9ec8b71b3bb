"""Parameter servers, which apply clients' updates to the weights in order of arrival."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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
    Request,
    SplitComm,
    agree,
    answer,
    begin_receive,
    broadcast,
    joined,
    look,
    lost_ranks,
    receive_items,
    receive_request,
    send_items,
    tells_of_loss,
)
from mpikfac.lab.parameter_server.config import ParameterServer
from mpikfac.layers import Statistic, find_uncovered
from mpikfac.model import (
    check_optimizer,
    common_type,
    describe,
    load_model_state,
    model_state,
    set_group_setting,
)
from mpikfac.numerics import Arena, all_finite, copy_all
from mpikfac.plan import Layout, lay_out
from mpikfac.plan.names import OF_OPTIMIZER, OPTIMIZER, RECEIVE_UPDATE, SEND_WEIGHTS, VERSION
from mpikfac.trace import Trace

SILENCE = 60.0  # seconds of silence after which a client is named in the log

log = logging.getLogger("mpikfac")


def run_parameter_server(
    model: nn.Module, optimizer: Optimizer, team: SplitComm, trace: Trace | None = None
) -> list[Counter[int]]:
    """Apply the clients' updates to the weights until all clients have left.

    Args:
        model: the clients' model; the server receives the weights of client 0.
        optimizer: takes one step per update, with the update as gradient.
        team: the result of `split_comm`.
        trace: records the seconds and bytes of the stages.

    Returns:
        For each client, the number of updates for each value of staleness; see
        `AsyncSGD.staleness`.

    Collective over: the team's intercommunicator.

    Raises:
        ValueError: the rank is not a server, or the optimizer needs a closure.
        UserError: servers and clients disagree on the model.
    """
    check_optimizer(optimizer, model)
    if team.comm is not None or team.intercomm is None:
        raise ValueError(
            "run_parameter_server() is for the servers that split_comm() selects; this rank trains"
        )
    server = Server(model, optimizer, team.intercomm, trace or Trace())
    server.run()
    return server.staleness


def spans(layout: Layout, servers: int) -> list[tuple[int, int]]:
    """Return the spans of the servers' shards: consecutive blocks of about equal total size."""
    places = [*layout.offsets.values(), layout.size]
    equal = [layout.size * server / servers for server in range(1, servers)]
    cuts = [min(places, key=lambda place: abs(place - cut)) for cut in equal]
    return list(pairwise([0, *cuts, layout.size]))


def on_host(flat: Tensor) -> Tensor:
    """Return `flat` if it is on the host; otherwise, return pinned host memory of the same size."""
    if flat.is_cpu:
        return flat
    return torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)


class Server:
    """A parameter server, which owns a shard of the weights.

    A client is identified by its first rank, as numbered on the other side of the
    intercommunicator.

    Attributes:
        version: the number of updates applied to the weights.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, link: Any, trace: Trace) -> None:
        self.model, self.optimizer, self.trace, self._link = model, optimizer, trace, link
        blocks = find_uncovered(model)
        kind = common_type(blocks)
        comm = joined(link, serves=True)
        choices: ParameterServer
        layout, choices = comm.bcast(None)
        agree(comm, describe(model, optimizer))
        broadcast(comm, [*model.parameters(), *model.buffers()])
        comm.Free()
        self.version = 0
        self._meet_at: int | None = None  # the step after which all clients meet
        self._asked = choices
        start, stop = spans(layout, choices.servers)[link.rank]
        of_server = {n: layout.shapes[n] for n, at in layout.offsets.items() if start <= at < stop}
        self._arena = Arena(lay_out([of_server.items()]), *kind)
        self._host = on_host(self._arena.flat)
        served = [block for block in blocks if block.name in of_server]
        self._slots = [(block, block.parts(self._arena[block.name])) for block in served]
        stepped = {id(block.tensor) for block in served if block.parameters}
        self._stepped = {n: p for n, p in model.named_parameters() if id(p) in stepped}
        optimizer.zero_grad()
        self._clients = list(range(0, link.remote_size, choices.ranks_per_client))
        self._present = set(self._clients)
        self._held: set[int] = set()  # clients that wait for the end of the warm-up
        self._waiting: set[int] = set()  # clients that wait until all clients meet
        self._fetched = dict.fromkeys(self._clients, 0)  # the weights' version at each client
        self._steps = dict.fromkeys(self._clients, -1)
        self._votes: dict[int, list[float]] = {}
        self._heard = dict.fromkeys(self._clients, time.monotonic())
        self._counts = {client: Counter[int]() for client in self._clients}

    @property
    def staleness(self) -> list[Counter[int]]:
        """For each client, the number of updates for each value of staleness."""
        return list(self._counts.values())

    def run(self) -> None:
        """Serve clients until all of them have left."""
        tasks = {PUSH: self._push, GIVE: self._give, FETCH: self._fetch}
        tasks |= {HOLD: self._hold, MEET: self._meet}
        tasks |= {SAVE: self._save, LOAD: self._load, LEAVING: self._leave}
        while self._present:
            if (request := look(self._link)) is None:
                self._look_for_lost()
                continue
            client, tag = request
            self._heard[client] = time.monotonic()
            try:
                tasks[tag](client)
            except Exception as error:
                if not tells_of_loss(error):
                    raise

    # -- requests --------------------------------------------------------------------------------

    def _push(self, client: int) -> None:
        self._answer(client, PUSH, self._take(client, PUSH))
        self._release()

    def _give(self, client: int) -> None:
        staleness = self._take(client, GIVE)
        self._fetched[client] += 1  # the client has already applied the update to its replica
        answer(self._link, client, GIVE, [], self._words(staleness))
        self._release()

    def _take(self, client: int, tag: int) -> int:
        """Take a step with a client's update; return the staleness of the update."""
        request = receive_request(self._link, client, tag)
        with self.trace.stage(RECEIVE_UPDATE, "servers"):
            begin_receive(self._link, self._host, client, tag)()
        self._note(client, request)
        staleness = self.version - self._fetched[client]
        self._counts[client][staleness] += 1
        with self.trace.stage(OPTIMIZER):
            self._apply(request.numbers)
        self.version += 1
        return staleness

    def _fetch(self, client: int) -> None:
        request = receive_request(self._link, client, FETCH)
        # Only updates advance the client's step.
        self._note(client, request._replace(step=self._steps[client]))
        self._answer(client, FETCH)

    def _hold(self, client: int) -> None:
        self._note(client, receive_request(self._link, client, HOLD))
        self._held.add(client)
        self._release()

    def _meet(self, client: int) -> None:
        receive_request(self._link, client, MEET)
        self._waiting.add(client)
        self._release()

    def _save(self, client: int) -> None:
        self._link.recv(source=client, tag=SAVE)
        state = model_state(self.model, self.optimizer, self._stepped)
        items = {name: value for name, value in state.items() if name.startswith(OF_OPTIMIZER)}
        send_items(self._link, items | {VERSION: self.version}, client, SAVE)

    def _load(self, client: int) -> None:
        items = receive_items(self._link, client, LOAD)
        load_model_state(self.model, self.optimizer, self._stepped, items)
        self.version = items[VERSION]
        self._fetched = dict.fromkeys(self._clients, self.version)
        self._steps = dict.fromkeys(self._present, -1)
        self._meet_at = None
        self._link.send(None, dest=client, tag=LOAD)

    def _leave(self, client: int) -> None:
        self._link.recv(source=client, tag=LEAVING)
        self._drop(client)

    # -- steps -----------------------------------------------------------------------------------

    def _note(self, client: int, request: Request) -> None:
        """Store the step and votes in a client's request; schedule a meeting if it asks for one."""
        self._steps[client] = request.step
        self._votes[client] = request.votes
        if request.wish and self._meet_at is None:
            # No client is ahead of this step, so the answers to the next updates will announce the
            # meeting to all clients in time.
            self._meet_at = max(self._steps.values()) + self._asked.push_interval

    def _apply(self, numbers: Mapping[str, float]) -> None:
        """Apply the received update to this server's shard of the weights.

        Blocks with NaN or infinity are ignored. With n clients, a running statistic moves 1/n of
        the way to the client's value, so it approaches the average over clients.
        """
        for name, number in numbers.items():
            set_group_setting(self.optimizer, name, number)
        if self._host is not self._arena.flat:
            self._arena.flat.copy_(self._host)
        finite = bool(all_finite(self._arena.flat))
        written: list[tuple[Tensor, Tensor]] = []
        for block, parts in self._slots:
            if not (finite or all_finite(parts[0])):
                block.abort_batch()
            elif isinstance(block, Statistic):
                value = parts[0].to(block.tensor.dtype)
                block.tensor.lerp_(value, 1 / len(self._clients))
            else:
                written += block.gradients_from(parts)
        copy_all(written)
        self.optimizer.step()

    def _answer(self, client: int, tag: int, staleness: int | None = None) -> None:
        """Send the weights to a client."""
        copy_all(pair for block, parts in self._slots for pair in block.values_to(parts))
        if self._host is not self._arena.flat:
            self._host.copy_(self._arena.flat)
        with self.trace.stage(SEND_WEIGHTS, "servers", self._host.nbytes):
            answer(self._link, client, tag, [self._host], self._words(staleness))
        self._fetched[client] = self.version

    def _words(self, staleness: int | None) -> Answer:
        columns = list(zip(*self._votes.values()))
        votes = [sum(column) / len(column) for column in columns]
        return Answer(self.version, staleness, self._meet_at, votes)

    def _release(self) -> None:
        """Answer the waiting clients that need not wait any longer.

        The warm-up ends, at the latest, when the client that trains during it wants to meet.
        """
        first = self._clients[0]
        warm = first in self._present - self._waiting and self.version < self._asked.warmup_updates
        while self._held and not warm:
            self._answer(self._held.pop(), HOLD)
        if self._present and self._waiting >= self._present:
            self._meet_at = None
            while self._waiting:
                self._answer(self._waiting.pop(), MEET)

    # -- clients that leave ----------------------------------------------------------------------

    def _drop(self, client: int) -> None:
        for clients in (self._present, self._held, self._waiting):
            clients.discard(client)
        self._votes.pop(client, None)
        self._steps.pop(client, None)
        self._release()

    def _look_for_lost(self) -> None:
        """Drop clients that have died, and log which clients are silent."""
        for client in {
            rank - rank % self._asked.ranks_per_client for rank in lost_ranks(self._link)
        }:
            if client in self._present:
                self._drop(client)
                left = len(self._present)
                log.warning("client %d is lost; %d clients continue", self._number(client), left)
        now = time.monotonic()
        for client in self._present - self._held - self._waiting:
            if now - self._heard[client] > SILENCE:
                self._heard[client] = now
                log.warning("client %d has sent nothing for %d s", self._number(client), SILENCE)

    def _number(self, client: int) -> int:
        return self._clients.index(client)
