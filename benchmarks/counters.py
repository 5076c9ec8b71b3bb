"""Count the bytes that MPI sends for the messages of a plan, and compare them with the plan.

    unset OMPI_MCA_pml
    export OMPI_MCA_pml_monitoring_enable=1
    mpirun -n 16 python -m mpi4py benchmarks/counters.py --model resnet20 --append FILE

The counters are those of Open MPI (pml/monitoring): all bytes that a rank passes to the network or
to shared memory, including collectives. A line is the total over the messages of a stage with the
same primitive, in a step with new factors and bases: the bytes of the busiest rank and of all
ranks, as planned (`Message.wire`, a ring) and as counted. Overlapped reductions include the
agreements of the ranks. A file gets a line of JSON for each line of the table.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import mpikfac
from mpikfac.comm import Grid
from mpikfac.plan import Message, names
from mpikfac.trace import Trace
from mpikfac_apps.planning.facts import strategy_of
from mpikfac_apps.problems import models
from mpikfac_apps.text import table

STRATEGIES = ("comm-opt", "sharded-optimizer", "spd-kfac")
HEAD = ("strategy", "stage", "primitive", "over", "messages", "bytes")
COUNTS = ("busiest, plan", "busiest", "all ranks, plan", "all ranks")
VARIABLE, OF_SIZES = b"pml_monitoring_messages_size", 2  # MPI_T_PVAR_CLASS_SIZE


def main() -> None:
    """Print the table, and write the file.

    Collective over: world.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES)
    parser.add_argument("--append", type=Path, metavar="FILE")
    options = parser.parse_args()
    comm = mpikfac.world()
    counter = Counter(comm)
    rows = [row for name in options.strategies for row in counted(comm, counter, name, options)]
    if comm.rank == 0:
        print(f"{options.model}, {comm.size} ranks, {counter.library}")
        print("\n".join(table([(*HEAD, *COUNTS), *(map(str, row.values()) for row in rows)])))
        if options.append:
            facts = {"model": options.model, "ranks": comm.size, "library": counter.library}
            with options.append.open("a") as file:
                file.writelines(json.dumps(facts | row) + "\n" for row in rows)


class Counter:
    """Read the number of bytes that this process has sent to any rank of the world.

    The calls are those of MPI's interface for tools, which mpi4py does not have.
    """

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self.library = MPI.Get_library_version().partition(",")[0]
        self._mpi = ctypes.CDLL(MPI.__file__)
        number, count = ctypes.c_int(), ctypes.c_int()
        self._mpi.MPI_T_init_thread(MPI.THREAD_MULTIPLE, ctypes.byref(number))
        if self._mpi.MPI_T_pvar_get_index(VARIABLE, OF_SIZES, ctypes.byref(number)):
            sys.exit(f"{self.library} counts no bytes: see the first lines of this file")
        self._session, self._handle = ctypes.c_void_p(), ctypes.c_void_p()
        world = ctypes.c_void_p(MPI._addressof(MPI.COMM_WORLD))
        check = self._mpi.MPI_T_pvar_session_create(ctypes.byref(self._session))
        check |= self._mpi.MPI_T_pvar_handle_alloc(
            *(self._session, number, world, ctypes.byref(self._handle), ctypes.byref(count))
        )
        check |= self._mpi.MPI_T_pvar_start(self._session, self._handle)
        assert check == 0
        self._sent = (ctypes.c_size_t * count.value)()

    def read(self) -> int:
        """Return the bytes so far."""
        assert self._mpi.MPI_T_pvar_read(self._session, self._handle, self._sent) == 0
        return sum(self._sent)


def counted(
    comm: Any, counter: Counter, name: str, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the lines of a strategy.

    Collective over: world.
    """
    strategy, preconditioner = strategy_of(name, comm.size, mpikfac.Inverse())
    layers, others = models.shapes_of(options.model)
    forms = mpikfac.preconditioners.forms(preconditioner)
    plan = mpikfac.plan.plan_for(layers, comm.size, strategy, others, forms)
    per_node = strategy.transport.ranks_per_node
    grid = Grid(comm, plan.grid.workers, Trace(), per_node, plan.split.tp_plan)
    stages: dict[tuple[str, str, str], list[tuple[int, int, int]]] = defaultdict(list)
    for message in plan.messages(comm.rank, statistics=True, refresh=True):
        before = counter.read()
        send(grid, plan.of(comm.rank), message)
        sent = counter.read() - before
        stages[message.stage, message.primitive, message.over].append(
            (message.size, message.wire, sent)
        )
    grid.free()
    for key, numbers in stages.items():
        size, wire, sent = map(sum, zip(*numbers))
        wires, sents = comm.allgather(wire), comm.allgather(sent)
        facts = (name, *key, len(numbers), size, max(wires), max(sents), sum(wires), sum(sents))
        yield dict(zip(HEAD + COUNTS, facts))


def send(grid: Grid, plan: mpikfac.plan.RankPlan, message: Message) -> None:
    """Send a message of zeros, on the thread of overlapped messages if the stage is overlapped.

    Collective over: world.
    """
    layouts = {
        names.REDUCE_STATISTICS: plan.layouts.statistics,
        names.REDUCE_GRADIENTS: plan.layouts.gradients,
    }
    flat = torch.zeros(max(stop for _, stop in (*message.spans, *message.to)))
    if not (plan.strategy.transport.overlap and message.stage in layouts):
        grid.exchange([message], flat)
        return
    ((start, stop),) = message.spans
    layout = layouts[message.stage]
    sums = grid.overlapped([message], layout, flat, urgency=0)
    for name, offset in layout.offsets.items():
        if start <= offset < stop:
            sums.ready(name)
    sums.wait()


if __name__ == "__main__":
    main()
