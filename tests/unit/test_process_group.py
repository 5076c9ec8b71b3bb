"""Refusals around process groups; tests/mpi/test_process_group.py trains over them."""

from __future__ import annotations

import operator
import subprocess
import sys

import pytest
import torch
from torch import distributed, nn

import mpikfac
from support.launch import PROGRAMS, environment, launch, torchrun

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4"}
CALL = "torchrun started 4 processes, which are not connected: call torch.distributed.init_process"


@pytest.fixture
def group():
    """Yield a process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_processes_that_are_not_connected_are_refused_once(monkeypatch, capfd, rank):
    """Oracle: exit code 2 on all ranks, and a line from the first."""
    for name, value in (TORCHRUN | {"RANK": rank}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        mpikfac.world()
    assert left.value.code == 2
    assert capfd.readouterr().err.count(CALL) == (rank == "0")


def test_torchrun_starts_no_mpi_and_a_process_alone_is_not_told_to_install_one():
    """Oracle: the modules that were loaded, and the output."""
    code = "import sys, mpikfac; print(mpikfac.world().size, 'mpi4py' in sys.modules)"
    alone = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment() | alone, capture_output=True, text=True
    )
    assert (ended.stdout, ended.stderr) == ("1 False\n", "")


def test_a_group_that_cannot_be_used_is_refused(group):
    """Oracle: the lines."""
    with pytest.raises(ValueError, match="group=-100 must be a process group that contains this"):
        mpikfac.over(distributed.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ValueError, match=r"must be a communicator of mpi4py, mpikfac.over\(group"):
        mpikfac.KFACOptimizer(nn.Linear(2, 2), comm=group)


def test_a_group_without_a_backend_for_the_host_is_refused(group, monkeypatch):
    """Oracle: the line."""
    monkeypatch.setattr(distributed, "get_backend_config", lambda _: "cuda:nccl")
    with pytest.raises(ValueError, match="'cuda:nccl', and K-FAC also sends host memory: use"):
        mpikfac.over()


def test_a_group_must_be_initialised():
    """Oracle: the line."""
    with pytest.raises(ValueError, match="connects no processes; call init_process_group before"):
        mpikfac.over()


def test_servers_need_mpi(group, monkeypatch):
    """Oracle: the line, which names the strategies."""
    comm = mpikfac.over()
    comm.size = 2
    with pytest.raises(ValueError, match="CurvatureServers and ParameterServer need an inter"):
        mpikfac.split_comm(comm, 1)


@pytest.mark.gate
def test_torchrun_trains_without_mpi_and_checkpoints_move_between_launchers(comm, tmp_path):
    """Oracle: the weights of the run under mpirun, in bits; the launcher and ranks name the cause.

    MPI continues from torchrun's checkpoint and torchrun from MPI's, which one process reads alike.
    """
    program, own, other = str(PROGRAMS / "process_group.py"), tmp_path / "own", tmp_path / "other"
    ended = torchrun(2, program, str(own), "raise")
    first, *digests = ended.stdout.splitlines()
    assert first == "ProcessGroupComm, with mpi4py: False"
    assert ended.returncode == 1 and len(digests) == 2
    assert "mpikfac: rank 1 of 2" in ended.stderr and "RuntimeError: rank 1 fails" in ended.stderr
    assert launch(2, program, str(own)).stdout.splitlines()[1:] == digests
    assert launch(2, program, str(other)).stdout.splitlines()[1:] == digests
    killed = torchrun(2, program, str(other), "kill")
    assert killed.stdout.splitlines()[1:] == digests
    assert killed.returncode == 1 and "Signal 9 (SIGKILL) received" in killed.stderr
    for name in ("overlapped", "late"):
        saved, expected = (dict(mpikfac.find_checkpoint(comm, p / name)) for p in (own, other))
        assert saved.keys() == expected.keys()
        for item, value in expected.items():
            same = torch.equal if torch.is_tensor(value) else operator.eq
            assert same(saved[item], value), item


class Wrapped(nn.Linear):
    """A class as wrappers create them."""


def test_a_model_of_which_no_layer_is_covered_is_refused_by_name(comm):
    """Oracle: the line; a single covered layer is enough."""
    model = nn.Sequential(nn.LayerNorm(2), Wrapped(2, 2))
    with pytest.raises(ValueError, match="covers no layer: 1 is a Wrapped, a class derived from L"):
        mpikfac.KFACOptimizer(model)
    mpikfac.KFACOptimizer(model.append(nn.Linear(2, 2)))
    mpikfac.KFACOptimizer(nn.Sequential(nn.LayerNorm(2)))
