"""The `mpikfac` command: hands the rest of the command line to one of the programs."""

from __future__ import annotations

import sys
from importlib import import_module, metadata

PROGRAMS = {
    "train": ("training.train", "train a CNN (start it under mpirun or srun)"),
    "strategies": ("planning.strategies", "list the ways to distribute K-FAC by name"),
    "plan": ("planning.plan", "print who computes and sends what, without MPI"),
    "check": (
        "checking.check",
        "a model of your own: what is covered, numbers against autograd",
    ),
    "calibrate": (
        "planning.calibrate",
        "measure a machine (start it under mpirun or srun)",
    ),
    "simulate": (
        "planning.simulate",
        "step times of strategies on a machine, without MPI",
    ),
    "compare": ("study.compare", "table and curves of several runs"),
    "study": ("study.study", "run a matrix of runs and write a report in HTML"),
    "inspect": ("inspecting.inspect", "what a checkpoint holds, and its spectra"),
    "export": (
        "inspecting.export",
        "weights and factors of a checkpoint as plain files",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of the program named by the first argument."""
    arguments = sys.argv[1:] if argv is None else argv
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in PROGRAMS:
        return import_module(f"mpikfac_apps.{PROGRAMS[name][0]}").main(rest)
    if name == "--version":
        print(f"mpikfac {metadata.version('mpikfac')}")
        return 0
    if name in ("-h", "--help"):
        print(usage())
        return 0
    print(f"mpikfac: unknown program {name!r}; one of {', '.join(PROGRAMS)}", file=sys.stderr)
    return 2


def usage() -> str:
    """Returns the help text, one line per program."""
    lines = [f"  {name:<12}{what}" for name, (_, what) in PROGRAMS.items()]
    return "\n".join(
        ["usage: mpikfac PROGRAM [options]   (mpikfac PROGRAM --help lists them)", "", *lines]
    )


if __name__ == "__main__":
    sys.exit(main())
