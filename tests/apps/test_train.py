"""The training program from the command line to the written files."""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

import mpikfac
from mpikfac.checkpoint import read_checkpoint
from mpikfac_apps.options import by_epoch
from mpikfac_apps.problems import models
from mpikfac_apps.problems.resnet import conv
from mpikfac_apps.running import run_directory
from mpikfac_apps.training import train
from mpikfac_apps.training.calendar import Calendar
from mpikfac_apps.training.run import Run
from support.launch import PROGRAMS, TRAIN, launch

KL_CLIP = "--kfac.clip=kl", "--kfac.clip.kl_clip=0.1"
ROOT = Path(__file__).parents[2]
TIMES = ("seconds", "images_per_second", "communication")
QUICK = ("--batch=120", "--data.train_images=360", "--epochs=3", "--log_every=2", "--threads=1")


def arguments(run_dir, *more):
    return [*QUICK, f"--run_dir={run_dir}", *more]


def rows(run_dir):
    """Return lines of metrics without times."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: row[key] for key in row if key not in TIMES} for row in lines]


def last(run_dir, key):
    return [row[key] for row in rows(run_dir) if key in row][-1]


def refused(run_dir, capfd, message, *more):
    """Check that the options end a run in the directory with code 2 and a single line."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as leave:
        train.main(arguments(run_dir, *more))
    assert leave.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("mpikfac: ")
    assert message in line


@pytest.mark.gate
def test_two_ranks_learn_digits_and_leave_a_complete_run_directory(tmp_path):
    """Oracle: 95 % of the test digits, and the files and keys promised by the program's text."""
    config = ROOT / "jobs" / "configs" / "digits_kfac.yaml"
    run = tmp_path / "run"
    job = launch(2, *TRAIN, f"--config={config}", f"--run_dir={run}", "--epochs=4")
    assert job.returncode == 0, job.stderr
    assert "epoch 4: " in job.stdout
    assert last(run, "test_accuracy") > 0.95
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert (saved["optimizer"], saved["epochs"]) == ("kfac", 4)
    environment = json.loads((run / "environment.json").read_text())
    assert environment["ranks"] == sum(environment["ranks_per_host"].values()) == 2
    assert "complete after" in (run / "log.txt").read_text()
    assert (run / "checkpoints").is_dir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = set().union(*(line.keys() for line in lines))
    assert {"step", "epoch", "lr", "loss", "test_loss", *TIMES} <= keys
    again = launch(2, *TRAIN, f"--config={config}", f"--run_dir={run}")
    assert again.returncode == 2
    assert again.stderr.count("is not empty; use another one, or resume=auto") == 1


@pytest.fixture(
    scope="module",
    params=["sgd comm-opt", "adamw comm-opt", "kfac comm-opt", "kfac eva"],
)
def whole(request, tmp_path_factory):
    """Return the options and the directory of an uninterrupted run."""
    optimizer, strategy = request.param.split()
    chosen = (f"--optimizer={optimizer}", "--kfac.inv_update_steps=2", *KL_CLIP)
    chosen += (f"--strategy={strategy}",)
    root = tmp_path_factory.mktemp("whole")
    assert train.main(arguments(root, *chosen)) == 0
    return chosen, root


@pytest.mark.parametrize("stop", [3, 4, 7])
def test_a_resumed_run_goes_on_exactly(tmp_path, whole, stop):
    """Oracle: the uninterrupted run. 3 steps are an epoch; a basis lives for 2 steps."""
    chosen, expected = whole
    assert train.main(arguments(tmp_path, *chosen, f"--max_steps={stop}")) == 0
    with open(tmp_path / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 99, "written after": "the checkpoint"}\n')
    assert train.main(arguments(tmp_path, *chosen, "--resume=auto")) == 0
    assert rows(tmp_path) == rows(expected)


