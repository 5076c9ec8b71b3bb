"""Emulated hosts of jobs/emulated_cluster.sh, for real; no time has an upper bound."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from support.pace import paced

pytestmark = pytest.mark.slow

JOBS = Path(__file__).parents[2] / "jobs"
NAME = f"test{os.getpid()}"  # no cluster of a user, nor of a parallel test
STATE = Path(f"/run/mpikfac-{NAME}")
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "setsid", "flock", "pgrep")
PROBE = """
ip link add end1 type veth peer name end2 && ip link add hub type bridge &&
tc qdisc add dev end1 root tbf rate 1gbit burst 125000 latency 50ms
"""
# A project in a folder with a blank; the project uses the virtual environment of the tests.
COMMON = f"""
. "{JOBS}/common.sh"
ROOT=$(cd "$(dirname "${{BASH_SOURCE[0]}}")/.." && pwd)
VENV="{sys.prefix}"
make_venv() {{ :; }}
install() {{ echo "install $*"; }}
"""
HOSTS = 3
SHORT = ("sleep", "0.2")  # Open MPI may miss the end of a command as quick as `true`

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    """Return the script in an own project."""
    if reason := cannot_start():
        pytest.skip(reason)
    jobs = tmp_path_factory.mktemp("emulated") / "a project" / "jobs"
    jobs.mkdir(parents=True)
    for name in ("emulated_cluster.sh", "emulated_host.sh"):
        shutil.copy(JOBS / name, jobs)
    (jobs / "common.sh").write_text(COMMON)
    return jobs / "emulated_cluster.sh"


def cannot_start() -> str | None:
    """Return why this machine cannot start a cluster; None if it can."""
    if missing := [name for name in TOOLS if not shutil.which(name)]:
        return f"not installed: {', '.join(missing)}; Debian: iproute2, util-linux, procps"
    if not Path(sys.prefix, "bin", "mpirun").exists():
        return "the Open MPI of PyPI, which the jobs run with, is not installed beside this Python"
    probe = ["unshare", "--pid", "--fork", "--mount-proc", "--net", "sh", "-c", PROBE]
    tried = subprocess.run(probe, capture_output=True, text=True)
    if os.getuid() or tried.returncode:
        return f"takes root's rights, bridges and shaped links: {tried.stderr.strip()}"
    return None


def environment(**more: str) -> dict[str, str]:
    """Return the script's environment."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("MPIRUN")}
    return plain | {"MPIKFAC_CLUSTER": NAME} | more


@pytest.fixture(scope="module")
def call(script) -> Iterator[Run]:
    """Return a function that calls the script, in a directory, with a larger environment."""

    def run(*args: str, cwd: Path = JOBS, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(script), *args],
            cwd=cwd,
            env=environment(**more),
            capture_output=True,
            text=True,
            timeout=paced(240),
        )

    yield run
    run("down")


@pytest.fixture
def cluster(call) -> Run:
    """Return `call` with a running cluster at 100 Mbit/s."""
    if call("status").returncode:
        up = call("up", str(HOSTS), "--rate", "100mbit")
        assert up.returncode == 0, up.stderr
    return call


def program(path: Path, text: str) -> Path:
    """Make `path` an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def ranks(job: psutil.Process) -> int:
    """Return how many ranks of a sleeping job have started."""
    count = 0
    for process in job.children(recursive=True):
        with suppress(psutil.Error):  # the process has ended
            count += process.cmdline() == ["sleep", "3600"]
    return count


@pytest.fixture
def sleeping(cluster, script, tmp_path) -> Iterator[subprocess.Popen[str]]:
    """Return a job of two ranks per host that takes an hour; temporary files go to `tmp_path`."""
    command = ["bash", str(script), "run", "-n", str(2 * HOSTS), "sleep", "3600"]
    more = environment(TMPDIR=str(tmp_path))
    job = subprocess.Popen(command, env=more, start_new_session=True)
    try:
        wait_until(lambda: ranks(psutil.Process(job.pid)) == 2 * HOSTS)
        yield job
    finally:
        job.kill()
        job.wait()


def wait_until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + paced(240)
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def network() -> str:
    """Return this machine's own network and mounts."""
    commands = (["ip", "-brief", "link"], ["ip", "-brief", "address"], ["ip", "netns"])
    seen = [subprocess.run(one, capture_output=True, text=True).stdout for one in commands]
    return "".join([*seen, Path("/proc/self/mounts").read_text()])


