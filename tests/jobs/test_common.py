"""Choices of jobs/common.sh: the interpreter, the time of installation, and the mpirun."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.launch import launcher
from support.pace import paced

COMMON = Path(__file__).parents[2] / "jobs" / "common.sh"


@pytest.fixture
def project(tmp_path):
    """Return a project with nothing but the script, in a folder with a blank in the name."""
    root = tmp_path / "a project"
    (root / "jobs").mkdir(parents=True)
    (root / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(COMMON, root / "jobs")
    (root / "setup.cfg").write_text("one")
    (root / "constraints.txt").write_text("two")
    return root


def program(path: Path, text: str) -> Path:
    """Make `path` an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def run(root: Path, commands: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return the end of `commands` in a bash that sourced the script; the environment is bare."""
    path = environment.pop("path", "")
    clean = {"HOME": str(root), "PATH": f"{path}:/usr/bin:/bin"}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f". jobs/common.sh\n{commands}"],
        cwd=root,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=paced(240),
    )


def choose(root: Path, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Let the script choose an mpirun; the script prints the chosen installation and mpirun."""
    python = shlex.quote(sys.executable)
    commands = f"""
        PYTHON={python}
        install() {{ echo "install $*"; }}
        {before}
        choose_mpirun
        echo "run $MPIRUN"
    """
    return run(root, commands, **environment)


@pytest.mark.gate
def test_a_working_mpirun_on_the_path_is_respected(project, tmp_path):
    mpirun, flags = launcher()
    text = f'exec {shlex.quote(mpirun)} {" ".join(flags)} "$@"'
    site = program(tmp_path / "site mpi" / "bin" / "mpirun", text)
    libraries = Path(mpirun).resolve().parents[1] / "lib"
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # Jobs of tests beside this test can have the same name of shared memory; see jobs/common.sh.
    allowed["OMPI_MCA_btl_sm_backing_directory"] = str(tmp_path)
    found = choose(project, path=str(site.parent), MPI4PY_LIBMPI=f"{libraries}:", **allowed)
    assert found.stdout.splitlines() == [f"using {site}", f"run {site}"], found.stderr


def test_a_broken_mpirun_on_the_path_gives_way_to_the_wheel(project, tmp_path):
    site = program(tmp_path / "site" / "mpirun", "exit 1")
    wheel = program(project / ".venv" / "bin" / "mpirun", "echo 'mpirun (Open MPI) 5.0'")
    found = choose(project, path=str(site.parent))
    said, installed, chosen = found.stdout.splitlines()
    assert said.startswith(f"not using {site}")
    assert (installed, chosen) == ("install mpi", f"run {wheel}")


def test_a_launcher_that_fails_with_code_0_is_not_used(project, tmp_path):
    site = program(tmp_path / "site" / "mpirun", "exit 0")
    program(project / ".venv" / "bin" / "mpirun", "true")
    assert f"not using {site}" in choose(project, path=str(site.parent)).stdout


@pytest.mark.gate
def test_singletons_are_not_taken_for_a_job(project, tmp_path):
    """Oracle: mpi4py's size; an mpirun of another MPI starts two jobs of a single rank."""
    text = 'while [ "$1" != -n ]; do shift; done; shift 2; "$@"'
    site = program(tmp_path / "site" / "mpirun", text)
    program(project / ".venv" / "bin" / "mpirun", "true")
    libraries = Path(sys.executable).parents[1] / "lib"
    found = choose(project, path=str(site.parent), MPI4PY_LIBMPI=f"{libraries}:")
    assert f"not using {site}" in found.stdout


def test_the_project_s_own_mpirun_is_no_site_mpi(project):
    wheel = program(project / ".venv" / "bin" / "mpirun", "exit 1")
    found = choose(project, path=str(wheel.parent))
    assert str(wheel) in found.stdout
    assert "not using" not in found.stdout


def test_a_wrong_mpirun_of_the_caller_ends_the_script(project):
    found = choose(project, MPIRUN="/no/such/mpirun")
    assert found.returncode == 2
    assert found.stderr.splitlines()[-1].startswith("MPIRUN=/no/such/mpirun did not start 2 ranks")
    assert "install" not in found.stdout


@pytest.mark.parametrize(
    ("says", "flags"), [("mpirun (Open MPI) 4.1.4", "--oversubscribe"), ("HYDRA build details", "")]
)
def test_flags_by_make_of_mpi(project, tmp_path, says, flags):
    mpirun = program(tmp_path / "mpirun", f"echo '{says}'")
    commands = f'MPIRUN={shlex.quote(str(mpirun))}; use_site_mpi; echo "flags $MPIRUN_FLAGS"'
    assert run(project, commands).stdout.strip() == f"flags {flags}".strip()
    asked = run(project, commands, MPIRUN_FLAGS="--mine")
    assert asked.stdout == "flags --mine\n"


def test_pip_runs_once_for_the_same_requirements(project):
    """Oracle: a stand-in for python that counts calls."""
    log = project / "calls"
    program(project / ".venv" / "bin" / "python", f'echo "$*" >>{shlex.quote(str(log))}')
    for _ in range(2):
        assert run(project, "install test lint; install").returncode == 0
    first, second = log.read_text().splitlines()
    assert first.endswith("--constraint constraints.txt --editable .[apps,test,lint]")
    assert second.endswith("--editable .[apps]")
    (project / "constraints.txt").write_text("three")
    run(project, "install test lint")
    assert len(log.read_text().splitlines()) == 3


def test_pip_tells_of_each_package_on_the_way(project):
    """Oracle: lines of pip with a file or the installation, and no lines about versions."""
    says = (
        "echo 'Collecting torch>=2.6'; echo '  Downloading torch-2.13.0.whl (190.1 MB)'; "
        "echo 'Requirement already satisfied: numpy'; "
        "echo 'Installing collected packages: torch, mpikfac'; echo 'Successfully installed torch'"
    )
    program(project / ".venv" / "bin" / "python", says)
    first, *lines = run(project, "install").stdout.splitlines()
    assert first.startswith("installing mpikfac[apps] into")
    assert lines == [
        "  Downloading torch-2.13.0.whl (190.1 MB)",
        "  Installing the packages, which takes a minute",
    ]


def test_a_failed_installation_is_tried_again(project):
    program(project / ".venv" / "bin" / "python", "exit 1")
    for _ in range(2):
        failed = run(project, "install test")
        assert (failed.returncode, failed.stderr) == (
            2,
            "pip could not install the project; see above\n",
        )


def test_old_pythons_are_named(project, tmp_path):
    for name in ("python3", "python3.13", "python3.12", "python3.11"):
        program(tmp_path / "old" / name, "echo 3.9; exit 1")
    found = run(project, "find_python", path=str(tmp_path / "old"))
    assert found.returncode == 2
    assert "Python 3.11 or newer is needed" in found.stderr
    assert "python3 is 3.9" in found.stderr


def test_the_first_python_that_is_new_enough_is_taken(project, tmp_path):
    program(tmp_path / "new" / "python3", "echo 3.9; exit 1")
    program(tmp_path / "new" / "python3.13", f'exec {shlex.quote(sys.executable)} "$@"')
    found = run(project, "find_python", path=str(tmp_path / "new"))
    assert found.stdout == "python3.13\n"


def test_home_is_set_for_open_mpi(project):
    commands = ["bash", "-c", '. jobs/common.sh; echo "$HOME"']
    path = {"PATH": os.environ["PATH"]}
    bare = subprocess.run(commands, cwd=project, env=path, capture_output=True, text=True)
    assert Path(bare.stdout.strip()).is_dir()
