"""Populations: selection by hand, runs on several numbers of ranks, restarts and refusals."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

import mpikfac
from mpikfac_apps.populations import selection
from mpikfac_apps.populations.crew import Crew, divided
from mpikfac_apps.populations.options import parse
from mpikfac_apps.populations.run import PopulationRun
from mpikfac_apps.populations.selection import Parents
from mpikfac_apps.training.parts.problem import first_model
from support.launch import TRAIN, launch

pytestmark = pytest.mark.lab

PROGRAM = ("-m", "mpikfac_apps", "train-population")
# an epoch has three steps
QUICK = (
    *("--data.train_images=460", "--population.held_out=100", "--batch=120", "--epochs=4"),
    *("--threads=1", "--log_every=1", "--population.every=4", "--seed=2"),
)
EVOLVING = (
    *("--population.crossover=true", "--population.mutation=0.01", "--population.near=0.5"),
)
STEPS = 12


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# -- selection -------------------------------------------------------------------------------------


def test_the_worst_are_replaced_by_the_best():
    """Oracle: by hand; a quarter of eight members are two."""
    ranking = [3, 1, 0, 2, 7, 6, 5, 4]
    found = [selection.replacements(ranking, [], 0.25, False, generator(n)) for n in range(20)]
    assert all(parents.keys() == {5, 4} for parents in found)
    drawn = {parent for parents in found for each in parents.values() for parent in each}
    assert drawn == {3, 1}
    assert all(each.first == each.second for parents in found for each in parents.values())


def test_lost_members_are_replaced_too_and_the_best_never():
    """Oracle: by hand; with crossover the second parent is any member that stays."""
    ranking = [2, 0, 1, 3]
    found = [selection.replacements(ranking, [2, 0], 0.5, True, generator(n)) for n in range(9)]
    assert set().union(*found) == {0, 1, 3}
    assert {each for parents in found for each in parents.values()} == {Parents(2, 2)}
    found = [selection.replacements(ranking, [], 0.25, True, generator(n)) for n in range(30)]
    assert {parents[3] for parents in found} == {Parents(2, other) for other in (2, 0, 1)}


def test_numbers_are_multiplied_or_divided():
    """Oracle: by hand; both directions of both numbers come up."""
    numbers = {"lr": 0.5, "damping": 8.0}
    found = [selection.explored(numbers, 2.0, generator(n)) for n in range(40)]
    assert {(each["lr"], each["damping"]) for each in found} == {
        (lr, damping) for lr in (0.25, 1.0) for damping in (4.0, 16.0)
    }


def test_first_numbers_lie_within_the_spread():
    """Oracle: the bounds, and the mean of uniform logarithms."""
    numbers = [selection.first_numbers({"lr": 2.0}, 10.0, generator(n))["lr"] for n in range(400)]
    assert all(0.2 <= number <= 20 for number in numbers)
    logarithms = [math.log10(number / 2) for number in numbers]
    assert abs(sum(logarithms) / 400) < 0.1 and min(logarithms) < -0.9 and max(logarithms) > 0.9
    assert selection.first_numbers({"lr": 2.0}, 1.0, generator()) == {"lr": 2.0}


def test_layers_come_from_one_of_two_parents():
    """Oracle: by hand; all items of a layer are of one parent, all else of the first."""
    names = [
        *("model/3.weight", "kfac/factors/3.A", "kfac/graft/3#", "optimizer/state/3.weight/m"),
        *("model/31.weight", "kfac/momentum/31", "trainer/steps", "kfac/preconditioner"),
    ]
    first, second = ({name: f"{name} of {side}" for name in names} for side in "ab")
    sides = set()
    for seed in range(20):
        child = selection.crossed(first, second, ["3", "31"], generator(seed))
        assert child.keys() == first.keys()
        of = {name: value[-1] for name, value in child.items()}
        assert of["trainer/steps"] == of["kfac/preconditioner"] == "a"
        assert len({of[name] for name in names[:4]}) == len({of[name] for name in names[4:6]}) == 1
        sides.add((of["model/3.weight"], of["model/31.weight"]))
    assert sides == {("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")}


def test_noise_has_the_size_of_the_weights():
    """Oracle: the standard deviation that was asked for; other items stay."""
    weights = torch.full((200, 100), -3.0)
    weights[::2] *= -1
    state = {"model/w": weights, "model/b": torch.zeros(3), "steps": 4}
    changed = selection.mutated(state, ["model/w", "model/b"], 0.1, generator())
    noise = changed["model/w"] - weights
    assert noise.std().item() == pytest.approx(0.3, rel=0.02) and abs(noise.mean()) < 0.01
    assert torch.equal(changed["model/b"], torch.zeros(3)) and changed["steps"] == 4
    assert torch.equal(state["model/w"], weights) and changed["model/w"].dtype == weights.dtype


def test_the_best_of_a_cluster_stays():
    """Oracle: by hand; points on a line, and mean distances between clusters."""
    points = torch.tensor([0.0, 1.0, 10.0, 2.5, 11.5])
    distances = (points - points.unsqueeze(1)).abs()
    # 0 and 1 join at 1, then 2 and 4 at 1.5, then both with 3 at the mean of 2.5 and 1.5, 2.
    ranking = [3, 4, 0, 1, 2]
    for near, gone in ((1.0, set()), (1.2, {1}), (1.8, {1, 2}), (2.1, {0, 1, 2})):
        assert selection.suppressed(ranking, distances, near) == gone
    assert selection.suppressed(ranking, distances, 100.0) == {0, 1, 2, 4}


def test_distances_are_shares_of_the_norms():
    """Oracle: numpy's norms by hand: 5 and 10, apart by 5."""
    found = selection.distances_of([torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])])
    torch.testing.assert_close(found, torch.tensor([[0, 5 / 7.5], [5 / 7.5, 0]]).double())


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "ranks", "text"),
    [
        ([], 6, r"population.members=4 must divide the number of ranks \(6\), or be at least this"),
        (["--population.members=1"], 1, "population.members=1 must be a whole number >= 2"),
        (["--sync=local-sgd"], 2, "a population needs sync=synchronous, not local-sgd"),
        (["--kfac.damping=1 until 3, 2"], 1, "a population needs a single damping, not 1"),
        (["--model=airbench94", "--data.name=cifar10"], 1, "a model other than airbench94"),
        (
            ["--optimizer=sgd", "--population.numbers=[damping]"],
            1,
            r"a population needs population.numbers of lr, not \['damping'\]",
        ),
        (["--patience=2"], 1, "unknown key patience"),
        (["--batch=7"], 8, r"batch=7 must be a multiple of the number of ranks \(2\)"),
    ],
)
def test_what_a_population_cannot_do_is_refused(arguments, ranks, text):
    """Oracle: the message."""
    with pytest.raises(ValueError, match=text):
        parse(arguments, ranks)


