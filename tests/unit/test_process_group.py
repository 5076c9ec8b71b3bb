"""Refusals around process groups; tests/mpi/test_process_group.py trains over them."""

from __future__ import annotations

import datetime
import multiprocessing
import operator
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.nn.utils.parametrizations import weight_norm

import mpikfac
from mpikfac.comm import Grid, mpi
from mpikfac.comm.messages import Buffers
from mpikfac.comm.mpi import MPI
from mpikfac.plan import PASSED, Message
from mpikfac_apps.guard.ranks import connected
from support.launch import PROGRAMS, environment, launch, torchrun

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4"}
CALL = "torchrun started 4 processes, which are not connected: call torch.distributed.init_process"


@pytest.fixture
def group():
    """Yield a process group of this process alone."""
    alone = {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=70), **alone)
    yield distributed.group.WORLD
    if distributed.is_initialized():
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


@pytest.mark.gate
def test_torchrun_starts_no_mpi_and_a_process_alone_is_not_told_to_install_one():
    """Oracle: the modules that were loaded, and the output."""
    code = "import sys, mpikfac; print(mpikfac.world().size, 'mpi4py' in sys.modules)"
    alone = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment() | alone, capture_output=True, text=True
    )
    assert (ended.stdout, ended.stderr) == ("1 False\n", "")


def test_variables_that_torchrun_has_left_are_told(monkeypatch, capfd):
    """Oracle: the code and the line; each rank of mpirun would train alone."""
    for name, value in (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(SystemExit) as left:
        mpikfac.world()
    assert left.value.code == 2
    assert "=4, but MPI is not started in the processes of torchrun" in capfd.readouterr().err


@pytest.mark.parametrize("joined", [False, True])
def test_a_worker_process_that_torch_connects_needs_no_mpi(joined, monkeypatch, request):
    """Oracle: the stand-in's name; without torch.distributed, the refusal of data loaders' workers.

    Slurm sets the variable in every allocation.
    """
    request.getfixturevalue("group") if joined else None
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setattr(mpi, "parent_process", multiprocessing.current_process)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    names = type(MPI)()
    if joined:
        assert names.IN_PLACE == "in place"
    else:
        with pytest.raises(SystemExit):
            _ = names.IN_PLACE


def test_programs_connect_host_memory_on_machines_with_gpus(monkeypatch):
    """Oracle: torch's own choice there is NCCL alone."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    alone = {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
    begin = partial(distributed.init_process_group, **alone)
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(distributed, "init_process_group", begin)
    monkeypatch.setattr(mpikfac, "world", mpikfac.over)
    try:
        assert connected().size == 1
    finally:
        distributed.destroy_process_group()


# -- groups --------------------------------------------------------------------------------------


def timeouts():
    """Return the timeouts of all process groups, in seconds."""
    groups = distributed.distributed_c10d._world.pg_names
    cpu = torch.device("cpu")
    return [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]


def test_groups_are_like_the_group_that_they_come_from(group):
    """Oracle: the timeouts; groups that differ in them do not replace each other."""
    short = distributed.new_group([0], timeout=datetime.timedelta(seconds=5))
    for _ in range(2):
        for comm in (mpikfac.over(), mpikfac.over(short)):
            comm.Split()
            comm.Dup().Free()
    assert sorted(timeouts()) == [5.0] * 3 + [70.0] * 3


def test_the_program_can_destroy_its_groups(group):
    """Oracle: sums over what is left; torch's names depend on the number of groups."""
    own = distributed.new_group([0], use_local_synchronization=True)
    first = mpikfac.over().Dup()
    distributed.destroy_process_group(own)
    second, total = mpikfac.over().Dup(), np.ones(2)
    for comm in (first, second):
        comm.Allreduce(MPI.IN_PLACE, total)
    assert total.tolist() == [1, 1]
    distributed.destroy_process_group()
    first.Free()  # as a trainer's close() does


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/gloo/tcp/pair.cc:5] Connection closed by peer [::1]:1. It"), True),
        (RuntimeError("Timed out waiting 5ms for recv"), True),
        (distributed.DistNetworkError("the store is gone"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("[enforce fail at alloc.cpp:1] can't allocate memory"), False),
    ],
)
def test_only_errors_of_the_connection_tell_of_a_lost_rank(group, error, lost):
    """Oracle: by hand."""

    def fail():
        raise error

    with pytest.raises(mpikfac.errors.RankLostError if lost else type(error)) as found:
        mpikfac.over().call("Allreduce", fail)
    assert (found.value is not error) == lost


def test_ranks_can_meet_more_than_once_and_without_a_store(group, monkeypatch):
    """Oracle: one of two ranks has arrived each time; a store that is gone ends the waiting."""
    comm = mpikfac.over()
    comm.size = 2
    assert [comm.Ibarrier().Test() for _ in range(2)] == [False, False]

    def gone(*_):
        raise distributed.DistNetworkError("the store is gone")

    monkeypatch.setattr(distributed.PrefixStore, "add", gone)
    assert comm.Ibarrier().Test()


def test_unknown_operations_and_buffers_with_gaps_are_refused(group):
    """Oracle: the errors; an element has no gaps, whatever its stride."""
    comm, numbers = mpikfac.over(), np.arange(4.0)
    with pytest.raises(ValueError, match="op='maximum' cannot be reduced over a process group: "):
        comm.Allreduce(MPI.IN_PLACE, numbers, "maximum")
    with pytest.raises(RuntimeError, match="Invalid scalar type"):  # no bfloat16
        comm.Allreduce(MPI.IN_PLACE, numbers.astype(np.int16))
    with pytest.raises(RuntimeError, match="stride"):
        comm.Bcast(numbers[::2])
    comm.Bcast(numbers[::4])


def test_messages_of_pairs_are_sent_from_the_host(group, monkeypatch):
    """Oracle: the buffers that are used; NCCL would wait for ever."""
    grid, flat = Grid(mpikfac.over(), 1, mpikfac.Trace()), torch.arange(2.0)
    monkeypatch.setattr(Buffers, "of", None)
    grid.exchange([Message("", PASSED, "world", ((0, 2),), -1, 2, 0, 0, to=((0, 2),))], flat)
    grid.free()


# -- refusals ------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="covers no layer: 0 is a ParametrizedLinear, a class de"):
        mpikfac.KFACOptimizer(nn.Sequential(weight_norm(nn.Linear(2, 2, bias=False))))
    mpikfac.KFACOptimizer(model.append(nn.Linear(2, 2)))
    mpikfac.KFACOptimizer(nn.Sequential(nn.LayerNorm(2)))


def test_a_layer_whose_own_weights_are_frozen_is_no_reason(comm):
    """Oracle: no error, as no class is left to cover."""
    attention, wrapped = nn.MultiheadAttention(2, 1), Wrapped(2, 2)
    for frozen in (attention.in_proj_weight, attention.in_proj_bias, wrapped.weight, wrapped.bias):
        frozen.requires_grad_(False)
    wrapped.norm = nn.LayerNorm(2)
    mpikfac.KFACOptimizer(nn.ModuleList([attention, wrapped]))