def assert_same_training(found, expected):
    """Check that the numbers of both runs agree to rounding, step by step."""
    for key in ("step", "lr", "loss", "train_loss", "test_loss"):
        numbers = [[row[key] for row in lines if key in row] for lines in (found, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4), key


LENGTHS = {
    "relative": ("relative_damping=0.2",),
    "grafted and bounded": (
        "grafting=sgd",
        "clip=norm",
        "clip.max_norm=0.5",
        "damping=0.003 until 1, 0.1",
    ),
    "adapted": ("damping_adapt=2", "damping=0.1", "grafting=none"),
}


def plain(run_dir, *more):
    """Return options with a network of which the share of each rank is exact."""
    return arguments(run_dir, "--model=plain", *more)


def runs(root):
    """Yield ranks and options of runs on several ranks."""
    chosen = ("--batch=null", "--batch_per_rank=60", "--scale_lr=linear", "--warmup_epochs=1")
    yield 2, plain(root / "whole", *chosen)
    yield 2, plain(root / "parts", *chosen, "--max_steps=2")
    yield 1, plain(root / "parts", *chosen, "--max_steps=5", "--resume=auto")
    yield 3, plain(root / "parts", *chosen, "--resume=auto")
    chosen = ("--batch=null", "--batch_per_rank=5", "--max_steps=1")
    yield 1, plain(root / "batch of 5", *chosen)
    yield 1, plain(root / "neither", "--kfac.preconditioner=eigen", "--kfac.damping=0.1")
    for name, chosen in LENGTHS.items():
        options = [f"--kfac.{option}" for option in ("preconditioner=eigen", *chosen)]
        for ranks in (1, 2):
            yield ranks, plain(root / f"{name} {ranks}", *options)
    chosen = ("--log_every=1", "--kfac.inv_update_steps=4", *KL_CLIP)
    yield 1, plain(root / "placed", *chosen)
    yield 1, plain(root / "stopped", *chosen, "--max_steps=6")
    placed = ("--strategy=mem-opt", "--assignment.factor_reduction=reduce_scatter")
    yield 2, plain(root / "moved", *chosen, *placed, f"--resume={root / 'stopped'}")


@pytest.mark.gate
def test_a_run_on_other_ranks_keeps_its_batch_and_learning_rate(job):
    """Oracle: the uninterrupted run on the first part's number of ranks."""
    whole, parts = job / "whole", job / "parts"
    kept = "the run was first started with ranks=2; it keeps batch=120, lr scaled for 2"
    assert (parts / "log.txt").read_text().count(kept) == 2
    assert_same_training(rows(parts), rows(whole))
    saved = yaml.safe_load((parts / "config.yaml").read_text())
    assert (saved["batch"], saved["batch_per_rank"]) == (120, None)


@pytest.mark.gate
@pytest.mark.parametrize("name", LENGTHS)
def test_damping_and_the_length_of_steps_are_the_same_on_two_ranks(job, name):
    """Oracle: one rank; a run without the options learns differently."""
    runs = [job / f"{name} 1", job / f"{name} 2", job / "neither"]
    assert_same_training(rows(runs[1]), rows(runs[0]))
    losses = [last(run, "test_loss") for run in runs]
    assert losses[2] != pytest.approx(losses[0], rel=1e-3)


def resumed(root, *chosen):
    """Check that a run in two parts equals a whole run; return the last state of the whole run."""
    whole, parts = root / "whole", root / "parts"
    assert train.main(arguments(whole, *chosen)) == 0
    assert train.main(arguments(parts, *chosen, "--max_steps=4")) == 0
    assert train.main(arguments(parts, *chosen, "--resume=auto")) == 0
    assert rows(parts) == rows(whole)
    return read_checkpoint(mpikfac.checkpoint.latest_checkpoint(whole / "checkpoints"))


def test_a_run_with_adapted_damping_goes_on_exactly(tmp_path):
    """Oracle: the uninterrupted run; BatchNorm's count of passes."""
    chosen = ("--kfac.damping_adapt=2", "--kfac.inv_update_steps=2", "--kfac.grafting=none")
    state = resumed(tmp_path, *chosen)
    assert state["kfac/damping"] != 0.1
    counts = {name for name in state if name.endswith("num_batches_tracked")}
    assert counts
    assert {int(state[name]) for name in counts} == {9}


def test_a_run_with_momentum_of_gradients_goes_on_exactly(tmp_path):
    """Oracle: the uninterrupted run; by hand: the momentum is taken once."""
    chosen = ("--kfac.momentum_of=gradients", "--momentum=0.8", "--kfac.inv_update_steps=2")
    state = resumed(tmp_path, *chosen)
    assert state["optimizer/groups/0/momentum"] == 0
    assert any(name.startswith("kfac/momentum/") for name in state)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            ("--kfac.momentum_of=gradients",),
            ("--kfac.momentum_of=directions",),
            "use optimizer=kfac, kfac.momentum_of=gradients and momentum > 0, as before",
        ),
        (
            ("--optimizer=sgd",),
            ("--optimizer=kfac", "--kfac.momentum_of=gradients"),
            "it contains momentum of directions (momentum=0.9), but no momentum of gradients",
        ),
    ],
)
def test_a_momentum_of_another_kind_is_refused_by_the_names_of_options(
    tmp_path, capfd, before, after, message
):
    """Oracle: by hand: the momentum would be taken never, or twice."""
    assert train.main(arguments(tmp_path, *before, "--max_steps=1")) == 0
    refused(tmp_path, capfd, message, *after, "--max_steps=2", "--resume=auto")


