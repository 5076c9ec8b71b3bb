"""Trackers of runs: what trackers get, and what becomes of a run whose tracker fails."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from mpikfac_apps.tracking.start import Start
from mpikfac_apps.tracking.tracker import Trackers, check
from mpikfac_apps.training import train

QUICK = ("--batch=120", "--data.train_images=360", "--epochs=2", "--log_every=2", "--threads=1")
OWN = """
import json

def log(start):
    lines = open(start.directory / "own.jsonl", "a")
    print(json.dumps({"id": start.id, "step": start.step, "lr": start.options["lr"]}), file=lines)

    def write(step, values):
        print(json.dumps({"step": step, **values}), file=lines, flush=True)

    write.close = lambda: (print('"closed"', file=lines), lines.close())
    return write

def broken(start):
    def write(step, values):
        if step > 2:
            raise RuntimeError("the disk of the tracker is full\\nand more")
    return write

def unable(start):
    raise RuntimeError("no server\\nand more")

def nothing(start):
    pass
"""
STUB_WANDB = """
import json

class Settings(dict):
    def __init__(self, **kept):
        super().__init__(kept)

class Run:
    def __init__(self, path):
        self.file = open(path, "a")
    def note(self, *what):
        print(json.dumps(what), file=self.file, flush=True)
    def define_metric(self, name, step_metric):
        self.note("axis", name, step_metric)
    def log(self, values):
        self.note("log", values)
    def finish(self):
        self.note("finish")

def init(*, dir, id, name, config, resume, mode, settings):
    run = Run(f"{dir}/stub.jsonl")
    run.note("init", id, name, config["kfac.damping"], resume, mode)
    return run
"""
STUB_MLFLOW = """
import json
from types import SimpleNamespace

runs = []

class entities:
    def Metric(key, value, timestamp, step):
        return key, value, step
    def Param(key, value):
        return key, value

class MlflowClient:
    def __init__(self, uri):
        assert uri.startswith("sqlite:////") and uri.endswith("/mlflow/runs.db"), uri
    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=name) if runs else None
    def create_experiment(self, name):
        return name
    def search_runs(self, groups, condition):
        assert groups == ["mpikfac"]
        return [run for run in runs if condition == f"tags.mpikfac = '{run.tags['mpikfac']}'"]
    def create_run(self, group, tags):
        info = SimpleNamespace(run_id=len(runs))
        runs.append(SimpleNamespace(info=info, tags=tags, log=[], params={}, status=[]))
        return runs[-1]
    def update_run(self, run, status):
        runs[run].status.append(status)
    def set_terminated(self, run):
        runs[run].status.append("FINISHED")
    def log_batch(self, run, metrics=(), params=()):
        assert len(params) <= 100 and not {key for key, _ in params} & set(runs[run].params)
        runs[run].log += metrics
        runs[run].params |= dict(params)
"""


def rows(path: Path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()]


def arguments(run: Path, *more: str) -> list[str]:
    return [*QUICK, f"--run_dir={run}", "--resume=auto", *more]


def refused(run: Path, capfd: pytest.CaptureFixture[str], *more: str) -> str:
    """Return the line with which a start ends, with code 2."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as leave:
        train.main(arguments(run, *more))
    assert leave.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    return line


@pytest.fixture
def own(tmp_path) -> Path:
    path = tmp_path / "trackers.py"
    path.write_text(OWN)
    return path


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Return a function that makes a package of a text, in the place of an installed package."""

    def make(name: str, text: str):
        (tmp_path / f"{name}.py").write_text(text)
        for known in [known for known in sys.modules if known.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, known)
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module(name)

    yield make
    for name in ("wandb", "mlflow"):
        sys.modules.pop(name, None)


@pytest.mark.gate
def test_a_function_of_the_user_gets_the_lines_of_metrics(tmp_path, own):
    """Oracle: metrics.jsonl, to six digits; one id at both starts, and the steps of the starts."""
    run = tmp_path / "run"
    chosen = (f"--metrics={own}:log", "--max_steps=3")
    assert train.main(arguments(run, *chosen)) == 0
    assert train.main(arguments(run, *chosen[:1])) == 0
    first, *found = rows(run / "own.jsonl")
    at = found.index("closed")
    second = found[at + 1]
    assert (first["step"], second["step"]) == (0, 3)
    assert first["id"] == second["id"] == (run / "tracking_id").read_text()
    assert first["lr"] == 0.0075
    told = [*found[:at], *found[at + 2 : -1]]
    expected = rows(run / "metrics.jsonl")
    assert len(told) == len(expected) > 4
    for mine, theirs in zip(told, expected):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert found[-1] == "closed"


def test_a_tracker_that_raises_is_left_out(tmp_path, own, capfd):
    """Oracle: the exit code, the lines of the metrics and of the other tracker, one warning."""
    run = tmp_path / "run"
    assert train.main(arguments(run, f"--metrics=[{own}:broken,{own}:log]")) == 0
    assert len(rows(run / "own.jsonl")) == len(rows(run / "metrics.jsonl")) + 2
    warning = f"metrics={own}:broken raised RuntimeError: the disk of the tracker is full; training"
    assert capfd.readouterr().out.count(warning) == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("unable", "unable raised RuntimeError: no server"),
        ("nothing", "nothing returned NoneType, not a function"),
        ("missing", "has no function 'missing'"),
    ],
)
def test_a_tracker_that_cannot_start_ends_the_start(tmp_path, own, name, told):
    """Oracle: one line with the tracker and the reason."""
    with pytest.raises(ValueError, match=told) as error:
        Trackers([f"{own}:{name}"], Start(tmp_path, 0, {}))
    assert "\n" not in str(error.value)


@pytest.mark.gate
def test_a_start_that_fails_is_one_line(tmp_path, own, capfd):
    """Oracle: code 2 and the line; the metrics of an earlier start stay."""
    run = tmp_path / "run"
    assert train.main(arguments(run, "--max_steps=2")) == 0
    before = (run / "metrics.jsonl").read_bytes()
    line = refused(run, capfd, f"--metrics={own}:unable")
    assert line.endswith("unable raised RuntimeError: no server")
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tensorbord", "metrics=tensorbord must be one of tensorboard, wandb, mlflow, or FILE.py"),
        ("missing.py:log", "missing.py is not a file"),
    ],
)
def test_a_tracker_that_does_not_exist(tmp_path, capfd, name, told):
    """Oracle: one line, and no run directory."""
    assert told in refused(tmp_path / "run", capfd, f"--metrics={name}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_package_that_is_missing(monkeypatch, name):
    """Oracle: one line with the remedy."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"is not installed; run pip install {name}"):
        check([name])


