"""Runs whose storage fails for a while: training goes on, and no line of metrics is lost."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import mpikfac
from mpikfac_apps.running.checkpoints import Saver
from mpikfac_apps.tracking.metrics_file import MetricsFile
from mpikfac_apps.training import train
from mpikfac_apps.training.run import Run

QUICK = ("--batch=120", "--data.train_images=360", "--epochs=3", "--log_every=1", "--threads=1")
OPTIONS = (*QUICK, "--checkpoint_every=2", "--resume=auto")
TIMES = ("seconds", "images_per_second", "communication")
STEPS = 9


def rows(run: Path) -> list[dict[str, float]]:
    """Return lines of metrics without times."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: row[key] for key in row if key not in TIMES} for row in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict[str, float]]:
    run = tmp_path_factory.mktemp("undisturbed")
    assert train.main([*OPTIONS, f"--run_dir={run}"]) == 0
    return rows(run)


def mounted(*how: str) -> None:
    done = subprocess.run(["mount", *how], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """Return the path of a file system of 16 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted("-t", "tmpfs", "-o", "size=16M", "mpikfac-test", str(place))
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)  # the log is still open


@contextmanager
def full(disk: Path) -> Iterator[None]:
    filler = disk / "filler"
    with open(filler, "wb") as file:
        file.write(bytes(shutil.disk_usage(disk).free))
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Put a read-only mount on the disk; open files stay writable, as Linux wants."""
    mounted("--bind", str(disk), str(disk))
    mounted("-o", "remount,bind,ro", str(disk))
    try:
        yield
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@contextmanager
def out_of_descriptors(disk: Path) -> Iterator[None]:
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Not the lowest free descriptor: a checkpoint that is just written closes lower ones.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, former)


@contextmanager
def without_metrics(disk: Path) -> Iterator[None]:
    (disk / "run" / "metrics.jsonl").unlink()
    yield


@contextmanager
def with_other_metrics(disk: Path) -> Iterator[None]:
    """Replace the file by a copy, as editors do."""
    path = disk / "run" / "metrics.jsonl"
    shutil.copy(path, path.with_name("new"))
    os.replace(path.with_name("new"), path)
    yield


@contextmanager
def with_cut_metrics(disk: Path) -> Iterator[None]:
    """Copy the file and cut off all lines, as log rotation may do."""
    shutil.copy(disk / "run" / "metrics.jsonl", disk / "cut")
    os.truncate(disk / "run" / "metrics.jsonl", 0)
    yield


@contextmanager
def with_half_a_line(disk: Path) -> Iterator[None]:
    with open(disk / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step')
    yield


@contextmanager
def with_renamed_log(disk: Path) -> Iterator[None]:
    (disk / "run" / "log.txt").rename(disk / "run" / "log.txt.1")
    yield


FAULTS = (full, read_only, out_of_descriptors, without_metrics, with_other_metrics)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_run_outlives_storage_that_fails_for_a_while(disk, undisturbed, monkeypatch, fault):
    """Oracle: metrics and the last checkpoint's step of an undisturbed run."""
    step = Run.step
    with ExitStack() as failing:

        def disturbed(run: Run, number: int, *batch: object) -> None:
            if number in (3, 6):
                run.saver.settle()
            if number == 3:
                failing.enter_context(fault(disk))
            if number == 6:
                failing.close()
            step(run, number, *batch)

        monkeypatch.setattr(Run, "step", disturbed)
        assert train.main([*OPTIONS, f"--run_dir={disk / 'run'}"]) == 0
    assert rows(disk / "run") == undisturbed
    found = mpikfac.find_checkpoint(mpikfac.world(), disk / "run" / "checkpoints")
    assert found.step == STEPS
    log = (disk / "run" / "log.txt").read_text()
    warned = "training continues" if fault in FAULTS[:3] else "metrics.jsonl was removed or"
    assert warned in log


def disturbed_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, fault, *options: str, at: int = 3
) -> int:
    """Return the exit code of a run with a fault before a step."""
    step = Run.step

    def disturbed(trained: Run, number: int, *batch: object) -> None:
        if number == at:
            trained.saver.settle()
            fault(run.parent).__enter__()
        step(trained, number, *batch)

    monkeypatch.setattr(Run, "step", disturbed)
    return train.main([*OPTIONS, f"--run_dir={run}", *options])


