"""Tests of the network: of a checkpoint after a run, top-5 accuracy, the best test, patience."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch

import mpikfac
from mpikfac_apps.inspecting import export, inspect
from mpikfac_apps.problems import datasets, models, tasks
from mpikfac_apps.training import settings, train
from mpikfac_apps.training.batches import Normalise
from mpikfac_apps.training.parts.problem import Problem
from mpikfac_apps.training.testing import evaluate
from mpikfac_apps.training.testing.best import Best
from support import pictures
from support.launch import launch
from support.outlive import outlive

TIMES = ("seconds", "images_per_second", "communication")
QUICK = ("--batch=120", "--data.train_images=360", "--optimizer=sgd", "--threads=1")


def arguments(run_dir, *more):
    return [*QUICK, f"--run_dir={run_dir}", *more]


def rows(run_dir):
    """Return lines of metrics without times."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: row[key] for key in row if key not in TIMES} for row in lines]


def numbers(line):
    """Return loss, accuracy and top-5 accuracy of a line of the program, in per cent."""
    return [float(word) for word in re.findall(r"(\d+\.\d+)(?: %|,)", line.rpartition(": ")[2])]


def by_hand(file):
    """Return the same numbers of `digits_cnn` with the weights of a file, on all test images."""
    model, found = models.build("digits_cnn", 10, 1), datasets.load("digits")
    model.load_state_dict(torch.load(file, weights_only=True))
    inputs = Normalise(found.train_images[:360], torch.device("cpu"))(found.test_images)
    with torch.no_grad():
        scores = model.eval()(inputs)
    places = [
        sorted(row, reverse=True).index(row[label])
        for row, label in zip(scores.tolist(), found.test_labels.tolist())
    ]
    shares = [100 * sum(place < k for place in places) / len(places) for k in (1, 5)]
    return [torch.nn.functional.cross_entropy(scores, found.test_labels).item(), *shares]


def test_top_5_is_counted_by_hand():
    """Oracle: by hand, with and without positions; five classes have no top 5."""
    scores = torch.tensor([[6.0, 5, 4, 3, 2, 1], [6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6]])
    assert tasks.right_in_5(scores, torch.tensor([4, 5, 0])) == 1
    assert tasks.right_in_5(scores.T[None], torch.tensor([[4, 5, 1]])) == 2
    assert list(tasks.CLASSIFICATION.tests(6)) == ["accuracy", "top5"]
    assert list(tasks.CLASSIFICATION.tests(5)) == ["accuracy"]
    assert list(tasks.RECONSTRUCTION.tests(10)) == ["error"]


FIXED = """
from torch import nn


def build():
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
"""


def test_images_of_more_classes_than_the_network_has_are_refused(tmp_path, capsys):
    """Oracle: a network of three outputs, and images of three classes, then of four classes."""
    (tmp_path / "fixed.py").write_text(FIXED)
    three, four = (pictures.noise(tmp_path / name, {"train": 4, "val": 2}) for name in ("3", "4"))
    for part in ("train", "val"):
        shutil.copytree(four / part / "ant", four / part / "dog")
    given = f"--data.name=folder --data.path={three} --data.size=8 --data.workers=0 --batch=12"
    own = f"--model={tmp_path}/fixed.py:build --optimizer=sgd --epochs=1 --run_dir={tmp_path}/run"
    assert train.main([*given.split(), *own.split(), "--threads=1"]) == 0
    asked = [f"{tmp_path}/run", "--device=cpu", "--trust"]
    assert evaluate.main(asked) == 0
    with pytest.raises(SystemExit) as left:
        evaluate.main([*asked, f"--data_path={four}"])
    assert left.value.code == 2
    assert "returns [3] for an image, but the data has 4 classes" in capsys.readouterr().err


OF_STRANGERS = """
from pathlib import Path

Path(__file__).with_suffix(".ran").touch()
"""
NETWORK = """

def build():
    from torch import nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""
IMAGES = """

def build():
    from mpikfac_apps.problems import datasets
    return datasets.load("digits")
"""


@pytest.mark.parametrize(("key", "body"), [("model", NETWORK), ("data.name", IMAGES)])
@pytest.mark.parametrize("source", ["checkpoint", "config.yaml"])
def test_a_file_that_a_run_directory_names_is_not_executed(
    tmp_path, monkeypatch, capfd, key, body, source
):
    """Oracle: the file leaves a trace: with --trust alone, and as the training leaves one."""
    file, trace = tmp_path / f"{key[:4]}{source[:4]}.py", tmp_path / f"{key[:4]}{source[:4]}.ran"
    file.write_text(OF_STRANGERS + body)
    run = tmp_path / "run"
    given = ["--batch=120", f"--run_dir={run}", "--max_steps=1", f"--{key}={file}:build"]
    assert train.main([*given, "--optimizer=sgd", "--threads=1"]) == 0
    if source == "config.yaml":  # as earlier versions wrote checkpoints
        monkeypatch.setattr(settings, "saved_run", lambda checkpoint: {})
    trace.unlink()
    file.touch()  # a changed file is executed anew
    with pytest.raises(SystemExit) as left:
        evaluate.main([str(run), "--device=cpu"])
    assert left.value.code == 2 and not trace.exists()
    assert f"{key}={file}:build would run {file}; if you trust the file, pass --trust" in (
        capfd.readouterr().err
    )
    for program in (inspect, export):
        assert program.main([str(run)]) in (0, 2) and not trace.exists()
    assert evaluate.main([str(run), "--device=cpu", "--trust"]) == 0 and trace.exists()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return the directory of a run that averages weights, and keeps the best."""
    root = tmp_path_factory.mktemp("ran")
    with pytest.MonkeyPatch.context() as patch:
        outlive(patch)
        more = ("--epochs=2", "--keep_best", "--ema_decay=0.7")
        assert train.main(arguments(root, *more)) == 0
    return root


