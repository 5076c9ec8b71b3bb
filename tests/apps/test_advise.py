"""The advise program: arithmetic of the lemmas, and a machine with round numbers."""

from __future__ import annotations

import json
import math
import re

import pytest

import mpikfac
from mpikfac.predict import Level, Machine, Network
from mpikfac_apps.lab.predict import advise, simulate
from mpikfac_apps.lab.predict.options import ADVISE
from mpikfac_apps.options.parse import parse

pytestmark = pytest.mark.lab

OWN = "import torch\n\ndef build():\n    return torch.nn.Linear(1000, 500, bias=False)\n"


@pytest.fixture
def round_machine(tmp_path):
    """Return arguments for a network of 1000 x 500 weights on a machine with round numbers.

    Messages have no latency to speak of and 1 GB/s; an image takes 1 ms forward, 2 ms backward and
    1 ms of statistics.
    """
    (tmp_path / "own.py").write_text(OWN)
    name = f"{tmp_path / 'own.py'}:build"
    network = Network(name, 4, 0.004, 0.008, 0.004, 0.0, 0.0, precondition=0.0)
    level = Level(1e-15, 1e9)
    machine = Machine("round", level, (network,), {"inverse": ((1000.0, 1e-9),)})
    (tmp_path / "round.json").write_text(machine.to_json())
    return ["--machine", str(tmp_path / "round.json"), "--model", name]


@pytest.mark.parametrize(
    ("messages", "per_image", "images"),
    [(0.034, 0.002, 17), (0.0341, 0.002, 18), (0.0, 0.002, 1), (0.3, 0.1, 3)],
)
def test_computing_covers_messages(messages, per_image, images):
    """Oracle: by hand: 34 ms are 17 images of 2 ms; 3 x 0.1 rounds above 0.3 and is enough."""
    assert advise.images_to_cover(messages, per_image) == images


@pytest.mark.parametrize(
    ("size", "clients", "bandwidth", "computing", "servers"),
    [(100e6, 10, 1e9, 0.5, 4), (100e6, 11, 1e9, 0.5, 5), (1.0, 1, 1e9, 1.0, 1)],
)
def test_servers_take_and_give_the_model_while_clients_compute(
    size, clients, bandwidth, computing, servers
):
    """Oracle: by hand: 10 clients push and fetch 100 MB each, 2 GB in 0.5 s: 4 servers of 1 GB/s.

    One server less would need more than the computing time.
    """
    found = advise.servers_to_hide(size, clients, bandwidth, computing)
    assert found == servers
    assert 2 * size * clients / (found * bandwidth) <= computing
    if found > 1:
        assert 2 * size * clients / ((found - 1) * bandwidth) > computing


