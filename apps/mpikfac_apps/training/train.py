"""Trains a CNN with K-FAC, SGD or AdamW on as many ranks as it is started with.

    mpirun -n 4 python -m mpi4py apps/train_cnn.py --config jobs/configs/cifar10_resnet20_kfac.yaml

Every option of `--help` may stand in the file or, as `--key value`, on the command line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

import mpikfac
from mpikfac_apps.cli import read_options
from mpikfac_apps.guard.guard import Guard
from mpikfac_apps.guard.requests import ignore_signals
from mpikfac_apps.options.options import Options
from mpikfac_apps.options.parse import parse
from mpikfac_apps.options.strategy import curvature_ranks
from mpikfac_apps.place import Place, share_cores
from mpikfac_apps.training.run import Run
from mpikfac_apps.training.shrink import go_on


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as the command line says; 0 when the run is complete, `stop_code` if it was stopped.

    Collective over: world.

    Raises:
        SystemExit: code 2 after one line about what the user can mend.
    """
    comm = mpikfac.world()
    with mpikfac.ending(comm):
        options = read_options(comm, lambda: parse(argv, comm.size))
    return 0 if options is None else mpikfac.comm.leaving(train(comm, options))


def train(comm: Any, options: Options) -> int:
    """Trains, or decomposes for the ranks that train; the exit code.

    When ranks are lost, the ranks that are left start again, if the options allow it.

    Collective over: comm.
    """
    code = None
    while code is None:
        with mpikfac.ending(comm):
            place = settle(comm, options)
            team = mpikfac.split(comm, curvature_ranks(options))
        if team.link is None:
            code, comm, options = run_training(team, options, place)
        elif team.comm is None:
            assist(comm, team, place.device)
            code = comm.bcast(0)
        else:
            code, *_ = run_training(team, options, place)
            code = comm.bcast(code)
    return code


def settle(comm: Any, options: Options) -> Place:
    """Shares the cores and GPUs of nodes among their ranks.

    Collective over: comm.
    """
    hosts = share_cores(comm, options.threads)
    with mpikfac.comm.together(comm, "options"):
        device = mpikfac.device(comm, options.device)
        if options.shrink:
            mpikfac.comm.check_survivable()
    return Place(device, hosts)


def assist(comm: Any, team: mpikfac.comm.Team, device: torch.device) -> None:
    """Decomposes for the ranks that train, until they are done.

    The watchdog and signals are left to them: this rank may have nothing to do for long.

    Collective over: comm.
    """
    with mpikfac.ending(comm, lambda: "curvature"):
        ignore_signals()
        mpikfac.serve(team, device)


def run_training(
    team: mpikfac.comm.Team, options: Options, place: Place
) -> tuple[int | None, Any, Options]:
    """One training run; the exit code, or None if ranks were lost, and with what to go on then.

    Returns:
        The exit code, the ranks that are left, and the options with which these start again.

    Collective over: the team, and all curvature ranks.
    """
    comm = team.comm
    with mpikfac.ending(comm):
        guard = Guard(comm, options)
    with mpikfac.ending(comm, guard.where), contextlib.closing(guard):
        run = Run(team, options, guard, place)
        try:
            return run.train(), comm, options
        except Exception as error:
            if not (options.shrink and mpikfac.comm.lost_a_rank(comm, error)):
                raise
            return None, *go_on(run)
