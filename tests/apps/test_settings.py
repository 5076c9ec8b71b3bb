"""A resumed run keeps its settings; changes are named, or refused; runs of all releases go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

import mpikfac
from mpikfac_apps.options.documents import flattened
from mpikfac_apps.options.fields import leaves
from mpikfac_apps.options.options import USUAL_RATES, Options
from mpikfac_apps.options.parse import parse, resolved
from mpikfac_apps.training import settings, train

STORED = Path(__file__).parents[1] / "golden" / "runs"
RELEASES = sorted(path.name for path in STORED.iterdir() if path.is_dir() and path.name[0] == "2")
QUICK = ("--batch=120", "--data.train_images=360", "--epochs=3", "--log_every=1", "--threads=1")
UNUSUAL = (
    *(
        "--kfac.grafting=sgd",
        "--kfac.subsample=1",
        "--kfac.preconditioner=eigen",
        "--kfac.inv_update_steps=2",
    ),
    *(
        "--kfac.relative_damping=0.2",
        "--kfac.factor_decay=0.9",
        "--label_smoothing=0.1",
        "--refresh.staleness=1",
    ),
    *("--schedule=step", "--decay_epochs=[2]", "--data.test_images=100", "--weight_decay=0.01"),
    *("--momentum=0.8", "--checkpoint_every=3", "--eval_steps=2"),
)
CLOCKS = ("seconds", "images_per_second", "communication")


def begin(run: Path, *more: str) -> None:
    assert train.main([*QUICK, f"--run_dir={run}", *more]) == 0


def go_on(run: Path, *more: str) -> str:
    """Resume a run, and return the new lines of the log without times."""
    before = log(run)
    assert train.main([f"--run_dir={run}", "--resume=auto", "--threads=1", *more]) == 0
    return log(run)[len(before) :]


def log(run: Path) -> str:
    path = run / "log.txt"
    return path.read_text() if path.exists() else ""


def refused(capfd, run: Path, *more: str) -> str:
    capfd.readouterr()
    with pytest.raises(SystemExit) as leave:
        train.main([f"--run_dir={run}", "--resume=auto", "--threads=1", *more])
    assert leave.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    return line


def saved(run: Path) -> mpikfac.checkpoint.Checkpoint:
    newest = mpikfac.checkpoint.latest_checkpoint(run / "checkpoints")
    return mpikfac.checkpoint.read_checkpoint(newest)


def config(run: Path) -> dict:
    return flattened(yaml.safe_load((run / "config.yaml").read_text()))


def rows(run: Path) -> list[dict]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: row[key] for key in row if key not in CLOCKS} for row in lines]


def change(run: Path, **items: object) -> None:
    """Replace entries of the item about the run in the newest checkpoint; None takes one away."""
    checkpoint = saved(run)
    about = json.loads(checkpoint["run/data"]) | items
    about = {key: value for key, value in about.items() if value is not None}
    state = dict(checkpoint) | {"run/data": json.dumps(about)}
    mpikfac.save_checkpoint(mpikfac.world(), run / "checkpoints", state, checkpoint.step)


@pytest.fixture
def run(tmp_path) -> Path:
    """Return the directory of a run of two steps with usual options."""
    begin(tmp_path / "run", "--max_steps=2")
    return tmp_path / "run"


# -- settings are kept -----------------------------------------------------------------------------


@pytest.mark.gate
def test_a_run_goes_on_without_its_options(tmp_path):
    """Oracle: all numbers of the undisturbed run, to the last bit; its config.yaml."""
    begin(tmp_path / "whole", *UNUSUAL)
    begin(tmp_path / "parts", *UNUSUAL, "--max_steps=4")
    text = go_on(tmp_path / "parts", "--max_steps=6") + go_on(tmp_path / "parts")
    assert "changed since" not in text
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    states = [dict(saved(tmp_path / name)) for name in ("parts", "whole")]
    assert states[0].keys() == states[1].keys()
    for name in states[0].keys() - {"run/seconds", "run/metrics_bytes"}:
        assert str(states[0][name]) == str(states[1][name]), name
    options = [
        config(tmp_path / name) | {"run_dir": "", "resume": ""} for name in ("parts", "whole")
    ]
    assert options[0] == options[1]


@pytest.mark.gate
def test_a_run_goes_on_without_its_options_in_another_directory(tmp_path):
    """Oracle: the rows of the undisturbed run after the checkpoint."""
    begin(tmp_path / "whole", *UNUSUAL)
    begin(tmp_path / "begun", *UNUSUAL, "--max_steps=4")
    moved = ["--threads=1", f"--run_dir={tmp_path / 'moved'}", f"--resume={tmp_path / 'begun'}"]
    assert train.main(moved) == 0
    assert rows(tmp_path / "moved") == [row for row in rows(tmp_path / "whole") if row["step"] > 4]


def test_a_checkpoint_has_the_writer_and_the_settings(run, monkeypatch):
    """Oracle: the version of the package; config.yaml; the log of a later version."""
    assert saved(run).writer == f"mpikfac {mpikfac.__version__}"
    about = json.loads(saved(run)["run/data"])
    of_run = {key: value for key, value in config(run).items() if key not in settings.OF_A_START}
    assert about["settings"] == of_run
    monkeypatch.setattr("importlib.metadata.version", lambda package: "9.9")
    said = f"the checkpoint was written by mpikfac {mpikfac.__version__}; this is mpikfac 9.9"
    assert said in go_on(run)


@pytest.mark.gate
def test_open_choices_stay_when_a_version_chooses_otherwise(run, monkeypatch):
    """Oracle: by hand: the rate of the first start; an optimizer's own rate with the optimizer."""
    monkeypatch.setitem(USUAL_RATES, "kfac", 0.5)
    text = go_on(run, "--max_steps=3")
    assert "changed since" not in text and config(run)["lr"] == 0.0075
    assert "lr 0.0075 -> 0.5" in go_on(run, "--max_steps=4", "--lr=0.5")
    options = settings.of_start([f"--run_dir={run}", "--resume=auto", "--optimizer=adamw"], 1)
    assert options.rate == 0.5  # was given
    begin(run.with_name("other"), "--max_steps=1", "--optimizer=sgd")
    monkeypatch.setitem(USUAL_RATES, "sgd", 0.7)  # not the rate of the first start, 0.1
    started = [f"--run_dir={run.with_name('other')}", "--resume=auto", "--optimizer=adamw"]
    assert settings.of_start(started, 1).rate == USUAL_RATES["adamw"]


