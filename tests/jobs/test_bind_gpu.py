"""The GPU that jobs/bind_gpu.sh makes visible to a rank."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from support.pace import paced

BIND = Path(__file__).parents[2] / "jobs" / "bind_gpu.sh"


def bound(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return the wrapper's end on a node of four GPUs; the command prints the visible GPUs."""
    query = tmp_path / "nvidia-smi"
    query.write_text("#!/bin/sh\nprintf '0\\n1\\n2\\n3\\n'\n")
    query.chmod(0o755)
    return subprocess.run(
        [str(BIND), "sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"'],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"} | environment,
        capture_output=True,
        text=True,
        timeout=paced(240),
    )


@pytest.mark.parametrize(
    "variable",
    ["SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
)
def test_every_launcher_s_local_rank_chooses_the_gpu(tmp_path, variable):
    """Oracle: four GPUs, dealt out in turn."""
    seen = [bound(tmp_path, **{variable: str(rank)}).stdout.strip() for rank in range(6)]
    assert seen == ["0", "1", "2", "3", "0", "1"]


@pytest.mark.parametrize(
    ("visible", "seen"), [("4,6", ["4", "6", "4"]), ("GPU-8a,GPU-9b", ["GPU-8a", "GPU-9b"])]
)
def test_a_rank_gets_its_part_of_what_the_site_shows(tmp_path, visible, seen):
    """Oracle: the site's list, dealt out in turn."""
    for rank, gpu in enumerate(seen):
        found = bound(tmp_path, SLURM_LOCALID=str(rank), CUDA_VISIBLE_DEVICES=visible)
        assert found.stdout == f"{gpu}\n"


def test_an_mpirun_inside_a_slurm_job_says_the_rank(tmp_path):
    """Oracle: mpirun's number; Slurm's number belongs to the daemon that started the ranks."""
    ranks = {"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert bound(tmp_path, **ranks).stdout == "3\n"


def test_a_start_without_a_launcher_is_refused_in_one_line(tmp_path):
    """Oracle: code 2 and a remedy."""
    found = bound(tmp_path)
    assert found.returncode == 2
    assert found.stderr == (
        "bind_gpu.sh: no launcher has set the local rank; start it under mpirun or srun\n"
    )


def bound_without_nvidia(tmp_path: Path, **environment: str) -> str:
    """Return what the wrapper shows to local rank 5 where there is no nvidia-smi."""
    seen = [
        "ROCR_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
        "HIP_VISIBLE_DEVICES",
        "CUDA_VISIBLE_DEVICES",
    ]
    shown = " ".join(f"{name}=${{{name}-none}}" for name in seen)
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("sh", "tr", "awk"):
        (tools / name).unlink(missing_ok=True)
        (tools / name).symlink_to(str(shutil.which(name)))
    found = subprocess.run(
        [str(BIND), "sh", "-c", f'echo "{shown}"'],
        env={"PATH": str(tools), "SLURM_LOCALID": "5"} | environment,
        capture_output=True,
        text=True,
        timeout=paced(240),
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_gpus_of_amd_and_intel_have_variables_of_their_own(tmp_path):
    """Oracle: by hand. HIP counts from 0 among the GPUs that ROCR_VISIBLE_DEVICES leaves."""
    eight = "0,1,2,3,4,5,6,7"
    found = bound_without_nvidia(tmp_path, ROCR_VISIBLE_DEVICES=eight, HIP_VISIBLE_DEVICES=eight)
    none = "HIP_VISIBLE_DEVICES=none CUDA_VISIBLE_DEVICES=none"
    assert found == f"ROCR_VISIBLE_DEVICES=5 ZE_AFFINITY_MASK=none {none}"
    found = bound_without_nvidia(tmp_path, ZE_AFFINITY_MASK="0.0,0.1,1.0,1.1")
    assert found == f"ROCR_VISIBLE_DEVICES=none ZE_AFFINITY_MASK=0.1 {none}"


def test_on_nodes_of_nvidia_only_cuda_s_variable_counts(tmp_path):
    """Oracle: four GPUs; Slurm may set the variables of all makers."""
    others = {"ROCR_VISIBLE_DEVICES": "0,1", "ZE_AFFINITY_MASK": "0,1"}
    assert bound(tmp_path, SLURM_LOCALID="3", **others).stdout == "3\n"
