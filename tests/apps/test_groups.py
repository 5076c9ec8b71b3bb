"""Runs in groups of ranks that learn from each other's predictions."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac_apps.options.options import GroupOptions
from mpikfac_apps.options.parse import parse
from mpikfac_apps.running import checkpoints
from mpikfac_apps.training import settings
from mpikfac_apps.training.batches import mixed
from mpikfac_apps.training.parts import trainers
from mpikfac_apps.training.parts.groups import joined, open_checkpoint
from mpikfac_apps.training.parts.problem import Problem
from support.launch import TRAIN, launch, run_each

pytestmark = pytest.mark.lab

# an epoch has three steps
QUICK = (
    *("--data.train_images=360", "--batch=120", "--epochs=3", "--threads=1", "--log_every=1"),
    *("--groups=2", "--burn_in=2", "--swap_every=3", "--distill_weight=0.7", "--lr=0.01"),
    *("--schedule=constant", "--seed=5"),
)
STEPS = 9  # swaps after 2, 5 and 8 steps


def saved(run_dir, step=STEPS):
    """Return the items of a checkpoint, without times."""
    found = mpikfac.checkpoint.read_checkpoint(run_dir / "checkpoints" / f"step-{step:09d}")
    return {name: found[name] for name in found.keys() - {"run/seconds", "run/metrics_bytes"}}


def steps(run_dir):
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))


def alike(found, expected):
    """Return whether two checkpoints hold the same items, bit for bit."""
    assert found.keys() == expected.keys()
    return all(
        torch.equal(value, found[name]) if torch.is_tensor(value) else value == found[name]
        for name, value in expected.items()
        if not name.startswith("run/")
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a directory of finished runs."""
    root = tmp_path_factory.mktemp("groups")
    half = ("--optimizer=sgd", f"--run_dir={root / 'half'}")
    asked = [
        (2, ("--optimizer=sgd", f"--run_dir={root / 'sgd'}")),
        (2, ("--optimizer=kfac", f"--run_dir={root / 'kfac'}")),
        (2, ("--optimizer=sgd", "--model=plain", f"--run_dir={root / 'two'}")),
        (4, ("--optimizer=sgd", "--model=plain", f"--run_dir={root / 'four'}")),
        (2, (*half, "--max_steps=4")),
        (2, (*half, "--resume=auto", "--checkpoint_every=3")),
        (2, ("--optimizer=sgd", "--distill_weight=0", f"--run_dir={root / 'apart'}")),
        (1, ("--optimizer=sgd", "--groups=1", "--seed=6", f"--run_dir={root / 'plain'}")),
    ]
    run_each([(ranks, [*QUICK, *more]) for ranks, more in asked], root)
    return root


def by_hand(optimizer):
    """Return the models of both groups: the rule as a loop over trainings in one process."""
    comm = mpikfac.world()
    options = parse([*QUICK, "--groups=1", f"--optimizer={optimizer}"], 1)
    trainings = []
    for number in range(2):
        of_group = dataclasses.replace(options, seed=options.seed + number)
        problem = Problem(comm, of_group, torch.device("cpu"))
        model, steps_of = trainers.make_model(problem, starts=True)
        team = mpikfac.comm.SplitComm(comm)
        trace = mpikfac.Trace()
        trainings.append(trainers.training_of_group(problem, team, model, steps_of, trace))
    for step in range(STEPS):
        if step in (2, 5, 8):
            stale = [copy.deepcopy(training.trainer.model).eval() for training in trainings]
        for number, training in enumerate(trainings):
            problem, trainer = training.problem, training.trainer
            images, labels = problem.batches.get(*problem.calendar.place(step))
            torch.manual_seed(mixed(problem.options.seed, step, 0))
            trainer.optimizer.zero_grad()
            outputs = trainer.model(inputs := problem.normalise(images))
            loss = objective = F.cross_entropy(outputs, labels)
            if step >= 2:
                with torch.no_grad():
                    peer = stale[1 - number](inputs).softmax(1)
                each = (peer * (peer.log() - outputs.log_softmax(1))).sum(1)
                objective = loss + 0.7 * each.mean()
            training.record(outputs)
            objective.backward()
            training.step(images, labels, loss)
    return [training.trainer.model for training in trainings]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "kfac"])
