"""The strategies on the page about exchanges are what the page says."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpikfac
from mpikfac.plan import Aggregation, Synchronization, named_types
from support.launch import TRAIN, launch
from support.pace import paced

pytestmark = pytest.mark.lab

PAGE = Path(__file__).parents[2] / "docs" / "extensions" / "exchange.md"


def programs() -> list[str]:
    """Return the page's programs."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_strategies_are_made():
    """Oracle: the steps between two exchanges, and the step of the first exchange, by hand."""
    program = programs()[0]
    made: dict[str, mpikfac.Strategy] = {}
    exec(program, made)
    dues = {
        name: [step for step in range(1100) if made[name].sync.due(step)][:2]
        for name in ("local_sgd", "post_local_sgd", "diloco", "local_kfac")
    }
    assert dues == {
        "local_sgd": [7, 15],
        "post_local_sgd": [1007, 1015],
        "diloco": [49, 99],
        "local_kfac": [7, 15],
    }
    assert made["local_kfac"].assignment == mpikfac.CommOpt()


def test_every_choice_of_an_exchange_is_on_the_page():
    """Oracle: the fields of the values."""
    page = PAGE.read_text() + (PAGE.parents[1] / "ideas" / "strategies.md").read_text()
    kinds = [*named_types(Synchronization).values(), *named_types(Aggregation).values()]
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert [name for name in names if not re.search(rf"`[^`\n]*\b{name}\b", page)] == []


STUDY = """\
name: own-sync
options: {epochs: 1, max_steps: 6, model: digits_cnn, optimizer: sgd}
matrix: {strategy: [mine], ranks: [1]}
strategies:
  mine: {strategy: comm-opt, sync: my_sync.py:PartialSGD, sync.alpha: 0.3, sync.sync_every: 4}
"""
OWN = ["--sync", "my_sync.py:PartialSGD", "--sync.sync_every", "4"]
OF_RESNET = ["--model", "resnet50", "--ranks", "8", *OWN]


@pytest.mark.gate
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--optimizer", "sgd", "--max_steps", "6", *OWN, "--sync.alpha", "0.3"], ""),
        (["plan", *OF_RESNET], "exchange weights"),
        (["simulate", *OF_RESNET, "--machine", "v100-edr", "--strategy", "sgd:comm-opt"], "sgd"),
        (["study", "study.yaml"], "mine"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_all_programs_accept_the_synchronization_of_the_page(tmp_path, arguments, words):
    """Oracle: the exit code, and the words of the output."""
    (tmp_path / "my_sync.py").write_text(programs()[1])
    (tmp_path / "study.yaml").write_text(STUDY)
    command = [sys.executable, "-m", "mpikfac_apps", *arguments]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=paced(300), check=False
    )
    assert run.returncode == 0, run.stderr
    assert words in run.stdout


@pytest.mark.gate
def test_ranks_train_with_the_synchronization_of_the_page_and_continue(tmp_path):
    """Oracle: the log; the file is not in the folder from which the ranks start."""
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "my_sync.py").write_text(programs()[1])
    own = f"--sync={tmp_path}/rules/my_sync.py:PartialSGD", "--sync.sync_every=2"
    arguments = *TRAIN, "--optimizer=sgd", *own, f"--run_dir={tmp_path}/run"
    for more, words in (("--max_steps=2",), "steps 0 to 2"), (("--resume=auto",), "steps 2 to 4"):
        run = launch(2, *arguments, "--max_steps=4", *more)
        assert run.returncode == 0, run.stderr
        assert words in run.stdout + run.stderr
