"""The recipes of images: Docker's and Apptainer's build the same image."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "jobs" / "containers"
DOCKER = (FOLDER / "Dockerfile").read_text()
APPTAINER = (FOLDER / "apptainer.def").read_text()


def section(name: str) -> list[str]:
    """Return the lines of a section of the recipe for Apptainer."""
    _, _, rest = APPTAINER.partition(f"\n%{name}\n")
    return [line.strip() for line in rest.partition("\n%")[0].splitlines() if line.strip()]


def test_both_recipes_copy_the_same_files():
    """Oracle: the recipes, each for the other; the files that an installation reads."""
    copied = [line.split()[1:-1] for line in DOCKER.splitlines() if line.startswith("COPY")]
    files = {file for line in copied for file in line}
    assert files == {line.split()[0] for line in section("files")}
    assert all((ROOT / file).exists() for file in files)
    installed = {"setup.cfg", "setup.py", "pyproject.toml", "constraints.txt", "mpikfac", "apps"}
    assert installed <= files


def test_both_recipes_have_the_same_arguments_and_run_the_same_script():
    """Oracle: the recipes, each for the other; the script's variables."""
    arguments = dict(line.split("=", 1) for line in section("arguments"))
    assert arguments == dict(re.findall(r"^ARG (\w+)=(.*)$", DOCKER, re.MULTILINE))
    (build,) = section("post")
    run = re.sub(r"\{\{ (\w+) \}\}", r"$\1", build)
    assert f"\nRUN {run}\n" in DOCKER
    script = (FOLDER / "install.sh").read_text()
    assert set(re.findall(r'(\w+)="', run)) == set(re.findall(r"\$\{(\w+):", script))
    environment = section("environment")[0].removeprefix("export ")
    assert f"\nENV {environment}\n" in DOCKER