def namespaces(process: psutil.Process) -> set[str]:
    """Return the process's namespaces that this test does not share."""
    own = set()
    for kind in ("net", "uts", "mnt", "ipc", "pid"):
        with suppress(FileNotFoundError, PermissionError):  # ended, or no permission
            own |= {os.readlink(f"/proc/{process.pid}/ns/{kind}")}
            own -= {os.readlink(f"/proc/self/ns/{kind}")}
    return own


def inhabited() -> set[str]:
    """Return all namespaces with a process."""
    return set().union(*map(namespaces, psutil.process_iter()))


def test_mpi_sees_one_node_per_host(cluster, tmp_path):
    """Oracle: MPI's communicators of ranks that share memory, and the hosts' names."""
    who = tmp_path / "who.py"
    who.write_text(
        "import os; from mpi4py import MPI; world = MPI.COMM_WORLD\n"
        "mates = world.Split_type(MPI.COMM_TYPE_SHARED).size\n"
        "all = world.gather((world.rank, os.uname().nodename, mates))\n"
        "if world.rank == 0: print(all)"
    )
    one = cluster("run", "python", "-m", "mpi4py", str(who))
    assert one.stdout.strip() == str([(k, f"node{k + 1}", 1) for k in range(HOSTS)]), one.stderr
    two = cluster("run", "-n", str(2 * HOSTS), "python", "-m", "mpi4py", str(who))
    blocks = [(k, f"node{k // 2 + 1}", 2) for k in range(2 * HOSTS)]
    assert two.stdout.strip() == str(blocks), two.stderr
    more = cluster("run", "-n", str(HOSTS + 1), "python", "-m", "mpi4py", str(who))
    dealt = [(k, f"node{k % HOSTS + 1}", 2 if k % HOSTS == 0 else 1) for k in range(HOSTS + 1)]
    assert more.stdout.strip() == str(dealt), more.stderr


def test_environment_and_folder_arrive_on_all_hosts(cluster, tmp_path):
    """Oracle: the caller's environment and folder; the virtual environment's interpreter."""
    names = ("MPIKFAC_WORD", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "HOME")
    given = {name: f"/{name} 'with \"quotes\"'; and $more" for name in names}
    text = f"import os, sys; print([os.environ[k] for k in {names}], os.getcwd(), sys.prefix)"
    ran = cluster("run", "python", "-c", text, cwd=tmp_path, **given)
    expected = f"{list(given.values())} {tmp_path} {sys.prefix}\n"
    assert ran.stdout == HOSTS * expected, ran.stderr