def test_two_momenta_are_refused_by_the_names_of_options(tmp_path, capfd):
    """Oracle: by hand: `dgc` has a momentum of its own."""
    message = "compression.gradients.momentum=0.9 needs momentum=0, not 0.8: otherwise"
    refused(tmp_path, capfd, message, "--strategy=dgc", "--momentum=0.8")


@pytest.mark.gate
@pytest.mark.parametrize("optimizer", ["kfac", "sgd"])
def test_a_resumed_run_follows_another_decay_and_momentum(tmp_path, optimizer):
    """Oracle: the numbers of the options in the last checkpoint, and the lines of the log."""
    chosen = (f"--optimizer={optimizer}", "--kfac.momentum_of=directions")
    assert train.main(arguments(tmp_path, *chosen, "--max_steps=4")) == 0
    other = ("--weight_decay=1", "--momentum=0.5", "--max_steps=6", "--resume=auto")
    assert train.main(arguments(tmp_path, *chosen, *other)) == 0
    state = read_checkpoint(mpikfac.checkpoint.latest_checkpoint(tmp_path / "checkpoints"))
    assert state["optimizer/groups/0/weight_decay"] == 1
    assert state["optimizer/groups/0/momentum"] == 0.5
    changed = "changed since the checkpoint: momentum 0.9 -> 0.5, weight_decay 0.0005 -> 1.0\n"
    assert changed in (tmp_path / "log.txt").read_text()


@pytest.mark.gate
def test_a_batch_that_other_ranks_cannot_share_is_refused(job):
    """Oracle: the divisors of the batch."""
    chosen = ("--batch=null", "--batch_per_rank=5", "--max_steps=1", "--resume=auto")
    program = str(PROGRAMS / "plain.py")
    again = launch(2, program, *arguments(job / "batch of 5", *chosen))
    assert again.returncode == 2
    message = "it was saved with batch=5, which is not a multiple of 2 ranks; use one of [1, 5]"
    assert again.stderr.count(message) == again.stderr.count("mpikfac: ") == 1


@pytest.mark.gate
def test_a_run_goes_on_with_other_ranks_placement_and_run_directory(job):
    """Oracle: the uninterrupted run of one rank, step by step, between two decompositions too."""
    expected = [row for row in rows(job / "placed") if row["step"] > 6]
    assert_same_training(rows(job / "moved"), expected)