def test_a_strategy_brings_its_own_choices(run):
    """Oracle: the options of a run that begins with the strategy."""
    strategy = "--strategy=dgc"
    resumed = settings.of_start([f"--run_dir={run}", "--resume=auto", strategy], 1)
    assert resumed.distribution == parse([*QUICK, strategy], 1).distribution


# -- changes are named, or refused -----------------------------------------------------------------

NAMED = {
    "kfac.relative_damping": ("0.2", "kfac.relative_damping 10.0 -> 0.2"),
    "kfac.preconditioner.type": ("eigen", "kfac.preconditioner.type inverse -> eigen"),
    "kfac.grafting.max_trust_ratio": ("4.0", "kfac.grafting.max_trust_ratio 8.0 -> 4.0"),
    "kfac.factor_decay": ("0.9", "kfac.factor_decay 0.95 -> 0.9"),
    "label_smoothing": ("0.1", "label_smoothing 0.0 -> 0.1"),
    "schedule": ("cosine", "schedule linear -> cosine"),
    "data.test_images": ("100", "data.test_images null -> 100"),
    "weight_decay": ("0.1", "weight_decay 0.0005 -> 0.1"),
    "momentum": ("0.5", "momentum 0.9 -> 0.5"),
    "strategy": ("dp-kfac", "strategy comm-opt -> dp-kfac"),
}
FIXED = {
    *("model", "batch", "transport.virtual_ranks", "frozen_epochs", "seed"),
    *(f"data.{key}" for key in ("name", "train_images", "size", "classes")),
    *(f"data.{key}" for key in ("augment", "shift", "mirror", "mixup", "cutmix")),
}