def test_a_transfer_takes_no_less_time_than_the_rate_allows(cluster, tmp_path):
    """Oracle: 4 MiB over the single link that all data must pass, less the first 1 ms of data.

    Every clock starts before the clock's rank lets the remaining ranks begin. In a Bcast on two
    hosts the link is either host's link. In a Gather the link is the receiving host's link, in a
    Scatter the sending host's link.
    """
    timed = tmp_path / "timed.py"
    timed.write_text(
        "import sys, time; import numpy; from mpi4py import MPI; world = MPI.COMM_WORLD\n"
        "def seconds(call, *args):\n"
        "    start = time.perf_counter(); world.Barrier(); call(*args); world.Barrier()\n"
        "    return time.perf_counter() - start\n"
        "others = world.size - 1\n"
        "part = numpy.ones(2**22 // others, numpy.uint8)\n"
        "all = numpy.ones(world.size * part.size, numpy.uint8)\n"
        "whole = numpy.ones(2**22, numpy.uint8)\n"
        "took = [seconds(world.Bcast, whole, 0), seconds(world.Bcast, whole, others),\n"
        "        seconds(world.Gather, part, all), seconds(world.Scatter, all, part)]\n"
        "if world.rank == 0: print(*took)"
    )
    run = ("run", "-n", "2", "python", "-m", "mpi4py", str(timed))
    for how, bits in ((run, 1e8), (("rate", "1gbit"), 1e9), (run, 1e9), (("run", *run[3:]), 1e9)):
        ran = cluster(*how)
        assert ran.returncode == 0, ran.stderr
        took = [float(word) for word in ran.stdout.split()]
        assert len(took) == (4 if how[0] == "run" else 0)
        assert all(seconds >= 8 * 2**22 / bits - 1.1e-3 for seconds in took), (took, bits)
    assert cluster("rate", "100mbit").returncode == 0
    took = [float(word) for word in cluster("run", *run[3:]).stdout.split()]
    assert min(took) >= 8 * 2**22 / 1e8 - 1.1e-3, took


def test_status_says_the_kernel_s_rate(cluster):
    """Oracle: the requested rate, on the links of both directions."""
    assert cluster("rate", "250mbit").returncode == 0
    assert cluster("status").stdout == "up: hosts node1 to node3, rate 250Mbit each way\n"
    shaped = cluster("run", "sh", "-c", "sleep 0.2; tc qdisc show dev eth0").stdout
    assert shaped.count("rate 250Mbit burst 31250b") == HOSTS
    assert cluster("rate", "100mbit").returncode == 0


def test_the_exit_code_is_the_command_s(cluster):
    """Oracle: the exit code of the last rank."""
    text = f"import os; os._exit(7 * (os.environ['OMPI_COMM_WORLD_RANK'] == '{HOSTS - 1}'))"
    assert cluster("run", "python", "-c", text).returncode == 7
    assert cluster("run", *SHORT).returncode == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_job_that_is_ended_leaves_nothing(sleeping, tmp_path, how):
    """Oracle: the job's processes before, and the folder for the job's temporary files."""
    family = psutil.Process(sleeping.pid).children(recursive=True)
    assert len(family) > 2 * HOSTS
    sleeping.send_signal(how)
    assert sleeping.wait(timeout=paced(240)) == -how
    assert psutil.wait_procs(family, timeout=paced(60))[1] == []
    assert list(tmp_path.iterdir()) == []


def test_down_ends_all_that_runs_and_leaves_nothing(sleeping, cluster):
    """Oracle: processes and namespaces of a running job; this machine's network and mounts."""
    machine = network()
    bystander = psutil.Process()
    family = psutil.Process(sleeping.pid).children(recursive=True)
    held = set().union(*map(namespaces, family))
    assert len(held) > 3 * HOSTS
    assert held <= inhabited()
    down = cluster("down")
    assert (down.returncode, down.stdout, down.stderr) == (0, "", "")
    assert sleeping.wait(timeout=paced(240)) == -signal.SIGKILL
    assert psutil.wait_procs(family, timeout=paced(60))[1] == []
    assert not held & inhabited()
    assert not STATE.exists()
    assert bystander.is_running()
    assert network() == machine
    assert cluster("down").returncode == 0


def test_a_cluster_changes_nothing_outside(call):
    """Oracle: this machine's network, mounts and name before."""
    call("down")
    machine = (network(), os.uname().nodename, Path("/etc/hosts").read_text())
    assert call("up", "2", "--rate", "1gbit").returncode == 0
    assert (network(), os.uname().nodename, Path("/etc/hosts").read_text()) == machine
    call("down")