@pytest.mark.gate
def test_images_per_second_leave_out_the_time_before_a_restart(tmp_path, monkeypatch):
    """Oracle: a clock that advances by 1 s in every step of 120 images."""
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr("mpikfac_apps.running.metrics.time", clock)
    assert train.main(arguments(tmp_path, "--max_steps=5")) == 0
    assert train.main(arguments(tmp_path, "--resume=auto")) == 0
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    speeds = {row["step"]: row["images_per_second"] for row in lines if "images_per_second" in row}
    assert speeds == dict.fromkeys((2, 4, 6, 8), 120.0)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        # A line of a step counts all earlier steps; a basis lives for 2 steps, of 8 factors.
        (("--strategy=event-driven", "--refresh.tolerance=1e-30"), [8, 16, 24, 32]),
        (("--strategy=event-driven", "--refresh.tolerance=1e9"), [8, 8, 8, 8]),
        ((), []),
    ],
)
def test_decompositions_are_counted_where_they_do_not_follow_from_the_options(
    tmp_path, more, expected
):
    """Oracle: by hand."""
    assert train.main(arguments(tmp_path, "--kfac.inv_update_steps=2", *more)) == 0
    found = [row["decompositions"] for row in rows(tmp_path) if "decompositions" in row]
    assert found == expected


def test_tests_of_the_network_may_be_fewer_and_smaller(tmp_path, capsys):
    """Oracle: lines with a test accuracy: epochs 2, 4 and the last; eighths of 8 test images."""
    options = ("--epochs=5", "--eval_every=2", "--data.test_images=8", "--optimizer=sgd")
    assert train.main(arguments(tmp_path / "run", *options)) == 0
    found = {row["epoch"]: row.get("test_accuracy") for row in rows(tmp_path / "run")}
    assert [epoch for epoch, accuracy in found.items() if accuracy is not None] == [2, 4, 5]
    assert all(accuracy * 8 % 1 == 0 for accuracy in found.values() if accuracy is not None)
    assert [row["epoch"] for row in rows(tmp_path / "run") if "train_loss" in row] == [
        1,
        2,
        3,
        4,
        5,
    ]
    said = capsys.readouterr().out.splitlines()
    assert ["test" in line for line in said if line.startswith("epoch ")] == [
        *(False, True, False, True, True)
    ]


@pytest.mark.gate
def test_tests_within_an_epoch_change_nothing_else(tmp_path, capsys):
    """Oracle: the rows of a run without such tests; steps with a test, by hand."""
    options = ("--epochs=2", "--log_every=100", "--threads=1")
    found = []
    for name, more in (("plain", ()), ("more", ("--eval_steps=2",))):
        assert train.main(arguments(tmp_path / name, *options, *more)) == 0
        found.append(
            {row["step"]: {**row, "seconds": 0} for row in rows(tmp_path / name) if "epoch" in row}
        )
    plain, more = found
    assert {step: more[step] for step in plain} == plain
    assert sorted(step for step, row in more.items() if "test_accuracy" in row) == [2, 3, 4, 6]
    assert "\nstep 2: test accuracy " in capsys.readouterr().out


def test_the_log_says_how_the_run_differs_from_the_usual_way(tmp_path, capsys):
    """Oracle: the strategy's name, workers and changed choices; a network for larger images."""
    options = ("--refresh.staleness=1", "--model=resnet20", "--max_steps=1")
    assert train.main(arguments(tmp_path / "run", *options)) == 0
    said = capsys.readouterr().out.splitlines()
    assert "strategy comm-opt: assignment=comm-opt, refresh.staleness=1" in said
    assert sum("model=resnet20 is made for images of 32x32 pixels" in line for line in said) == 1


@pytest.mark.gate
def test_a_complete_run_has_nothing_to_resume(tmp_path):
    """Oracle: the run's metrics before."""
    assert train.main(arguments(tmp_path)) == 0
    before = rows(tmp_path)
    assert train.main(arguments(tmp_path, "--resume=auto")) == 0
    assert rows(tmp_path) == before