@pytest.mark.gate
def test_changes_are_named_in_one_line(run):
    """Oracle: the lines, written out; the next start names nothing; the log keeps the history."""
    text = go_on(run, "--max_steps=3", *(f"--{key}={value}" for key, (value, _) in NAMED.items()))
    (line,) = [line for line in text.splitlines() if "changed since the checkpoint" in line]
    assert " step 2: changed since the checkpoint: " in line
    for _, words in NAMED.values():
        assert words in line
    assert "changed since" not in go_on(run, "--max_steps=4")
    assert all(str(config(run)[key]) == value for key, (value, _) in NAMED.items())


def test_a_file_of_the_command_line_names_options(run, tmp_path):
    """Oracle: by hand."""
    (tmp_path / "more.yaml").write_text("kfac: {factor_decay: 0.9}\nlog_every: 2\n")
    text = go_on(run, "--max_steps=3", f"--config={tmp_path / 'more.yaml'}", "--log_every=1")
    assert "changed since the checkpoint: kfac.factor_decay 0.95 -> 0.9\n" in text


@pytest.mark.parametrize("key", [leaf.key for leaf in leaves(Options)])
def test_every_option_is_named_refused_or_of_a_start(key):
    """Oracle: the list of options; another value of the option, in the options of two starts."""
    before = parse(["--kfac.grafting=sgd"], 1)
    options = settings.about_run(before, 1)["settings"]
    assert settings.changes(options, options) == ""
    words = settings.changes(options, options | {key: "another"})
    told = f"{key} " if key in options else "1 option new"
    assert words.startswith(told) != (key in settings.OF_A_START)
    assert (key in settings.identity(before)) == (key in FIXED)


@pytest.mark.gate
def test_two_exclusive_options_are_refused_by_name(run, capfd):
    """Oracle: the line: both options, and the checkpoint that gives one of both."""
    go_on(run, "--max_steps=3", "--kfac.relative_damping=0.2")
    line = refused(capfd, run, "--kfac.damping=0.3")
    assert "kfac.damping=0.3 and relative_damping=0.2 exclude each other" in line
    assert f"change the options that come from {saved(run).path}" in line
    mended = ("--kfac.damping=0.3", "--kfac.relative_damping=null", "--max_steps=4")
    assert "kfac.damping null -> 0.3" in go_on(run, *mended)


# -- files of others, and of earlier versions ------------------------------------------------------

PROGRAM = """
from pathlib import Path

Path(__file__).with_suffix(".ran").touch()


def log(start):
    return lambda step, numbers: None
"""


@pytest.mark.gate
def test_a_file_that_the_checkpoint_names_is_not_executed(tmp_path, capfd):
    """Oracle: no trace of the file; with the option on the command line, a trace."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    tracker = f"--metrics={tmp_path}/mine.py:log"
    begin(tmp_path / "run", "--max_steps=1", tracker)
    trace = tmp_path / "mine.ran"
    trace.unlink()
    line = refused(capfd, tmp_path / "run", "--max_steps=2")
    assert f"would run {tmp_path}/mine.py; if you trust the file, pass --metrics=" in line
    assert not trace.exists()
    assert "changed since" not in go_on(tmp_path / "run", "--max_steps=2", tracker)


IMAGES = """
import torch