@pytest.mark.parametrize("text", ["", "../../elsewhere", "0" * 31 + "\n"])
def test_an_id_that_is_none(tmp_path, text):
    """Oracle: one line that names the file."""
    (tmp_path / "tracking_id").write_text(text)
    with pytest.raises(ValueError, match="tracking_id is damaged: it must contain 32"):
        _ = Start(tmp_path, 0, {}).id


def test_wandb_continues_one_run(tmp_path, stub):
    """Oracle: calls of a stub with wandb's interface."""
    stub("wandb", STUB_WANDB)
    for step in (0, 2):
        trackers = Trackers(["wandb"], Start(tmp_path, step, {"kfac.damping": 0.1}))
        trackers.add(step + 1, {"loss": 0.5})
        trackers.close()
    id = (tmp_path / "tracking_id").read_text()
    begin = [["init", id, tmp_path.name, 0.1, "allow", "offline"], ["axis", "*", "step"]]
    logs = [["log", {"step": step, "loss": 0.5}] for step in (1, 3)]
    found = rows(tmp_path / "stub.jsonl")
    assert found == [*begin, logs[0], ["finish"], *begin, logs[1], ["finish"]]


def test_mlflow_continues_one_run(tmp_path, stub):
    """Oracle: calls of a stub with MLflow's interface; a parameter is logged once."""
    mlflow = stub("mlflow", STUB_MLFLOW)
    options = {f"key{number}": number for number in range(150)}
    for step in (0, 2):
        trackers = Trackers(["mlflow"], Start(tmp_path, step, options))
        trackers.add(step + 1, {"loss": 0.5, "lr": 1.0})
        trackers.close()
    (run,) = mlflow.runs
    assert run.tags == {
        "mpikfac": (tmp_path / "tracking_id").read_text(),
        "mlflow.runName": tmp_path.name,
    }
    assert run.params == {key: str(value) for key, value in options.items()}
    logged = ("loss", 0.5), ("lr", 1.0)
    assert run.log == [(key, value, step) for step in (1, 3) for key, value in logged]
    assert run.status == ["RUNNING", "FINISHED"] * 2


@pytest.mark.gate
@pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="no tensorboard")
def test_tensorboard_shows_one_record_after_a_kill(tmp_path):
    """Oracle: TensorBoard's own reader; steps 4 and 5 of the first start came after step 3."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begin, end in ((0, 5), (3, 6)):
        trackers = Trackers(["tensorboard"], Start(tmp_path, begin, {}))
        for step in range(begin + 1, end + 1):
            trackers.add(step, {"loss": float(step + 10 * begin)})
        if begin:
            trackers.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    steps = {event.step: event.value for event in found.Scalars("loss")}
    assert steps == {1: 1.0, 2: 2.0, 3: 3.0, 4: 34.0, 5: 35.0, 6: 36.0}
    assert len(found.Scalars("loss")) == 6


def test_a_directory_in_the_place_of_the_id(tmp_path):
    """Oracle: one line: the error of the file."""
    (tmp_path / "tracking_id").mkdir()
    with pytest.raises(OSError, match="it is a directory, not a regular file"):
        _ = Start(tmp_path, 0, {}).id


def test_the_tracker_on_the_page_works(tmp_path):
    """Oracle: the loss of one of two lines, by hand."""
    page = Path(__file__).parents[2] / "docs" / "guide" / "training.md"
    codes = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (code,) = (code for code in codes if "def log(start)" in code)
    (tmp_path / "page.py").write_text(code)
    trackers = Trackers([f"{tmp_path / 'page.py'}:log"], Start(tmp_path, 0, {}))
    trackers.add(2, {"loss": 0.5})
    trackers.add(3, {"test_loss": 0.25})
    trackers.close()
    assert (tmp_path / "losses.txt").read_text() == "2 0.5\n"