def test_resume_auto_starts_a_run_that_was_killed_before_its_first_checkpoint(tmp_path):
    """Oracle: a run that starts at step 0 and drops the lines of the killed run."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert train.main(arguments(tmp_path, "--resume=auto", "--max_steps=2")) == 0
    assert [row["step"] for row in rows(tmp_path)] == [2]


@pytest.mark.gate
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--batch=60 --resume=auto", "it was saved with batch=120; this run has 60; pass --batch"),
        ("--seed=1 --resume=auto", "it was saved with seed=0; this run has 1; pass --seed=0"),
        ("--model=resnet20 --resume=auto", "it was saved with model=digits_cnn; this run has resn"),
        ("--data.augment=true --resume=auto", "this run has true; pass --data.augment=false"),
        ("", "is not empty; use another one, or resume=auto to continue the run"),
        ("--data.train_images=9 --resume=auto", "this run has 9; pass --data.train_images=360"),
        ("--kfac.skip=[nine] --resume=auto", "nine"),
    ],
)
def test_what_does_not_fit_the_run_ends_with_code_2_and_one_line(tmp_path, capfd, more, message):
    """Oracle: the key, the saved value, the run's value, and the flag that helps."""
    assert train.main(arguments(tmp_path, "--max_steps=1")) == 0
    refused(tmp_path, capfd, message, *more.split())


@pytest.mark.gate
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "--data.classes=5",
            "--data.classes=null",
            "saved with data.classes=5; this run has null; pass --data",
        ),
        ("", "--data.size=8", "saved with data.size=null; this run has 8; pass --data.size=null"),
    ],
)
def test_other_images_or_classes_are_refused_in_one_line(tmp_path, capfd, before, after, message):
    """Oracle: the saved option, in the spelling of the command line."""
    synthetic = ("--data.name=synthetic", "--max_steps=1")
    assert train.main(arguments(tmp_path, *synthetic, *before.split())) == 0
    refused(tmp_path, capfd, message, *synthetic, *after.split(), "--resume=auto")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--data.train_images=2000", "data.train_images=2000: digits has only 1437"),
        ("--data.test_images=361", "data.test_images=361: digits has only 360"),
        ("--batch=720", "batch=720 must not exceed the number of images (360)"),
    ],
)
def test_numbers_of_images_that_do_not_exist_are_refused_in_one_line(
    tmp_path, capfd, given, message
):
    """Oracle: the counts of images."""
    refused(tmp_path, capfd, message, given)


def test_a_network_of_another_shape_is_refused_in_one_line(tmp_path, capfd, monkeypatch):
    """Oracle: the first item with a different shape, the network's shape, the saved shape."""
    assert train.main(arguments(tmp_path, "--max_steps=1")) == 0
    wider = nn.Sequential(conv(1, 32, 3), *models.digits_cnn(10, 1)[1:])
    network = models.NetworkEntry(lambda classes, channels: wider)
    monkeypatch.setitem(models.MODELS, "digits_cnn", network)
    message = "item 'model/0.weight' must be float32 [32, 1, 3, 3]; it is float32 [16, 1, 3, 3]"
    refused(tmp_path, capfd, message, "--resume=auto")


class Faulty(nn.Module):
    """A network whose outputs are NaN in some passes of the training, counted from 0."""

    def __init__(self, faulty):
        super().__init__()
        self.network, self.faulty, self.passes = models.digits_cnn(10, 1), faulty, -1

    def forward(self, x):
        self.passes += self.training
        outputs = self.network(x)
        return outputs * math.nan if self.training and self.passes in self.faulty else outputs


INTERVALS = ("--log_every=1", "--log_every=2", "--log_every=7", "--eval_steps=1")