def test_held_out_images_train_no_member():
    """Oracle: the data set; the last training images judge, and the test of the data stays."""
    options = parse(["--population.held_out=100"], 1)
    judged, tested = divided(mpikfac.world(), options, torch.device("cpu"))
    least = parse(["--population.held_out=1"], 1)
    whole, _ = divided(mpikfac.world(), least, torch.device("cpu"))
    images = torch.cat([whole.batches.images, whole.batches.tested[0]])
    assert torch.equal(judged.batches.images, images[:-100])
    assert torch.equal(judged.batches.tested[0], images[-100:])
    assert len(tested.batches.tested[0]) == 360 and torch.equal(
        tested.batches.images, images[:-100]
    )
    with pytest.raises(mpikfac.UserError, match="population.held_out=5000 must be less than the"):
        every = parse(["--population.held_out=5000"], 1)
        divided(mpikfac.world(), every, torch.device("cpu"))


def test_members_say_how_they_begin(caplog):
    """Oracle: the options for member 0; further members have other numbers."""
    options = parse(["--population.members=2", "--optimizer=sgd", "--lr=0.25"], 1)
    with caplog.at_level("INFO", "mpikfac"):
        crew = Crew(mpikfac.world(), options, torch.device("cpu"))
    told = [text for text in caplog.messages if text.startswith("member ")]
    assert told[0] == "member 0 starts with lr 0.25"
    assert told[1] == f"member 1 starts with lr {crew.members[1].numbers['lr']:.3g}" != told[0]
    crew.close()


