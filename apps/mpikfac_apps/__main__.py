"""The `mpikfac` command: run the program that the first argument names."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib import import_module, metadata
from typing import NoReturn

from mpikfac_apps.cli import mend_streams
from mpikfac_apps.launching import programs
from mpikfac_apps.launching.programs import PROGRAMS, RANK_VARIABLES

EXTRA = ("docstring_parser", "jinja2", "jsonargparse", "matplotlib", "tabulate", "tqdm", "yaml")
"""Modules that pip installs with `mpikfac[apps]`; the library itself does not need them."""


def command() -> NoReturn:
    """Run the `mpikfac` command; an error on any rank aborts all ranks, as with `-m mpi4py`."""
    try:
        sys.exit(main())
    except BaseException as error:
        if "mpi4py.MPI" in sys.modules and any(name in os.environ for name in RANK_VARIABLES):
            from mpi4py.run import set_abort_status

            set_abort_status(error)
        raise


def main(argv: list[str] | None = None) -> int:
    """Run the program named by the first argument; return the exit code."""
    mend_streams()
    arguments = sys.argv[1:] if argv is None else argv
    name, program_arguments = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name == "--version":
        print(f"mpikfac {metadata.version('mpikfac')}")
        return 0
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in (*PROGRAMS, "launch"):
        if near := get_close_matches(name, ("launch", *PROGRAMS), n=1):
            print(f"mpikfac: unknown program {name!r}; did you mean {near[0]}?", file=sys.stderr)
        else:
            print(f"mpikfac: unknown program {name!r}; see mpikfac --help", file=sys.stderr)
        return 2
    try:
        if name == "launch":
            code = import_module("mpikfac_apps.launching.launch").main(program_arguments)
        else:
            code = programs.run(name, program_arguments)
        return int(code)
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


def usage() -> str:
    """Return the help text, one line per program."""
    lines = [f"  {name:<22}{program.purpose}" for name, program in PROGRAMS.items()]
    start = f"  {'launch':<22}start a program, or your own script, on several ranks under MPI"
    hint = "Run mpikfac PROGRAM --help to list a program's options."
    return "\n".join(["usage: mpikfac PROGRAM [--key value ...]", "", start, *lines, "", hint])


if __name__ == "__main__":
    sys.exit(main())
