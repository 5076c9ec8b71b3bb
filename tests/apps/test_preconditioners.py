"""A preconditioner brings its defaults to the programs, and replaces no value of a user."""

from __future__ import annotations

import json

import pytest
import torch

import mpikfac
from mpikfac.preconditioners import PRECONDITIONERS, Defaults
from mpikfac.settings import MOMENTUM
from mpikfac_apps.lab.predict.options import SIMULATE
from mpikfac_apps.options.fields import flat
from mpikfac_apps.options.options import TRAIN
from mpikfac_apps.options.parse import parse
from mpikfac_apps.options.strategy import kfac_settings, make_strategy
from mpikfac_apps.planning.options import PLAN
from mpikfac_apps.training import train
from support import inside

QUICK = ("--batch=120", "--data.train_images=240", "--epochs=4", "--log_every=1", "--threads=1")
OF_SHAMPOO = {
    **{"kfac.relative_damping": 0.001, "kfac.damping": None},
    **{"kfac.grafting.orthogonalize": False, "kfac.factor_update_steps": 1},
}


def options_of(*argv: str) -> dict:
    return flat(parse(argv, 1))


def part(values: dict, keys) -> dict:
    return {key: values[key] for key in keys}


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_a_preconditioner_alone_means_what_it_means_to_the_library(preconditioner):
    """Oracle: the settings and the estimator of a KFAC with the preconditioner alone."""
    options = parse([f"--kfac.preconditioner={preconditioner}"], 1)
    _, chosen = make_strategy(options.distribution, options.kfac, 1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    descent = torch.optim.SGD(model.parameters(), 0.01)
    usual = mpikfac.KFAC(model, descent, preconditioner=preconditioner)
    taken = mpikfac.KFAC(model, descent, **kfac_settings(options.kfac, chosen, float))
    expected, found = inside.settings(usual), inside.settings(taken)
    assert (found.damping, found.grafting.with_momentum(0)) == (
        expected.damping,
        expected.grafting.with_momentum(0),
    )
    assert in_force(found) == in_force(expected)
    assert inside.estimator(taken) == inside.estimator(usual)
    assert options.momentum == (expected.grafting.momentum or MOMENTUM)


def in_force(settings) -> int:
    """Return the interval of factors in the end."""
    often = settings.factor_update_steps
    return often(1000) if callable(often) else often


GIVEN = {
    "damping": ("kfac.damping", 0.2, {"kfac.relative_damping": None}),
    "relative damping": ("kfac.relative_damping", 10.0, {"kfac.damping": None}),
    "grafting": ("kfac.grafting.type", "sgd", {}),
    "clip": ("kfac.clip.type", "kl", {"kfac.grafting.type": "none"}),
    "interval": ("kfac.factor_update_steps", 3, {}),
    "momentum": ("momentum", MOMENTUM, {}),
}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("by_file", [False, True], ids=["command-line", "file"])
def test_a_value_that_a_user_gives_wins(name, by_file, tmp_path):
    """Oracle: the value itself, and all further usual values; also where it is K-FAC's default."""
    key, value, implied = GIVEN[name]
    given, preconditioner = (
        f"--{key}={json.dumps(value)}",
        "muon" if key == "momentum" else "shampoo",
    )
    if by_file:
        file = tmp_path / "mine.yaml"
        group, _, last = key.rpartition(".")
        file.write_text(f"{group}:\n  {last}: {value}\n" if group else f"{last}: {value}\n")
        given = f"--config={file}"
    found = options_of(given.replace('"', ""), f"--kfac.preconditioner={preconditioner}")
    assert part(found, [key, *implied]) == {key: value, **implied}
    if preconditioner == "shampoo" and name not in ("grafting", "clip"):  # fields of another type
        changed = {key, *implied} | ({"kfac.damping"} if "damping" in key else set())
        others = OF_SHAMPOO.keys() - changed
        assert part(found, others) == part(OF_SHAMPOO, others)


def test_other_optimizers_and_strategies_keep_their_meaning():
    """Oracle: by hand: a baseline takes no preconditioner; the strategy "eva" brings one."""
    assert options_of("--optimizer=sgd", "--kfac.preconditioner=muon")["momentum"] == MOMENTUM
    assert options_of("--strategy=eva")["kfac.damping"] == 0.003


def test_a_printed_configuration_shows_usual_values_and_is_the_same_run(capsys, tmp_path):
    """Oracle: the options of the same command line."""
    argv = ["--kfac.preconditioner=shampoo"]
    with pytest.raises(SystemExit):
        TRAIN.read([*argv, "--print_config"])
    text = capsys.readouterr().out
    assert "    orthogonalize: false\n" in text and "  relative_damping: 0.001\n" in text
    file = tmp_path / "printed.yaml"
    file.write_text(text)
    assert options_of(f"--config={file}") == options_of(*argv)


def test_planned_runs_have_the_same_usual_values():
    """Oracle: the options of a training."""
    of_run = parse(["--kfac.preconditioner=shampoo"], 1).kfac
    plan = PLAN.read(["--model=resnet20", "--ranks=2", "--preconditioner=shampoo"]).kfac
    machine = ["--machine=none.json", "--model=resnet20", "--ranks=2", "--preconditioner=shampoo"]
    for found in (plan, SIMULATE.read(machine).kfac):
        assert (found.damping, found.factor_update_steps) == (
            of_run.damping,
            of_run.factor_update_steps,
        )
        assert found.grafting == of_run.grafting.with_momentum(0.0)


def test_any_usual_value_of_a_preconditioner_replaces_a_default(monkeypatch):
    """Oracle: by hand: of a preconditioner with a number of each kind; what is given, stays."""
    estimator = mpikfac.Estimator(fisher_type="forward-only", factor_decay=0.5)
    defaults = Defaults(estimator=estimator, factor_update_steps=3)
    monkeypatch.setattr(mpikfac.Eigen, "defaults", defaults)
    options = TRAIN.read(["--kfac.preconditioner=eigen", "--kfac.factor_decay=0.95"])
    found = flat(options)
    assert (found["kfac.fisher_type"], found["kfac.factor_decay"]) == ("forward-only", 0.95)
    assert found["kfac.factor_update_steps"] == 3


# -- runs and restarts -----------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    begin = [*QUICK, f"--run_dir={path}", "--max_steps=2", "--kfac.preconditioner=shampoo"]
    assert train.main(begin) == 0
    return path


def go_on(run, *more: str) -> str:
    """Resume a run, and return the new lines of the log."""
    before = len((run / "log.txt").read_text())
    assert train.main([f"--run_dir={run}", "--resume=auto", "--threads=1", *more]) == 0
    return (run / "log.txt").read_text()[before:]


def test_the_log_shows_what_is_in_force_and_a_restart_keeps_it(run):
    """Oracle: the lines, by hand."""
    words = (
        "preconditioner shampoo with learning rate 0.0075, momentum 0.9 of gradients, weight decay "
        "0.0005, grafting adam, relative damping 0.001"
    )
    assert words in (run / "log.txt").read_text()
    text = go_on(run, "--max_steps=4")
    assert words in text and "changed since" not in text


@pytest.mark.gate
def test_another_preconditioner_takes_its_own_usual_values(run):
    """Oracle: by hand: the values of Shampoo go, and a value that was given at a start stays."""
    go_on(run, "--max_steps=3", "--weight_decay=0.01", "--kfac.factor_decay=0.9")
    text = go_on(run, "--max_steps=4", "--kfac.preconditioner=muon")
    (line,) = [line for line in text.splitlines() if "changed since the checkpoint" in line]
    changed = (
        *(
            "momentum 0.9 -> 0.95",
            "kfac.preconditioner.type shampoo -> muon",
            "kfac.grafting.orthogonalize false -> true",
        ),
        *("kfac.factor_update_steps 1 -> null", "kfac.relative_damping 0.001 -> 10.0"),
        "2 options gone",  # of Shampoo: dtype and exponent
    )
    told = line.partition("checkpoint: ")[2].split(", ")
    assert sorted(told) == sorted(changed) and told[0].startswith("kfac.preconditioner.type ")
    assert (
        "weight decay 0.01" in text and "damping 10" not in text.partition("preconditioner muon")[2]
    )
    line = "continued: lengths, momenta; restarted: nothing; dropped: decompositions, factors\n"
    assert line in text
    again = go_on(run, "--max_steps=5", "--kfac.preconditioner=kl-shampoo")
    assert "restarted: decompositions, factors; dropped: nothing\n" in again


@pytest.mark.gate
@pytest.mark.parametrize(
    ("preconditioner", "there", "back"),
    [
        (
            "soap",
            "momenta; restarted: decompositions, factors, {}; dropped: lengths",
            "momenta; restarted: lengths; dropped: decompositions, factors, {}",
        ),
        (
            "normuon",
            "lengths, momenta; restarted: {}; dropped: decompositions, factors",
            "lengths, momenta; restarted: nothing; dropped: {}",
        ),
    ],
    ids=["soap", "normuon"],
)
def test_averages_of_another_length_start_anew_by_name(run, preconditioner, there, back):
    """Oracle: by hand: what each length keeps, from Shampoo there, and to Muon."""
    own = {"soap": "lengths in eigenbases", "normuon": "lengths of rows"}[preconditioner]
    text = go_on(run, "--max_steps=3", f"--kfac.preconditioner={preconditioner}")
    assert f"continued: {there.format(own)}\n" in text
    text = go_on(run, "--max_steps=4", "--kfac.preconditioner=muon")
    assert f"continued: {back.format(own)}\n" in text
