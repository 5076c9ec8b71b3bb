"""The scripts of apps/examples run unchanged on one rank and on two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpikfac_apps.lab.predict import simulate
from support.launch import launch

pytestmark = pytest.mark.lab

FOLDER = Path(__file__).parents[2] / "apps" / "examples"


def printed(name: str, ranks: int, *arguments: str) -> str:
    """Return what an example prints on so many ranks."""
    ended = launch(ranks, str(FOLDER / f"{name}.py"), *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_example_is_listed():
    """Oracle: the files, and the page that lists them."""
    names = {path.name for path in FOLDER.glob("*.py")}
    page = (FOLDER.parents[1] / "docs" / "guide" / "own_script.md").read_text()
    assert set(re.findall(r"`apps/examples/(\w+\.py)`", page)) == names


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_learns_the_digits(ranks):
    """Oracle: the labels; guessing is right in 10 % of the images."""
    accuracies = re.findall(r"epoch \d: test accuracy ([\d.]+)%", printed("train", ranks))
    assert len(accuracies) == 4
    assert float(accuracies[-1]) > 96


def test_resume_continues_on_a_different_number_of_ranks(tmp_path):
    """Oracle: the same 20 steps on a single rank, up to rounding."""
    losses = {}
    for first in (1, 2):
        directory = str(tmp_path / f"from {first}")
        text = printed("resume", first, directory) + printed("resume", 1, directory)
        assert re.findall(r"steps (\d+ to \d+)", text) == ["1 to 10", "11 to 20"]
        losses[first] = [float(loss) for loss in re.findall(r"test loss ([\d.]+)", text)]
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)
    assert losses[1][1] < losses[1][0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_strategies_agree_but_for_compression(ranks):
    """Oracle: the weights of COMM-OPT; 8-bit gradients take fewer bytes than float32."""
    rows = re.findall(
        r"^(.*?) +([\d.]+) KB per step, relative difference (\S+)$",
        printed("strategies", ranks),
        re.MULTILINE,
    )
    sent = {name: float(kilobytes) for name, kilobytes, _ in rows}
    errors = {name: float(error) for name, _, error in rows}
    compressed = errors.pop("comm-opt, 8-bit gradients")
    assert len(errors) == 4 and max(errors.values()) < 1e-5
    if ranks == 2:
        assert 1e-5 < compressed < 0.1
        assert sent["comm-opt, 8-bit gradients"] < sent["comm-opt"]


def test_local_sgd_sends_less_with_longer_intervals():
    """Oracle: an exchange has the same bytes at any interval; guessing has the loss log 16."""
    rows = re.findall(
        r"sync_every=(\d+) +([\d.]+) KB per step, test loss ([\d.]+)", printed("local_sgd", 2)
    )
    assert [int(interval) for interval, _, _ in rows] == [2, 8, 32]
    of_exchange = [int(interval) * float(sent) for interval, sent, _ in rows]
    assert of_exchange == pytest.approx([of_exchange[0]] * 3, rel=0.4)  # one digit is printed
    assert all(float(loss) < 2 for _, _, loss in rows)


def test_predict_agrees_with_the_program(capsys):
    """Oracle: `mpikfac simulate`, to the printed digit."""
    rows = re.findall(r"^(\S+) +([\d.]+) +([\d.]+) +([\d.]+)$", printed("predict", 1), re.MULTILINE)
    names = [name for name, *_ in rows]
    job = "--machine v100-edr --model resnet50 --preconditioner null --ranks 16,64,256"
    intervals = "--factor_update_steps 10 --inv_update_steps 100"
    assert simulate.main([*f"{job} {intervals}".split(), f"--strategy={','.join(names)}"]) == 0
    told = capsys.readouterr().out
    for name, *means in rows:
        assert re.findall(rf"^  {name} +([\d.]+)", told, re.MULTILINE) == means
