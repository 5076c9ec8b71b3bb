"""The programs of the `mpikfac` command by name, and what they print before they start."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from mpikfac import files

RANK_VARIABLES = (
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_PROCID"),
    "TORCHELASTIC_RUN_ID",
)
"""Environment variables: on every rank of a job, the launcher sets at least one of them."""


class Program(NamedTuple):
    """A program of the `mpikfac` command.

    Attributes:
        module: the module with `main`.
        command_line: the location of the `CommandLine`, as MODULE:NAME; the module does not import
            torch. "" for an example, which parses its own options.
        purpose: what the program does.
        ranks: whether the program starts under MPI or torchrun, on any number of ranks.
    """

    module: str
    command_line: str
    purpose: str
    ranks: bool = False


PROGRAMS = {
    "train": Program("training.train", "options.options:TRAIN", "train a network", ranks=True),
    "evaluate": Program(
        "training.testing.evaluate",
        "training.testing.options:EVALUATE",
        "evaluate the network in a run's checkpoint",
        ranks=True,
    ),
    "strategies": Program(
        "planning.strategies",
        "planning.options:LIST",
        "list the published strategies for distributing K-FAC, or describe one",
    ),
    "plan": Program(
        "planning.plan",
        "planning.options:PLAN",
        "print who computes and sends what, without MPI",
    ),
    "check": Program(
        "checking.check",
        "checking.options:CHECK",
        "check which layers of a model K-FAC covers, and whether its results are right",
        ranks=True,
    ),
    "calibrate": Program(
        "lab.predict.calibrate",
        "lab.predict.options:CALIBRATE",
        "measure the speed of a machine, on at least 2 ranks",
        ranks=True,
    ),
    "simulate": Program(
        "lab.predict.simulate",
        "lab.predict.options:SIMULATE",
        "predict step times on a machine, without MPI",
    ),
    "advise": Program(
        "lab.predict.advise",
        "lab.predict.options:ADVISE",
        "choose a batch size, servers and a strategy that hide communication",
    ),
    "reproduce": Program(
        "lab.reproduce.reproduce",
        "lab.reproduce.options:REPRODUCE",
        "list published results, or reproduce one of them",
    ),
    "compare": Program(
        "lab.study.compare",
        "lab.study.compare:COMPARE",
        "compare several runs with a table and curves",
    ),
    "study": Program(
        "lab.study.study",
        "lab.study:STUDY",
        "run a matrix of options, and write an HTML report",
    ),
    "inspect": Program(
        "inspecting.inspect",
        "inspecting.options:INSPECT",
        "show the contents and the spectra of a checkpoint",
    ),
    "influence": Program(
        "lab.influence.influence",
        "lab.influence.options:INFLUENCE",
        "score training images by their influence on test images",
        ranks=True,
    ),
    "laplace": Program(
        "lab.laplace.laplace",
        "lab.laplace.options:LAPLACE",
        "evaluate a network, taking the uncertainty of its weights into account",
        ranks=True,
    ),
    "equations": Program(
        "lab.equations.equations",
        "lab.equations.options:EQUATIONS",
        "solve a differential equation with a known solution using a network",
        ranks=True,
    ),
    "pack": Program(
        "inspecting.pack",
        "inspecting.options:PACK",
        "pack a folder of images into a single file",
    ),
    "export": Program(
        "inspecting.export",
        "inspecting.options:EXPORT",
        "write the weights and factors of a checkpoint to plain files",
    ),
    "train-graph": Program(
        "graphs.train",
        "",
        "example: a graph network with its nodes distributed over ranks",
        ranks=True,
    ),
    "train-recommendation": Program(
        "recommendation.train",
        "",
        "example: a recommender with its tables distributed over ranks",
        ranks=True,
    ),
    "train-detection": Program(
        "detection.train", "", "example: a detector of drawn shapes", ranks=True
    ),
    "train-population": Program(
        "populations.run", "", "example: a population of runs that select settings", ranks=True
    ),
}


def run(name: str, arguments: list[str]) -> int:
    """Run a program; return the exit code.

    Help and unknown options are handled before torch and MPI are imported, which takes seconds.
    Inside a job, the program handles them itself, so that only one rank prints.
    """
    if not any(variable in os.environ for variable in RANK_VARIABLES):
        code = answer(name, arguments)
        if code is not None:
            return code
    return int(import_module(f"mpikfac_apps.{PROGRAMS[name].module}").main(arguments))


def answer(name: str, arguments: Sequence[str]) -> int | None:
    """Print help or report unknown options, and return the exit code; None to start the program."""
    if not PROGRAMS[name].command_line:
        return None
    module, _, line = PROGRAMS[name].command_line.partition(":")
    try:
        getattr(import_module(f"mpikfac_apps.{module}"), line).answer(arguments)
    except ValueError as error:
        who = "mpikfac: options" if PROGRAMS[name].ranks else f"mpikfac {name}"
        print(files.printable(f"{who}: {error}"), file=sys.stderr)
        return 2
    except SystemExit as leave:
        return int(leave.code or 0)
    return None