def test_a_member_with_kfac_tells_its_own_rate(caplog):
    """Oracle: the numbers of the line before, to six digits."""
    options = parse(["--population.members=2"], 1)
    with caplog.at_level("INFO", "mpikfac"):
        crew = Crew(mpikfac.world(), options, torch.device("cpu"))
    told = [text for text in caplog.messages if text.startswith("preconditioner ")]
    for text, member in zip(told, crew.members.values(), strict=True):
        assert f"learning rate {member.numbers['lr']:g}," in text
        assert member.lr(0) == pytest.approx(member.numbers["lr"])
    crew.close()


@pytest.mark.parametrize(
    ("every", "told"),
    [
        (3, "a selection every 3"),
        (4, "no selection: population.every=4 must be less than 4 steps"),
    ],
)
def test_a_selection_that_never_happens_is_told(every, told, tmp_path):
    """Oracle: the four steps of an epoch; there is no selection after the last step."""
    options = parse([f"--population.every={every}", "--epochs=1", f"--run_dir={tmp_path}"], 1)
    guard = SimpleNamespace()
    run = PopulationRun(mpikfac.world(), options, guard, torch.device("cpu"))
    assert run.summary().endswith(told)
    run.crew.close()


# -- runs ------------------------------------------------------------------------------------------

slow = pytest.mark.slow


def test_a_mistake_is_told_in_a_line(tmp_path):
    """Oracle: the line, from one rank, and the code."""
    ended = launch(2, *PROGRAM, "--population.held_out=5000", f"--run_dir={tmp_path / 'run'}")
    assert ended.returncode == 2
    assert ended.stderr.count("population.held_out=5000 must be less than the") == 1
    assert "Traceback" not in ended.stderr


def run(ranks, run_dir, *more, program=PROGRAM):
    ended = launch(ranks, *program, *QUICK, *more, f"--run_dir={run_dir}")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def saved(run_dir, step=STEPS):
    """Return the items of a checkpoint that are of members."""
    found = mpikfac.checkpoint.read_checkpoint(run_dir / "checkpoints" / f"step-{step:09d}")
    return {name: found[name] for name in found if not name.startswith("run/")}


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def of_member(items, number):
    prefix = f"member-{number}/"
    return {n.removeprefix(prefix): items[n] for n in items if n.startswith(prefix)}