def test_lines_that_somebody_cuts_off_are_told(tmp_path, undisturbed, monkeypatch):
    """Oracle: the copy and the file together are the undisturbed run; a warning has the bytes."""
    run = tmp_path / "run"
    assert disturbed_run(run, monkeypatch, with_cut_metrics) == 0
    lost = (tmp_path / "cut").stat().st_size
    told = f"metrics.jsonl has only 0 of the {lost} bytes that were written: lines have been lost"
    assert (run / "log.txt").read_text().count(told) == 1
    steps = [row["step"] for row in rows(run)]
    assert steps and steps == [row["step"] for row in undisturbed][-len(steps) :]
    shutil.move(tmp_path / "cut", tmp_path / "metrics.jsonl")
    assert rows(tmp_path) + rows(run) == undisturbed


def test_a_line_begins_at_the_begin_of_a_line(tmp_path, undisturbed, monkeypatch):
    """Oracle: the undisturbed run, without the line of somebody else."""
    run = tmp_path / "run"
    assert disturbed_run(run, monkeypatch, with_half_a_line) == 0
    text = (run / "metrics.jsonl").read_text()
    assert text.count('{"step\n') == 1
    (run / "metrics.jsonl").write_text(text.replace('{"step\n', ""))
    assert rows(run) == undisturbed


GONE: dict[str, Callable[[Path], object]] = {
    "moved": lambda run: run.rename(run.with_name("elsewhere")),
    # Renamed first, because the run adds files while others are removed.
    "deleted": lambda run: shutil.rmtree(run.rename(run.with_name("old")), ignore_errors=True),
    "replaced": lambda run: shutil.copytree(run.rename(run.with_name("elsewhere")), run / "other"),
}


@pytest.mark.gate
@pytest.mark.parametrize("how", GONE)
def test_a_run_whose_directory_is_gone_makes_nothing_anew(
    tmp_path, undisturbed, monkeypatch, capfd, how
):
    """Oracle: one line with the cause; the undisturbed run, from the directory's new place."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    gone = contextmanager(lambda place: iter([GONE[how](place / "run")]))
    with pytest.raises(SystemExit) as leave:
        disturbed_run(run, monkeypatch, gone)
    assert leave.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"run_dir={run} was moved or deleted, or has lost its lock" in line
    assert [path.name for path in run.glob("*")] == ["other"] * (how == "replaced")
    assert run.exists() == (how == "replaced")
    if how != "deleted":
        monkeypatch.undo()
        (elsewhere / "lock").unlink()  # it names this process, which lives
        assert train.main([*OPTIONS, f"--run_dir={elsewhere}"]) == 0
        assert rows(elsewhere) == undisturbed


@pytest.mark.gate
@pytest.mark.parametrize("at", [3, 7])
@pytest.mark.parametrize("what", ["checkpoints", "checkpoints/step-*"])
def test_removed_checkpoints_are_told_and_made_anew(tmp_path, monkeypatch, what, at):
    """Oracle: a warning, and the last step's checkpoint, also if it was written before."""
    run = tmp_path / "run"
    emptied = contextmanager(lambda _: iter([[shutil.rmtree(path) for path in run.glob(what)]]))
    assert disturbed_run(run, monkeypatch, emptied, "--checkpoint_every=3", at=at) == 0
    assert "was emptied or removed during the run" in (run / "log.txt").read_text()
    assert mpikfac.find_checkpoint(mpikfac.world(), run / "checkpoints").step == STEPS


