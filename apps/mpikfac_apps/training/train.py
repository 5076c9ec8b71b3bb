"""Train a network with K-FAC or a first-order optimizer on all ranks of the MPI job.

    mpirun -n 4 mpikfac train --config jobs/configs/cifar10_resnet20_kfac.yaml

Every option that `--help_all` lists can be set in the file or, as `--key value`, on the command
line.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Sequence

import torch

import mpikfac
from mpikfac_apps.guard.guard import Guard
from mpikfac_apps.guard.ranks import run_watched
from mpikfac_apps.guard.requests import ignore_one_interrupt, ignore_signals
from mpikfac_apps.guard.watchdog import Watchdog
from mpikfac_apps.options.options import Options
from mpikfac_apps.options.strategy import serving_ranks
from mpikfac_apps.place import RankPlace, share_cores
from mpikfac_apps.training import settings
from mpikfac_apps.training.parts.groups import joined
from mpikfac_apps.training.parts.problem import build
from mpikfac_apps.training.run import Run
from mpikfac_apps.training.shrink import go_on

PATIENCE = 10.0  # seconds after the end of the main thread until other threads are reported


def main(argv: Sequence[str] | None = None) -> int:
    """Train; return 0 after a complete run, and the option `exit_code` after a request to stop.

    Collective over: world.

    Raises:
        SystemExit: with code 2, after a one-line message about an error that the user can correct.
    """

    def work(comm: mpikfac.comm.Comm, options: Options, watchdog: Watchdog) -> int:
        code = train(comm, options, watchdog)
        threading.Thread(target=tell_of_threads, args=(comm.rank,), daemon=True).start()
        return code

    return run_watched(lambda ranks: settings.of_start(argv, ranks), work)


def tell_of_threads(rank: int) -> None:
    """Print a line if a thread prevents the process, and therefore the job, from exiting."""
    main = threading.main_thread()
    main.join(60)  # times out if a larger program continues after training
    time.sleep(PATIENCE)
    others = [
        thread for thread in threading.enumerate() if not thread.daemon and thread is not main
    ]
    names = [repr(thread.name) for thread in others]
    if names and not main.is_alive():
        print(
            f"mpikfac: the run is over, but rank {rank} is waiting for the thread "
            f"{', '.join(names)}; end the job, and start such threads as daemons",
            file=sys.stderr,
            flush=True,
        )


def train(comm: mpikfac.comm.Comm, options: Options, watchdog: Watchdog) -> int:
    """Train on this rank, or serve the ranks that train; return the exit code.

    If ranks are lost and the options allow it, the remaining ranks start again.

    Collective over: comm.
    """
    code = None
    while code is None:
        watchdog.follow(options.watchdog_timeout)
        with mpikfac.abort_on_error(comm):
            place = settle(comm, options)
            group, options = joined(comm, options)
            team = mpikfac.split_comm(group, serving_ranks(options)[1])
        if team.comm is None:
            watchdog.follow(None)
            assist(comm, team, options, place.device)
            code = comm.bcast(0)
        elif team.intercomm is None:
            code, comm, options = run_training(comm, team, options, place, watchdog)
        else:
            code, *_ = run_training(comm, team, options, place, watchdog)
            code = comm.bcast(code)
    return code


def settle(comm: mpikfac.comm.Comm, options: Options) -> RankPlace:
    """Divide the cores and GPUs of each node among its ranks.

    Collective over: comm.
    """
    hosts = share_cores(comm, options.threads)
    with mpikfac.comm.together(comm, "options"):
        device = mpikfac.device(comm, options.device)
        if options.shrink:
            mpikfac.comm.check_survivable()
    return RankPlace(device, hosts)


def assist(
    comm: mpikfac.comm.Comm, team: mpikfac.comm.SplitComm, options: Options, device: torch.device
) -> None:
    """Serve the ranks that train, by decomposing factors or storing weights, until they finish.

    The ranks that train run the watchdog and handle signals, because a server can be idle for a
    long time.

    Collective over: comm.
    """
    servers = not options.distribution.sync.waits_for_all
    with mpikfac.abort_on_error(comm, lambda: "server" if servers else "curvature"):
        ignore_signals()
        ignore_one_interrupt()
        assert team.intercomm, "the rank serves"
        if servers:
            classes, channels = mpikfac.comm.announced(team.intercomm)
            model, optimizer = build(options, classes, channels, device)
            mpikfac.lab.run_parameter_server(model, optimizer, team)
        else:
            mpikfac.lab.run_curvature_server(team, device)


def run_training(
    world: mpikfac.comm.Comm,
    team: mpikfac.comm.SplitComm,
    options: Options,
    place: RankPlace,
    watchdog: Watchdog,
) -> tuple[int | None, mpikfac.comm.Comm, Options]:
    """Train until the run ends, or until ranks are lost.

    Args:
        world: all ranks, of all groups.

    Returns:
        The exit code (None if ranks were lost), the remaining ranks, and the options with which
        they start again.

    Collective over: the team, and all curvature servers.
    """
    comm = team.trains
    with mpikfac.abort_on_error(comm):
        guard = Guard(comm, options, watchdog)
    with mpikfac.abort_on_error(comm, guard.where), contextlib.closing(guard):
        run = Run(world, team, options, guard, place)
        try:
            return run.train(), comm, options
        except Exception as error:
            if not (options.shrink and mpikfac.comm.lost_a_rank(comm, error)):
                raise
            return None, *go_on(run)
        finally:
            run.problem.batches.close()
