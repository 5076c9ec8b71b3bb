"""How a job ends when a rank fails, and how single ranks of a mismatched launcher end."""

from __future__ import annotations

import io
import platform
import re
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

import mpikfac
from mpikfac.comm import Grid
from support.launch import launch

HEADER = """
import sys, torch, mpikfac
from mpikfac import UserError
from mpikfac.comm import together
comm = mpikfac.world()
rank = comm.rank

def trainer(**settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mpikfac.KFAC(model, optimizer, comm, **settings)

with mpikfac.abort_on_error(comm, lambda: 'in a test'):
"""


def end(tmp_path, body):
    """Return how a program ends whose `abort_on_error` block is `body`."""
    program = tmp_path / "program.py"
    program.write_text(HEADER + textwrap.indent(textwrap.dedent(body), "    "))
    return launch(2, str(program))


CRASHES = {
    "alone": ("if rank == 1: raise KeyError('lost')\ncomm.Barrier()", "KeyError: 'lost'"),
    "by leaving": ("if rank == 1: sys.exit(0)\ncomm.Barrier()", "SystemExit: 0"),
    "in a step": (
        """
        kfac = trainer()
        loss = kfac.model(torch.ones(5, 4)).sum()
        if rank == 0:
            loss.backward()
        kfac.step()
        """,
        "RuntimeError: no covered layer took part",
    ),
}


@pytest.mark.gate
@pytest.mark.parametrize("how", CRASHES)
def test_a_crash_ends_the_job_with_one_traceback(tmp_path, how):
    """Oracle: exit code 1, rank 1's own report and no further report, and no hang."""
    body, text = CRASHES[how]
    job = end(tmp_path, body)
    assert job.returncode == 1
    assert job.stderr.count("Traceback (most recent call last)") == 1
    (line,) = [line for line in job.stderr.splitlines() if line.startswith("mpikfac: ")]
    assert line.startswith(f"mpikfac: rank 1 of 2, {platform.node()}, in a test: {text}")


class Writes(io.RawIOBase):
    """A stream that keeps its input, piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        self.pieces.append(bytes(piece).decode())
        return len(piece)


def test_a_report_is_one_write(monkeypatch):
    """Oracle: pieces that reach the launcher; between pieces the launcher may put its own notes."""
    writes = Writes()
    stream = io.TextIOWrapper(io.BufferedWriter(writes), line_buffering=True)  # as stderr is
    monkeypatch.setattr(sys, "stderr", stream)
    comm = SimpleNamespace(rank=1, size=2, Abort=lambda code: None)
    with pytest.raises(SystemExit) as left, mpikfac.abort_on_error(comm, lambda: "in a test"):
        raise KeyError("lost")
    assert left.value.code == 1
    (report,) = writes.pieces
    assert report.endswith("in a test: KeyError: 'lost'\n")


MISTAKES = {
    "in a file on one rank": (
        """
        with together(comm, "reading checkpoint x"):
            if rank:
                raise OSError(f"no room for rank {rank}")
        """,
        "mpikfac: reading checkpoint x: no room for rank 1",
    ),
    "on one rank, which the others cannot know": (
        "if rank: raise UserError('no room')\ncomm.Barrier()",
        "mpikfac: only on rank 1: no room",
    ),
}


@pytest.mark.gate
@pytest.mark.parametrize("what", MISTAKES)
def test_a_users_mistake_is_one_line(tmp_path, what):
    """Oracle: exit code 2, and the line as the program's only own output."""
    body, line = MISTAKES[what]
    job = end(tmp_path, body)
    assert job.returncode == 2
    assert [s for s in job.stderr.splitlines() if "mpikfac" in s] == [line]
    assert "Traceback" not in job.stderr
    assert job.stdout == ""


@pytest.fixture
def bare(monkeypatch):
    """Return monkeypatch, in an environment without any launcher's marks."""
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("size", "rank"),
    [
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("SLURM_NTASKS", "SLURM_PROCID"),
    ],
)
def test_a_launcher_that_made_single_ranks_is_told_apart(bare, capfd, size, rank):
    """Oracle: exit code 2 on all ranks, and a single message, from the first, with the remedy."""
    bare.setenv(size, "4")
    for number in (0, 1):
        bare.setenv(rank, str(number))
        with pytest.raises(SystemExit) as left:
            mpikfac.world()
        assert left.value.code == 2
    printed = "".join(capfd.readouterr())
    assert printed.count("mpikfac:") == 1
    assert f"{size}=4 but MPI sees 1 rank" in printed
    assert f"unset {size}" in printed


@pytest.mark.parametrize("environment", [{}, {"OMPI_COMM_WORLD_SIZE": "1", "SLURM_NTASKS": "4"}])
def test_one_rank_may_be_alone(bare, environment):
    """Oracle: the innermost launcher's word counts: `mpirun -n 1` inside a larger allocation."""
    for name, value in environment.items():
        bare.setenv(name, value)
    assert mpikfac.world().size == 1


def test_a_process_without_communicators_is_told_the_remedy(comm):
    """Oracle: the last line of MPI's own text, and the remedy."""

    def full(sides):
        raise MPI.Exception(MPI.ERR_COMM)

    text = re.escape(str(MPI.Exception(MPI.ERR_COMM)).splitlines()[-1])
    with pytest.raises(
        mpikfac.UserError, match=rf"^MPI cannot create a communicator: {text}; call close"
    ):
        Grid(SimpleNamespace(size=1, Create_cart=full), 1, mpikfac.Trace())
