"""Start one of the programs with the rest of the command line: the `mpikfac` command."""

from __future__ import annotations

import sys
from importlib import import_module, metadata

from mpikfac_apps.cli import mend_streams

PROGRAMS = {
    "train": ("training.train", "train a network (under mpirun or srun)"),
    "evaluate": ("training.testing.evaluate", "test the network of a run's checkpoint"),
    "strategies": ("planning.strategies", "list the ways to distribute K-FAC by name"),
    "plan": ("planning.plan", "print who computes and sends what, without MPI"),
    "check": ("checking.check", "check K-FAC on a model: covered layers, right numbers"),
    "calibrate": ("planning.calibrate", "measure a machine (under mpirun or srun)"),
    "simulate": ("planning.simulate", "predict step times on a machine, without MPI"),
    "advise": ("planning.advise", "choose batch, servers and strategy that hide messages"),
    "compare": ("study.compare", "compare several runs: a table and curves"),
    "study": ("study.study", "run a matrix of options and write a report in HTML"),
    "inspect": ("inspecting.inspect", "show the contents and the spectra of a checkpoint"),
    "pack": ("inspecting.pack", "pack a folder of images into a single file"),
    "export": ("inspecting.export", "write weights and factors of a checkpoint as plain files"),
}
EXTRA = ("docstring_parser", "jinja2", "jsonargparse", "matplotlib", "tabulate", "tqdm", "yaml")
"""Modules of the extra `apps`: a user of the library alone does not install these."""


def main(argv: list[str] | None = None) -> int:
    """Run the program named by the first argument; return the exit code."""
    mend_streams()
    arguments = sys.argv[1:] if argv is None else argv
    name, program_arguments = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in PROGRAMS:
        try:
            return import_module(f"mpikfac_apps.{PROGRAMS[name][0]}").main(program_arguments)
        except ModuleNotFoundError as error:
            if error.name not in EXTRA:
                raise
            print(
                f"mpikfac {name} needs the package {error.name}, which is not installed; run pip "
                f"install 'mpikfac[apps]'",
                file=sys.stderr,
            )
            return 2
        except KeyboardInterrupt:
            print(f"mpikfac {name}: interrupted", file=sys.stderr)
            return 130
    if name == "--version":
        print(f"mpikfac {metadata.version('mpikfac')}")
        return 0
    if name in ("-h", "--help"):
        print(usage())
        return 0
    print(f"mpikfac: unknown program {name!r}; one of {', '.join(PROGRAMS)}", file=sys.stderr)
    return 2


def usage() -> str:
    """Return the help text, one line per program."""
    lines = [f"  {name:<12}{what}" for name, (_, what) in PROGRAMS.items()]
    hint = "mpikfac PROGRAM --help lists the options of a program."
    return "\n".join(["usage: mpikfac PROGRAM [--key value ...]", "", *lines, "", hint])


if __name__ == "__main__":
    sys.exit(main())
