"""Files written by `trace_steps`."""

from __future__ import annotations

import gzip
import json
import re
import signal

import pytest

from mpikfac_apps.training import train
from mpikfac_apps.training.run import Run
from support.launch import TRAIN, launch

QUICK = ("--batch=120", "--data.train_images=720", "--epochs=1", "--threads=1")


def picture(run):
    """Return slices of the trace by rank."""
    found = json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))["traceEvents"]
    by_rank = {}
    for event in found:
        if event["ph"] == "X":
            by_rank.setdefault(event["pid"], []).append(event)
    return by_rank


@pytest.mark.gate
def test_two_ranks_leave_a_timeline_means_and_a_table(tmp_path):
    """Oracle: steps 2 to 4 of 6; stages of a K-FAC step; equal bytes in both files."""
    chosen = ("--trace_steps=3", "--strategy=mem-opt", "--kfac.inv_update_steps=3")
    job = launch(2, *TRAIN, *QUICK, *chosen, f"--run_dir={tmp_path}")
    assert job.returncode == 0, job.stderr
    log = (tmp_path / "log.txt").read_text()
    assert "steps 2 to 4, means over ranks, in ms:" in log
    for name in ("forward", "backward", "statistics", "reduce statistics", "waiting", "step"):
        assert re.search(rf"^  {name} +\d+\.\d\d +\d+\.\d%", log, re.MULTILINE), name
    means = json.loads((tmp_path / "stages.json").read_text())
    assert (means["steps"], means["rows"], means["columns"]) == ([2, 3, 4], 1, 2)
    assert "messages of these steps, in ms:" in log
    assert set(means["collectives"]) == {
        *("reduce statistics", "reduce gradients", "publish gradients")
    }
    for stage, values in means["collectives"].items():
        assert re.search(rf"^  {stage}( +\d+\.\d+){{4}} +0\.0%$", log, re.MULTILINE), stage
        sent = sum(row["stages"][stage]["bytes"] for row in means["ranks"]) / 2
        assert values["bytes"] == pytest.approx(sent)
        assert values["hidden"] == 0 and values["isolated"] > 0
    ranks = picture(tmp_path)
    assert sorted(ranks) == [0, 1]
    for rank, row in enumerate(means["ranks"]):
        names = [event["name"] for event in ranks[rank]]
        assert [name for name in names if name.startswith("step")] == ["step 2", "step 3", "step 4"]
        calls = {name: round(3 * stage["calls"]) for name, stage in row["stages"].items()}
        assert calls == {name: names.count(name) for name in row["stages"]}
        assert names.count("decompose") == 1
        assert names.count("forward") == names.count("backward") == names.count("data") == 3
        sent = sum(event.get("args", {}).get("bytes", 0) for event in ranks[rank])
        assert sent == pytest.approx(3 * sum(s["bytes"] for s in row["stages"].values()))
        assert sum(s["seconds"] for s in row["stages"].values()) == pytest.approx(row["seconds"])


def test_sgd_has_stages_too(tmp_path):
    """Oracle: the program's marks, and the stages of data parallelism; one rank sends nothing."""
    chosen = ("--optimizer=sgd", "--trace_steps=1", f"--run_dir={tmp_path}")
    assert train.main([*QUICK, *chosen]) == 0
    (rank,) = json.loads((tmp_path / "stages.json").read_text())["ranks"]
    assert sorted(rank["stages"]) == sorted(
        ["data", "forward", "backward", "read gradients", "write back", "optimizer", "other"]
    )
    assert rank["beside"] == {}


