"""The simulate program: the table holds the library's predictions, an error is a single line."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

import mpikfac
from mpikfac_apps.lab.predict import simulate
from mpikfac_apps.lab.predict.options import STRATEGIES
from mpikfac_apps.planning.facts import near_root
from mpikfac_apps.problems import models
from support.pace import paced

pytestmark = pytest.mark.lab

GRAFTING = mpikfac.AdamGrafting(momentum=0.9)
ASK = ["--model", "resnet50", "--machine", "v100-edr"]


def rows_of(text: str) -> dict[str, list[float]]:
    """Return the numbers of a table by strategy."""
    lines = [line.replace("*", " ").split() for line in text.splitlines()]
    told = [line for line in lines if line and line[0] in NAMES and line[1] != "is"]
    return {line[0]: [*map(float, line[1:])] for line in told}


NAMES = set(STRATEGIES)


def test_numbers_are_the_librarys(capsys, tmp_path):
    """Oracle: `mpikfac.predict.simulate` of a plan made by the test."""
    file = tmp_path / "found.json"
    asked = [
        "--ranks",
        "16",
        "--strategy",
        "mem-opt",
        "--factor_update_steps",
        "5",
        "--inv_update_steps",
        "20",
    ]
    assert simulate.main([*ASK, *asked, "--stragglers", "0.1", "--json", str(file)]) == 0
    layers, others = models.shapes_of("resnet50")
    plan = mpikfac.make_plan(layers, 16, mpikfac.Strategy(mpikfac.MemOpt()), others)
    machine = mpikfac.predict.load_machine("v100-edr")
    job = mpikfac.predict.Job("resnet50", 32, 5, 20, 0.1, grafting=GRAFTING)
    found = mpikfac.predict.simulate(plan, machine, job)
    kinds = found.mean, found.ordinary, found.factors, found.refresh
    milliseconds = [*(kind.seconds for kind in kinds), found.mean.exposed, found.mean.waiting]
    mib = [found.memory / 2**20, found.mean.sent / 2**20]
    expected = [*(1e3 * seconds for seconds in milliseconds), *mib]
    assert rows_of(capsys.readouterr().out)["mem-opt"] == pytest.approx(expected, abs=0.051)
    (row,) = json.loads(file.read_text())
    intervals = {"factor_update_steps": 5, "inv_update_steps": 20}
    expected = {"strategy": "mem-opt", "ranks": 16, "workers": 1, **intervals, **found.as_dict()}
    assert row == json.loads(json.dumps(expected))


def test_a_model_of_ones_own_is_predicted_once_it_is_measured(capsys, tmp_path):
    """Oracle: `mpikfac.predict.simulate` for the same module; without a measurement, the remedy."""
    file, known = tmp_path / "own.py", mpikfac.predict.load_machine("v100-edr")
    file.write_text("import torch\n\ndef build():\n    return torch.nn.Linear(400, 300)\n")
    name = f"{file}:build"
    asked = ["--model", name, "--ranks", "4", "--strategy", "sgd,comm-opt"]
    assert simulate.main([*asked, "--machine", "v100-edr"]) == 2
    assert f"measure them with mpikfac calibrate --model {name}" in capsys.readouterr().err
    mine = dataclasses.replace(known, networks=[dataclasses.replace(known.networks[0], model=name)])
    (tmp_path / "machine.json").write_text(mine.to_json())
    assert simulate.main([*asked, "--machine", str(tmp_path / "machine.json")]) == 0
    layers, others = mpikfac.layers.covered_shapes(torch.nn.Linear(400, 300))
    machine = mpikfac.predict.load_machine(str(tmp_path / "machine.json"))
    job = mpikfac.predict.Job(name, 32, grafting=GRAFTING)
    strategy = mpikfac.predict.tuned(
        mpikfac.Strategy(),
        layers,
        others,
        4,
        machine,
        job,
        mpikfac.preconditioners.forms("inverse"),
    )
    found = mpikfac.predict.simulate(mpikfac.make_plan(layers, 4, strategy, others), machine, job)
    rows = rows_of(capsys.readouterr().out)
    assert rows["comm-opt"][0] == pytest.approx(1e3 * found.mean.seconds, abs=0.051)
    assert set(rows) == {"sgd", "comm-opt"}


@pytest.mark.parametrize(
    ("machine", "ranks", "faster"), [("v100-edr", "8", "true"), ("a100-hdr", "64", "false")]
)
def test_sgd_overlaps_its_messages_where_that_is_faster(machine, ranks, faster, capsys):
    """Oracle: the predictions with the option; the faster one is named by hand."""
    asked = ["--model", "resnet50", "--machine", machine, "--ranks", ranks, "--strategy", "sgd"]
    seconds = {}
    for overlap in ([], ["--transport.overlap", "true"], ["--transport.overlap", "false"]):
        assert simulate.main([*asked, *overlap]) == 0
        seconds[overlap[-1] if overlap else ""] = rows_of(capsys.readouterr().out)["sgd"][0]
    assert seconds[""] == seconds[faster] == min(seconds.values()) < max(seconds.values())


@pytest.mark.parametrize("model", ["resnet50", "resnet101", "resnet152"])
def test_the_machine_of_sc20_knows_networks_and_eigenbases(model, capsys):
    """Oracle: the numbers whose sources say that they were derived, by hand; bases take longest.

    SC20's figures are of these three networks; the intervals are those of the authors' job.
    """
    asked = [f"--model={model}", "--machine=v100-edr", "--preconditioner=null", "--grafting=none"]
    asked += [
        "--ranks=64",
        "--strategy=sgd,kfac-opt",
        "--factor_update_steps=10",
        "--inv_update_steps=100",
    ]
    assert simulate.main(asked) == 0
    text = capsys.readouterr().out
    estimated = " ".join(text.partition("Estimated: ")[2].partition("Milliseconds")[0].split())
    assert estimated == (
        "inside.latency, networks.forward, networks.backward, networks.statistics, "
        "networks.gradients, networks.optimizer, decompositions.inverse, decompositions.eigen, "
        "decompositions.shampoo"
    )
    mean, _, factors, bases, *_ = rows_of(text)["kfac-opt"]
    assert rows_of(text)["sgd"][0] < mean < factors < bases / 2


@pytest.mark.slow
def test_all_strategies_on_thousands_of_ranks(capsys):
    """Oracle: every name once per table, except strategies unknown to the machine or the model.

    K-FAC takes longer than SGD; SGD needs least memory.
    """
    assert simulate.main([*ASK, "--ranks", "6,4096"]) == 0
    text = capsys.readouterr().out
    small, large = (rows_of(part) for part in text.split("4096 ranks"))
    assert set(small) == set(large) == NAMES - {"eva", "downpour"}
    assert text.count("eva is left out: machine 'V100 with EDR") == 2
    for rows in (small, large):
        assert min(rows, key=lambda name: rows[name][0]) == "sgd"
        assert min(rows, key=lambda name: rows[name][6]) == "sgd"


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (4, 2), (7, 1), (8, 2), (12, 3), (64, 8)])
def test_hybrids_are_near_the_square_root(ranks, workers):
    """Oracle: the divisor whose square is nearest, by hand."""
    assert near_root(ranks) == workers


@pytest.mark.gate
def test_mpi_is_not_imported():
    program = (
        "import sys; from mpikfac_apps.__main__ import main; "
        f"code = main(['simulate', *{ASK}, '--ranks', '4', '--strategy', 'comm-opt']); "
        "sys.exit(code or any(name.startswith('mpi4py') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=paced(240)).returncode == 0


def test_shards_are_predicted_for_strategies_with_owners(capsys, tmp_path):
    """Oracle: the stages of the plan; strategies without owners are left out by name."""
    file = tmp_path / "found.json"
    asked = ["--ranks", "16", "--strategy", "sharded-optimizer,comm-opt", "--json", str(file)]
    shards = ["--fully_shard", "--replicas", "4"]
    assert simulate.main([*ASK, *asked, *shards]) == 0
    text = capsys.readouterr().out
    assert "fully_shard without its own messages" in text
    assert "comm-opt is left out: fully_shard=True needs assignment.shard_optimizer=True" in text
    stages = json.loads(file.read_text())[0]["mean"]["stages"]
    assert stages["gather gradients"] > 0 < stages["scatter directions"]
    assert not stages.get("publish weights")


def test_work_that_is_not_predicted_is_named(capsys):
    """Oracle: the line; and the numbers without the options."""
    asked = ["--model=resnet50", "--machine=v100-edr", "--ranks=2,2", "--strategy=comm-opt"]
    found = []
    for more in ([], ["--fisher_type=mc"], ["--grafting.orthogonalize=false"]):
        assert simulate.main([*asked, *more]) == 0
        found.append(capsys.readouterr().out.splitlines())
    plain, sampled, adam = found
    assert [line for line in sampled if line not in plain] == [
        "Not counted: the backward passes of fisher_type=mc"
    ]
    assert sum(line.startswith("2 ranks") for line in plain) == 1
    (with_products,), (without,) = (
        [float(line.split()[1]) for line in lines if line.split()[:1] == ["comm-opt"]]
        for lines in (plain, adam)
    )
    assert without < with_products


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--model resnet5 --machine v100-edr --ranks 2", "resnet20"),
        (
            "--model resnet20 --machine v100-edr --ranks 2",
            "only for: resnet101, resnet152, resnet50",
        ),
        ("--model resnet50 --machine nowhere --ranks 2", "a100-hdr, rtx2080ti-ib100, v100-edr"),
        ("--model resnet50 --machine v100-edr --ranks 2,0", "a whole number from 1 to 1,048,576"),
        ("--model resnet50 --machine v100-edr --ranks 2 --strategy best", "mem-opt"),
        ("--model resnet50 --machine v100-edr --ranks 2 --stragglers 2", "between 0 and 1"),
        (
            "--model resnet50 --machine v100-edr --ranks 2 --preconditioner eva "
            "--strategy deferred-allreduce",
            "no times for preconditioner='eva'",
        ),
        ("--model resnet50 --machine v100-edr --ranks 2 --json /nowhere/x", "/nowhere/x"),
        ("--model resnet50 --ranks 2", "--machine"),
        (
            "--model resnet50 --machine v100-edr --ranks 2 --json .",
            "must be a file in an existing folder",
        ),
        ("--model resnet50 --machine v100-edr --ranks 2 --tp_size 2", "unknown key tp_size"),
    ],
)
def test_bad_arguments_are_one_line(arguments, told, capsys):
    try:
        code = simulate.main(arguments.split())
    except SystemExit as ended:
        code = ended.code
    output = capsys.readouterr()
    assert (code, output.out, output.err.count("\n")) == (2, "", 1)
    assert told in output.err