def test_a_checkpoint_is_tested_as_in_the_run(ran, tmp_path, capsys):
    """Oracle: the run's last line of metrics; the exported averages on all images at once."""
    file = tmp_path / "average.pt"
    assert export.main([str(ran), f"--average={file}"]) == 0
    capsys.readouterr()
    assert evaluate.main([str(ran)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    last = rows(ran)[-1]
    metrics = last["test_loss"], 100 * last["test_accuracy"], 100 * last["test_top5"]
    assert line.startswith(str(ran / "checkpoints" / "step-000000006") + ": test loss ")
    assert numbers(line) == pytest.approx(metrics, abs=0.006)
    assert numbers(line) == pytest.approx(by_hand(file), abs=0.006)


@pytest.mark.gate
def test_two_ranks_test_a_file_of_weights(ran):
    """Oracle: the network with the file's weights, on all test images at once."""
    job = launch(2, "-m", "mpikfac_apps", "evaluate", str(ran), f"--weights={ran}/best.pt")
    assert job.returncode == 0, job.stderr
    (line,) = job.stdout.splitlines()
    assert numbers(line) == pytest.approx(by_hand(ran / "best.pt"), abs=0.006)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nothing", "mpikfac: evaluate nothing: nothing contains no complete checkpoint"),
        ("RUN --data_path=none", "data.path=none needs data.name=cifar10"),
        ("RUN --weights=none.pt", "mpikfac: reading none.pt: none.pt cannot be read: No such file"),
        (
            "RUN --weights=other.pt",
            "a test needs all tensors, but 10.weight, 10.bias are missing or have the wrong shape",
        ),
    ],
)
def test_what_cannot_be_tested_is_one_line(ran, tmp_path, monkeypatch, capfd, given, message):
    """Oracle: the messages, written out."""
    monkeypatch.chdir(tmp_path)
    torch.save(dict(list(models.build("digits_cnn", 10, 1).state_dict().items())[:-2]), "other.pt")
    with pytest.raises(SystemExit) as leave:
        evaluate.main(given.replace("RUN", str(ran)).split())
    assert leave.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line


# -- the best test, and patience -------------------------------------------------------------------


@pytest.mark.parametrize(("task", "sign"), [(tasks.CLASSIFICATION, 1), (tasks.RECONSTRUCTION, -1)])
def test_a_high_accuracy_or_a_low_error_is_best(task, sign):
    """Oracle: by hand; a value that is not finite is never best."""
    follower = Best(task)
    values = [sign * value for value in (-3.0, -3.0, -2.0, float("nan"), -2.5)]
    assert [follower.follow(value) for value in values] == [True, False, True, False, False]
    assert (follower.value, follower.since) == (sign * -2.0, 2)
    resumed = Best(task)
    resumed.load(follower.state())
    assert resumed.state() == follower.state() and Best(task).state() == {}


@pytest.mark.parametrize("items", [{"run/best": "x", "run/since_best": 1}, {"run/best": 1.0}])
def test_forged_items_are_refused(items):
    """Oracle: the names of the items."""
    with pytest.raises(ValueError, match="run/best, run/since_best must be a number and a count"):
        Best(tasks.CLASSIFICATION).load(items)


ACCURACIES = [0.1, 0.5, 0.4, 0.5, 0.7, 0.6, 0.7, 0.65, 0.9]


@pytest.fixture
def scripted(monkeypatch):
    """Give the test of each epoch a known accuracy; return the weights at each test."""
    weights = {}
    own = Problem.evaluate

    def evaluated(self, model):
        epoch = len(weights)
        weights[epoch] = {n: t.clone() for n, t in model.state_dict().items()}
        return own(self, model) | {"accuracy": ACCURACIES[epoch]}

    monkeypatch.setattr(Problem, "evaluate", evaluated)
    return weights


@pytest.mark.gate
@pytest.mark.parametrize("stops", [[], [12, 18]])
def test_a_run_ends_early_and_keeps_the_best_weights(tmp_path, scripted, capsys, stops):
    """Oracle: by hand: epoch 5 is best, three worse tests follow; restarts change nothing."""
    more = ("--epochs=9", "--keep_best", "--patience=3", "--resume=auto")
    for stop in [*stops, 27, 27]:
        assert train.main(arguments(tmp_path, *more, f"--max_steps={stop}")) == 0
    found = [row["test_accuracy"] for row in rows(tmp_path) if "test_accuracy" in row]
    assert found == ACCURACIES[:8]
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert all(torch.equal(best[name], value) for name, value in scripted[4].items())
    said = capsys.readouterr().out
    assert said.count("wrote " + str(tmp_path / "best.pt")) == 3  # epochs 1, 2 and 5
    assert said.count("3 tests in a row brought no improvement: the run ends early") == 1
    path = mpikfac.checkpoint.latest_checkpoint(tmp_path / "checkpoints")
    assert path.name == "step-000000024"


def test_best_weights_that_cannot_be_written_cost_no_run(tmp_path, monkeypatch, capsys):
    """Oracle: a run to the end, and one warning for each test."""

    def full(*_):
        raise ValueError("best.pt cannot be written: No space left on device")

    monkeypatch.setattr(export, "write", full)
    assert train.main(arguments(tmp_path, "--epochs=1", "--keep_best")) == 0
    said = capsys.readouterr().out
    assert "No space left on device; training continues, but the best weights are not" in said
    assert "complete after 3 steps" in said