def test_the_arithmetic_is_that_of_the_machine(round_machine, tmp_path, capsys):
    """Oracle: by hand, 4 ranks: rings of 1.5 x bytes at 1 GB/s.

    Gradients of 2 MB take 3 ms. The factors as triangles, 500500 and 125250 numbers, take 3.75 ms.
    An image computes 4 ms, so 6.75 / 4 = 1.7 are 2 images. Servers: 2 x 2 MB x 4 clients in 3 ms of
    an image at 1 GB/s: 5.3 are 6.
    """
    file = tmp_path / "found.json"
    asked = ["--ranks", "4", "--strategy", "comm-opt", "--batch_per_rank", "1"]
    asked += ["--factor_update_steps", "1", "--transport.overlap=true"]
    assert advise.main([*round_machine, *asked, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    (kfac,) = json.loads(file.read_text())
    assert kfac["mean"]["overlapped"] == pytest.approx(1.5 * 4 * (500e3 + 625750) / 1e9, rel=1e-3)
    assert kfac["images"] == 2
    assert kfac["per_image"] == pytest.approx(0.004)
    for line in (
        "computing time of an image = (forward 1.0 + backward 2.0 + statistics 1.0) ms / 1 image = "
        "4.000 ms",
        "images >= overlapped messages / computing time of an image = 6.8 ms / 4.000 ms = 1.7: 2",
        "Use --strategy comm-opt --transport.overlap true --batch_per_rank 2",
        "= 2 x 1.91 MiB x 4 / (1.00 GB/s x 3.0 ms) = 5.3: 6",
        "Learning rate for 8 images, instead of 2 on one rank",
        "--scale_lr linear: lr x 4",
        "--scale_lr sqrt: lr x 2.00",
    ):
        assert line in text


def test_a_large_batch_is_enough(round_machine, capsys):
    """Oracle: by hand: with statistics at every second step, (3 + 3.75 / 2) / (3 + 1 / 2) = 1.4."""
    asked = ["--ranks", "4", "--strategy", "comm-opt", "--batch_per_rank", "8"]
    asked += ["--transport.overlap=true"]
    assert advise.main([*round_machine, *asked, "--factor_update_steps", "2"]) == 0
    text = capsys.readouterr().out
    assert "= 4.9 ms / 3.500 ms = 1.4: 2" in text
    assert "Use --strategy comm-opt --transport.overlap true --batch_per_rank 8" in text


def row(name, seconds):
    return {"strategy": name, "mean": {"seconds": seconds}}


def test_the_fastest_strategy_with_the_numbers_of_one_process_is_advised():
    """Oracle: by hand; dp-kfac has another estimator, stale-inverse an upper bound."""
    rows = [
        *(row("sgd", 1.0), row("dp-kfac", 2.0), row("stale-inverse", 2.0)),
        *(row("mem-opt", 4.0), row("comm-opt", 3.0), {"strategy": "eva", "left_out": "why"}),
    ]
    assert advise.best(rows)["strategy"] == "comm-opt"
    assert advise.best(rows[:4])["strategy"] == "mem-opt"
    assert advise.best(rows[:3])["strategy"] == "dp-kfac"
    assert advise.best(rows[:1])["strategy"] == "sgd"


@pytest.mark.parametrize("machine", ["v100-edr", "a100-hdr"])
@pytest.mark.parametrize("strategy", ["sgd", "comm-opt", "dp-kfac"])
def test_no_advice_is_slower_than_what_simulate_lists(machine, strategy, tmp_path, capsys):
    """Oracle: `mpikfac simulate` with and without overlap; of further levels, not slower."""
    job = [f"--machine={machine}", "--model=resnet50", "--ranks=16,256", f"--strategy={strategy}"]
    seconds = {}
    for overlap in ("true", "false"):
        file = tmp_path / f"{overlap}.json"
        assert simulate.main([*job, f"--transport.overlap={overlap}", f"--json={file}"]) == 0
        for found in json.loads(file.read_text()):
            seconds.setdefault(found["ranks"], []).append(found["mean"]["seconds"])
    capsys.readouterr()
    assert advise.main(job) == 0
    steps = re.findall(r"A step is then ([\d.]+) ms", capsys.readouterr().out)
    for step, of_ranks in zip(steps, (seconds[16], seconds[256]), strict=True):
        assert float(step) <= 1e3 * min(of_ranks) + 0.051


def test_published_machines_and_strategies_that_cannot_overlap(capsys):
    """Oracle: the lemma from the numbers of `mpikfac.predict`; the names in the catalogue."""
    asked = [
        "--machine",
        "v100-edr",
        "--model",
        "resnet50",
        "--ranks",
        "64",
        "--factor_update_steps",
        "1",
    ]
    asked += ["--strategy", "comm-opt,kfac-lw"]
    assert advise.main([*asked, "--transport.overlap=true"]) == 0
    text = capsys.readouterr().out
    assert "Left out: kfac-lw; mpikfac simulate --transport.overlap true prints the reasons" in text
    network = mpikfac.predict.load_machine("v100-edr").network("resnet50", 32)
    per_image = (network.forward + network.backward + network.statistics) / 32
    (line,) = (line for line in text.splitlines() if "images >= overlapped" in line)
    told = float(line.split(" ms / ")[0].split("= ")[-1]) / 1e3
    assert line.endswith(f": {math.ceil(told / per_image)}")


@pytest.mark.parametrize(
    ("preconditioner", "seconds"), [("inverse", 7.0), ("shampoo", 3.0), ("muon", 3.0)]
)
def test_factors_of_the_gradient_do_not_grow_with_the_batch(preconditioner, seconds):
    """Oracle: by hand: passes of 1 + 2 s, and 4 s of factors, for 8 images."""
    asked = [
        "--machine=none",
        "--model=resnet20",
        "--ranks=2",
        f"--preconditioner={preconditioner}",
    ]
    options = ADVISE.read([*asked, "--batch_per_rank=8"])
    stages = {"forward": 1.0, "backward": 2.0, "statistics": 4.0}
    found = advise.needs({"mean": {"stages": stages, "overlapped": 1.0}}, options)
    assert found == {"per_image": seconds / 8, "images": math.ceil(8 / seconds)}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (
            "comm-opt --transport.overlap false",
            "--strategy comm-opt --transport.ranks_per_node 4 --transport.overlap false",
        ),
        ("sgd --transport.overlap true", "--optimizer sgd --transport.overlap true"),
        (
            "hybrid --transport.overlap true",
            "--strategy hybrid --assignment.grad_workers 2 --transport.overlap true",
        ),
        (
            "comm-opt --preconditioner muon --transport.overlap true",
            "--strategy comm-opt --kfac.preconditioner muon --transport.overlap true",
        ),
        (
            "kfac-opt --preconditioner inverse --transport.overlap false",
            "--strategy kfac-opt --kfac.preconditioner inverse",
        ),
    ],
)
def test_the_training_program_takes_the_advice(given, taken, capsys):
    """Oracle: the words by hand, and the parser of the training program."""
    asked = f"--machine v100-edr --model resnet50 --ranks 8 --strategy {given}".split()
    assert advise.main(asked) == 0
    (line,) = (one for one in capsys.readouterr().out.splitlines() if "per_rank" in one)
    words = line.split("Use ")[1]
    assert words.startswith(taken)
    assert parse(["--model=resnet50", "--data.name=cifar10", "--data.path=.", *words.split()], 8)