def data():
    images = torch.randint(256, (60, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    images, labels = images.to(torch.uint8), torch.arange(60) % 7
    images[{changed}] ^= 1
    return images[:48], labels[:48], images[48:], labels[48:]
"""


@pytest.mark.gate
def test_other_images_of_a_function_are_seen(tmp_path, capfd):
    """Oracle: one bit of a training image is refused; a bit of a test image is named."""
    file, run = tmp_path / "images.py", tmp_path / "run"
    file.write_text(IMAGES.format(changed="47:47"))
    own = f"--data.name={file}:data"
    assert train.main([own, "--batch=12", f"--run_dir={run}", "--max_steps=1", "--threads=1"]) == 0
    file.write_text(IMAGES.format(changed="47, 0, 7, 7"))
    assert "different training images" in refused(capfd, run, own, "--max_steps=2")
    file.write_text(IMAGES.format(changed="59, 0, 7,  7"))  # another size: compiled anew
    words = "the test images differ from those of the checkpoint"
    assert words in go_on(run, own, "--max_steps=2")
    assert words not in go_on(run, own, "--max_steps=3")


@pytest.mark.gate
@pytest.mark.parametrize("release", RELEASES)
def test_a_run_of_each_release_goes_on(tmp_path, monkeypatch, release):
    """Oracle: the stored config.yaml."""
    monkeypatch.chdir(STORED)
    run = shutil.copytree(STORED / release, tmp_path / "run")
    before = config(run)
    text = go_on(run, "--model=tiny.py:build", "--max_steps=4")
    kept = before.keys() - set(settings.OF_A_START)
    assert {key: config(run)[key] for key in kept} == {key: before[key] for key in kept}
    assert saved(run).step == 4
    assert "no option" not in text


def test_a_checkpoint_without_settings_is_said(run):
    """Oracle: the warning; usual options."""
    change(run, settings=None, open=None)
    (run / "config.yaml").unlink()
    assert "the checkpoint has no settings" in go_on(run, *QUICK, "--max_steps=3")


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"settings": [1]}, "item 'run/data' has settings of an unexpected form"),
        ({"settings": {"lr": "x"}, "open": {}}, "lr=x must be a finite number > 0"),
        ({"settings": {"lr": {"a": 1}}, "open": {}}, "must be a finite number > 0"),
        (
            {"settings": {"kfac.preconditioner.type": ["eigen"]}, "open": {}},
            'kfac.preconditioner=["eigen"] must be one',
        ),
        ({"settings": {"lr": 1e999}, "open": {}}, "finite"),
    ],
)
def test_settings_of_another_form_are_refused_in_one_line(run, capfd, items, message):
    """Oracle: the messages, written out."""
    change(run, **items)
    assert message in refused(capfd, run, *QUICK, "--max_steps=3")


def test_a_wrong_value_of_the_checkpoint_can_be_replaced(run):
    """Oracle: by hand."""
    options = config(run) | {"strategy": "comm-opt", "kfac.preconditioner.type": "of old"}
    change(run, settings=options, open={})
    text = go_on(run, "--max_steps=3", "--kfac.preconditioner=eigen")
    assert "kfac.preconditioner.type 'of old' -> eigen" in text


@pytest.mark.parametrize(
    ("before", "now", "first", "last"),
    [
        (["--optimizer=adamw"], [], "optimizer adamw -> kfac", "options new"),
        ([], ["--optimizer=adamw"], "optimizer kfac -> adamw", "options gone"),
        (["--lr=0.1"], ["--sync=local-sgd", "--lr=0.2"], "sync.type ", "options new"),
        ([], ["--momentum=0.5"], "momentum 0.9 -> 0.5", "momentum 0.9 -> 0.5"),
    ],
)
def test_the_choice_of_an_algorithm_is_named_first(before, now, first, last):
    """Oracle: by hand; options that only one start has are counted."""
    starts = (flattened(resolved(parse(argv, 1), 1)) for argv in (before, now))
    changed = settings.changes(*starts).split(", ")
    assert changed[0].startswith(first) and changed[-1].endswith(last)
    assert "no option" not in str(changed)