def test_one_of_two_at_once_comes_up(script, call):
    """Oracle: the exit codes; a cluster of another name is independent."""
    call("down")
    command = ["bash", str(script), "up", "1", "--rate", "1gbit"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    both = [subprocess.Popen(command, env=environment(), **quiet) for _ in range(2)]
    assert sorted(job.wait(timeout=paced(240)) for job in both) == [0, 2]
    other = {"MPIKFAC_CLUSTER": f"{NAME}-other"}
    try:
        assert call("up", "1", "--rate", "1gbit", **other).returncode == 0
        assert call("run", *SHORT, **other).returncode == 0
        assert call("run", *SHORT).returncode == 0
    finally:
        call("down", **other)
    assert call("status").returncode == 0
    call("down")


def test_ip_and_tc_are_found_without_their_folder_on_path(call):
    """Oracle: the exit codes; a user's PATH often lacks the folder."""
    call("down")
    folders = os.environ["PATH"].split(":")
    path = ":".join(folder for folder in folders if not folder.endswith("sbin"))
    assert call("up", "2", "--rate", "1gbit", PATH=path).returncode == 0
    assert call("run", *SHORT, PATH=path).returncode == 0
    assert call("down", PATH=path).returncode == 0


STEPS = """
import sys
from pathlib import Path
import mpikfac
from mpikfac_apps.guard.reports import Reports
from mpikfac_apps.guard.watchdog import Watchdog
comm, trace, place = mpikfac.world(), mpikfac.Trace(), Path(sys.argv[1])
reports, limit = Reports(place / "hang", comm.rank, comm.size), int(sys.argv[2])
watchdog = Watchdog(reports, limit, lambda: trace.current)
for step in range(10**9):
    watchdog.enter("step", step)
    with trace.stage("reduce gradients"):
        comm.Barrier()
    if step == 10 and comm.rank == 0:
        (place / "started").touch()
"""


def test_a_link_that_goes_down_for_good_ends_the_job(cluster, script, tmp_path):
    """Oracle: code and line of rank 0; the processes before, except those of the lost host.

    Without an end of the launcher, the launcher waits as long as TCP: a quarter of an hour.
    """
    steps = tmp_path / "steps.py"
    steps.write_text(STEPS)
    limit = str(round(paced(3)))
    words = ("python", "-m", "mpi4py", str(steps), str(tmp_path), limit)
    command = ["bash", str(script), "run", *words]
    with open(tmp_path / "said", "w") as said:
        job = subprocess.Popen(command, env=environment(), stdout=said, stderr=said)
    try:
        wait_until((tmp_path / "started").exists)
        holder = (STATE / "holder").read_text().strip()
        down = ["nsenter", f"--target={holder}", "--net", "ip", "link", "set", "node3", "down"]
        subprocess.run(down, check=True)
        assert job.wait(timeout=paced(120)) == 1
    finally:
        job.kill()
        cluster("down")
    assert f"mpikfac: no progress for {limit} s: " in (tmp_path / "said").read_text()


def test_a_failure_half_way_leaves_nothing(call, tmp_path):
    """Oracle: a tc that fails; the exit code, and the directory with a cluster's notes."""
    call("down")
    program(tmp_path / "tc", "echo 'no such kind of link' >&2; exit 1")
    up = call("up", "2", "--rate", "1gbit", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert up.returncode == 2
    assert up.stderr == "no such kind of link\nthe cluster could not be built; see above\n"
    assert not STATE.exists()


def test_killed_half_way_it_leaves_no_process_and_is_no_hindrance(script, call, tmp_path):
    """Oracle: a tc that never ends; the processes before the kill."""
    call("down")
    reached = tmp_path / "reached"
    program(tmp_path / "bin" / "tc", f"touch '{reached}'; exec sleep 3600")
    more = environment(PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    command = ["bash", str(script), "up", "2", "--rate", "1gbit"]
    with subprocess.Popen(command, env=more) as job:
        wait_until(reached.exists)
        family = psutil.Process(job.pid).children(recursive=True)
        assert len(family) >= 3
        job.kill()
    assert psutil.wait_procs(family, timeout=paced(60))[1] == []
    assert call("status").returncode == 1
    assert call("up", "2", "--rate", "1gbit").returncode == 0
    call("down")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("up 0 --rate 1gbit", "HOSTS=0 must be a number from 1 to 64"),
        ("up 65 --rate 1gbit", "HOSTS=65 must be a number from 1 to 64"),
        ("up two --rate 1gbit", "HOSTS=two must be a number from 1 to 64"),
        ("up 2 --rate 100mbps", "RATE=100mbps must be bits per second from 1kbit to 99gbit"),
        ("rate 0mbit", "RATE=0mbit must be bits per second from 1kbit to 99gbit"),
        ("rate 1gbit", "no cluster is up; start one: bash jobs/emulated_cluster.sh up"),
        ("run true", "no cluster is up; start one: bash jobs/emulated_cluster.sh up"),
    ],
)
def test_what_cannot_be_done_is_refused(call, args, says):
    """Oracle: a single line, exit code 2, nothing made."""
    call("down")
    refused = call(*args.split())
    assert refused.returncode == 2
    assert re.fullmatch(rf"{re.escape(says)}.*\n", refused.stderr)
    assert not STATE.exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("up 2 --rate 1gbit", "a cluster is already up"),
        ("run -n 0 true", "RANKS=0 must be a number from 1 to 9999"),
        ("run -n true true", "RANKS=true must be a number from 1 to 9999"),
    ],
)
def test_what_cannot_be_done_on_a_cluster_is_refused(cluster, args, says):
    """Oracle: a single line, exit code 2; the cluster stays."""
    refused = cluster(*args.split())
    assert refused.returncode == 2
    assert re.fullmatch(rf"{re.escape(says)}.*\n", refused.stderr)
    assert cluster("status").returncode == 0


