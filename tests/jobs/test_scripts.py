"""The job scripts, with stand-ins for scheduler and program; test_slurm has a real scheduler."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.pace import paced

JOBS = Path(__file__).parents[2] / "jobs"
SCRIPTS = sorted(path for path in JOBS.glob("*/*.*") if path.suffix in (".sbatch", ".pbs", ".lsf"))
RUN = "runs/cifar10_resnet20_kfac"
STAND_INS = """
set_up() { :; }
mpi() {
    echo "ranks $*"
    echo "flags ${MPIRUN_FLAGS-}, threads ${OMP_NUM_THREADS-}"
    return "${CODE:-0}"
}
qsub() { echo "qsub $*"; }
"""


def run(tmp_path: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return a script's end in a project of stand-ins, as job 7 with 8 ranks.

    The program ends with CODE.
    """
    (tmp_path / "jobs").mkdir(exist_ok=True)
    (tmp_path / "jobs" / "common.sh").write_text(f". '{JOBS}/common.sh'\n{STAND_INS}")
    (tmp_path / "nodes").write_text("n1\n" * 4 + "n2\n" * 4)
    scheduler = {"PBS_O_WORKDIR": tmp_path, "PBS_NODEFILE": tmp_path / "nodes", "PBS_JOBID": "7"}
    scheduler |= {"LS_SUBCWD": tmp_path, "LSB_DJOB_NUMPROC": "8", "LSB_JOBID": "7"}
    scheduler |= {"SLURM_SUBMIT_DIR": tmp_path, "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}
    scheduler |= {"SLURM_JOB_END_TIME": "1"}
    return subprocess.run(
        ["bash", str(JOBS / script)],
        env={"PATH": "/usr/bin:/bin", "HOME": "/home/me"} | scheduler | environment,
        capture_output=True,
        text=True,
        timeout=paced(240),
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_has_one_block_to_edit(script):
    """Oracle: bash's parser; the two marks, in order; no scheduler directive follows the block."""
    assert subprocess.run(["bash", "-n", str(script)], timeout=paced(240)).returncode == 0
    before, _, rest = script.read_text().partition("# ---- edit from here ----\n")
    _, _, after = rest.partition("# ---- to here ----\n")
    assert "bash -c '. jobs/common.sh; " in before
    assert after
    assert not any(line.startswith(("#SBATCH", "#PBS", "#BSUB")) for line in after.splitlines())


@pytest.mark.parametrize("name", ["pbs/one_node.pbs", "lsf/one_node.lsf"])
def test_a_job_starts_the_program_on_all_its_ranks_and_hands_on_its_code(tmp_path, name):
    """Oracle: the options that stop the program in time and resume the program."""
    job = run(tmp_path, name, CODE="3")
    assert job.stdout.startswith("ranks 8 -m mpikfac_apps train --config jobs/configs/")
    assert "--resume auto --run_dir runs/cifar10_budget_kfac --max_time 60" in job.stdout
    assert job.returncode == 3


@pytest.mark.parametrize(("code", "again"), [(0, False), (3, False), (75, True)])
def test_a_pbs_job_that_was_stopped_submits_its_successor(tmp_path, code, again):
    """Oracle: the program's code; the run directory is that of every job of the script."""
    job = run(tmp_path, "pbs/multi_node.pbs", CODE=str(code))
    assert f"--run_dir {RUN} --resume auto --max_time 240 --exit_code 75" in job.stdout
    assert ("qsub jobs/pbs/multi_node.pbs" in job.stdout) == again
    assert job.returncode == (0 if again else code)


def test_an_lsf_job_that_was_stopped_ends_with_the_code_for_which_it_is_requeued(tmp_path):
    """Oracle: the codes of #BSUB -Q."""
    job = run(tmp_path, "lsf/multi_node.lsf", CODE="75")
    assert f"--run_dir {RUN} --resume auto --max_time 240 --exit_code 75" in job.stdout
    assert job.returncode == 75
    assert '#BSUB -Q "75"' in (JOBS / "lsf" / "multi_node.lsf").read_text()


@pytest.mark.parametrize(
    "name", ["slurm/multi_node.sbatch", "pbs/multi_node.pbs", "lsf/multi_node.lsf"]
)
@pytest.mark.parametrize("lost", [True, False])
def test_a_run_that_lost_a_host_is_not_complete_although_mpirun_returns_0(tmp_path, name, lost):
    """Oracle: the lock, which only a run that ends by itself removes."""
    if lost:
        (tmp_path / RUN).mkdir(parents=True)
        (tmp_path / RUN / "lock").touch()
    job = run(tmp_path, name)
    assert job.returncode == lost
    why = "the run was ended from outside, perhaps because a host was lost"
    told = f"{RUN}/lock still exists: {why}\n"
    assert job.stderr == (told if lost else "")


@pytest.mark.parametrize("name", ["slurm/multi_node.sbatch", "slurm/requeue.sbatch"])
@pytest.mark.parametrize(("cores", "asked"), [("3", " --cpus-per-task=3"), ("", "")])
def test_ranks_under_srun_get_the_cores_that_the_job_asked_for(tmp_path, name, cores, asked):
    """Oracle: srun's option, which srun does not take from the job; none if the job has none."""
    script = tmp_path / "jobs" / "edited"
    script.parent.mkdir()
    script.write_text((JOBS / name).read_text().replace("launcher=mpirun", "launcher=srun"))
    more = {"SLURM_CPUS_PER_TASK": cores} if cores else {}
    job = run(tmp_path, str(script), **more)
    (flags,) = (line for line in job.stdout.splitlines() if line.startswith("flags "))
    assert flags.startswith("flags --mpi=pmix")
    assert flags.endswith(f"{asked}, threads {cores or 1}")
    assert ("--cpus-per-task" in flags) == bool(cores)
