"""Ranks as forked processes without MPI, which start in milliseconds and can be killed any time."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import socket
import subprocess
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO

import pytest

FORK = multiprocessing.get_context("fork")
LEFT_ALONE = 9


class Comm:
    """A communicator over sockets, with the collectives that checkpoints use.

    Messages and files use different system calls, so that faults can be injected into files alone.
    """

    def __init__(self, rank: int, size: int, peers: list[BinaryIO]) -> None:
        self.rank, self.size, self._peers = rank, size, peers

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's value, on every rank; a rank exits if a peer is gone."""
        try:
            if self.rank == 0:
                values = [value, *(pickle.load(peer) for peer in self._peers)]
                self._send(values)
                return values
            self._send(value)
            return pickle.load(self._peers[0])
        except (EOFError, OSError):
            os._exit(LEFT_ALONE)

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value, on rank 0."""
        values = self.allgather(value)
        return values if self.rank == 0 else None

    def bcast(self, value: Any) -> Any:
        """Return rank 0's value."""
        return self.allgather(value)[0]

    def scatter(self, values: Any) -> Any:
        """Return rank 0's value for this rank."""
        return self.bcast(values)[self.rank]

    def _send(self, value: Any) -> None:
        for peer in self._peers:
            pickle.dump(value, peer)
            peer.flush()


def start(ranks: int, body: Callable[[Comm], None]) -> list[BaseProcess]:
    """Start processes, each of which runs `body` with its communicator, and return them."""
    pairs = [socket.socketpair() for _ in range(ranks - 1)]

    def run(rank: int) -> None:
        mine = [pair[0] for pair in pairs] if rank == 0 else [pairs[rank - 1][1]]
        for end in (end for pair in pairs for end in pair if end not in mine):
            end.close()  # otherwise, nobody would notice that the owner has died
        body(Comm(rank, ranks, [end.makefile("rwb") for end in mine]))

    processes = [FORK.Process(target=run, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for pair in pairs:
        for end in pair:
            end.close()
    return processes


def traced(process: BaseProcess, log: Path, *options: str) -> subprocess.Popen[str]:
    """Start strace on a waiting process and its later children; as a context, wait for their end.

    The test is skipped without strace, or without permission to trace.
    """
    reason = "strace is not installed"
    if shutil.which("strace"):
        command = ["strace", "-f", "-y", "-o", str(log), *options, "-p", str(process.pid)]
        strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        reason = strace.stderr.readline().strip()
        if "attached" in reason:
            return strace
        strace.communicate()
    process.kill()
    pytest.skip(f"nothing can be traced here: {reason}")
