"""Settings of strangers that name code: no program executes a file that only the settings name.

Oracle of all tests: the trace that the file leaves when it is executed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import yaml

import mpikfac
from mpikfac_apps.launching import programs
from mpikfac_apps.launching.programs import PROGRAMS
from mpikfac_apps.options.fields import possible
from mpikfac_apps.options.options import Options
from mpikfac_apps.training import settings, train

CODE = """
from pathlib import Path

Path(__file__).with_suffix(".ran").touch()


def build(*arguments):
    raise RuntimeError("executed")


class Mine:
    pass
"""
pytestmark = pytest.mark.gate
TEXTS = sorted(
    leaf.key for leaf in possible(Options).values() if leaf.joint or leaf.kind in (str, str | None)
)
LISTS = sorted(leaf.key for leaf in possible(Options).values() if leaf.is_list)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Return the directory of a run of one step."""
    run = tmp_path_factory.mktemp("finished") / "run"
    options = ("--batch=120", "--data.train_images=360", "--max_steps=1", "--threads=1")
    assert train.main([*options, f"--run_dir={run}"]) == 0
    return run


@pytest.fixture
def code(tmp_path) -> Path:
    """Return a file that leaves a trace when it is executed."""
    file = tmp_path / "stranger.py"
    file.write_text(CODE)
    return file


def forged(finished: Path, run: Path, hidden: bool, **values: object) -> Path:
    """Return a copy of a run whose newest checkpoint and config.yaml have other settings.

    Args:
        hidden: the options seem to be left open by the user of the run.
    """
    shutil.copytree(finished, run)
    newest = mpikfac.checkpoint.latest_checkpoint(run / "checkpoints")
    checkpoint = mpikfac.checkpoint.read_checkpoint(newest)
    about = json.loads(checkpoint["run/data"])
    if hidden:
        about["open"] |= {key: about["settings"].get(key) for key in values}
    about["settings"] |= values
    about |= {key: values[key] for key in values.keys() & about.keys()}
    state = dict(checkpoint) | {"run/data": json.dumps(about)}
    mpikfac.save_checkpoint(mpikfac.world(), run / "checkpoints", state, checkpoint.step)
    (run / "config.yaml").write_text(yaml.safe_dump(about["settings"]))
    return run


def ended(program: Callable[[Sequence[str]], int], *arguments: str) -> None:
    """Run a program up to its end, or up to its refusal."""
    with contextlib.suppress(SystemExit, ValueError):
        program([*arguments])


FORMS = (
    ("RUN",),
    ("--run_dir=RUN", "--resume=auto"),
    ("--run_dir=COPY", "--resume=RUN"),
    ("--run_dir=COPY", "--resume=RUN/checkpoints/step-000000001"),
)
"""How a program of the command line can be given the directory of a run."""
FURTHER = {
    "train": ("--max_steps=2",),
    "train-population": ("--max_steps=2", "--population.members=2", "--population.every=1"),
    "export": ("--weights=COPY.pt",),
    "compare": ("RUN",),
    "study": ("--runs=COPY",),
}
"""Options without which a program refuses its arguments, or takes long."""


def start_all(run: Path) -> None:
    """Start every program of the command line with the directory of a run, in every form."""
    named = {"RUN": str(run), "COPY": str(run.with_name("copy"))}
    for name in PROGRAMS:
        for form in FORMS:
            arguments = [*form, *FURTHER.get(name, ())]
            for word, path in named.items():
                arguments = [argument.replace(word, path) for argument in arguments]
            ended(partial(programs.run, name), *arguments)
    replaced = ("--model=digits_cnn", "--metrics=[]", "--max_steps=2")
    ended(partial(programs.run, "train"), f"--run_dir={run}", "--resume=auto", *replaced)


@pytest.mark.parametrize(
    ("key", "damaged"),
    [("model", False), ("model", True), ("metrics", False), ("kfac.grafting.type", False)],
)
def test_no_program_executes_a_file_of_a_run_directory(
    finished, code, tmp_path, key, damaged
) -> None:
    """Damaged: the settings are those of config.yaml."""
    value = f"{code}:build" if "type" not in key else f"{code}:Mine"
    run = forged(finished, tmp_path / "run", False, **{key: value})
    if damaged:
        for file in (run / "checkpoints").glob("*/*.h5"):
            file.write_bytes(file.read_bytes()[:-1])
    start_all(run)
    assert not code.with_suffix(".ran").exists()


def started(run: Path, *given: str) -> None:
    """Read the options of a resumed run, as rank 0 does."""
    ended(lambda argv: bool(settings.of_start(argv, 1)), f"--run_dir={run}", *given)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("key", [*TEXTS, *LISTS])
def test_no_option_of_a_checkpoint_executes_a_file(finished, code, tmp_path, key, hidden) -> None:
    """Every option that takes a text; hidden: only the resolved settings name the file."""
    value = f"{code}:{'Mine' if key.endswith('.type') else 'build'}"
    run = forged(finished, tmp_path / "run", hidden, **{key: [value] if key in LISTS else value})
    replaced = ("--model=digits_cnn", "--data.name=digits", "--metrics=[]")
    for given in ((), replaced, ("--kfac.preconditioner=eigen",)):
        started(run, "--resume=auto", *given)
    assert not code.with_suffix(".ran").exists()


def test_the_command_line_executes_what_it_names(finished, code, tmp_path) -> None:
    """A file that the user names is executed, and a second file of the checkpoint is not."""
    other = tmp_path / "other.py"
    other.write_text(CODE)
    names = {"model": f"{code}:build", "metrics": [f"{other}:build"]}
    run = forged(finished, tmp_path / "run", False, **names)
    started(run, "--resume=auto", f"--model={code}:build")
    assert not other.with_suffix(".ran").exists()
    started(run, "--resume=auto", f"--model={code}:build", "--metrics=[]")
    assert code.with_suffix(".ran").exists() and not other.with_suffix(".ran").exists()
