"""The job scripts on a real Slurm: four nodes on this machine, started by slurm/cluster.sh.

The scripts run unchanged except for the marked block, as users edit the block.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import mpikfac
from support.launch import PROGRAMS, TRAIN
from support.pace import paced

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOOLS = ("slurmctld", "slurmd", "srun", "munged", "unshare", "nsenter", "ip", "pgrep")
NAMESPACES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--net")
# The wheel with the wheel's PMIx; shared memory and the only network of the cluster's namespaces.
WHEEL = {
    "MPI4PY_LIBMPI": f"{sys.prefix}/lib:",
    "OPAL_PREFIX": sys.prefix,
    "PMIX_PREFIX": sys.prefix,
    "PMIX_MCA_psec": "native",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_btl_sm_backing_directory": "/dev/shm",
    "OMPI_MCA_btl_tcp_if_include": "lo",
}
PROGRAM = "--batch=120 --data.train_images=360 --epochs=40 --log_every=1 --checkpoint_every=40"
STEPS = 120
PATIENCE = paced(600)  # seconds, on a machine that does other things too
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
REQUEUES = 10 if os.environ.get("MPIKFAC_SOAK") else 3
# A project that uses the virtual environment of the tests.
COMMON = f"""
. "{ROOT}/jobs/common.sh"
VENV="{sys.prefix}" PYTHON="{sys.executable}"
make_venv() {{ :; }}
install() {{ :; }}
eval "$(declare -f mpi | sed '1s/mpi/python_on_ranks/')"
mpi() {{
    [ "$2" = -c ] || set -- "$1" "{PROGRAMS}/slow.py" "${{@:5}}" # for -m mpikfac_apps train
    python_on_ranks "$@"
}}
"""
BLOCK = """#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --output=log
#SBATCH {sbatch}
launcher=srun plugin={plugin}
config="{root}/jobs/configs/digits_kfac.yaml"
run_dir=run options=({program} --resume=auto)
"""

Slurm = Callable[..., str]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Return a function that runs a command on a cluster, in a directory, and returns output."""
    if reason := cannot_start():
        pytest.skip(reason)
    start = [*NAMESPACES, "bash", str(HERE / "slurm" / "cluster.sh")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # Out of reach of an interrupt from the keyboard: the cluster ends when its input ends.
    with subprocess.Popen(start, **pipes, start_new_session=True) as job:
        ready, _, directory = job.stdout.readline().strip().partition(" ")
        assert ready == "ready"
        (first,) = psutil.Process(job.pid).children()
        environment = os.environ | WHEEL | {"SLURM_CONF": f"{directory}/slurm.conf"}

        def run(*command: str, cwd: Path = ROOT) -> str:
            return subprocess.run(
                ["nsenter", f"--target={first.pid}", "--all", f"--wd={cwd}", *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=paced(240),
            ).stdout

        yield run


def cannot_start() -> str | None:
    """Return why this machine cannot start a cluster; None if it can."""
    if missing := [name for name in TOOLS if not shutil.which(name)]:
        return f"not installed: {', '.join(missing)}; .ci/run installs Slurm on Debian"
    if not Path(sys.prefix, "bin", "mpirun").exists():
        return "the Open MPI of PyPI, which the jobs run with, is not installed beside this Python"
    if subprocess.run([*NAMESPACES, "true"], stderr=subprocess.DEVNULL).returncode:
        return "a cluster needs namespaces of its own, which take root's rights"
    return None


@dataclass
class Job:
    """A submitted job script, with steps of half a second until told to hurry."""

    slurm: Slurm
    project: Path
    id: str

    @property
    def state(self) -> str:
        """Return RUNNING, PENDING, ..., as Slurm has it."""
        return re.search(r"JobState=(\S+)", self.slurm("scontrol", "show", "job", self.id))[1]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the job's measurements after every step, without times."""
        metrics = self.project / "run" / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        clock = ("seconds", "images_per_second", "communication")
        return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]

    @property
    def log(self) -> str:
        """Return the job's whole output."""
        return (self.project / "log").read_text()

    def take_a_step(self) -> None:
        """Wait for a further step."""
        before = len(self.rows)
        self.wait("a step", lambda: len(self.rows) > before)

    def wait(self, what: str, reached: Callable[[], bool]) -> None:
        """Wait until `reached()` is true."""
        end = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < end, f"waited for {what}; {self.state}:\n{self.log}"
            time.sleep(0.1)

    def start_again(self, count: int, *changes: str) -> None:
        """Start a requeued job now, for the `count`-th time; Slurm alone waits for two minutes.

        With `changes`, such as "TimeLimit=30", in what it asks for.
        """
        # If nodes are free at once, Slurm may not wait.
        begun = f"restart {count}"
        self.wait("its return to the queue", lambda: self.state == "PENDING" or begun in self.log)
        # Daemons of the old and the new step, with equal names, would share a socket.
        step = rf"^slurmstepd: \[{self.id}\."
        self.wait(
            "the end of its steps",
            lambda: begun in self.log or not self.slurm("pgrep", "--full", step),
        )
        self.slurm("scontrol", "update", f"JobId={self.id}", "StartTime=now+1", *changes)
        self.wait("its restart", lambda: begun in self.log)

    def finish(self) -> None:
        """Wait for the job's end, in a hurry."""
        (self.project / "hurry").touch()
        self.wait("its end", lambda: self.state not in ("RUNNING", "PENDING", "COMPLETING"))


@pytest.fixture
def submit(slurm, tmp_path_factory) -> Callable[..., Job]:
    """Return a function that submits a script with an edited block."""
    return lambda *how, **more: submitted(slurm, tmp_path_factory.mktemp("job"), *how, **more)


def submitted(slurm: Slurm, project: Path, script: str, sbatch: str, plugin: str = "pmix") -> Job:
    (project / "jobs").mkdir(exist_ok=True)
    (project / "jobs" / "common.sh").write_text(COMMON)
    block = BLOCK.format(sbatch=sbatch, plugin=plugin, root=ROOT, program=PROGRAM)
    text = (ROOT / "jobs" / "slurm" / script).read_text()
    marked = r"(?s)(?<=# ---- edit from here ----\n).*(?=# ---- to here ----)"
    (project / script).write_text(re.sub(marked, lambda _: block, text))
    return Job(slurm, project, slurm("sbatch", "--parsable", script, cwd=project).strip())


@pytest.fixture(scope="module")
def limited(slurm, tmp_path_factory) -> Job:
    """Return a job of two minutes; Slurm signals the limit 75 s before, or up to 30 s earlier."""
    project = tmp_path_factory.mktemp("limited")
    return submitted(slurm, project, "requeue.sbatch", "-t 2 -w n1,n2 --signal=USR1@75")


@pytest.fixture(scope="module")
def undisturbed(slurm, limited, tmp_path_factory) -> Job:
    """Return a complete run."""
    project = tmp_path_factory.mktemp("undisturbed")
    job = submitted(slurm, project, "multi_node.sbatch", "--time=30 --nodelist=n3,n4")
    job.finish()
    return job


def saved(job: Job) -> dict[str, Any]:
    """Return the items of the job's last checkpoint, without times and options."""
    path = mpikfac.checkpoint.latest_checkpoint(job.project / "run" / "checkpoints")
    items = dict(mpikfac.load_checkpoint(mpikfac.world(), path))
    timed = ("run/seconds", "run/metrics_bytes", "run/data")
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in items.items()
        if name not in timed
    }