def test_groups_follow_the_rule(runs, optimizer):
    """Oracle: the rule [Anil et al. 2018] as a loop in one process, with trainers of one rank."""
    for number, model in enumerate(by_hand(optimizer)):
        found = saved(runs / optimizer / f"group-{number}")
        for name, expected in model.state_dict().items():
            torch.testing.assert_close(found[f"model/{name}"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_groups_of_two_ranks_train_as_groups_of_one(runs):
    """Oracle: the run on one rank for each group, up to rounding in float32."""
    for number in range(2):
        found, expected = (saved(runs / name / f"group-{number}") for name in ("four", "two"))
        tensors = [name for name in expected if torch.is_tensor(expected[name])]
        assert any(name.startswith("codistillation/peers/") for name in tensors)
        for name in tensors:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_restart_repeats_every_bit(runs):
    """Oracle: the run that was not interrupted."""
    for number in range(2):
        ends = [saved(runs / name / f"group-{number}") for name in ("half", "sgd")]
        assert alike(*ends)


@pytest.mark.slow
def test_without_weight_a_group_is_a_plain_run_with_its_seed(runs):
    """Oracle: the plain run, bit for bit."""
    found, expected = saved(runs / "apart" / "group-1"), saved(runs / "plain")
    del found["codistillation/steps"]
    assert alike(found, expected)


@pytest.mark.slow
def test_a_restart_goes_back_to_a_step_of_all_groups(runs, tmp_path):
    """Oracle: the run before; the newest checkpoint of a group is missing, as after a crash."""
    run_dir = tmp_path / "run"
    shutil.copytree(runs / "half", run_dir)
    assert steps(run_dir / "group-0") == steps(run_dir / "group-1") == [6, 9]
    shutil.rmtree(run_dir / "group-1" / "checkpoints" / "step-000000009")
    ended = launch(2, *TRAIN, "--resume=auto", f"--run_dir={run_dir}")
    assert ended.returncode == 0, ended.stderr
    for number in range(2):
        assert "step-000000006" in (run_dir / f"group-{number}" / "log.txt").read_text()
        ends = [saved(of / f"group-{number}") for of in (run_dir, runs / "half")]
        assert alike(*ends)


@pytest.mark.parametrize(("found", "told"), [((4, -1), "none and step 4"), ((4, 6), "step 4 and")])
def test_groups_without_a_common_step_are_refused(monkeypatch, found, told):
    """Oracle: the line; a group without a checkpoint, and checkpoints that a user names."""
    options = dataclasses.replace(parse(["--groups=2"], 2), resume="auto" if -1 in found else "x")
    world = SimpleNamespace(allgather=lambda _: list(found))
    monkeypatch.setattr(checkpoints, "open_checkpoint", lambda *_: SimpleNamespace(step=4))
    with pytest.raises(mpikfac.UserError, match=rf"no checkpoints of the same step \({told}"):
        open_checkpoint(world, None, options)


@pytest.mark.slow
@pytest.mark.parametrize(("burn_in", "lines"), [(9, 1), (8, 0)])
def test_a_burn_in_without_an_end_is_told(tmp_path, burn_in, lines):
    """Oracle: by hand: the run has 9 steps; one rank tells."""
    asked = (*QUICK, "--optimizer=sgd", f"--burn_in={burn_in}", "--max_steps=1")
    ended = launch(2, *TRAIN, *asked, f"--run_dir={tmp_path}")
    assert ended.returncode == 0, ended.stderr
    told = f"burn_in={burn_in}: groups learn nothing from each other in the 9 steps of the run"
    assert (ended.stdout + ended.stderr).count(told) == lines


@pytest.mark.slow
def test_a_request_to_a_group_reaches_all_groups(tmp_path):
    """Oracle: the steps of the checkpoints; the request waits in the directory of a group."""
    control = tmp_path / "group-1" / "control"
    control.mkdir(parents=True)
    (control / "stop").touch()
    asked = (*QUICK, "--optimizer=sgd", "--resume=auto", "--exit_code=7", f"--run_dir={tmp_path}")
    ended = launch(2, *TRAIN, *asked)
    assert ended.returncode == 7, ended.stderr
    assert steps(tmp_path / "group-0") == steps(tmp_path / "group-1") == [1]


@pytest.mark.slow
def test_another_number_of_groups_is_refused(runs):
    """Oracle: the line."""
    for groups, ranks in ((4, 4), (1, 1)):
        given = (f"--groups={groups}", "--resume=auto", f"--run_dir={runs / 'sgd'}")
        with pytest.raises(ValueError, match=f"groups={groups} must be 2, as in the run that"):
            settings.of_start(given, ranks)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--groups=3"], r"groups=3 must divide the number of ranks \(4\)"),
        (
            ["--groups=2", "--shrink=true"],
            "groups=2 needs shrink=false, not true: the remaining ranks",
        ),
        (
            ["--groups=2", "--patience=2"],
            "groups=2 needs patience=null, not 2: all groups must end",
        ),
        (
            ["--groups=2", "--sync=local-sgd", "--optimizer=sgd"],
            "groups=2 needs sync=synchronous, not local-sgd: all ranks of a group must "
            "have the same model",
        ),
        (
            ["--groups=2", "--kfac.damping_adapt=5"],
            "groups=2 needs kfac.damping_adapt=null, not 5: the loss after a step",
        ),
        (
            [
                "--groups=2",
                "--kfac.grafting=quadratic-model",
                "--schedule=constant",
                "--momentum=0",
                "--weight_decay=0",
            ],
            "groups=2 needs a kfac.grafting other than quadratic-model: the quadratic model",
        ),
        (
            ["--groups=2", "--model=autoencoder", "--data.name=curves"],
            "groups=2 needs a classifier, not model=autoencoder",
        ),
        (
            ["--groups=2", "--refresh=curvature-servers"],
            "groups=2 needs refresh=owners, not curvature-servers",
        ),
    ],
)
def test_what_cannot_work_in_groups_is_refused(arguments, text):
    """Oracle: the message."""
    with pytest.raises(ValueError, match=text):
        parse(arguments, 4)


@pytest.mark.parametrize(("rank", "group"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_a_group_has_a_directory_and_a_seed_of_its_own(rank, group):
    """Oracle: by hand: neighbours of four ranks form a group."""
    world = SimpleNamespace(rank=rank, size=4, Split=lambda number, key: (number, key))
    options = parse(["--groups=2", "--seed=4", "--run_dir=runs/x"], 4)
    comm, found = joined(world, options)
    assert comm == (group, rank)
    assert (found.seed, found.run_dir) == (4 + group, f"runs/x/group-{group}")
    alone = dataclasses.replace(options, codistillation=GroupOptions())
    assert joined(world, alone) == (world, alone)