@pytest.mark.gate
@pytest.mark.parametrize("optimizer", ["sgd", "kfac"])
def test_a_loss_that_is_not_finite_ends_the_run_after_steps_in_a_row(
    tmp_path, capfd, caplog, monkeypatch, optimizer
):
    """Oracle: two and four steps in a row; the same end with every interval of log and tests."""
    monkeypatch.setattr(logging.getLogger("mpikfac"), "propagate", True)
    for faulty, interval in itertools.product([(3, 4), (3, 4, 5, 6)], INTERVALS):
        network = models.NetworkEntry(lambda classes, channels, faulty=faulty: Faulty(faulty))
        monkeypatch.setitem(models.MODELS, "digits_cnn", network)
        chosen = (f"--optimizer={optimizer}", interval)
        run, code = tmp_path / f"{interval}-{len(faulty)}", 0
        try:
            code = train.main(arguments(run, *chosen))
        except SystemExit as leave:
            code = leave.code
        assert code == (0 if len(faulty) == 2 else 2)
        told = capfd.readouterr().err
        ended = re.search(r"step 6: NaN or infinity 4 times in a row in the \w+ of", told)
        assert bool(ended) == (code == 2)
        losses = [
            record.message for record in caplog.records if "the loss is nan" in record.message
        ]
        assert losses == ["rank 0, step 3: the loss is nan; " + losses[0].partition("; ")[2]]
        caplog.clear()
        assert "NaN" not in (run / "metrics.jsonl").read_text()


class UntestableNetwork(nn.Module):
    """A network whose outputs are NaN in tests alone."""

    def __init__(self):
        super().__init__()
        self.network, self.passes = models.digits_cnn(10, 1), 0

    def forward(self, x):
        self.passes += self.training
        outputs = self.network(x)
        return outputs if self.training or not self.passes else outputs * math.nan


def test_a_test_that_is_not_finite_warns_and_ends_no_run(tmp_path, caplog, monkeypatch):
    """Oracle: three epochs, each with a test of NaN."""
    monkeypatch.setattr(logging.getLogger("mpikfac"), "propagate", True)
    network = models.NetworkEntry(lambda classes, channels: UntestableNetwork())
    monkeypatch.setitem(models.MODELS, "digits_cnn", network)
    assert train.main(arguments(tmp_path, "--optimizer=sgd")) == 0
    told = [record.message for record in caplog.records if "test loss" in record.message]
    assert [line.partition(";")[0] for line in told] == [
        f"the test loss is nan after step {step}" for step in (3, 6, 9)
    ]
    assert all("test_loss" not in row for row in rows(tmp_path))


