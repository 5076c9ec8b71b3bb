"""Run directories that lost their checkpoints, or have links, pipes and folders for files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from mpikfac_apps.training import train

pytestmark = pytest.mark.gate

QUICK = ("--batch=120", "--data.train_images=360", "--log_every=1", "--threads=1")
FILES = ("config.yaml", "environment.json", "log.txt", "metrics.jsonl")
FOLDERS = ("checkpoints", "control", "hang", "tensorboard", "wandb", "mlflow")


def arguments(run: Path, *more: str) -> list[str]:
    return [*QUICK, f"--run_dir={run}", "--resume=auto", "--max_steps=2", *more]


def refused(run: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Return the line with which a start in the directory ends, with code 2."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as leave:
        train.main(arguments(run))
    assert leave.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    return line


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Return the directory of a run of two steps, with checkpoints of both."""
    run = tmp_path_factory.mktemp("finished") / "run"
    assert train.main(arguments(run, "--checkpoint_every=1")) == 0
    return run


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.parametrize("lost", ["manifests", "checkpoints", "names"])
def test_a_run_that_lost_its_checkpoints_does_not_begin_anew(run, capfd, lost) -> None:
    """Oracle: one line that says what to do; every line of metrics stays."""
    before = (run / "metrics.jsonl").read_bytes()
    for path in (run / "checkpoints").iterdir():
        if lost == "manifests":
            (path / "manifest.json").unlink()
        elif lost == "checkpoints":
            shutil.rmtree(path)
        else:
            path.rename(path.with_name(f"best-{path.name}"))
    line = refused(run, capfd)
    if lost == "manifests":
        assert f"no checkpoint in {run}/checkpoints can be read" in line
        assert line.count("manifest.json is missing") == 2
    else:
        assert f"{run}/checkpoints has none; put a checkpoint back, or delete metrics" in line
    assert (run / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    assert train.main(arguments(run)) == 0


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_killed_before_its_first_checkpoint_begins_anew_aloud(run, capfd, begun) -> None:
    """Oracle: all lines of both starts, in two files; a warning names the first file."""
    before = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints")
    for number in (1, 2):
        if begun:
            (run / "checkpoints" / ".step-000000001.partial").mkdir(parents=True)
        assert train.main(arguments(run)) == 0
        aside = f"the run starts at step 0, and the earlier metrics are in {run}/metrics-{number}"
        assert aside in capfd.readouterr().out
        assert (run / f"metrics-{number}.jsonl").read_bytes() == before
        before = (run / "metrics.jsonl").read_bytes()
        assert json.loads(before.splitlines()[0])["step"] == 1
        shutil.rmtree(run / "checkpoints")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_a_file_of_a_run_that_is_none(run, tmp_path, capfd, name, kind) -> None:
    """Oracle: one line with the name, at once; what a link leads to stays."""
    outside = (run / name).rename(tmp_path / "outside")
    before = outside.read_bytes()
    if kind == "link":
        (run / name).symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(run / name)
    else:
        (run / name).mkdir()
    assert f"{run / name}: it is a {kind}, not a regular file" in refused(run, capfd)
    assert outside.read_bytes() == before


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_folder_of_a_run_that_is_none(run, tmp_path, capfd, name, kind) -> None:
    """Oracle: one line with the name; what a link leads to stays empty."""
    outside = tmp_path / "outside"
    outside.mkdir()
    if (run / name).exists():
        (run / name).rename(tmp_path / "former")
    if kind == "link":
        (run / name).symlink_to(outside)
    else:
        (run / name).write_text("")
    if kind == "file" and name in ("tensorboard", "wandb", "mlflow"):  # left alone
        assert train.main(arguments(run)) == 0
    else:
        line = refused(run, capfd)
        assert f"{run / name}" in line and ("is a link" in line) == (kind == "link")
    assert os.listdir(outside) == []


def test_the_run_directory_itself_may_be_a_link(run, tmp_path) -> None:
    """Oracle: the run goes on."""
    (tmp_path / "link").symlink_to(run)
    assert train.main(arguments(tmp_path / "link")) == 0


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_a_report_of_hanging_ranks_that_is_no_file(run, tmp_path, capfd, kind) -> None:
    """Oracle: the run ends well, and a link's target stays: earlier reports are set aside."""
    outside, report = tmp_path / "outside", run / "hang" / "rank-0.txt"
    outside.write_text("mine")
    report.parent.mkdir()
    if kind == "link":
        report.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(report)
    else:
        report.mkdir()
    assert train.main(arguments(run)) == 0
    assert outside.read_text() == "mine"
