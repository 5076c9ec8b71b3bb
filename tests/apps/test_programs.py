"""What the command answers before a program starts: help, unknown programs and options."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from mpikfac_apps import __main__ as program
from mpikfac_apps.launching.programs import PROGRAMS, answer
from support.launch import environment, launcher
from support.pace import paced

ANSWERS = """
import sys
HEAVY = ("torch", "mpi4py", "h5py")
for name in HEAVY:
    sys.modules[name] = None  # an import fails
from mpikfac_apps.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
WITHOUT_TORCH = [name for name, program in PROGRAMS.items() if program.command_line]
DIES = """
import sys
from mpikfac_apps import __main__ as program
import mpikfac

def main():
    comm = mpikfac.world()
    assert comm.rank == 0, "rank 1 fails"
    comm.Barrier()

program.main = main
program.command()
"""


@pytest.mark.gate
@pytest.mark.parametrize(("argument", "code"), [("--help_all", 0), ("--bogus_option=1", 2)])
@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_help_and_unknown_options_need_neither_torch_nor_mpi(name, argument, code):
    """Oracle: a process in which the import of torch, mpi4py or h5py fails."""
    command = [sys.executable, "-c", ANSWERS, name, argument]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    if code:
        (line,) = ended.stderr.splitlines()
        assert "unknown key bogus_option" in line and not ended.stdout
    else:
        assert ended.stdout.startswith(f"usage: mpikfac {name}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_table_of_programs_names_what_exists(name):
    """Oracle: the modules, and the name of the program in its command line."""
    entry = PROGRAMS[name]
    assert callable(import_module(f"mpikfac_apps.{entry.module}").main)
    if not entry.command_line:
        assert entry.purpose.startswith("example: ")
        return
    module, _, line = entry.command_line.partition(":")
    assert getattr(import_module(f"mpikfac_apps.{module}"), line).program == f"mpikfac {name}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--lerning_rate", "1"], "mpikfac: options: unknown key lerning_rate; did you"),
        (["train", "--kfac", "1"], "kfac is a group of options; set one of them, such as --kfac."),
        (["plan", "--modl=x"], "mpikfac plan: unknown key modl; did you mean model?"),
        (
            ["plan", "--kfac.preconditioner=x"],
            "mpikfac plan: unknown key kfac.preconditioner; did you mean preconditioner?",
        ),
        (
            ["train", "--preconditioner=x"],
            "mpikfac: options: unknown key preconditioner; did you mean kfac.preconditioner?",
        ),
        (
            ["plan", "--inv_update_freq=1"],
            "mpikfac plan: unknown key inv_update_freq; did you mean inv_update_steps?",
        ),
        (["trane"], "mpikfac: unknown program 'trane'; did you mean train?"),
        (["x"], "mpikfac: unknown program 'x'; see mpikfac --help"),
    ],
)
def test_a_misspelt_word_is_one_line(capsys, arguments, words):
    """Oracle: the nearest names, by hand."""
    assert program.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and len(line) < 200


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("train", ["--config", "x.yaml", "--decay_epochs+=3", "--lr", "-1"]),
        ("train", ["--lr=1", "--", "--bogus"]),
        ("compare", ["a+", "b"]),
        ("evaluate", ["runs/a"]),
    ],
)
def test_known_options_are_left_to_the_program(name, arguments):
    """Oracle: names of options by hand; values and files are not read."""
    assert answer(name, arguments) is None


def test_a_rank_leaves_the_answer_to_the_program(monkeypatch):
    """Oracle: a call of the program; in an MPI job, a single rank prints help."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr("mpikfac_apps.planning.strategies.main", lambda arguments: 7)
    assert program.main(["strategies", "--help"]) == 7


@pytest.mark.gate
def test_a_failing_rank_of_the_command_ends_all_ranks():
    """Oracle: an end at all; without `python -m mpi4py`, the other rank would wait for ever."""
    mpirun, flags = launcher()
    ended = subprocess.run(
        [mpirun, *flags, "-n", "2", sys.executable, "-c", DIES],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=paced(60),
    )
    assert ended.returncode and "rank 1 fails" in ended.stderr