def test_other_workers_and_levels_are_advised(tmp_path, capsys):
    """Oracle: the quickest of the simulator's predictions for all workers and levels, one by one.

    A table has a further line for what is advised and not asked for; a file has a further row.
    """
    asked = ["--machine=v100-edr", "--model=resnet50", "--ranks=8", "--transport.overlap=false"]
    seconds = {}
    for workers in (2, 4):
        for level in ([], ["--transport.ranks_per_node=4"]):
            file, more = (
                tmp_path / "one.json",
                ["--strategy=hybrid", f"--assignment.grad_workers={workers}"],
            )
            assert simulate.main([*asked, *more, *level, "--json", str(file)]) == 0
            (found,) = json.loads(file.read_text())
            seconds[workers, bool(level)] = found["mean"]["seconds"]
    workers, level = min(seconds, key=seconds.__getitem__)
    capsys.readouterr()
    assert advise.main([*asked, "--strategy=hybrid", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    per_node = "--transport.ranks_per_node 4 " * level
    words = f"Use --strategy hybrid --assignment.grad_workers {workers} {per_node}"
    assert f"{words}--transport.overlap false" in text
    _, *further = json.loads(file.read_text())
    assert len(further) == ((workers, level) != (2, False))
    label = ", ".join(
        ["hybrid", f"assignment.grad_workers={workers}", *["transport.ranks_per_node=4"] * level]
    )
    assert text.count(f"  {label}  ") == len(further)
    played = f"A step is then {1e3 * seconds[workers, level]:.1f} ms"
    assert played in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--model resnet50 --ranks 2", "--machine"),
        ("--model resnet50 --machine v100-edr --ranks 0", "a whole number from 1 to 1,048,576"),
        ("--model resnet50 --machine v100-edr --ranks 2 --batch_per_rank 0", "batch_per_rank=0"),
        (
            "--model resnet20 --machine v100-edr --ranks 2",
            "only for: resnet101, resnet152, resnet50",
        ),
        (
            "--model resnet50 --machine v100-edr --ranks 2 --strategy kfac-lw "
            "--transport.overlap true",
            "transport.overlap=True needs",
        ),
        ("--model resnet50 --machine v100-edr --ranks 2 --efficiency 80", "efficiency=80"),
        (
            "--model resnet50 --machine v100-edr --ranks 8 --strategy krum "
            "--transport.overlap=false --efficiency 0.8",
            "efficiency=0.8 is relative to a single rank, which cannot be predicted: "
            "sync.aggregation='krum'",
        ),
    ],
)
def test_bad_arguments_are_one_line(arguments, told, capsys):
    """Oracle: code 2, nothing on the output, and a line that names the value."""
    assert advise.main(arguments.split()) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert told in output.err


@pytest.mark.parametrize(
    ("least", "ranks"), [(1.0, 1), (0.95, 2), (0.9, 8), (0.8, 8), (0.5, 16), (0.1, 16)]
)
def test_the_largest_number_of_ranks_is_efficient_enough(least, ranks):
    """Oracle: by hand: efficiencies of 1, 0.95, 0.85, 0.9 and 0.5; 8 ranks are better than 4."""
    steps = {1: 1.0, 2: 1 / 0.95, 4: 1 / 0.85, 8: 1 / 0.9, 16: 2.0}
    assert advise.efficient(steps, least - 1e-9) == ranks


@pytest.mark.parametrize(("efficiency", "ranks"), [(0.95, 1), (0.93, 2), (0.92, 4), (0.9, 8)])
def test_ranks_for_an_efficiency(efficiency, ranks, round_machine, capsys):
    """Oracle: by hand: 12 images take 36 ms, and a ring of 2 MB on P ranks 4 (P - 1) / P ms.

    So 2, 4 and 8 ranks have efficiencies of 36/38, 36/39 and 36/39.5.
    """
    asked = [
        "--ranks",
        "2,8",
        "--strategy",
        "sgd",
        "--transport.overlap",
        "false",
        "--batch_per_rank",
        "12",
    ]
    assert advise.main([*round_machine, *asked, "--efficiency", str(efficiency)]) == 0
    text = capsys.readouterr().out.partition("Ranks for an efficiency")[2]
    told = [line.split() for line in text.splitlines() if line.strip()[:1].isdecimal()]
    assert told == [
        ["1", "36.0", "1.00"],
        ["2", "38.0", "0.95"],
        ["4", "39.0", "0.92"],
        ["8", "39.5", "0.91"],
    ]
    assert f"Use --optimizer sgd --transport.overlap false on {ranks} rank" in text