FAULTY_RANK = """
import sys, torch, mpikfac
from mpikfac_apps.training import run, train
first, calls = run.Run._pass, []
def faulty(self, images, labels, share):
    calls.append(1)
    if len(calls) in (4, 5) and mpikfac.world().rank == 1:
        images = images.float() * torch.nan
    return first(self, images, labels, share)
run.Run._pass = faulty
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.gate
def test_a_line_names_the_rank_whose_loss_is_not_finite(tmp_path):
    """Oracle: the rank and the first of two steps with inputs of NaN."""
    program = tmp_path / "program.py"
    program.write_text(FAULTY_RANK)
    job = launch(2, str(program), *arguments(tmp_path / "run", "--optimizer=sgd"))
    assert job.returncode == 0, job.stderr
    told = re.findall(r"rank (\d), step (\d+): the loss is nan", job.stdout + job.stderr)
    assert told == [("1", "3")]


def test_a_run_whose_last_step_is_not_finite_is_not_complete(tmp_path, capfd):
    """Oracle: the line, code 2, and no checkpoint."""
    with pytest.raises(SystemExit) as leave:
        train.main(arguments(tmp_path, "--optimizer=sgd", "--lr=1e18", "--max_steps=2"))
    assert leave.value.code == 2
    assert "a value in step 2, the last step, was not finite" in capfd.readouterr().err
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_a_diverging_run_keeps_a_checkpoint_from_before(tmp_path):
    """Oracle: the weights of the checkpoint at the step before the rate of 1e30."""
    often = ("--optimizer=sgd", "--checkpoint_every=1")
    assert train.main(arguments(tmp_path, *often, "--max_steps=2")) == 0
    kept = tmp_path / "checkpoints" / "step-000000002"
    before = read_checkpoint(kept)["model/0.weight"]
    with pytest.raises(SystemExit):
        train.main(arguments(tmp_path, *often, "--lr=1e30", "--resume=auto"))
    assert torch.equal(read_checkpoint(kept)["model/0.weight"], before)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--kfac.damping=0.1 until 1, -1", "kfac.damping=-1.0 must be a finite number"),
        pytest.param(
            *("--lr=-1", "options: lr=-1.0 must be a finite number > 0"), marks=pytest.mark.slow
        ),
        ("--data.name=cifar10 --data.path=/", "data.path=/ contains neither cifar-10-batches-bin"),
    ],
)
def test_two_ranks_say_once_what_is_wrong(tmp_path, given, message):
    """Oracle: a single line, code 2, no traceback, and no run directory."""
    run = tmp_path / "run"
    job = launch(2, *TRAIN, *arguments(run), *re.split(" (?=--)", given))
    assert job.returncode == 2
    assert (job.stdout + job.stderr).count("mpikfac: ") == 1
    assert message in job.stderr
    assert "Traceback" not in job.stderr
    assert not run.exists()


def test_the_time_to_go_counts_epochs_and_not_steps(monkeypatch, caplog):
    """Oracle: by hand: after 6 s, the first epoch of 6 steps is done; 2 epochs of 1 step follow."""
    calendar = Calendar(60, by_epoch.read("10 until 1, 60", int))
    monkeypatch.setattr(run_directory, "LINE_EVERY", 0.0)
    monkeypatch.setattr(run_directory, "on_terminal", lambda: False)
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(run_directory, "time", clock)
    progress = run_directory.RunProgress(0, calendar.first(3), calendar.epochs)
    with caplog.at_level("INFO", logger="mpikfac"):
        for _ in range(6):
            progress.advance(str)
    assert caplog.messages[-1] == ", 00:12 to go"


def test_progress_is_logged_from_time_to_time_when_nobody_watches(monkeypatch, caplog):
    """Oracle: a line per step at an interval of 0 s; no time is left at the last step."""
    monkeypatch.setattr(run_directory, "LINE_EVERY", 0.0)
    monkeypatch.setattr(run_directory, "on_terminal", lambda: False)
    progress = run_directory.RunProgress(first=2, last=4, epochs=lambda step: step / 3)
    with caplog.at_level("INFO", logger="mpikfac"):
        for _ in range(2):
            progress.advance(lambda: "loss 1.0")
    assert [text.partition(",")[0] for text in caplog.messages] == ["loss 1.0"] * 2
    assert caplog.messages[-1] == "loss 1.0, 00:00 to go"


@pytest.mark.parametrize(
    ("stderr_of_mpirun", "watched"), [("/dev/pts/3", True), ("pipe:[7]", False), ("/log", False)]
)
def test_a_terminal_is_looked_for_behind_mpirun(monkeypatch, stderr_of_mpirun, watched):
    """Oracle: targets of mpirun's descriptor: a terminal, a pipe, a file."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(run_directory.os, "readlink", lambda path: stderr_of_mpirun)
    assert run_directory.on_terminal() == watched


def test_a_run_whose_directory_another_has_taken_writes_no_more(tmp_path, capfd, monkeypatch):
    """Oracle: the checkpoints before; a single line, code 2."""
    step = Run.step

    def taken(run: Run, *batch: object) -> None:
        named = json.loads((tmp_path / "lock").read_text())
        (tmp_path / "lock").write_text(json.dumps(named | {"token": "another"}))
        step(run, *batch)

    monkeypatch.setattr(Run, "step", taken)
    with pytest.raises(SystemExit) as leave:
        train.main(arguments(tmp_path, "--max_steps=2"))
    assert leave.value.code == 2
    assert "was taken over by another run" in capfd.readouterr().err
    assert not (tmp_path / "checkpoints").exists()