def assert_same_training(job: Job, expected: Job) -> None:
    """Check that both jobs took every step once, and ended with the same numbers, bit for bit."""
    assert job.state == "COMPLETED", job.log
    assert job.rows == expected.rows
    assert saved(job) == saved(expected)


@pytest.mark.gate
def test_srun_starts_two_ranks_on_two_nodes(undisturbed):
    """Oracle: Slurm's and the program's count of ranks, and all the steps."""
    assert undisturbed.state == "COMPLETED", undisturbed.log
    assert "ranks 2," in undisturbed.log
    assert undisturbed.rows[-1]["step"] == STEPS


def test_a_job_that_is_preempted_and_requeued_goes_on_exactly(submit, undisturbed):
    """Oracle: the undisturbed run, and Slurm's count of restarts."""
    job = submit("requeue.sbatch", "--time=30 --nodelist=n3,n4")
    job.take_a_step()
    urgent = ("--partition=urgent", "--nodelist=n3,n4", "--nodes=2", "--exclusive")
    assert "urgent" in job.slurm("srun", *urgent, "echo", "urgent")
    job.start_again(1)
    for count in range(2, REQUEUES + 2):
        job.take_a_step()
        job.slurm("scontrol", "requeue", job.id)
        job.start_again(count)
    job.finish()
    assert_same_training(job, undisturbed)


def test_a_job_that_is_cancelled_stays_cancelled(submit):
    """Oracle: Slurm's state of the job, and the job's checkpoint."""
    job = submit("requeue.sbatch", "--time=30 --nodelist=n3,n4")
    job.take_a_step()
    job.slurm("scancel", job.id)
    job.finish()
    assert job.state == "CANCELLED"
    assert saved(job)["trainer/steps"] == job.rows[-1]["step"]


def test_a_launcher_that_starts_singletons_is_refused_by_the_script(submit):
    """Oracle: the line of jobs/common.sh, once; the job is not requeued."""
    job = submit("requeue.sbatch", "--time=30 --nodelist=n3,n4", plugin="none")
    job.finish()
    assert job.state == "FAILED"
    assert job.log.count("MPIRUN=srun did not start 2 ranks that mpi4py joins into one job") == 1


def test_singletons_are_refused_by_the_program(slurm, tmp_path):
    """Oracle: the program's single line, and no run directory."""
    program = [sys.executable, "-m", "mpi4py", *TRAIN, "--run_dir=run"]
    found = slurm("srun", "--mpi=none", "--ntasks=2", *program, "--batch=120", cwd=tmp_path)
    assert found.count("mpikfac: ") == 1
    assert "separate jobs" in found
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_waits_for_another_continues_its_run(slurm, tmp_path, undisturbed):
    """Oracle: the undisturbed run; the first job stops before its limit of one minute."""
    first = submitted(slurm, tmp_path, "multi_node.sbatch", "-t 1 -w n3,n4")
    sbatch = f"-t 30 -w n3,n4 --dependency=afterany:{first.id}"
    second = submitted(slurm, tmp_path, "multi_node.sbatch", sbatch)
    first.wait("its end", lambda: first.state == "COMPLETED")
    assert 0 < first.rows[-1]["step"] < STEPS
    second.finish()
    assert_same_training(second, undisturbed)


@pytest.mark.gate
def test_a_job_that_reaches_its_time_limit_goes_on_exactly(limited, undisturbed):
    """Oracle: the undisturbed run."""
    limited.start_again(1, "TimeLimit=30")
    limited.finish()
    assert_same_training(limited, undisturbed)
