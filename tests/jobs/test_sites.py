"""The scripts of jobs/sites, and the lines of the page, with stand-ins for launchers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from support.pace import paced

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "jobs"
PAGE = (ROOT / "docs" / "guide" / "clusters.md").read_text()
# LUMI: the seven cores that are free of the eight next to GPUs 0 to 7.
MASKS = [0xFE << 8 * block for block in (6, 7, 2, 3, 0, 1, 4, 5)]
SITES = sorted(path.name for path in (JOBS / "sites").glob("*.sbatch"))
END = "# ---- to here ----\n"
# The stand-ins end as `set_up` and a launcher would; `mpi` is the script's own.
COMMON = f". '{JOBS}/common.sh'\nset_up() {{ PYTHON=python; MPIRUN=${{MPIRUN:-mpirun}}; }}\n"
LAUNCHER = """#!/bin/sh
echo "$(basename "$0") $*"
env
"""
SHOWN = ("OMP_", "OMPI_", "MPICH_", "MPIKFAC_", "CUDA_", "ROCR_", "SLURM_CPU_BIND")
SCHEDULERS = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_END_TIME": "1",
    "PBS_JOBID": "7",
    "LSB_JOBID": "7",
    "LSB_DJOB_NUMPROC": "85",  # of jsrun's hosts: a slot to launch from, and the cores
    "BASH_FUNC_module%%": '() { echo "module $*"; }',
}


def launched(tmp_path: Path, script: str, **environment: str) -> tuple[str, dict[str, str]]:
    """Return the command that a job script's text runs, and the command's environment."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "common.sh").write_text(COMMON)
    (tmp_path / "nodes").write_text("n1\n" * 4 + "n2\n" * 4)
    for name in ("srun", "mpiexec", "jsrun", "mpirun"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(LAUNCHER)
        program.chmod(0o755)
    places = {name: str(tmp_path) for name in ("SLURM_SUBMIT_DIR", "PBS_O_WORKDIR", "LS_SUBCWD")}
    places |= {"PBS_NODEFILE": str(tmp_path / "nodes"), "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    job = subprocess.run(
        ["bash", "-c", script],
        env={"HOME": "/home/me"} | SCHEDULERS | places | environment,
        capture_output=True,
        text=True,
        timeout=paced(240),
    )
    assert (job.returncode, job.stderr) == (0, "")
    lines = job.stdout.splitlines()
    (command,) = (line for line in lines if " -m mpikfac_apps train " in line)
    seen = dict(line.split("=", 1) for line in lines if line.startswith(SHOWN))
    return command, seen


def directives(script: str) -> dict[str, str]:
    """Return the options of a script for sbatch."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script, re.MULTILINE))


@pytest.mark.parametrize(
    ("name", "gpus", "cores", "threads", "flags"),
    [
        ("perlmutter", 4, 32, 16, "--cpu-bind=cores --gpu-bind=none"),
        ("frontier", 8, 7, 7, "--gpus-per-task=1 --gpu-bind=closest"),
        ("leonardo", 4, 8, 8, "--mpi=pmix --cpu-bind=cores --gpu-bind=none"),
        ("juwels", 4, 12, 12, "--threads-per-core=1"),
        ("lumi", 8, 7, 7, f"--cpu-bind=mask_cpu:{','.join(map(hex, MASKS))}"),
    ],
)
def test_a_site_s_script_starts_a_rank_per_gpu(tmp_path, name, gpus, cores, threads, flags):
    """Oracle: the nodes of the site's documentation, and the launcher's command line."""
    script = (JOBS / "sites" / f"{name}.sbatch").read_text()
    asked = directives(script)
    assert (asked["ntasks-per-node"], asked["cpus-per-task"]) == (str(gpus), str(cores))
    job = {"SLURM_NTASKS": str(2 * gpus), "SLURM_CPUS_PER_TASK": str(cores)}
    command, seen = launched(tmp_path, script, **job)
    start = f"srun {flags} --cpus-per-task={cores} --kill-on-bad-exit=1 -n {2 * gpus} python"
    assert command.startswith(f"{start} -m mpi4py -m mpikfac_apps train --config jobs/configs/")
    assert command.endswith("--resume auto --run_dir runs/cifar10_resnet20_kfac")
    assert seen["OMP_NUM_THREADS"] == str(threads)
    # Cray MPICH does not tell what it takes; the remaining MPI does.
    cray = "craype-accel" in script
    assert (seen.get("MPICH_GPU_SUPPORT_ENABLED") == "1") == cray
    assert (seen.get("MPIKFAC_CUDA_AWARE") == "1") == cray


@pytest.mark.parametrize("name", SITES)
def test_a_site_s_script_says_that_it_was_not_run_there_and_how_to_install(name):
    """Oracle: the sentences, and the two settings of pip that build mpi4py with the site's MPI."""
    head = (JOBS / "sites" / name).read_text().partition("# ---- edit")[0]
    told = " ".join(head.replace("#", " ").split())
    assert "Written from public documentation, not run at the site" in told
    assert re.search(r"MPICC=\S+.* PIP_NO_BINARY=mpi4py PIP_NO_CACHE_DIR=1 ", told)
    assert ". jobs/common.sh; make_venv; install" in told
    assert f"`jobs/sites/{name}`" in PAGE


def test_installing_builds_mpi4py_with_the_site_s_compiler(tmp_path):
    """Oracle: what a stand-in for the virtual environment's Python is asked and told."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "common.sh").write_text((JOBS / "common.sh").read_text())
    for name in ("setup.cfg", "constraints.txt"):
        (tmp_path / name).touch()
    for name in ("python", "pip"):
        program = tmp_path / ".venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        told = 'echo "Processing $* by $MPICC, no wheel of $PIP_NO_BINARY"'
        program.write_text(f"#!/bin/sh\n{told}\n")
        program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", ". jobs/common.sh; make_venv; install"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "MPICC": "cc -shared", "PIP_NO_BINARY": "mpi4py"},
        capture_output=True,
        text=True,
        timeout=paced(240),
    )
    assert "--editable .[apps] by cc -shared, no wheel of mpi4py" in done.stdout


def edited(script: str) -> str:
    """Return a job script with the page's commands at the end of the script's block."""
    (lines,) = re.findall(rf"```bash\n# into {re.escape(script)}:\n(.*?)```", PAGE, re.DOTALL)
    commands = [line for line in lines.splitlines(keepends=True) if not line.startswith("#")]
    return (ROOT / script).read_text().replace(END, "".join(commands) + END)


def test_the_page_s_lines_for_slurm(tmp_path):
    """Oracle: srun's own variables, which options on the command line do not overrule."""
    job = {"SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "8"}
    command, seen = launched(tmp_path, edited("jobs/slurm/requeue.sbatch"), **job)
    assert command.startswith(
        "srun --mpi=pmix --cpus-per-task=8 -n 8 python -m mpi4py -m mpikfac_apps"
    )
    assert "bind" not in command
    assert seen["SLURM_CPU_BIND"] == "cores"


def test_the_page_s_lines_for_pbs(tmp_path):
    """Oracle: the options of PALS, and a rank per GPU."""
    command, seen = launched(tmp_path, edited("jobs/pbs/multi_node.pbs"))
    assert command.startswith(
        "mpiexec --ppn 4 --depth 8 --cpu-bind depth -n 8 python -m mpi4py -m mpikfac_apps train"
    )
    assert seen["CUDA_VISIBLE_DEVICES"] == "3,2,1,0"
    assert (seen["MPICH_GPU_SUPPORT_ENABLED"], seen["MPIKFAC_CUDA_AWARE"]) == ("1", "1")


def test_the_page_s_lines_for_lsf(tmp_path):
    """Oracle: a resource set per rank, with a rank, a GPU and a GPU's share of the cores."""
    command, _ = launched(tmp_path, edited("jobs/lsf/multi_node.lsf"))
    assert command.startswith(
        "jsrun -a 1 -c 7 -g 1 -l gpu-cpu -b packed:7 --smpiargs=-gpu -n 12 python -m mpi4py -m m"
    )