@pytest.mark.slow
def test_clients_of_servers_have_stages_too(tmp_path):
    """Oracle: two clients of two ranks: sums of a client alone, and messages to the server."""
    chosen = (
        "--strategy=downpour",
        "--optimizer=sgd",
        "--sync.ranks_per_client=2",
        "--trace_steps=2",
    )
    job = launch(5, *TRAIN, *QUICK, *chosen, f"--run_dir={tmp_path}")
    assert job.returncode == 0, job.stderr
    means = json.loads((tmp_path / "stages.json").read_text())
    assert (means["rows"], means["columns"]) == (2, 2)
    found = means["collectives"]
    assert set(found) == {"reduce gradients", "exchange updates"}
    assert found["exchange updates"]["isolated"] is None
    assert found["reduce gradients"]["isolated"] > 0
    for row in means["ranks"]:
        for stage in row["stages"].values():
            assert 0 <= stage["waiting"] <= stage["seconds"]


@pytest.mark.gate
def test_a_run_that_ends_before_leaves_the_steps_that_it_took(tmp_path):
    """Oracle: 4 steps are taken, 2 of 4 warm up; then a second start, with 2 steps left."""
    chosen = ("--trace_steps=10", f"--run_dir={tmp_path}")
    assert train.main([*QUICK, *chosen, "--max_steps=4"]) == 0
    assert json.loads((tmp_path / "stages.json").read_text())["steps"] == [2, 3]
    before = (tmp_path / "stages.json").read_bytes()
    assert train.main([*QUICK, *chosen, "--resume=auto"]) == 0
    text = "trace_steps=10: no steps are left after 2 warm-up steps"
    assert text in (tmp_path / "log.txt").read_text()
    assert (tmp_path / "stages.json").read_bytes() == before


@pytest.mark.gate
def test_a_start_near_the_end_does_not_replace_the_means_of_more_steps(tmp_path):
    """Oracle: the files of the first start; the second start has 1 step after the warm-up."""
    chosen = ("--trace_steps=2", f"--run_dir={tmp_path}", "--epochs=2")
    assert train.main([*QUICK, *chosen, "--max_steps=9"]) == 0
    files = [tmp_path / "stages.json", tmp_path / "trace.json.gz"]
    before = [path.read_bytes() for path in files]
    assert json.loads(before[0])["steps"] == [2, 3]
    assert train.main([*QUICK, *chosen, "--resume=auto"]) == 0
    assert [path.read_bytes() for path in files] == before
    log = (tmp_path / "log.txt").read_text()
    assert "steps 11 to 11, means over ranks" in log
    assert "stages.json and trace.json.gz are kept, because they contain more steps" in log


def test_a_run_that_is_stopped_leaves_the_steps_that_it_took(tmp_path, monkeypatch):
    """Oracle: a signal in step 3, known to all ranks in step 4."""
    step = Run.step

    def signalled(self, number, *batch):
        step(self, number, *batch)
        if number == 3:
            signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(Run, "step", signalled)
    chosen = ("--trace_steps=10", "--epochs=3", f"--run_dir={tmp_path}")
    assert train.main([*QUICK, *chosen]) == 0
    assert "stopped after 5 steps (SIGUSR1)" in (tmp_path / "log.txt").read_text()
    assert json.loads((tmp_path / "stages.json").read_text())["steps"] == [2, 3, 4]


def test_files_that_cannot_be_written_do_not_end_the_run(tmp_path, monkeypatch):
    """Oracle: a directory in a file's place; the run is complete."""
    (tmp_path / "run" / "stages.json").mkdir(parents=True)
    monkeypatch.setattr("mpikfac_apps.guard.guard.check_directory", lambda *_: None)
    assert train.main([*QUICK, "--trace_steps=1", f"--run_dir={tmp_path / 'run'}"]) == 0
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "stages.json and trace.json.gz cannot be written:" in log
    assert "stages.json: it is a directory, not a regular file" in log
    assert "complete after 6 steps" in log


def test_without_the_option_nothing_is_recorded(tmp_path):
    """Oracle: no file, no event."""
    assert train.main([*QUICK, f"--run_dir={tmp_path}"]) == 0
    assert not list(tmp_path.glob("*stages*")) and not list(tmp_path.glob("trace*"))
