"""The commands of the tutorial run as they stand, one after another."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from mpikfac_apps import __main__ as program
from mpikfac_apps.problems.datasets import DATASETS
from support.launch import launch

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
RANKS = "mpirun -n 2 python -m mpi4py "


def commands() -> Iterator[str]:
    """Yield the commands of the page, without the installation."""
    for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL):
        yield from (line.partition("  #")[0].strip() for line in block.splitlines())


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
    monkeypatch.setattr("mpi4py.MPI.Finalize", lambda: None)


@pytest.mark.slow
@pytest.mark.skipif(
    "evaluate" not in program.PROGRAMS or "folder" not in DATASETS,
    reason="the programs have no `mpikfac evaluate`, or no data.name=folder",
)
@pytest.mark.usefixtures("mpi_goes_on")
def test_the_commands_run(tmp_path, monkeypatch, capfd):
    """Oracle: exit codes; the words that the page promises; the weights in the model's layers."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    Path("my_model.py").write_text(code)
    pictures(Path("DIR"))
    said = {}
    for line in commands():
        if line.startswith(RANKS):
            assert launch(2, *shlex.split(line.removeprefix(RANKS))).returncode == 0
        elif line.startswith("mpikfac "):
            capfd.readouterr()
            assert program.main(shlex.split(line)[1:]) == 0, line
            said[line.split()[1]] = capfd.readouterr().out
    assert "epoch 4: loss" in said["train"] or "epoch 10: loss" in said["train"]
    assert "All right" in said["check"]
    assert "90" in said["compare"]
    assert set(said) == {"train", "check", "compare", "evaluate", "export"}
    assert Path("my_weights.pt").exists()
