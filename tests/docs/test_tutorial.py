"""The commands of the tutorial run as they stand, one after another."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from mpikfac_apps import __main__ as program
from mpikfac_apps.problems.datasets import DATASETS
from support.launch import launch
from support.outlive import outlive

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "start" / "tutorial.md"
TIMED = ROOT / "benchmarks" / "newcomer.sh"
RANKS = "mpirun -n 2 mpikfac "


def commands(page: str = "") -> Iterator[str]:
    """Yield the commands of a part of the page, or of the whole page."""
    for block in re.findall(r"```bash\n(.*?)```", page or PAGE.read_text(), re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        yield from (line.partition("  #")[0].strip() for line in lines)


def pictures(root: Path) -> None:
    """Make small images of two classes in folders."""
    for part, number in (("train", 256), ("test", 8)):
        for name, grey in (("dark", 40), ("light", 200)):
            folder = root / part / name
            folder.mkdir(parents=True)
            for each in range(number // 2):
                Image.new("L", (32, 32), grey + each % 20).save(folder / f"{each}.png")


@pytest.fixture
def mpi_goes_on(monkeypatch):
    outlive(monkeypatch)


@pytest.mark.slow
@pytest.mark.skipif(
    "evaluate" not in program.PROGRAMS or "folder" not in DATASETS,
    reason="the programs have no `mpikfac evaluate`, or no data.name=folder",
)
@pytest.mark.usefixtures("mpi_goes_on")
def test_the_commands_run(tmp_path, monkeypatch, capfd):
    """Oracle: exit codes; the words that the page promises; the step of a stop."""
    monkeypatch.chdir(tmp_path)
    (stop,) = (Path(line.split()[1]) for line in commands() if line.startswith("touch "))
    stop.parent.mkdir(parents=True)
    stop.touch()  # before the start, so the first run ends after a step
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    Path("my_model.py").write_text(code)
    pictures(Path("DIR"))
    said = {}
    for line in commands():
        if line.startswith(RANKS):
            for _ in range(2):  # the second run goes on
                arguments = shlex.split(line.removeprefix(RANKS))
                assert launch(2, "-m", "mpikfac_apps", *arguments).returncode == 0
        elif line.startswith("mpikfac "):
            capfd.readouterr()
            assert program.main(shlex.split(line)[1:]) == 0, line
            said[line.split()[1]] = capfd.readouterr().out
    assert "epoch 4: loss" in said["train"] or "epoch 10: loss" in said["train"]
    log = stop.parents[1].joinpath("log.txt").read_text()
    said_in_turn = (
        "stopped after 1 steps (control/stop)",
        "continuing from",
        "complete after 4 st",
    )
    assert sorted(said_in_turn, key=log.find) == list(said_in_turn) and log.find("stopped") > 0
    assert "All right" in said["check"]
    assert "90" in said["compare"]
    assert set(said) == {"train", "check", "compare", "evaluate", "export"}
    assert Path("my_weights.pt").exists()


def test_the_benchmark_takes_the_commands_of_the_page():
    """Oracle: the page's commands, section by section, as this test finds the commands."""
    script = TIMED.read_text()
    (function,) = re.findall(r"^code\(\) \{\n.*?^\}\n", script, re.MULTILINE | re.DOTALL)
    numbers = {*re.findall(r"typed (\d)", script), *re.findall(r"code bash (\d)", script)}
    sections = PAGE.read_text().split("\n## ")[1:]
    assert numbers == {section[0] for section in sections if [*commands(section)]}
    for number in numbers:
        (section,) = (text for text in sections if text.startswith(f"{number}. "))
        found = subprocess.run(
            ["bash", "-c", f"{function}\ncode bash {number}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        lines = [line.partition("  #")[0] for line in found.splitlines()]
        assert [line.split() for line in lines] == [line.split() for line in commands(section)]
    assert [line.split()[0] for line in commands(sections[5])] == ["mpirun", "touch"]