@pytest.mark.parametrize("args", ["", "go", "up 2", "up 2 --speed 1gbit", "rate", "down now"])
def test_what_is_not_understood_is_answered_by_the_usage(call, args):
    """Oracle: the exit code and the first word."""
    answer = call(*args.split())
    assert (answer.returncode, answer.stderr.split()[0]) == (2, "usage:")


def test_another_make_of_mpi_is_refused(cluster, tmp_path):
    """Oracle: a single line, exit code 2."""
    mpirun = program(tmp_path / "bin" / "mpirun", "echo 'HYDRA build details'")
    refused = cluster("run", "true", MPIRUN=str(mpirun))
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"MPIRUN={mpirun} is not Open MPI 5")


def test_the_caller_s_mpirun_is_taken(cluster):
    """Oracle: nothing is installed; the stand-in would report an installation."""
    mpirun = str(Path(sys.prefix, "bin", "mpirun"))
    assert "install mpi" in cluster("run", *SHORT).stderr
    assert "install" not in cluster("run", *SHORT, MPIRUN=mpirun).stderr


def test_a_machine_that_cannot_is_told_why(call, tmp_path):
    """Oracle: stand-ins for another user, and a PATH without tc."""
    program(tmp_path / "user" / "id", "case $1 in -u) echo 1000 ;; *) echo me ;; esac")
    refused = call("down", PATH=f"{tmp_path}/user:{os.environ['PATH']}")
    assert refused.returncode == 2
    assert refused.stderr == "an emulated cluster needs root's rights; this is user me\n"
    (tmp_path / "few").mkdir()
    for tool in ("bash", "dirname", "id"):
        (tmp_path / "few" / tool).symlink_to(shutil.which(tool))
    refused = call("down", PATH=str(tmp_path / "few"))
    assert refused.returncode == 2
    assert re.match("(ip|unshare) is not installed; Debian has it in iproute2", refused.stderr)
    refused = call("status", MPIKFAC_CLUSTER="../name")
    assert refused.returncode == 2
    assert refused.stderr.startswith("MPIKFAC_CLUSTER=../name must be a name of at most 30")