@pytest.mark.gate
def test_a_renamed_log_goes_on_under_its_name(tmp_path, monkeypatch):
    """Oracle: the first lines in the renamed file, and the last lines in the new file."""
    run = tmp_path / "run"
    assert disturbed_run(run, monkeypatch, with_renamed_log) == 0
    former, log = (run / "log.txt.1").read_text(), (run / "log.txt").read_text()
    assert "steps 0 to 9" in former and "complete" not in former
    assert "complete after 9 steps" in log and "steps 0 to 9" not in log


@pytest.mark.parametrize("text", ["", "{}\n", '{}\n{"step": 1}\n{"st'])
def test_a_shortened_file_of_metrics_stays_readable(tmp_path, text):
    """Oracle: the whole lines that are left, and the new line."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    metrics = MetricsFile(path, kept_bytes=99)
    metrics.add('{"step": 2}')
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    assert path.read_text() == "".join([*whole, '{"step": 2}\n'])


@pytest.mark.gate
@pytest.mark.parametrize("room", ["before the checkpoint", "after the checkpoint"])
def test_waiting_lines_outlive_a_kill(tmp_path, undisturbed, monkeypatch, room):
    """Oracle: the undisturbed run; the directory as a kill after the checkpoint leaves it."""
    run, killed = tmp_path / "run", tmp_path / "killed"
    save, write = Saver.save, MetricsFile._write
    failing: list[Callable[..., None]] = []

    def saved(saver: Saver, items, step: int, last: bool = False) -> None:
        save(saver, items, step, last)
        if step == 6:
            saver.settle()
            older = shutil.ignore_patterns(".*", "step-*2", "step-*4")  # deleted meanwhile
            shutil.copytree(run, killed, ignore=older)
            (killed / "lock").unlink()

    def written(metrics: MetricsFile) -> None:
        last = metrics._waiting.splitlines()[-1:]
        at = json.loads(last[0])["step"] if last else 0
        if at == 6 and not (room == "before the checkpoint" and failing):
            failing.append(write)
            raise OSError(28, "No space left on device")
        write(metrics)

    monkeypatch.setattr(Saver, "save", saved)
    monkeypatch.setattr(MetricsFile, "_write", written)
    assert train.main([*OPTIONS, f"--run_dir={run}"]) == 0
    assert failing and rows(run) == undisturbed
    monkeypatch.undo()
    assert train.main([*OPTIONS, f"--run_dir={killed}"]) == 0
    assert rows(killed) == undisturbed


@pytest.mark.gate
def test_lost_lines_of_metrics_are_told(tmp_path, undisturbed):
    """Oracle: the lines left in the file, and the lines of the steps that follow."""
    run = tmp_path / "run"
    assert train.main([*OPTIONS, f"--run_dir={run}", "--max_steps=6"]) == 0
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    assert train.main([*OPTIONS, f"--run_dir={run}"]) == 0
    assert "bytes that were written: lines have been lost" in (run / "log.txt").read_text()
    kept = [row["step"] for row in rows(run)]
    assert kept == [row["step"] for row in undisturbed[:2] + undisturbed[len(lines) :]]


def test_a_limit_of_the_size_of_files_is_called_a_limit(tmp_path, caplog):
    """Oracle: the kernel's own refusal; all lines, once the limit is gone."""
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        for _ in range(3):
            metrics.add("x" * 60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caplog.messages == [
        "metrics.jsonl cannot be written: File too large; its lines wait in memory"
    ]
    metrics.add("end")
    assert (tmp_path / "metrics.jsonl").read_text() == 3 * f"{'x' * 60}\n" + "end\n"


@pytest.mark.gate
def test_a_start_on_a_full_disk_names_the_file(disk, capfd):
    """Oracle: one line with the reason and a path in the run directory, and the same checkpoint."""
    run = disk / "run"
    assert train.main([*OPTIONS, f"--run_dir={run}", "--max_steps=2"]) == 0
    with full(disk), pytest.raises(SystemExit) as leave:
        train.main([*OPTIONS, f"--run_dir={run}"])
    assert leave.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "No space left on device: " in line and f"'{run}/.lock-" in line
    assert mpikfac.find_checkpoint(mpikfac.world(), run / "checkpoints").step == 2