def differing(found, expected):
    """Return the names of the items that differ in a bit."""
    assert found.keys() == expected.keys()
    same = torch.equal
    return {
        name
        for name, value in expected.items()
        if not (same(value, found[name]) if torch.is_tensor(value) else value == found[name])
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a directory of finished runs."""
    root = tmp_path_factory.mktemp("populations")
    run(2, root / "two", *EVOLVING)
    run(2, root / "apart", "--population.every=100", "--max_steps=4")
    run(2, root / "selected", "--max_steps=4")
    return root


@slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_numbers_do_not_depend_on_the_ranks(runs, tmp_path, ranks):
    """Oracle: the run on two ranks, bit for bit, with crossover, mutation and suppression."""
    run(ranks, tmp_path / "run", *EVOLVING)
    assert differing(saved(tmp_path / "run"), saved(runs / "two")) == set()


@slow
def test_a_member_of_two_ranks_trains_as_on_one(runs, tmp_path):
    """Oracle: the run on two ranks, to rounding; the network has no normalisation of batches."""
    asked = ("--model=autoencoder_small", "--epochs=2", "--population.members=2")
    for ranks in (1, 4):
        run(ranks, tmp_path / str(ranks), *asked)
    found, expected = (saved(tmp_path / name, 6) for name in ("4", "1"))
    assert found.keys() == expected.keys()
    for name in expected:
        if "/model/" in name:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-4)


@slow
def test_a_restart_repeats_every_bit_on_other_ranks(runs, tmp_path):
    """Oracle: the run that was not interrupted."""
    run(4, tmp_path / "run", *EVOLVING, "--max_steps=7")
    run(1, tmp_path / "run", *EVOLVING, "--resume=auto")
    assert differing(saved(tmp_path / "run"), saved(runs / "two")) == set()
    assert [row["step"] for row in rows(tmp_path / "run") if "best_member" in row] == [4, 8, 12]


@slow
def test_a_member_is_a_plain_run_until_a_selection(runs, tmp_path):
    """Oracle: the training program with the images that are not held out, bit for bit."""
    plain = ("--data.train_images=360", "--batch=120", "--epochs=4", "--threads=1", "--seed=2")
    ended = launch(1, *TRAIN, *plain, "--max_steps=4", f"--run_dir={tmp_path / 'run'}")
    assert ended.returncode == 0, ended.stderr
    expected = saved(tmp_path / "run", 4)
    found = of_member(saved(runs / "apart", 4), 0)
    assert found.pop("number/lr") == 0.0075 and found.pop("number/damping") == 10.0
    assert found.pop("lost") == 0
    assert differing(found, expected) == set()


@slow
def test_the_worst_member_takes_over_the_best(runs):
    """Oracle: the members before the selection, judged in this process."""
    options = parse([*QUICK], 1)
    problem, _ = divided(mpikfac.world(), options, torch.device("cpu"))
    before, after = (saved(runs / name, 4) for name in ("apart", "selected"))
    losses = []
    for number in range(4):
        state = of_member(before, number)
        model = first_model(problem.options, problem.classes, problem.channels, problem.device)
        model.load_state_dict({n[6:]: v for n, v in state.items() if n.startswith("model/")})
        result = problem.evaluate(model)
        losses.append(result["loss"])
    best, worst = (losses.index(found) for found in (min(losses), max(losses)))
    for number in range(4):
        found, parent = of_member(after, number), best if number == worst else number
        changed = differing(found, of_member(before, parent))
        assert changed == ({"number/lr", "number/damping"} if number == worst else set())
    child, parent = of_member(after, worst), of_member(before, best)
    for name in ("number/lr", "number/damping"):
        ratio = child[name] / parent[name]
        assert ratio == pytest.approx(1.2) or ratio == pytest.approx(1 / 1.2)


@slow
def test_a_request_reaches_all_ranks(tmp_path):
    """Oracle: the exit code, and the step of the checkpoint of all members."""
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "stop").touch()
    asked = (*QUICK, "--resume=auto", "--exit_code=7", f"--run_dir={tmp_path}")
    ended = launch(2, *PROGRAM, *asked)
    assert ended.returncode == 7, ended.stderr
    assert {name.partition("/")[0] for name in saved(tmp_path, 1)} == {
        *("member-0", "member-1", "member-2", "member-3", "trainer")
    }


@slow
def test_a_member_that_diverges_is_replaced(tmp_path):
    """Oracle: the log; rates up to 100,000 lose members."""
    asked = ("--optimizer=sgd", "--lr=1", "--population.spread=1e5", "--population.worst=0.5")
    run(2, tmp_path / "run", *asked)
    lost = [row["lost_members"] for row in rows(tmp_path / "run") if "lost_members" in row]
    assert len(lost) == 3 and lost[0] > 0
    items = saved(tmp_path / "run", 12)
    assert sum(of_member(items, number)["lost"] for number in range(4)) == lost[-1] < 4
