"""Connect clients, which compute updates, with servers, which store the weights.

A client sends a request to a server and waits for the answer. A server answers requests in order
of arrival. Tensors are sent in non-blocking messages.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from mpikfac.comm.curvature_servers import begin_receive, begin_send
from mpikfac.comm.job import survives, tells_of_loss
from mpikfac.comm.mpi import MPI

PAUSE = 2e-4  # seconds between two checks for a message; polling would occupy a core
PUSH, GIVE, FETCH, HOLD, MEET, SAVE, LOAD = range(7)
"""Message tags. A client uses PUSH to send an update and get weights, GIVE to send an update only,
FETCH to get weights only, HOLD to wait for the end of the warm-up, MEET to wait for all clients,
SAVE to get the optimizer's state, and LOAD to send it."""


class Request(NamedTuple):
    """A client's request to a server; it precedes the update, if the client sends one.

    Attributes:
        step: the step in which the client computed the update.
        wish: whether the client requests a meeting of all clients.
        votes: the client's votes in this step, averaged over its ranks.
        numbers: the parameter groups' hyperparameters that have changed on the client.
    """

    step: int
    wish: bool
    votes: list[float]
    numbers: Mapping[str, float]


class Answer(NamedTuple):
    """A server's answer to a request; it follows the weights, if the server sends any.

    Attributes:
        version: the number of updates that the weights contain.
        staleness: the number of other clients' updates that were applied between the client's fetch
            of the weights and its update; None without an update.
        meet_at: the step after which all clients meet; None if no client has requested a meeting.
        votes: the means of all clients' latest votes.
    """

    version: int
    staleness: int | None
    meet_at: int | None
    votes: list[float]


def joined(link: MPI.Intercomm, serves: bool) -> MPI.Intracomm:
    """Return a communicator of all clients followed by all servers.

    Collective over: the link, on both sides.
    """
    return link.Merge(high=serves)


def ask(
    link: MPI.Intercomm,
    tag: int,
    request: Request,
    update: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> Answer:
    """Send servers a request and an update, receive weights from them, and return an answer.

    Each server gets and sends one shard. All servers answer; the answer of server 0 is returned.

    Collective over: none.

    Args:
        update: one shard per server, in host memory; empty to send no update.
        weights: one shard per server, in host memory that `update` does not use; empty to receive
            no weights.
    """
    waits = [begin_receive(link, part, server, tag) for server, part in enumerate(weights)]
    for server in range(link.remote_size):
        link.send(request, dest=server, tag=tag)
    waits += [begin_send(link, part, server, tag) for server, part in enumerate(update)]
    words = []
    for server in range(link.remote_size):
        while not link.Iprobe(source=server, tag=tag):  # the answer follows the weights
            time.sleep(PAUSE)
        words.append(link.recv(source=server, tag=tag))
    for wait in waits:
        wait()
    return cast(Answer, words[0])


def look(link: MPI.Intercomm) -> tuple[int, int] | None:
    """Return the source and tag of an arrived message, or None after a pause if there is none.

    The caller must receive the message before the next call. Collective over: none.
    """
    status = MPI.Status()
    try:
        if link.Iprobe(status=status):
            return status.source, status.tag
    except MPI.Exception as error:
        if not tells_of_loss(error):
            raise
    time.sleep(PAUSE)
    return None


def receive_request(link: MPI.Intercomm, client: int, tag: int) -> Request:
    """Receive the request of a client whose message `look` has found. Collective over: none."""
    return cast(Request, link.recv(source=client, tag=tag))


def lost_ranks(link: MPI.Intercomm) -> list[int]:
    """Return the ranks on the other side of `link` that have died, as far as MPI knows.

    Collective over: none.
    """
    if not survives():
        return []
    failed = MPI.COMM_WORLD.Get_failed()  # for an intercommunicator, Open MPI reports none
    ranks = MPI.Group.Translate_ranks(failed, range(failed.size), link.Get_remote_group())
    return [rank for rank in ranks if rank != MPI.UNDEFINED]


def answer(
    link: MPI.Intercomm, client: int, tag: int, weights: Sequence[Tensor], words: Answer
) -> None:
    """Send a client a shard of the weights, unless `weights` is empty, and an answer.

    Collective over: none; the client waits in `ask`.
    """
    for part in weights:
        begin_send(link, part, client, tag)()
    link.send(words, dest=client, tag=tag)


def send_items(link: MPI.Intercomm, items: Mapping[str, Any], to: int, tag: int) -> None:
    """Send named tensors of any size, and plain values. Collective over: none."""
    tensors = {n: t.detach().cpu().contiguous() for n, t in items.items() if torch.is_tensor(t)}
    forms = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    plain = {name: value for name, value in items.items() if name not in tensors}
    link.send((forms, plain), dest=to, tag=tag)
    for tensor in tensors.values():
        begin_send(link, _bytes_of(tensor), to, tag)()


def receive_items(link: MPI.Intercomm, source: int, tag: int) -> dict[str, Any]:
    """Receive the items that the other side passes to `send_items`. Collective over: none."""
    forms, plain = link.recv(source=source, tag=tag)
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="cpu")
        for name, (dtype, shape) in forms.items()
    }
    for tensor in tensors.values():
        begin_receive(link, _bytes_of(tensor), source, tag)()
    return {**plain, **tensors}


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
